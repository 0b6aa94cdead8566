"""`build`: the loss and parameters of every trained method in a loop of the user's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F

from dubito import (
    MAP,
    Bernoulli,
    Categorical,
    ConfigError,
    DataError,
    Gaussian,
    Implicit,
    MCDropout,
    MeanField,
    NetworkError,
    Training,
    methods,
)
from dubito.inputs import TensorOptions
from dubito.likelihoods import Likelihood
from dubito.method import TrainedMethod
from dubito.objective import Objective
from dubito.posterior import Posterior
from dubito.sources import as_source
from dubito.training import Run, train

METHODS: dict[str, TrainedMethod] = {
    "map": MAP(prior_std=1.0),
    "mean field": MeanField(),
    "dropout": MCDropout(rate=0.2),
    "own dropout": MCDropout(rate=None, prior_std=2.0),
}
TARGETS: dict[str, tuple[Likelihood, int, Callable[[Tensor], Tensor]]] = {
    "classes": (Categorical(), 3, lambda x: x.argmax(1) % 3),
    "yes or no": (Bernoulli(), 1, lambda x: (x[:, :1] > 0).to(x)),
    "known noise": (Gaussian(std=0.5), 2, lambda x: x[:, :2] * 2),
    "learned noise": (Gaussian(), 2, lambda x: x[:, :2] * 2),
    "noise per output": (Gaussian(std=(0.5, 1.0)), 2, lambda x: x[:, :2] * 2),
    "covariance": (Gaussian(covariance=((1.0, 0.2), (0.2, 0.5))), 2, lambda x: x[:, :2] * 2),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, outputs))


def steps(
    built: Objective, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, count: int
) -> list[float]:
    losses = []
    for step in range(count):
        torch.manual_seed(step)  # the network's own dropout
        loss = built.loss(inputs, targets, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item())
    return losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("method", METHODS)
def test_the_loop_of_the_readme(method: str, target: str, dtype: torch.dtype) -> None:
    likelihood, outputs, make = TARGETS[target]
    inputs = normal(32, 4, dtype=dtype)
    targets = make(inputs)
    built = METHODS[method].build(network(outputs).to(dtype), likelihood, num_data=32)
    optimizer = torch.optim.Adam(built.parameter_groups(lr=2e-2))  # before the first loss, as people do
    losses = steps(built, optimizer, inputs, targets, 30)
    assert sum(losses[-5:]) < sum(losses[:5])
    posterior = built.posterior()
    assert posterior.predict(inputs, 4).log_prob(targets).isfinite().all()
    assert {t.dtype for t in (*posterior.parameters(), *posterior.buffers())} == {dtype}


@pytest.mark.parametrize(
    "make",
    [
        lambda groups: torch.optim.Adam(groups),
        lambda groups: torch.optim.AdamW(groups),
        lambda groups: torch.optim.SGD(groups),
        lambda groups: torch.optim.RMSprop(groups),
        lambda groups: torch.optim.Adam(groups, fused=True),
        lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]], lr=0.1, max_iter=2),
    ],
    ids=["Adam", "AdamW", "SGD", "RMSprop", "fused", "LBFGS"],
)
def test_noise_without_a_shape_is_learned_by_any_optimizer(make) -> None:
    inputs = normal(32, 4)
    targets = torch.stack([inputs[:, 0] + 3 * normal(32, seed=1), inputs[:, 1] + 0.1 * normal(32, seed=2)], 1)
    built = MAP().build(nn.Linear(4, 2), Gaussian(), num_data=32)
    optimizer = make(built.parameter_groups(lr=2e-2))

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = built.loss(inputs, targets).total
        total.backward()
        return total

    for _ in range(100):
        optimizer.step(closure)
    std = built.posterior().likelihood.std()
    assert std.shape == (2,)
    assert std[0] > 1.2 and std[1] < 0.8  # both started at 1


def test_learned_noise_finds_the_residuals() -> None:
    inputs = normal(64, 4, dtype=torch.float64)
    targets = inputs[:, :2] + torch.tensor([0.2, 1.5]).double() * normal(64, 2, seed=1, dtype=torch.float64)
    built = MAP().build(nn.Linear(4, 2).double(), Gaussian(), num_data=64)
    built.loss(inputs, targets)
    optimizer = torch.optim.LBFGS(
        built.parameters(), max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = built.loss(inputs, targets).total
        total.backward()
        return total

    optimizer.step(closure)
    solution = torch.linalg.lstsq(torch.cat([inputs, torch.ones(64, 1)], 1), targets).solution
    residuals = targets - inputs @ solution[:4] - solution[4]
    std = built.posterior().likelihood.std()
    torch.testing.assert_close(std, residuals.square().mean(0).sqrt(), rtol=1e-5, atol=0)


# -- the loss ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 32])
def test_terms_of_the_loss(rows: int) -> None:
    net, inputs, targets = nn.Linear(4, 3), normal(rows, 4), torch.arange(rows) % 3
    built = MAP(prior_std=0.5).build(net, Categorical(), num_data=50)
    for weight in (0.0, 0.3, 1.0):
        loss = built.loss(inputs, targets, kl_weight=weight)
        torch.testing.assert_close(loss.nll, F.cross_entropy(net(inputs), targets))
        penalty = sum(p.square().sum() for p in net.parameters()) / (2 * 0.25)
        torch.testing.assert_close(loss.kl, penalty)  # total nats, whatever the rows
        torch.testing.assert_close(loss.total, loss.nll + weight * penalty / 50)


def test_events_are_summed_and_rows_averaged() -> None:
    net, inputs, targets = nn.Linear(4, 2), normal(7, 4), normal(7, 2, seed=1)
    nll = MAP().build(net, Gaussian(std=0.5), num_data=7).loss(inputs, targets).nll
    torch.testing.assert_close(nll, -Normal(net(inputs), 0.5).log_prob(targets).sum(1).mean())
    built = MAP().build(net, Bernoulli(), num_data=7)
    labels = (targets > 0).float()
    expected = F.binary_cross_entropy_with_logits(net(inputs), labels, reduction="none").sum(1).mean()
    torch.testing.assert_close(built.loss(inputs, labels).nll, expected)


def test_batches_of_an_epoch_carry_one_divergence() -> None:
    inputs, targets = normal(20, 4), torch.arange(20) % 3
    built = MeanField().build(nn.Linear(4, 3), Categorical(), num_data=20)
    parts = [built.loss(x, y) for x, y in zip(inputs.split(6), targets.split(6), strict=True)]
    rows = [6, 6, 6, 2]
    shared = sum(n * (part.total - part.nll) for n, part in zip(rows, parts, strict=True))
    torch.testing.assert_close(shared, built.kl(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["mean field", "dropout"])
def test_noise_comes_from_the_generator(method: str) -> None:
    built = METHODS[method].build(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3)), Categorical(), num_data=8)
    inputs, targets = normal(8, 4), torch.arange(8) % 3
    state = torch.get_rng_state()
    one, same, other = (
        built.loss(inputs, targets, generator=torch.Generator().manual_seed(s)).nll.item() for s in (0, 0, 1)
    )
    assert one == same
    assert one != other
    assert torch.equal(torch.get_rng_state(), state)


# -- what is handed to an optimiser ------------------------------------------------------------------------------


def test_parameter_groups() -> None:
    net = network(2)
    net[0].bias.requires_grad_(False)
    built = MeanField().build(net, Gaussian(), num_data=8)
    weights, variational = built.parameter_groups(lr=0.1, variational_lr=0.2, weight_decay=0.3)
    assert (weights["lr"], weights["weight_decay"]) == (0.1, 0.3)
    assert (variational["lr"], variational["weight_decay"]) == (0.2, 0.0)
    own = dict(built.draft.network.named_parameters())
    moving = ("0.weight", "3.weight", "3.bias")
    assert {id(p) for p in weights["params"]} == {id(own[name]) for name in moving}
    beside = [*(built.draft.group("raw_std")[name] for name in moving), built.draft.likelihood.raw_std]
    assert {id(p) for p in variational["params"]} == {id(p) for p in beside}
    (only,) = MAP().build(net, Categorical(), num_data=8).parameter_groups(lr=0.1)
    assert only["name"] == "weights"


# -- snapshots, and what is left alone ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_posterior_is_a_snapshot(method: str) -> None:
    inputs = normal(16, 4)
    targets = inputs[:, :2]
    built = METHODS[method].build(network(2), Gaussian(), num_data=16)
    optimizer = torch.optim.SGD(built.parameter_groups(lr=0.1))
    steps(built, optimizer, inputs, targets, 2)
    posterior = built.posterior()
    before = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
    outputs = posterior.sample_outputs(inputs, 3)
    steps(built, optimizer, inputs, targets, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.state_dict().items())
    assert torch.equal(posterior.sample_outputs(inputs, 3), outputs)
    assert not any(tensor.requires_grad for tensor in posterior.parameters())
    later = built.posterior().state_dict()
    assert not torch.equal(later["network.0.weight"], before["network.0.weight"])
    assert not torch.equal(later["likelihood.raw_std"], before["likelihood.raw_std"])


@pytest.mark.parametrize("method", METHODS)
def test_the_users_network_is_copied(method: str) -> None:
    net = network(3)
    before, twin = copy.deepcopy(net.state_dict()), copy.deepcopy(net)
    built = METHODS[method].build(net, Categorical(), num_data=16)
    optimizer = torch.optim.SGD(built.parameter_groups(lr=0.1))
    steps(built, optimizer, normal(16, 4), torch.arange(16) % 3, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert [m.training for m in net.modules()] == [m.training for m in twin.modules()]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())


def test_batch_norm_learns_unless_it_was_frozen() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    net[3].eval()
    built = MeanField().build(net, Categorical(), num_data=16)
    built.train()  # as people do; a posterior stays in evaluation mode
    assert not built.draft.network.training
    built.loss(normal(16, 4) + 5, torch.arange(16) % 3)
    statistics = built.posterior().network
    assert statistics[1].num_batches_tracked == 1
    assert not torch.equal(statistics[1].running_mean, torch.zeros(6))
    assert statistics[3].num_batches_tracked == 0
    assert not built.draft.network.training


@pytest.mark.parametrize("method", METHODS)
def test_an_error_leaves_evaluation_mode_and_weights(method: str) -> None:
    built = METHODS[method].build(network(3), Categorical(), num_data=16)
    built.loss(normal(16, 4), torch.arange(16) % 3)
    parameters = dict(built.named_parameters())
    with pytest.raises((DataError, RuntimeError)):
        built.loss(normal(16, 5), torch.arange(16) % 3)
    assert not any(module.training for module in built.draft.modules())
    assert all(p is parameters[name] for name, p in built.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in built.modules())


# -- the start ----------------------------------------------------------------------------------------------------

TRAINED: dict[str, TrainedMethod] = {
    **{name: method for name, method in methods().items() if isinstance(method, TrainedMethod)},
    "mean field, spread": MeanField(initial_spread=0.5),
    "implicit, biases": Implicit(bias_factors=True),
}
DRAWN = {
    "k-tied", "batch-ensemble", "rank1", "implicit", "mean field, spread", "implicit, biases",
}  # their start depends on the seed  # fmt: skip


def stored(posterior: Posterior) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in posterior.stored().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", TRAINED)
def test_a_seed_starts_and_trains_as_fit_does(method: str, monkeypatch) -> None:
    chosen, net, data = TRAINED[method], network(3), (normal(24, 4), normal(24, 4, seed=1).argmax(1) % 3)
    starts: list[dict[str, Tensor]] = []

    def watched(objective: Objective, *rest: Any) -> Any:
        starts.append(stored(objective.draft))
        return train(objective, *rest)

    monkeypatch.setattr("dubito.method.train", watched)
    training = Training(epochs=2, batch_size=8)
    expected = chosen.fit(net, data, Categorical(), training=training, seed=5)
    built = chosen.build(net, Categorical(), 24, seed=5)
    built.bind(data[0])
    assert same(stored(built.draft), starts[0])
    assert same(stored(chosen.build(net, Categorical(), 24, seed=6).draft), starts[0]) == (method not in DRAWN)
    train(built, as_source(data, TensorOptions.of(net)), training, Run(seed=5, progress=False))
    assert same(stored(built.posterior()), stored(expected))


def test_seeds_that_are_none() -> None:
    with pytest.raises(ConfigError, match="seed"):
        MeanField().build(network(3), Categorical(), 24, seed="five")  # pyright: ignore


# -- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_refusals(method: str) -> None:
    chosen, net = METHODS[method], network(3)
    with pytest.raises(ConfigError, match="num_data must be a whole number of at least 1"):
        chosen.build(net, Categorical(), num_data=0)
    with pytest.raises(ConfigError, match="give an instance"):
        chosen.build(net, Categorical, num_data=8)  # pyright: ignore
    built = chosen.build(net, Categorical(), num_data=8)
    with pytest.raises(DataError, match="must be finite"):
        built.loss(torch.full((2, 4), torch.nan), torch.tensor([0, 1]))
    with pytest.raises(DataError, match=r"labels must lie in 0\.\.2"):
        built.loss(normal(2, 4), torch.tensor([0, 3]))
    with pytest.raises(NetworkError, match=r"call loss\(\.\.\.\) once first"):
        chosen.build(net, Gaussian(), num_data=8).posterior()
