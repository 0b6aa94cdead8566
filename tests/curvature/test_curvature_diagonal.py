"""The diagonal of the curvature against per-example Jacobians and closed-form Hessians of the likelihoods."""

import copy
import sys
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

from dubito import GGN, Bernoulli, Categorical, ConfigError, Empirical, Fisher, Gaussian, NetworkError
from dubito.curvature import Curvature, find_blocks, statistics
from dubito.inputs import TensorOptions
from dubito.likelihoods import Likelihood
from dubito.sources import as_source

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
ROWS = 64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def curvature(
    network: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    likelihood: Likelihood,
    kind: Curvature,
    *,
    batch_size: int = 16,
    seed: int = 0,
) -> dict[str, Tensor]:
    names = tuple(name for name, _ in network.named_parameters())
    covered = find_blocks(network.eval(), inputs[:8], names)
    blocks = list(covered.blocks.values())
    built = likelihood.build(network(inputs[:2]).detach()).requires_grad_(False)
    source = as_source((inputs, targets), TensorOptions.of(network))
    found = statistics(network, covered, source, built, kind, diagonal=True, batch_size=batch_size, seed=seed)
    sums: dict[str, Tensor] = {}
    for block in blocks:
        sums |= block.tensors(len(inputs) * found[block.name].diagonal)
    return sums


def jacobians(network: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs [B, C] of flattened events and, by name, their Jacobians [B, C, ...], by torch.func."""
    network = copy.deepcopy(network).double().eval()
    parameters = {name: p.detach() for name, p in network.named_parameters()}

    def function(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(network, parameters, (row[None],))[0].flatten()

    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return network(inputs).flatten(1).detach(), vmap(jacrev(function), (None, 0))(parameters, inputs)


def exact(jacobian: Tensor, hessians: Tensor) -> Tensor:
    """Σ_i diag(J_iᵀ H_i J_i)."""
    return torch.einsum("bc...,bcd,bd...->...", jacobian, hessians, jacobian)


def agree(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, value in actual.items():
        assert value.shape == expected[name].shape
        error = (value.double() - expected[name]).norm() / expected[name].norm()
        assert error < TOLERANCE[value.dtype], (name, error)


# -- networks -----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Batch norm, an in-place ReLU, a shortcut, grouped, dilated and circular convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 4, (3, 2), padding=(1, 0), bias=False), nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=2, groups=2, dilation=2)
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2)
        self.wrapped = nn.Conv2d(6, 5, 3, padding=1, padding_mode="circular")
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(5, 3)
        with torch.no_grad():
            self.norm.running_mean.copy_(normal(4, seed=3))
            self.norm.running_var.copy_(normal(4, seed=4).square() + 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu(self.norm(self.stem(inputs)))
        hidden = self.relu(self.conv(hidden) + self.shortcut(hidden))
        return self.head(self.wrapped(hidden).mean((2, 3)))


class Shared(nn.Module):
    """A layer called twice, one with its weight but no bias, and one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.tied = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.alias = self.twice
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.first(inputs))))
        return self.head(torch.tanh(self.tied(torch.tanh(self.alias(hidden)))))


class Positions(nn.Module):
    """Linear layers on [B, T, F], time-major, and flattened both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.time = nn.Linear(4, 5), nn.Linear(5, 6)
        self.flat, self.turned, self.head = nn.Linear(6, 4), nn.Linear(4, 5, bias=False), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        shape = inputs.shape[:2]
        hidden = torch.relu_(self.rows(inputs))
        hidden = torch.tanh(self.time(hidden.transpose(0, 1))).transpose(0, 1)
        hidden = torch.tanh(self.flat(hidden.flatten(0, 1))).unflatten(0, shape)
        hidden = self.turned(hidden.transpose(0, 1).flatten(0, 1)).unflatten(0, shape[::-1])
        return self.head(torch.tanh(hidden).mean(0))


def mlp(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(inplace=True), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, outputs))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (4,)),
    "residual": (Residual, (2, 6, 5)),
    "shared": (Shared, (4,)),
    "positions": (Positions, (3, 4)),
}


def make(name: str, dtype: torch.dtype = torch.float64, rows: int = ROWS) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape = NETWORKS[name]
    targets = torch.randint(3, (rows,), generator=torch.Generator().manual_seed(5))
    return build().to(dtype).eval(), normal(rows, *shape).to(dtype), targets


def softmax_hessians(logits: Tensor) -> Tensor:
    probs = logits.softmax(-1)
    return probs.diag_embed() - probs[:, :, None] * probs[:, None, :]


# -- exact curvatures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_ggn_of_classes(name: str, dtype: torch.dtype, batch_size: int) -> None:
    network, inputs, targets = make(name, dtype)
    logits, jacobian = jacobians(network, inputs)
    expected = {key: exact(value, softmax_hessians(logits)) for key, value in jacobian.items()}
    actual = curvature(network, inputs, targets, Categorical(), GGN(), batch_size=batch_size)
    agree(actual, expected)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_empirical_of_classes(name: str, dtype: torch.dtype, batch_size: int) -> None:
    network, inputs, targets = make(name, dtype)
    logits, jacobian = jacobians(network, inputs)
    gradient = logits.softmax(-1) - F.one_hot(targets, 3)
    expected = {k: torch.einsum("bc...,bc->b...", j, gradient).square().sum(0) for k, j in jacobian.items()}
    actual = curvature(network, inputs, targets, Categorical(), Empirical(), batch_size=batch_size)
    agree(actual, expected)


def test_blocks_of_examples_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    network, inputs, targets = make("residual")
    whole = curvature(network, inputs, targets, Categorical(), GGN())
    monkeypatch.setattr(sys.modules["dubito.curvature.sums"], "BLOCK", 100)
    agree(curvature(network, inputs, targets, Categorical(), GGN()), whole)


COVARIANCE = ((0.5, 0.1, 0.0), (0.1, 0.4, -0.1), (0.0, -0.1, 0.3))
REALS = {
    "one std": (Gaussian(std=0.5), 3, torch.eye(3) / 0.25),
    "std per output": (Gaussian(std=(0.5, 1.0, 2.0)), 3, torch.tensor([4.0, 1.0, 0.25]).diag()),
    "covariance": (Gaussian(covariance=COVARIANCE), 3, torch.tensor(COVARIANCE, dtype=torch.float64).inverse()),
    "one output": (Gaussian(std=0.5), 1, torch.eye(1) / 0.25),
}


@pytest.mark.parametrize("name", REALS)
def test_ggn_of_reals(name: str) -> None:
    likelihood, outputs, precision = REALS[name]
    network, inputs = mlp(outputs).double(), normal(ROWS, 4)
    _, jacobian = jacobians(network, inputs)
    hessians = precision.double().expand(ROWS, outputs, outputs)
    expected = {key: exact(value, hessians) for key, value in jacobian.items()}
    agree(curvature(network, inputs, normal(ROWS, outputs, seed=1), likelihood, GGN()), expected)


@pytest.mark.parametrize("roots", [1, 9, 50])
def test_columns_of_hessian_roots_come_in_parts(monkeypatch: pytest.MonkeyPatch, roots: int) -> None:
    likelihood, outputs, _ = REALS["covariance"]
    network, inputs, targets = mlp(outputs).double(), normal(ROWS, 4), normal(ROWS, outputs, seed=1)
    whole = curvature(network, inputs, targets, likelihood, GGN())
    monkeypatch.setattr(sys.modules["dubito.curvature.kinds"], "ROOTS", roots)
    agree(curvature(network, inputs, targets, likelihood, GGN()), whole)


@pytest.mark.parametrize("name", REALS)
def test_empirical_of_reals(name: str) -> None:
    likelihood, outputs, precision = REALS[name]
    network, inputs, targets = mlp(outputs).double(), normal(ROWS, 4), normal(ROWS, outputs, seed=1)
    means, jacobian = jacobians(network, inputs)
    gradient = (means - targets) @ precision.double()
    expected = {k: torch.einsum("bc...,bc->b...", j, gradient).square().sum(0) for k, j in jacobian.items()}
    agree(curvature(network, inputs, targets, likelihood, Empirical()), expected)


@pytest.mark.parametrize("outputs", [1, 3])
def test_ggn_of_yes_or_no(outputs: int) -> None:
    network, inputs = mlp(outputs).double(), normal(ROWS, 4)
    logits, jacobian = jacobians(network, inputs)
    hessians = (logits.sigmoid() * (1 - logits.sigmoid())).diag_embed()
    expected = {key: exact(value, hessians) for key, value in jacobian.items()}
    agree(curvature(network, inputs, torch.zeros(ROWS, outputs), Bernoulli(), GGN()), expected)


def test_one_logit_without_an_axis_of_its_own() -> None:
    flat = nn.Sequential(mlp(1), nn.Flatten(0)).double()
    inputs, targets = normal(ROWS, 4), torch.zeros(ROWS)
    expected = curvature(flat[0], inputs, targets[:, None], Bernoulli(), GGN())
    actual = curvature(flat, inputs, targets, Bernoulli(), GGN())
    agree(actual, {f"0.{name}": value for name, value in expected.items()})


# -- drawn labels -----------------------------------------------------------------------------------------------


def enumerated(
    network: nn.Module, inputs: Tensor, scores: Callable[[Tensor], list[tuple[Tensor, Tensor]]]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Mean and variance of one draw's curvature from all labels, as (probability [B], ∂(−log p)/∂f [B, C])."""
    outputs, jacobian = jacobians(network, inputs)
    mean, variance = {}, {}
    for name, own in jacobian.items():
        squares = [(p, torch.einsum("bc...,bc->b...", own, g).square()) for p, g in scores(outputs)]
        weigh = [(p.reshape(-1, *[1] * (s.ndim - 1)), s) for p, s in squares]
        first, second = sum(p * s for p, s in weigh), sum(p * s.square() for p, s in weigh)
        mean[name], variance[name] = first.sum(0), (second - first.square()).sum(0)
    return mean, variance


def classes(logits: Tensor) -> list[tuple[Tensor, Tensor]]:
    probs, count = logits.softmax(-1), logits.shape[-1]
    return [(probs[:, c], probs - F.one_hot(torch.tensor(c), count)) for c in range(count)]


def yes_or_no(logits: Tensor) -> list[tuple[Tensor, Tensor]]:
    probs, found = logits.sigmoid(), []
    for labels in product((0.0, 1.0), repeat=logits.shape[1]):
        y = torch.tensor(labels).double()
        found.append(((probs * y + (1 - probs) * (1 - y)).prod(1), probs - y))
    return found


def pixels(logits: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two classes at each of four pixels, outputs [B, 2, 2, 2]."""
    probs = logits.unflatten(1, (2, 4)).softmax(1)
    found = []
    for labels in product((0, 1), repeat=4):
        one_hot = F.one_hot(torch.tensor(labels), 2).T  # [C, pixels]
        found.append(((probs * one_hot).sum(1).prod(1), (probs - one_hot).flatten(1)))
    return found


DRAWN = {
    "classes": (mlp, (4,), Categorical(), classes, torch.zeros(ROWS, dtype=torch.long)),
    "yes or no": (lambda: mlp(2), (4,), Bernoulli(), yes_or_no, torch.zeros(ROWS, 2)),
    "pixels": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 1)),
        (1, 3, 3),
        Categorical(),
        pixels,
        torch.zeros(ROWS, 2, 2, dtype=torch.long),
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_labels_approach_the_exact_curvature(name: str) -> None:
    build, shape, likelihood, scores, targets = DRAWN[name]
    network, inputs = build().double(), normal(ROWS, *shape)
    mean, variance = enumerated(network, inputs, scores)
    if name == "classes":  # E_y[δ δᵀ] = Jᵀ H J: the two references agree
        logits, jacobian = jacobians(network, inputs)
        agree(mean, {key: exact(value, softmax_hessians(logits)) for key, value in jacobian.items()})
    draws = 150
    actual = curvature(network, inputs, targets, likelihood, Fisher(draws=draws), batch_size=64)
    for key, value in actual.items():
        scores_z = (value - mean[key]) / (variance[key] / draws).sqrt().clamp(min=1e-12)
        assert scores_z.abs().max() < 5, key
        assert scores_z.abs().max() > 0.1, key  # drawn, not enumerated


def test_drawn_reals_approach_the_exact_curvature() -> None:
    network, inputs, draws = mlp(2).double(), normal(ROWS, 4), 150
    _, jacobian = jacobians(network, inputs)
    precision = torch.tensor([4.0, 0.25]).double()
    actual = curvature(network, inputs, normal(ROWS, 2), Gaussian(std=(0.5, 2.0)), Fisher(draws=draws), batch_size=64)
    for name, value in actual.items():
        each = torch.einsum("bc...,c->b...", jacobian[name].square(), precision)
        # δ is Normal with variance v_i, so δ² has variance 2 v_i².
        deviation = (2 * each.square().sum(0) / draws).sqrt().clamp(min=1e-12)
        assert ((value - each.sum(0)) / deviation).abs().max() < 5, name


def test_drawn_labels_depend_on_the_seed_and_not_on_batches() -> None:
    network, inputs, targets = make("mlp")
    runs = [curvature(network, inputs, targets, Categorical(), Fisher(draws=3), batch_size=b) for b in (1, 7, 64)]
    agree(runs[1], runs[0])
    agree(runs[2], runs[0])
    other = curvature(network, inputs, targets, Categorical(), Fisher(draws=3), seed=1)
    assert not torch.allclose(other["0.weight"], runs[0]["0.weight"])


def test_draws_are_averaged_and_all_different() -> None:
    network, inputs, targets = make("mlp")
    one, two = (curvature(network, inputs, targets, Categorical(), Fisher(draws=d)) for d in (1, 2))
    second = 2 * two["0.weight"] - one["0.weight"]
    assert (second >= -1e-12).all()  # what the second draw adds is a sum of squares
    assert not torch.allclose(second, one["0.weight"])


# -- refusals, and the network left as it was -------------------------------------------------------------------


@pytest.mark.parametrize("draws", [0, -1, 1.5, True])
def test_draws_must_be_a_count(draws: object) -> None:
    with pytest.raises(ConfigError, match="draws must be a whole number"):
        Fisher(draws=draws)  # pyright: ignore


def test_too_many_reals_for_the_exact_curvature() -> None:
    network = nn.Sequential(nn.Linear(4, 1025))
    with pytest.raises(ConfigError, match=r"one backward pass per output, too many for outputs \(16, 1025\)"):
        curvature(network, normal(ROWS, 4).float(), torch.zeros(ROWS, 1025), Gaussian(std=1.0), GGN())


def test_dense_classes_are_too_many_for_the_exact_curvature() -> None:
    build, shape, likelihood, _, targets = DRAWN["pixels"]
    network = build().double()
    with pytest.raises(ConfigError, match=r"GGN\(\) takes one backward pass per output.*use Fisher"):
        curvature(network, normal(ROWS, *shape), targets, likelihood, GGN())
    assert not any(module._forward_hooks for module in network.modules())
    assert all(parameter.requires_grad for parameter in network.parameters())


class Cut(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.body, self.head, self.cut = nn.Linear(4, 5), nn.Linear(5, 3), cut

    def forward(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.body(inputs)
        return self.head(hidden).detach() if self.cut else self.head(hidden)


def test_layers_that_no_gradient_reaches_are_left_out_and_named() -> None:
    network, inputs, targets = Cut(False).double(), normal(ROWS, 4), torch.zeros(ROWS, dtype=torch.long)
    covered = find_blocks(network, inputs, [name for name, _ in network.named_parameters()])
    assert list(covered.blocks) == ["head"] and list(covered.left_out) == ["body.weight", "body.bias"]
    assert all("no gradient of the outputs reaches it" in reason for reason in covered.left_out.values())
    with pytest.raises(NetworkError, match=r"got none \(body\.weight: no gradient of the outputs reaches it"):
        curvature(Cut(True).double(), inputs, targets, Categorical(), GGN())


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", [Fisher(), GGN(), Empirical()], ids=str)
def test_networks_and_data_keep_no_trace(kind: Curvature, enabled: bool) -> None:
    network, inputs, targets = make("residual")
    network.stem.weight.requires_grad_(False)
    inputs.requires_grad_()
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with torch.set_grad_enabled(enabled):  # the caller's own mode does not matter
        curvature(network, inputs, targets, Categorical(), kind)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert [name for name, p in network.named_parameters() if not p.requires_grad] == ["stem.weight"]
    assert all(parameter.grad is None for parameter in network.parameters())
    assert inputs.grad is None
    assert not any(module._forward_hooks for module in network.modules())
    assert torch.equal(torch.get_rng_state(), state)
