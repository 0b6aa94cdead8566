"""Mean field and k-tied with every estimator: expected gradients, rows shared out, fallbacks, marginal predictions."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dubito
from dubito import (
    Categorical,
    ConfigError,
    Flipout,
    Gaussian,
    KTied,
    LocalReparameterised,
    MeanField,
    NetworkError,
    Reparameterised,
    Training,
    UnknownNameError,
)
from dubito.inputs import Batch
from dubito.layers import reasons, survey
from dubito.method import TrainedMethod
from dubito.objective import Objective
from dubito.weight_normals import NormalPosterior

ESTIMATORS = {"reparameterised": Reparameterised(), "local": LocalReparameterised(), "flipout": Flipout()}
METHODS = {"mean field": MeanField, "2-tied": KTied}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)
every_method = pytest.mark.parametrize("method", METHODS)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(count: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(method: str, estimator: str, **settings) -> TrainedMethod:
    return METHODS[method](estimator=ESTIMATORS[estimator], **settings)


def scatter(built: Objective) -> None:
    with torch.no_grad():
        for number, tensor in enumerate(built.draft.tensors.parameters()):
            tensor.copy_(normal(*tensor.shape, seed=number).to(tensor) * 0.5 - 1)


class Convolutional(nn.Module):
    """Convolutions in groups, batch norm, dropout, a layer called twice, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.body, self.drop = nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.Dropout(0.2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.stem(x)))
        x = self.body(torch.relu_(self.body(x)))
        return self.head(self.drop(x.mean((2, 3))))


class Tokens(nn.Module):
    """Time-major: embedding, LSTM, a dense layer on every step, and a transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 6), nn.LSTM(6, 6)
        self.dense = nn.Linear(6, 6)
        self.block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        steps = self.dense(self.lstm(self.embedding(ids.T))[0])
        return self.head(self.block(steps.transpose(0, 1)).mean(1))


def network(name: str) -> tuple[nn.Module, Tensor]:
    if name == "dense":
        layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
        return nn.Sequential(*layers).double(), normal(8, 4)
    if name == "convolutional":
        return Convolutional().double(), normal(8, 2, 4, 4)
    return Tokens().double(), torch.randint(9, (8, 5), generator=seeded(2))


# -- gradients ----------------------------------------------------------------------------------------------------


@every_estimator
@every_method
def test_expected_gradients_are_those_of_the_closed_form(method: str, estimator: str) -> None:
    # For y = Xw + noise: E[−log p] = Σ ((y − Xμ)² + Σ_j x_j² σ_j²) / 2s² + constant.
    inputs, targets, noise_std, count = normal(12, 4), normal(12, 3, seed=1), 0.5, 250
    settings = {} if method == "mean field" else {"rank": 1}
    built = make(method, estimator, **settings).build(nn.Linear(4, 3).double(), Gaussian(std=noise_std), num_data=12)
    scatter(built)
    draft = built.draft
    assert isinstance(draft, NormalPosterior)
    tensors = list(draft.tensors.parameters()) + list(draft.network.parameters())

    std = {name: draft.weight_scale(name).std for name in draft.random}
    errors = (targets - draft.network(inputs)).square().sum()
    spread = (inputs.square() @ std["weight"].square().T + std["bias"].square()).sum()
    expected = torch.autograd.grad((errors + spread) / (2 * noise_std**2) / 12, tensors)

    found: list[Tensor] = []
    for seed in range(count):
        loss = built.loss(inputs, targets, kl_weight=0.0, generator=seeded(seed))
        found.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss.nll, tensors)]))
    each = torch.stack(found)
    truth = torch.cat([g.flatten() for g in expected])
    scores = (each.mean(0) - truth) / (each.std(0) / count**0.5)
    assert scores.abs().max() < 5


def test_local_noise_and_flipout_lower_the_variance_of_gradients() -> None:
    inputs, targets = normal(64, 6), normal(64, 4, seed=1)
    variances = {}
    for name in ESTIMATORS:
        built = make("mean field", name, initial_std=0.3).build(
            nn.Linear(6, 4).double(), Gaussian(std=1.0), num_data=64
        )
        weight = built.draft.network.weight
        gradients = [
            torch.autograd.grad(built.loss(inputs, targets, generator=seeded(s)).nll, weight)[0] for s in range(60)
        ]
        variances[name] = torch.stack(gradients).var(0).mean().item()
    assert max(variances["local"], variances["flipout"]) < 0.5 * variances["reparameterised"]


@every_estimator
@every_method
@pytest.mark.parametrize("name", ["dense", "convolutional", "tokens"])
def test_processes_that_share_a_batch_see_what_one_sees(name: str, method: str, estimator: str) -> None:
    net, inputs = network(name)
    targets = labels(8)
    built = make(method, estimator, initial_std=0.2).build(net, Categorical(), num_data=8)
    built.bind(inputs)
    parameters = [p for p in built.parameters() if p.requires_grad]
    # Batch norm's and dropout's own noise see only their rows: in evaluation mode they do not matter.
    built.modes = {"norm": False, "drop": False} if name == "convolutional" else {}

    def gradients(first: int, end: int) -> list[Tensor]:
        batch = Batch(inputs[first:end], targets[first:end], first, 8)
        loss = built.batch_loss(batch, 1.0, seeded(4))
        found = torch.autograd.grad(loss.total, parameters, allow_unused=True, materialize_grads=True)
        return [(end - first) / 8 * gradient for gradient in found]

    whole = gradients(0, 8)
    shares = [sum(parts) for parts in zip(gradients(0, 3), gradients(3, 4), gradients(4, 8), strict=True)]
    for one, several in zip(whole, shares, strict=True):
        torch.testing.assert_close(several, one, rtol=1e-9, atol=1e-12)
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(gradients(0, 3), gradients(0, 4), strict=True))


@every_estimator
@every_method
@pytest.mark.parametrize("name", ["dense", "convolutional", "tokens"])
def test_every_tensor_learns_and_training_repeats_itself(name: str, method: str, estimator: str) -> None:
    net, inputs = network(name)
    state = copy.deepcopy(net.state_dict())
    data = (inputs, labels(8))
    fits = [
        make(method, estimator).fit(net, data, Categorical(), training=Training(epochs=2, batch_size=4), seed=3)
        for _ in range(2)
    ]
    assert all(torch.equal(tensor, state[key]) for key, tensor in net.state_dict().items())
    first, second = (posterior.stored() for posterior in fits)
    start = make(method, estimator).build(net, Categorical(), num_data=8).draft.stored()
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
        moved = not torch.equal(tensor, start[key])
        # nn.LSTM keeps two biases, and attention's key bias changes no output: their divergence moves them.
        assert moved or not tensor.is_floating_point(), key


# -- which layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("estimator", "words"), [("local", "local reparameterisation"), ("flipout", "flipout")])
def test_the_summary_says_where_noise_was_put(estimator: str, words: str) -> None:
    net, inputs = network("tokens")
    posterior = make("2-tied", estimator).fit(
        net, (inputs, labels(8)), Categorical(), training=Training(epochs=1, batch_size=4)
    )
    rows = {row.name: row.holds for row in posterior.summary().rows}
    assert rows["dense.weight"] == rows["block.linear1.weight"] == f"Normal, std of rank 2, {words}"
    assert rows["head.bias"] == f"Normal, own std, {words}"
    assert rows["block.self_attn.in_proj_weight"] == f"Normal, std of rank 2, {words}"
    assert rows["lstm.weight_hh_l0"] == f"Normal, std of rank 2, reparameterised ({reasons.STEPS})"
    assert rows["lstm.weight_ih_l0"] == f"Normal, std of rank 2, reparameterised ({reasons.STEPS})"
    assert rows["embedding.weight"] == f"Normal, std of rank 2, reparameterised ({reasons.NO_PRODUCT})"
    assert rows["block.norm1.weight"] == f"Normal, own std, reparameterised ({reasons.NO_PRODUCT})"
    plain = make("2-tied", "reparameterised").fit(net, (inputs, labels(8)), Categorical(), training=Training(epochs=1))
    assert plain.holds("dense.weight") == "Normal, std of rank 2"


@every_method
@pytest.mark.parametrize("estimator", [LocalReparameterised, Flipout])
def test_layers_that_cannot_have_an_estimator_are_refused_before_training(
    method: str, estimator: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dubito.method.train", lambda *_: pytest.fail("training started"))
    net, inputs = network("tokens")
    data = (inputs, labels(8))
    with pytest.raises(NetworkError, match=rf"layer 'lstm' cannot carry the noise .*{reasons.STEPS}"):
        METHODS[method](estimator=estimator(layers=["head", "lstm"])).fit(net, data, Categorical())
    with pytest.raises(UnknownNameError, match="unknown layer 'heads', did you mean 'head'"):
        METHODS[method](estimator=estimator(layers=["heads"])).fit(net, data, Categorical())
    with pytest.raises(ConfigError, match="estimator must be"):
        METHODS[method](estimator=None)


@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_estimators_survive_storage(estimator: str, tmp_path) -> None:
    net, inputs = network("dense")
    posterior = make("mean field", estimator).fit(net, (inputs, labels(8)), Categorical(), training=Training(epochs=1))
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", net)
    assert again.method == posterior.method == MeanField(estimator=ESTIMATORS[estimator])
    assert str(again.summary()) == str(posterior.summary())


@every_estimator
@every_method
def test_half_precision_keeps_full_precision_where_it_matters(method: str, estimator: str) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    data = (normal(16, 2, 4, 4, dtype=torch.float32), labels(16))
    built = make(method, estimator).build(net, Categorical(), num_data=16)
    full = built.loss(*data, generator=seeded(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = built.loss(*data, generator=seeded(0))
    assert half.kl.dtype == torch.float32
    torch.testing.assert_close(half.kl, full.kl, rtol=1e-6, atol=0)
    torch.testing.assert_close(half.nll, full.nll, rtol=0.02, atol=0)
    training = Training(epochs=1, batch_size=8, precision="bf16", channels_last=True)
    posterior = make(method, estimator).fit(net, data, Categorical(), training=training)
    assert all(tensor.dtype == torch.float32 and tensor.isfinite().all() for tensor in posterior.parameters())


# -- marginal predictions ---------------------------------------------------------------------------------------------


def fitted(method: str, name: str = "dense", **settings) -> tuple[NormalPosterior, Tensor]:
    net, inputs = network(name)
    built = make(method, "reparameterised", **settings).build(net, Categorical(), num_data=8)
    scatter(built)
    posterior = built.posterior()
    assert isinstance(posterior, NormalPosterior)
    return posterior, inputs


@every_method
@pytest.mark.parametrize("name", ["dense", "convolutional", "tokens"])
def test_marginal_predictions_do_not_depend_on_the_pieces(method: str, name: str) -> None:
    posterior, inputs = fitted(method, name)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    whole = posterior.predict(inputs, 5, seed=2, marginal=True)
    for max_rows in (1, 3, 8):
        pieces = posterior.predict(inputs, 5, seed=2, max_rows=max_rows, marginal=True)
        torch.testing.assert_close(pieces.probs, whole.probs, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(pieces.epistemic, whole.epistemic, rtol=1e-6, atol=1e-8)
    assert not torch.equal(posterior.predict(inputs, 5, seed=3, marginal=True).probs, whole.probs)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) or module._forward_pre_hooks for module in posterior.network.modules())


@every_method
def test_marginal_predictions_of_a_layer_are_exact(method: str) -> None:
    built = make(method, "reparameterised").build(nn.Linear(4, 3).double(), Gaussian(std=0.1), num_data=8)
    scatter(built)
    posterior, inputs, count = built.posterior(), normal(5, 4), 2000
    assert isinstance(posterior, NormalPosterior)
    with torch.no_grad():
        std = {name: posterior.weight_scale(name).std for name in posterior.random}
        mean = posterior.network(inputs)
        variance = inputs.square() @ std["weight"].square().T + std["bias"].square()
    draws = posterior.predict(inputs, count, marginal=True).means
    assert ((draws.mean(0) - mean) / (variance / count).sqrt()).abs().max() < 5
    assert (draws.var(0) / variance - 1).abs().max() < 5 * (2 / count) ** 0.5
    rows = torch.corrcoef(draws.flatten(1).T) - torch.eye(15)
    assert rows.abs().max() < 5 / count**0.5  # rows and outputs have noise of their own


@every_method
def test_marginal_and_function_draws_agree_on_each_row(method: str) -> None:
    posterior, inputs = fitted(method)
    functions = posterior.predict(inputs, 1000).probs
    marginal = posterior.predict(inputs, 1000, marginal=True).probs
    # Means of 1000 probabilities in [0, 1], whose deviation is at most ½ each.
    assert (functions - marginal).abs().max() < 5 * 0.5 * (2 / 1000) ** 0.5


def test_blocks_that_would_skip_their_layers_in_evaluation_do_not() -> None:
    net, inputs = network("tokens")
    built = MeanField(initial_std=0.3, subset=["block.linear1", "block.linear2"]).build(net, Categorical(), num_data=8)
    posterior = built.posterior()
    assert isinstance(posterior, NormalPosterior)
    assert posterior.predict(inputs, 8, marginal=True).epistemic.min() > 0


def test_refusals() -> None:
    posterior, inputs = fitted("2-tied")
    with pytest.raises(ConfigError, match="num_samples must be a whole number"):
        posterior.predict(inputs, 0, marginal=True)
    with pytest.raises(dubito.DataError, match="the network cannot read inputs"):
        posterior.predict(inputs[:, :2], 2)


# -- the survey -------------------------------------------------------------------------------------------------------


@every_estimator
def test_fitting_surveys_once_and_stores_it(estimator: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, inputs = network("tokens")
    posterior = make("2-tied", estimator).fit(net, (inputs, labels(8)), Categorical(), training=Training(epochs=1))
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", net)
    expected = posterior.predict(inputs, 3, marginal=True)
    monkeypatch.setattr("dubito.posterior.base.survey", lambda *_: pytest.fail("surveyed again"))
    assert torch.equal(again.predict(inputs, 3, marginal=True).probs, expected.probs)
    few = again.predict(inputs[:3], 3, max_rows=2, marginal=True).probs
    torch.testing.assert_close(few.sum(1), torch.ones(3, dtype=torch.float64))


def test_a_posterior_without_a_stored_survey_makes_one_and_shows_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, inputs = fitted("mean field", "convolutional")
    assert "survey" not in posterior.details  # built, never bound
    before, count, made = copy.deepcopy(posterior.details), 0, survey

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return made(*args)

    monkeypatch.setattr("dubito.posterior.base.survey", counted)
    first, second = (posterior.predict(inputs, 3, marginal=True).probs for _ in range(2))
    assert torch.equal(first, second) and count == 1 and posterior.details == before


@every_method
@pytest.mark.parametrize("estimator", ["local", "flipout"])
def test_points_are_named_with_a_reason(method: str, estimator: str) -> None:
    net, inputs = network("dense")
    net[2].bias.requires_grad_(False)  # pyright: ignore
    built = make(method, estimator, subset=["2"]).build(net, Categorical(), num_data=8)
    built.loss(inputs, labels(8))
    posterior = built.posterior()
    for name, reason in {"0.weight": "SUBSET", "0.bias": "SUBSET", "2.bias": "FROZEN"}.items():
        assert posterior.holds(name) == f"point ({getattr(reasons, reason)})"
    assert posterior.holds("2.weight").startswith("Normal")


# -- private passes ---------------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A body whose parts are recomputed in the backward pass, one layer in several of them."""

    def __init__(self, *, recomputed: bool) -> None:
        super().__init__()
        self.recomputed = recomputed
        self.first, self.shared, self.other = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(self.other(torch.tanh(self.shared(x))))))

    def mixed(self, x: Tensor) -> Tensor:
        sequence = x.unflatten(1, (1, -1)).expand(-1, 3, -1) * torch.linspace(1, 2, 3, dtype=x.dtype)[:, None]
        return self.attention(sequence, sequence, sequence, need_weights=False)[0].mean(1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for part in (self.part, self.part, self.mixed):
            x = checkpoint(part, x, use_reentrant=False) if self.recomputed else part(x)
        return self.head(x)


@every_estimator
@every_method
def test_checkpointing_changes_no_gradient(method: str, estimator: str) -> None:
    inputs, answers = normal(8, 4), {}
    start = Checkpointed(recomputed=False).double().state_dict()
    for recomputed in (False, True):
        net = Checkpointed(recomputed=recomputed).double()
        net.load_state_dict(start)
        built = make(method, estimator, initial_std=0.3).build(net, Categorical(), num_data=8)
        parameters = [p for p in built.parameters() if p.requires_grad]
        built.loss(inputs, labels(8), generator=seeded(5)).total.backward()
        answers[recomputed] = [p.grad for p in parameters]
    if estimator != "reparameterised":
        assert built.placement.names == tuple(start)  # pyright: ignore
    for ours, expected in zip(answers[True], answers[False], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert any(gradient.abs().max() > 1e-3 for gradient in answers[False])


class Alike(nn.Module):
    """Two checkpointed parts that call one layer on the same inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(sum(torch.tanh(checkpoint(self.layer, x, use_reentrant=False)) for _ in range(2)))  # pyright: ignore


def test_recomputed_calls_that_cannot_be_told_apart_are_refused() -> None:
    built = make("mean field", "local").build(Alike().double(), Categorical(), num_data=8)
    loss = built.loss(normal(8, 4), labels(8), generator=seeded(0)).total
    with pytest.raises(NetworkError, match=r"which of several calls of 'layer' .* use Reparameterised\(\)"):
        loss.backward()


@every_method
@pytest.mark.parametrize("name", ["dense", "convolutional", "tokens"])
@pytest.mark.parametrize("stored", [True, False], ids=["stored survey", "no survey"])
def test_predictions_from_threads_are_those_of_one(method: str, name: str, stored: bool) -> None:
    posterior, inputs = fitted(method, name)
    if stored:
        posterior.details["survey"] = survey(posterior.network, inputs).to_json()
    jobs = [(seed, marginal) for seed in range(6) for marginal in (True, False)] * 2

    def predict(job: tuple[int, bool]) -> Tensor:
        return posterior.predict(inputs, 4, seed=job[0], max_rows=3, marginal=job[1]).probs

    before = {key: tensor.clone() for key, tensor in posterior.stored().items()}
    modules = [(module.training, set(vars(module))) for module in posterior.network.modules()]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(8) as pool:
            ours = list(pool.map(predict, jobs))
    finally:
        sys.setswitchinterval(interval)
    alone = {job: predict(job) for job in set(jobs)}
    for job, answer in zip(jobs, ours, strict=True):
        assert torch.equal(answer, alone[job]), job
    assert all(torch.equal(tensor, before[key]) for key, tensor in posterior.stored().items())
    assert modules == [(module.training, set(vars(module))) for module in posterior.network.modules()]
    assert not any(
        "forward" in vars(m) or m._forward_pre_hooks or m._forward_hooks for m in posterior.network.modules()
    )
