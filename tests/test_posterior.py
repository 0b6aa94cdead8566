"""What every posterior can do on top of `draw`, on a posterior made by hand."""

import copy
import math

import numpy as np
import pytest
import sklearn.metrics
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from dubito import MAP, Bernoulli, Categorical, ConfigError, DataError, Gaussian, NetworkError, seeds
from dubito.networks import copied
from dubito.posterior import NamedTensors, Posterior, detached

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


class Spread(Posterior):
    """Every weight with independent noise around a centre that moves with the component."""

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        shift = index % self.num_components
        return {
            name: mean + shift + 0.3 * torch.randn(mean.shape, generator=generator, dtype=mean.dtype)
            for name, mean in self.weights().items()
        }

    def holds(self, name: str) -> str:
        return "noise of 0.3"


class Atoms(Posterior):
    """Three points."""

    num_atoms = 3

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {name: mean * (1 + index % 3) for name, mean in self.weights().items()}


def small_net(outputs: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, outputs)).to(dtype)


def rows(count: int = 10, dtype: torch.dtype = torch.float32, seed: int = 1, width: int = 4) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def spread(net: nn.Module | None = None, likelihood=None, components: int = 1, kind: type[Posterior] = Spread):
    """A posterior around the network, at rest."""
    network = copied(net or small_net()).eval()
    likelihood = likelihood or Categorical().build(None)
    posterior = kind(network, likelihood, method=MAP())
    posterior.num_components = components
    return posterior.finished()


# -- samples -----------------------------------------------------------------------------------------------


@BOTH
def test_samples_are_the_network_run_with_each_draw(dtype: torch.dtype):
    posterior, x = spread(small_net(dtype=dtype), components=2), rows(dtype=dtype)
    outputs = posterior.sample_outputs(x, 5, seed=7)
    assert outputs.shape == (5, 10, 3) and outputs.dtype == dtype and not outputs.requires_grad
    plain = small_net(dtype=dtype).eval()
    for index in range(5):
        weights = posterior.draw(index, seeds.generator(7, "draw", index))
        torch.testing.assert_close(outputs[index], functional_call(plain, weights, (x,)).detach())
    assert outputs.std(0).min() > 0


def test_samples_depend_on_the_seed_alone():
    posterior, x = spread(), rows()
    whole = posterior.sample_outputs(x, 6, seed=3)
    torch.manual_seed(17)
    assert torch.equal(posterior.sample_outputs(x, 6, seed=3), whole)
    assert torch.equal(posterior.sample_outputs(x, 2, seed=3), whole[:2])
    for max_rows in (1, 3, 10):
        torch.testing.assert_close(posterior.sample_outputs(x, 6, seed=3, max_rows=max_rows), whole)
    torch.testing.assert_close(posterior.sample_outputs(x[4:5], 6, seed=3), whole[:, 4:5])
    assert not torch.equal(posterior.sample_outputs(x, 6, seed=4), whole)
    assert torch.equal(posterior.sample_outputs(x.numpy().astype(np.float64), 6, seed=3), whole)


def test_atoms_are_computed_once_and_repeated():
    posterior, x = spread(kind=Atoms), rows()
    outputs = posterior.sample_outputs(x, 8)
    assert torch.equal(outputs[:2], outputs[3:5]) and torch.equal(outputs[:2], outputs[6:])
    assert not torch.equal(outputs[0], outputs[1])
    assert posterior.sample_outputs(x, 2).shape[0] == 2
    torch.testing.assert_close(posterior.predict(x, 1).probs, outputs[:3].softmax(-1).mean(0))


def test_predictions_average_the_draws_rounded_up_to_whole_rounds_of_components():
    posterior, x = spread(components=3), rows()
    for asked, taken in ((1, 3), (3, 3), (4, 6), (6, 6)):
        expected = posterior.sample_outputs(x, taken, seed=2).softmax(-1).mean(0)
        torch.testing.assert_close(posterior.predict(x, asked, seed=2).probs, expected)


def test_noise_of_a_component_meets_its_own_draws():
    """Means near 0, 1, 2, … by component, and noise that tells them apart."""
    net = small_net(1)
    stds = torch.tensor([[0.1], [1.0], [5.0]])
    posterior = spread(net, Gaussian().build(torch.zeros(1, 1)).with_noise(std=stds), components=3)
    x, y = rows(), rows(seed=2)[:, :1]
    outputs = posterior.sample_outputs(x, 6, seed=1)
    log_probs = torch.stack([torch.distributions.Normal(outputs[s], stds[s % 3]).log_prob(y).sum(1) for s in range(6)])
    prediction = posterior.predict(x, 6, seed=1)
    torch.testing.assert_close(prediction.log_prob(y), log_probs.logsumexp(0) - math.log(6))


def test_gradients_reach_the_inputs_on_request():
    posterior, x = spread(small_net(dtype=torch.float64)), rows(dtype=torch.float64).requires_grad_()
    assert not posterior.sample_outputs(x, 2).requires_grad
    outputs = posterior.sample_outputs(x, 2, keep_graph=True, max_rows=4)
    (gradient,) = torch.autograd.grad(outputs[1, :, 0].sum(), x)
    step = 1e-6 * rows(dtype=torch.float64, seed=3)
    with torch.no_grad():
        ahead, behind = (posterior.sample_outputs(x + sign * step, 2)[1, :, 0] for sign in (1, -1))
    torch.testing.assert_close((gradient * step).sum(1), (ahead - behind) / 2, rtol=1e-6, atol=1e-13)


@pytest.mark.parametrize("number", [0, -1, 2.5, None, "3", True])
def test_bad_counts_are_refused_before_any_work(number):
    posterior, x, y = spread(), rows(), torch.zeros(10, dtype=torch.long)
    posterior.network.register_forward_hook(lambda *_: pytest.fail("the network ran"))
    with pytest.raises(ConfigError, match="num_samples must be a whole number"):
        posterior.sample_outputs(x, number)
    with pytest.raises(ConfigError, match="num_samples"):
        posterior.predict(x, number)
    with pytest.raises(ConfigError, match="num_samples"):
        posterior.evaluate((x, y), num_samples=number)
    with pytest.raises(ConfigError, match="max_rows"):
        posterior.predict(x, max_rows=number)
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        posterior.predict(x, seed=0.5)  # pyright: ignore
    with pytest.raises(ConfigError, match="index"):
        posterior.fold(-1)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(3, 7), r"cannot read inputs of shape \{'inputs': \(3, 7\)\}"),
        ((torch.zeros(3, 4), torch.zeros(3, 4)), "cannot read inputs"),
        ({"wrong": torch.zeros(3, 4)}, r"cannot read inputs of shape \{\"inputs\['wrong'\]\""),
        (torch.full((3, 4), float("nan")), "must be finite, got nan at row 0"),
        (torch.zeros(0, 4), "at least one row"),
        (np.array([["a"] * 4]), "arrays must hold numbers"),
    ],
)
def test_bad_inputs_are_refused(inputs, message: str):
    with pytest.raises(DataError, match=message):
        spread().predict(inputs)


@pytest.mark.parametrize("shape", [(1, -1), (-1,), ()])
def test_answers_must_keep_their_rows(shape):
    class Reshaped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).reshape(shape) if shape else super().forward(x).sum()

    posterior = spread(Reshaped(4, 3))
    for max_rows in (1024, 3):
        with pytest.raises(NetworkError, match=r"must answer \d+ rows with \d+ rows of outputs on the first axis, got"):
            posterior.sample_outputs(rows(), 2, max_rows=max_rows)


def test_a_networks_own_noise_follows_the_seed_and_the_global_state_stays():
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.5, training=True)

    posterior, x, y = spread(Noisy(4, 3), kind=Atoms), rows(), torch.zeros(10, dtype=torch.long)
    weighted = WeightedRandomSampler(torch.ones(10), 10)
    loader = DataLoader(TensorDataset(x, y), sampler=weighted, batch_size=4)
    state = torch.get_rng_state()
    first, scores = posterior.sample_outputs(x, 3, seed=1), posterior.evaluate(loader)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert torch.equal(posterior.sample_outputs(x, 3, seed=1), first)
    assert posterior.evaluate(loader) == scores
    assert not torch.equal(posterior.sample_outputs(x, 3, seed=2), first)
    assert not torch.equal(first[0] == 0, first[1] == 0)  # every draw has noise of its own


# -- metrics -----------------------------------------------------------------------------------------------


def test_evaluation_of_classes():
    posterior, x = spread(), rows(40)
    y = torch.arange(40) % 2  # class 2 is absent
    scores = posterior.evaluate((x, y), num_samples=5, seed=1)
    probs = posterior.sample_outputs(x, 5, seed=1).double().softmax(-1).mean(0).numpy()
    assert scores["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(y, probs.argmax(1)))
    assert scores["nll"] == pytest.approx(sklearn.metrics.log_loss(y, probs, labels=[0, 1, 2]), rel=1e-5)
    assert scores["brier"] == pytest.approx(((probs - np.eye(3)[y]) ** 2).sum(1).mean(), rel=1e-5)
    assert 0 <= scores["ece"] <= 1


def test_evaluation_of_yes_and_no():
    posterior, x = spread(small_net(1), Bernoulli().build(None)), rows(40)
    y = (x[:, 0] > 0).long()
    scores = posterior.evaluate((x, y.bool()), num_samples=5, seed=1)
    probs = posterior.sample_outputs(x, 5, seed=1).double().sigmoid().mean(0)[:, 0].numpy()
    assert scores["accuracy"] == pytest.approx(((probs > 0.5) == y.numpy()).mean())
    assert scores["nll"] == pytest.approx(sklearn.metrics.log_loss(y, probs), rel=1e-5)


def test_evaluation_of_many_labels():
    posterior, x = spread(small_net(3), Bernoulli().build(None)), rows(40)
    y = (x[:, :3] > 0).long()
    scores = posterior.evaluate((x, y), num_samples=5, seed=1)
    prediction = posterior.predict(x, 5, seed=1)
    assert scores["accuracy"] == pytest.approx((prediction.labels == y).double().mean().item())
    assert scores["nll"] == pytest.approx(-prediction.log_prob(y).mean().item(), rel=1e-6)  # of whole rows
    errors = prediction.probs.double() - y  # both classes' squared errors, as for classes
    assert scores["brier"] == pytest.approx(2 * (errors**2).mean().item(), rel=1e-5)


def test_evaluation_of_reals():
    posterior, x = spread(small_net(2), Gaussian(std=(0.5, 2.0)).build(torch.zeros(1, 2))), rows(40)
    y = x[:, :2]
    scores = posterior.evaluate((x, y), num_samples=5, seed=1)
    prediction = posterior.predict(x, 5, seed=1)
    errors = (prediction.mean - y).double().numpy()
    assert scores["rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-5)
    assert scores["mae"] == pytest.approx(np.abs(errors).mean(), rel=1e-5)
    assert scores["nll"] == pytest.approx(-prediction.log_prob(y).mean().item(), rel=1e-5)
    lower, upper = prediction.interval(0.95)
    assert scores["coverage"] == pytest.approx(((lower <= y) & (y <= upper)).double().mean().item())
    assert scores["crps"] > 0


def test_evaluation_of_dense_classes():
    torch.manual_seed(0)
    posterior = spread(nn.Conv2d(2, 3, 3, padding=1))
    x = torch.randn(6, 2, 4, 5)
    y = torch.randint(3, (6, 4, 5))
    scores = posterior.evaluate((x, y), num_samples=4, seed=1)
    prediction = posterior.predict(x, 4, seed=1)
    assert scores["accuracy"] == pytest.approx((prediction.labels == y).double().mean().item())
    assert scores["nll"] == pytest.approx(-prediction.log_prob(y).mean().item(), rel=1e-6)


def test_evaluation_reads_every_form_of_data():
    class Stream(IterableDataset):
        def __iter__(self):
            return zip(x, y, strict=True)

    posterior, x, y = spread(), rows(23), torch.arange(23) % 3
    expected = posterior.evaluate((x, y), num_samples=4)
    pairs = TensorDataset(x, y)
    for data in (pairs, Subset(pairs, range(23)), DataLoader(pairs, batch_size=5), Stream(), (x.numpy(), y.tolist())):
        for max_rows in (4, 1024):
            assert posterior.evaluate(data, num_samples=4, max_rows=max_rows) == pytest.approx(expected, rel=1e-5)


def test_evaluation_names_the_bad_row():
    posterior, x, y = spread(), rows(23), torch.arange(23) % 3
    y[17] = 5
    for data in ((x, y), Subset(TensorDataset(x, y), range(23)), DataLoader(TensorDataset(x, y), sampler=range(23))):
        with pytest.raises(DataError, match=r"labels must lie in 0\.\.2 .* got 5 at row 17"):
            posterior.evaluate(data, max_rows=6)
    with pytest.raises(DataError, match="whole numbers"):
        posterior.evaluate((x, y.float()))


# -- folding, copies, modes --------------------------------------------------------------------------------


def test_a_fold_is_a_plain_network_of_its_own():
    net = small_net()
    net[0].requires_grad_(False)
    posterior, x = spread(net, components=2), rows()
    outputs = posterior.sample_outputs(x, 4, seed=5)
    folded = posterior.fold(3, seed=5)
    assert type(folded) is type(net) and not folded.training
    torch.testing.assert_close(folded(x).detach(), outputs[3])
    assert [p.requires_grad for p in folded.parameters()] == [p.requires_grad for p in net.parameters()]
    with torch.no_grad():
        for parameter in folded.parameters():
            parameter.zero_()
    assert torch.equal(posterior.sample_outputs(x, 4, seed=5), outputs)


def test_a_posterior_stays_in_evaluation_mode():
    posterior = spread()
    assert posterior.train() is posterior
    assert not any(module.training for module in posterior.modules())
    assert not any(parameter.requires_grad for parameter in posterior.parameters())


def test_a_detached_copy_no_longer_changes():
    class Keeps(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)  # a graph that a deep copy cannot follow
            return self.last

    draft = Spread(copied(Keeps(4, 3)).eval(), Categorical().build(None), method=MAP())
    draft.network(rows())
    still = detached(draft)
    x = rows()
    before = still.sample_outputs(x, 2)
    with torch.no_grad():
        next(draft.network.parameters()).add_(1)
    assert torch.equal(still.sample_outputs(x, 2), before)
    assert not any(parameter.requires_grad for parameter in still.parameters())
    assert next(draft.network.parameters()).requires_grad
    assert still.trainable == draft.trainable == {"weight", "bias"}


def test_moving_moves_everything():
    posterior = spread(small_net(2), Gaussian().build(torch.zeros(1, 2)))
    before = {name: tensor.clone() for name, tensor in posterior.stored().items()}
    posterior = posterior.double()
    for name, tensor in posterior.stored().items():
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name
    prediction = posterior.predict(rows())
    assert prediction.mean.dtype == prediction.std.dtype == torch.float64
    assert {tensor.dtype for tensor in (*posterior.parameters(), *posterior.buffers())} == {torch.float64, torch.int64}


# -- sizes, names, the summary -----------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.scale


def test_sizes_count_tied_tensors_once():
    tensors = {"raw_std": {"a.weight": torch.zeros(4, 4), "b.bias": torch.zeros(4)}}
    likelihood = Gaussian().build(torch.zeros(1, 4))
    posterior = Spread(copied(Tied()), likelihood, method=MAP(), tensors=tensors)
    weights, beside, noise = 16 + 4 + 4 + 1, 20, 4
    assert posterior.num_parameters == weights + beside + noise
    assert posterior.nbytes == 4 * (weights + beside + noise) + 3 * 4
    assert posterior.double().nbytes == 8 * (weights + beside + noise) + 3 * 4
    summary = posterior.summary()
    assert summary.method == "MAP"
    assert [(row.name, row.shape, row.num_parameters) for row in summary.rows] == [
        ("scale", (), 1),
        ("a.weight", (4, 4), 32),
        ("a.bias", (4,), 4),
        ("b.bias", (4,), 8),
    ]
    assert {row.holds for row in summary.rows} == {"noise of 0.3"}
    assert (summary.num_parameters, summary.nbytes) == (posterior.num_parameters, posterior.nbytes)


NAMES = ["0.weight", "items", "names", "training", "forward", "a/b", "a.b", "a//b", "/a", "state_dict"]


@pytest.mark.parametrize("buffers", [False, True])
def test_tensors_keep_any_name_a_user_gives(buffers: bool):
    tensors = {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}
    group = NamedTensors(tensors, buffers=buffers)
    assert [name for name, _ in group.items()] == NAMES
    assert all(torch.equal(group[name], tensor) for name, tensor in tensors.items())
    assert "items" in group and "a" not in group
    assert len(group.state_dict()) == len(NAMES)
    assert len(list(group.parameters())) == (0 if buffers else len(NAMES))
    assert not any(parameter.requires_grad for parameter in group.parameters())
    moved = copy.deepcopy(group).double()
    assert moved["a/b"].dtype == torch.float64 and group["a/b"].dtype == torch.float32


def test_a_parameter_in_the_structure_stays_the_same_object():
    parameter = nn.Parameter(torch.zeros(2))
    assert NamedTensors({"x": parameter})["x"] is parameter
