"""Monte Carlo dropout: which layers carry it, what training and prediction draw, and their expectations."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dubito import Categorical, ConfigError, DataError, Gaussian, MCDropout, NetworkError, Training
from dubito.inference.mc_dropout import bernoulli_factors
from dubito.inputs import Batch
from dubito.layers import Layout

QUICK = Training(epochs=1, batch_size=8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,), generator=torch.Generator().manual_seed(1))


def bound(network: nn.Module, inputs: object, rate: float | None = 0.5, **settings):
    """An objective that has seen a batch."""
    built = MCDropout(rate=rate, **settings).build(network.double(), Categorical(), num_data=20)
    built.bind(inputs)
    return built


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3))


class Branches(nn.Module):
    def __init__(self, normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise
        self.left, self.right, self.head = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs / 2 if self.normalise else inputs
        return self.head(torch.tanh(self.left(inputs[:, :2]) + self.right(inputs[:, 2:])))


class Pair(Branches):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left) + self.right(right)))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids).mean(1))))


class Tied(nn.Module):
    """A classifier of tokens whose last layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = (nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False))
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids).mean(1))))


class Recurrent(nn.Module):
    def __init__(self, embed: bool) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4) if embed else nn.Identity()
        self.lstm, self.head = (nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True), nn.Linear(10, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(inputs))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.block(self.embed(inputs)).mean(1))


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.again = self.body

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.body(torch.tanh(self.stem(inputs)))))))


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(torch.tanh(self.stem(inputs)).transpose(0, 1)))
        return self.head(hidden.mean(0))


RECURRENT = {f"lstm.weight_{part}_l{n}{side}" for part in ("ih", "hh") for n in (0, 1) for side in ("", "_reverse")}
ATTENTION = {"block.self_attn.in_proj_weight", "block.self_attn.out_proj.weight"}
IDS = torch.randint(3, (6, 5), generator=torch.Generator().manual_seed(2))
# For each network: the weights with dropout, and those of them with one draw per batch in training.
CASES = {
    "mlp": (mlp, normal(6, 4), {"2.weight", "4.weight"}, set()),
    "two branches": (Branches, normal(6, 4), {"head.weight"}, set()),
    "branches after scaling": (lambda: Branches(True), normal(6, 4), {"head.weight"}, set()),
    "two inputs": (Pair, (normal(6, 2), normal(6, 2, seed=1)), {"head.weight"}, set()),
    "embedding first": (Tokens, IDS, {"body.weight", "head.weight"}, set()),
    "head tied to the embedding": (Tied, IDS, {"body.weight"}, set()),
    "recurrent": (lambda: Recurrent(True), normal(6, 5, 4), RECURRENT | {"head.weight"}, RECURRENT),
    "recurrent first": (
        lambda: Recurrent(False),
        normal(6, 5, 4),
        (RECURRENT | {"head.weight"}) - {"lstm.weight_ih_l0", "lstm.weight_ih_l0_reverse"},
        RECURRENT - {"lstm.weight_ih_l0", "lstm.weight_ih_l0_reverse"},
    ),
    "attention": (
        Attending,
        normal(6, 5, 4),
        ATTENTION | {"block.linear1.weight", "block.linear2.weight", "head.weight"},
        set(),
    ),
    "one module, two names": (Aliased, normal(6, 4), {"body.weight", "head.weight"}, set()),
    "time-major": (TimeMajor, normal(6, 5, 4), {"body.weight", "head.weight"}, {"body.weight"}),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, (2, 1), groups=2),
            nn.Conv2d(6, 2, 1), nn.Flatten(), nn.Linear(8, 3),
        ),
        normal(6, 2, 5, 4),
        {"3.weight", "4.weight", "6.weight"},
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_layer_but_the_first_carries_dropout(name: str) -> None:
    build, inputs, expected, shared = CASES[name]
    draft = bound(build(), inputs).draft
    assert set(draft.uses) == expected
    assert draft.shared == shared
    for parameter in expected:
        assert draft.holds(parameter).startswith("dropout 0.5 on")
        assert draft.holds(parameter).endswith("one draw per batch in training") == (parameter in shared)
    for parameter in set(draft.weights()) - expected:
        assert draft.holds(parameter) == f"point ({draft.details['points'][parameter]})"


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_draws_drop_columns_at_the_rate_and_average_to_the_weights(rate: float) -> None:
    network, inputs, expected, _ = mlp(), *CASES["mlp"][1:]
    posterior, count = bound(network, inputs, rate).posterior(), 2000
    weights = {name: value.detach() for name, value in posterior.weights().items()}
    draws = [posterior.draw(i, posterior.generator(0, i)) for i in range(count)]
    for name in weights:
        stacked = torch.stack([draw[name].detach() for draw in draws])
        if name not in expected:
            assert torch.equal(stacked, weights[name].expand_as(stacked))
            continue
        factors = stacked / weights[name]
        assert torch.equal(factors == 0, (factors == 0)[:, :1].expand_as(factors))  # whole columns
        torch.testing.assert_close(factors[factors != 0], torch.full_like(factors[factors != 0], 1 / (1 - rate)))
        # A factor has variance rate / (1 − rate).
        allowed = 5 * (rate / (1 - rate) / count) ** 0.5
        torch.testing.assert_close(factors.mean(0), torch.ones_like(weights[name]), rtol=0, atol=allowed)
        between = torch.corrcoef(factors[:, 0].T) - torch.eye(factors.shape[-1])
        assert between.abs().max() < 5 / count**0.5  # columns are dropped independently


@pytest.mark.parametrize("name", CASES)
def test_training_folds_each_examples_factors_into_the_weights(name: str) -> None:
    build, inputs, _, _ = CASES[name]
    built = bound(build(), inputs)
    draft, frozen = built.draft, {name: False for name, m in built.draft.network.named_modules()
                                  if isinstance(m, nn.BatchNorm2d)}  # fmt: skip
    rows = 6
    batch = Batch(inputs, labels(rows))
    built.modes = frozen
    together = built.outputs(batch, torch.Generator().manual_seed(4))
    generator, weights, factors = torch.Generator().manual_seed(4), draft.weights(), {}
    for key, use in draft.uses.items():
        shape = use.input_shape if key in draft.shared else (rows, *use.input_shape)
        factors[key] = bernoulli_factors(shape, 0.5, weights[key], generator)
    plain = copy.deepcopy(draft.network)
    for row in range(rows):
        one = tuple(t[row : row + 1] for t in inputs) if isinstance(inputs, tuple) else (inputs[row : row + 1],)
        with torch.no_grad():
            for key, values in factors.items():
                own = values if key in draft.shared else values[row]
                view, inputs_view, _ = draft.uses[key].views
                folded = weights[key].reshape(view) * own.reshape(inputs_view)
                plain.get_parameter(key).copy_(folded.reshape(weights[key].shape))
        torch.testing.assert_close(together[row : row + 1], plain(*one), rtol=1e-10, atol=1e-12)
    some = [key for key in draft.uses if key not in draft.shared]
    assert all(len(factors[key].unique(dim=0)) > 1 for key in some)  # rows differ


def test_parts_of_a_batch_get_their_rows_of_its_noise() -> None:
    built, inputs = bound(mlp(), normal(7, 4)), normal(7, 4)
    whole = built.outputs(Batch(inputs, labels(7)), torch.Generator().manual_seed(0))
    part = built.outputs(Batch(inputs[2:5], labels(3), 2, 7), torch.Generator().manual_seed(0))
    torch.testing.assert_close(part, whole[2:5])


def test_predictions_average_to_the_plain_network_where_it_is_linear() -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)).double()
    inputs, count = normal(5, 4), 1500
    posterior = bound(network, inputs, 0.3).posterior()
    outputs = posterior.sample_outputs(inputs, count)
    deviation = outputs.std(0) / count**0.5
    assert ((outputs.mean(0) - network(inputs)) / deviation).abs().max() < 4.5


@pytest.mark.parametrize("name", CASES)
def test_draws_differ_fold_and_do_not_depend_on_chunks(name: str) -> None:
    build, inputs, _, _ = CASES[name]
    built = bound(build(), inputs)
    built.loss(inputs, labels(6), generator=torch.Generator().manual_seed(0)).total.backward()
    posterior = built.posterior()
    outputs = posterior.sample_outputs(inputs, 4)
    assert len(outputs.unique(dim=0)) > 1
    torch.testing.assert_close(posterior.sample_outputs(inputs, 4, max_rows=4), outputs, rtol=1e-10, atol=1e-12)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    for index in range(4):
        torch.testing.assert_close(posterior.fold(index)(*args), outputs[index], rtol=1e-10, atol=1e-12)


def test_the_prior_penalises_trainable_weights() -> None:
    network = mlp().double()
    network[0].weight.requires_grad_(False)
    built = bound(network, normal(6, 4), prior_std=0.5)
    expected = sum(p.square().sum() for name, p in network.named_parameters() if name != "0.weight") / 0.5
    torch.testing.assert_close(built.kl(), expected)
    assert bound(network, normal(6, 4)).kl().item() == 0


# -- the network's own dropout layers ---------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv2d(1, 6, 2), nn.Dropout2d(0.4)
        self.body, self.drop, self.head = nn.Linear(6, 6), nn.Dropout(0.4), nn.Linear(6, 3)
        self.pair = nn.Sequential(nn.Linear(6, 6), self.drop)  # one layer under two names
        self.unused = nn.Dropout(0.4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.channels(torch.relu_(self.conv(inputs))).mean((2, 3))
        return self.head(self.pair(self.drop(torch.tanh(self.body(hidden)))))


@pytest.mark.parametrize("layer", ["mine", "encoder"])
def test_own_dropout_layers_predict_with_masks_that_all_rows_share(layer: str) -> None:
    if layer == "mine":
        network, inputs = Own(), normal(6, 1, 3, 3)
    else:
        block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.4, batch_first=True)
        network = nn.Sequential(block, nn.Flatten(), nn.Linear(20, 3))
        inputs = normal(6, 5, 4)
    built = bound(network, inputs, None)
    posterior = built.posterior()
    assert set(posterior.layouts.values()) == {Layout.ROWS}
    if layer == "mine":
        assert set(posterior.layouts) == {"channels", "drop"}
    outputs = posterior.sample_outputs(inputs, 5)
    assert len(outputs.unique(dim=0)) == 5
    torch.testing.assert_close(posterior.sample_outputs(inputs, 5, max_rows=1), outputs, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        for index in range(5):
            torch.testing.assert_close(posterior.fold(index)(inputs), outputs[index], rtol=1e-10, atol=1e-12)
    twins = torch.stack([inputs[0], inputs[0]])
    alike = posterior.sample_outputs(twins, 3)
    torch.testing.assert_close(alike[:, 0], alike[:, 1], rtol=1e-10, atol=1e-12)


def test_own_dropout_layers_train_in_training_mode() -> None:
    network = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 3)).double()
    inputs = normal(6, 4)
    built = bound(network, inputs, None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        loss = built.loss(inputs, labels(6))
        torch.manual_seed(5)
        expected = F.cross_entropy(network.train()(inputs), labels(6))
    torch.testing.assert_close(loss.nll, expected)
    assert not built.draft.network.training


def test_own_dropout_predictions_average_over_masks() -> None:
    network = nn.Sequential(nn.Linear(4, 20), nn.Dropout(0.3), nn.Linear(20, 2)).double().eval()
    inputs, count = normal(3, 4), 1500
    outputs = bound(network, inputs, None).posterior().sample_outputs(inputs, count)
    deviation = outputs.std(0) / count**0.5
    assert ((outputs.mean(0) - network(inputs)) / deviation).abs().max() < 4.5
    # Var[Σ_k w_k h_k m_k / q] = (1 − q)/q Σ_k (w_k h_k)²
    hidden = network[0](inputs)
    expected = 0.3 / 0.7 * (network[2].weight.square() @ hidden.square().T).T
    torch.testing.assert_close(outputs.var(0), expected.detach(), rtol=0.2, atol=0)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    for rate in (0.0, 1.0, -0.1, "half"):
        with pytest.raises(ConfigError, match="rate must be a number in"):
            MCDropout(rate=rate)  # pyright: ignore
    with pytest.raises(NetworkError, match="rate=None uses the network's own dropout layers, but it has none"):
        MCDropout(rate=None).build(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)), Categorical(), num_data=5)
    with pytest.raises(NetworkError, match="all have requires_grad=False"):
        MCDropout().build(mlp().requires_grad_(False), Categorical(), num_data=5)
    with pytest.raises(NetworkError, match=r"no layer after its first \(found: \['0.weight'\]\)"):
        bound(nn.Sequential(nn.Linear(4, 3)), normal(6, 4))
    computed = nn.Sequential(nn.Linear(4, 5), parametrizations.weight_norm(nn.Linear(5, 3)))
    with pytest.raises(NetworkError, match="remove parametrisations"):
        bound(computed, normal(6, 4))


def test_dropout_layers_that_are_never_called_are_refused() -> None:
    class Forgotten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.5), nn.Linear(4, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(inputs)

    with pytest.raises(NetworkError, match=r"calls none of \['drop'\]"):
        MCDropout(rate=None).fit(Forgotten(), (normal(6, 4), labels(6)), Categorical(), training=QUICK)


def test_a_posterior_needs_one_batch_first() -> None:
    built = MCDropout().build(mlp(), Gaussian(std=1.0), num_data=5)
    with pytest.raises(NetworkError, match="call loss"):
        built.posterior()


def test_an_error_in_the_network_leaves_no_hooks() -> None:
    built = bound(mlp(), normal(6, 4))
    before = built.draft.network(normal(6, 4))
    with pytest.raises(DataError, match="the network cannot read inputs of shape"):
        built.loss(normal(6, 3), labels(6))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in built.modules())
    assert not built.draft.network.training
    assert torch.equal(built.draft.network(normal(6, 4)), before)


def test_functional_weights_of_a_module_with_two_names_are_put_back() -> None:
    # The recurrent kernel is folded for the whole batch, so that the network runs with other tensors.
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.rnn, self.head = nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 3)
            self.again = self.rnn

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.again(self.rnn(self.stem(inputs))[0])[0][:, -1])

    built = bound(Twice(), normal(6, 5, 4))
    own = built.draft.network.rnn.weight_hh_l0
    built.loss(normal(6, 5, 4), labels(6)).total.backward()
    assert built.draft.network.rnn.weight_hh_l0 is own
    assert own.grad is not None
