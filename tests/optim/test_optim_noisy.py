"""Natural-gradient optimisers against their algorithms, written densely."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import seeds
from dubito.errors import ConfigError
from dubito.optim import VOGN, NoisyAdam, NoisyKFAC, NoisyOptimizer, Vadam

N = 50
EVERY = (NoisyAdam, Vadam, VOGN, NoisyKFAC)
every = pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)


def table(rows: int = 12, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.to(dtype), (x[:, 0] > 0).long()


def run(model: nn.Module, optimizer: NoisyOptimizer, steps: int, x: Tensor, y: Tensor, passes: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(passes), y.chunk(passes), strict=True):
            with optimizer.sampled():
                (F.cross_entropy(model(a), b) * len(a) / len(x)).backward()
        optimizer.step(rows=len(x))


def noises(model: nn.Module, steps: int, seed: int = 0) -> list[list[Tensor]]:
    """The unit noise of each draw, one tensor per parameter."""
    return [
        [torch.randn(p.shape, generator=stream, dtype=p.dtype) for p in model.parameters()]
        for stream in (seeds.generator(seed, "draw", step) for step in range(steps))
    ]


def slopes(model: nn.Module, weights: list[Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
    """Each row's gradient of the log-likelihood, [B, ...] for each parameter, row by row."""
    other = copy.deepcopy(model)
    rows = []
    for i in range(len(x)):
        with torch.no_grad():
            for p, w in zip(other.parameters(), weights, strict=True):
                p.copy_(w)
        loss = F.cross_entropy(other(x[i : i + 1]), y[i : i + 1])
        rows.append([-g for g in torch.autograd.grad(loss, list(other.parameters()))])
    return [torch.stack(each) for each in zip(*rows, strict=True)]


def start(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_means(model: nn.Module, expected: list[Tensor]) -> None:
    for p, truth in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), truth, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("counted", "passes"), [(True, 1), (True, 3), (False, 1)])
def test_noisy_adam_is_algorithm_2(counted: bool, passes: int) -> None:
    """With the rows of a step counted, in one pass or several, or as printed."""
    model, (x, y) = net(), table()
    settings = {"lr": 0.02, "betas": (0.8, 0.9), "prior_std": 0.7, "kl_weight": 0.3, "extrinsic_damping": 0.1}
    mu, lam, eta = start(model), 0.3, 0.49
    gamma = lam / (N * eta)
    f = [torch.full_like(m, lam / (N * 0.05**2) - gamma) for m in mu]
    m = [torch.zeros_like(each) for each in mu]
    units, times = iter(noises(model, 6 * passes)), 12 if counted else 1
    for t in range(1, 7):
        g, drawn = [torch.zeros_like(a) for a in mu], [torch.zeros_like(a) for a in mu]
        for rows, targets in zip(x.chunk(passes), y.chunk(passes), strict=True):
            w = [a + e * (lam / N / (b + gamma)).sqrt() for a, b, e in zip(mu, f, next(units), strict=True)]
            for place, each in enumerate(slopes(model, w, rows, targets)):
                g[place] += each.sum(0) / 12
                drawn[place] += w[place] / passes
        m = [0.8 * a + 0.2 * (b - gamma * c) for a, b, c in zip(m, g, drawn, strict=True)]
        f = [0.9 * a + 0.1 * times * b**2 for a, b in zip(f, g, strict=True)]
        mu = [a + 0.02 * (b / (1 - 0.8**t)) / (c + gamma + 0.1) for a, b, c in zip(mu, m, f, strict=True)]
    optimizer = NoisyAdam(model.parameters(), num_data=N, count_rows=counted, **settings)
    run(model, optimizer, 6, x, y, passes)
    assert_means(model, mu)


@pytest.mark.parametrize("printed", [False, True])
def test_vadam_is_algorithm_3(printed: bool) -> None:
    """With rows counted and a correction for what started at 0 alone, or as printed."""
    model, (x, y) = net(), table()
    mu, gamma = start(model), 1 / (0.7**2 * N)
    first = 1 / (N * 0.05**2) - gamma
    f = [torch.full_like(m, first) for m in mu]
    m = [torch.zeros_like(each) for each in mu]
    for t, unit in enumerate(noises(model, 6), start=1):
        w = [a + e / (N * (b + gamma)).sqrt() for a, b, e in zip(mu, f, unit, strict=True)]
        g = [each.mean(0) for each in slopes(model, w, x, y)]
        m = [0.8 * a + 0.2 * (b - gamma * c) for a, b, c in zip(m, g, mu, strict=True)]
        f = [0.9 * a + 0.1 * (1 if printed else 12) * b**2 for a, b in zip(f, g, strict=True)]
        seen = f if printed else [a - 0.9**t * first for a in f]
        mu = [
            a + 0.02 * (b / (1 - 0.8**t)) / (c / (1 - 0.9**t) + gamma).sqrt()
            for a, b, c in zip(mu, m, seen, strict=True)
        ]
    form = {"count_rows": False, "correct_start": True} if printed else {}
    optimizer = Vadam(model.parameters(), num_data=N, lr=0.02, betas=(0.8, 0.9), prior_std=0.7, **form)
    run(model, optimizer, 6, x, y)
    assert_means(model, mu)


@pytest.mark.parametrize("passes", [1, 3])
def test_vogn_is_algorithm_4(passes: int) -> None:
    """With the squares of each row's own gradient, in one pass or several, while λ moves."""
    model, (x, y) = net(), table()
    mu, lam, eta, extra = start(model), 0.2, 0.49, 0.01
    gamma = lam / (N * eta)
    f = [torch.full_like(m, 1 / (N * 0.05**2) - gamma - extra) for m in mu]
    m = [torch.zeros_like(each) for each in mu]
    units = iter(noises(model, 4 * passes))
    for t in range(4):
        gamma = lam / (N * eta)
        g, squares = [torch.zeros_like(a) for a in mu], [torch.zeros_like(a) for a in mu]
        for a, b in zip(x.chunk(passes), y.chunk(passes), strict=True):
            w = [c + e / (N * (d + gamma + extra)).sqrt() for c, d, e in zip(mu, f, next(units), strict=True)]
            for place, each in enumerate(slopes(model, w, a, b)):
                g[place] += each.sum(0) / 12
                squares[place] += each.square().sum(0) / 12
        m = [0.8 * c + d - gamma * e for c, d, e in zip(m, g, mu, strict=True)]
        f = [(1 - lam * 0.1) * c + 0.1 * d for c, d in zip(f, squares, strict=True)]
        mu = [c + 0.02 * d / (e + gamma + extra) for c, d, e in zip(mu, m, f, strict=True)]
        lam = 0.2 + min(1.0, (t + 1) / 3) * 0.8
    optimizer = VOGN(
        model.parameters(),
        num_data=N,
        lr=0.02,
        betas=(0.8, 0.1),
        prior_std=0.7,
        kl_start=0.2,
        kl_steps=3,
        extrinsic_damping=0.01,
    )
    run(model, optimizer, 4, x, y, passes)
    assert_means(model, mu)


def test_noisy_kfac_is_algorithm_5() -> None:
    """With λ/N in the draw and π the root of the ratio of mean traces."""
    model, (x, y) = net(), table()
    lam, eta, beta, alpha = 0.4, 0.49, 0.2, 0.05
    gamma = lam / (N * eta)
    layers = [model[0], model[2]]
    means = [torch.cat([each.weight, each.bias[:, None]], 1).detach().mT for each in layers]  # inputs × outputs
    psi = [(torch.zeros(m.shape[0], m.shape[0]).double(), torch.zeros(m.shape[1], m.shape[1]).double()) for m in means]
    weights = [m.clone() for m in means]
    scales: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        if step:
            stream = seeds.generator(0, "draw", step)
            for i, (r, sigma) in enumerate(scales):
                unit = torch.randn(1, *weights[i].mT.shape, generator=stream, dtype=torch.float64)[0].mT
                rows = torch.linalg.inv(torch.linalg.cholesky(torch.linalg.inv(r))).mT  # a root of R
                columns = torch.linalg.inv(torch.linalg.cholesky(torch.linalg.inv(sigma))).mT
                weights[i] = means[i] + math.sqrt(lam / N) * rows @ unit @ columns.mT
        one = torch.ones(12, 1, dtype=torch.float64)
        x1 = torch.cat([x, one], 1)
        z1 = (x1 @ weights[0]).requires_grad_()
        x2 = torch.cat([z1.tanh(), one], 1)
        z2 = x2 @ weights[1]
        total = -F.cross_entropy(z2, y, reduction="sum")
        g = torch.autograd.grad(total, (z1, z2))
        scales = []
        for i, (a, b) in enumerate(zip((x1, x2.detach()), g, strict=True)):
            psi[i] = ((1 - beta) * psi[i][0] + beta * a.mT @ a / 12, (1 - beta) * psi[i][1] + beta * b.mT @ b / 12)
            pi = (psi[i][0].diagonal().mean() / psi[i][1].diagonal().mean()).sqrt()
            eye = [torch.eye(len(each), dtype=torch.float64) for each in psi[i]]
            r = torch.linalg.inv(pi * math.sqrt(gamma) * eye[0] + psi[i][0])
            sigma = torch.linalg.inv(math.sqrt(gamma) / pi * eye[1] + psi[i][1])
            slope = a.mT @ b / 12 - gamma * weights[i]
            means[i] = means[i] + alpha * r @ slope @ sigma
            scales.append((r, sigma))
    settings = {"beta": beta, "prior_std": 0.7, "kl_weight": lam, "initial_std": None}
    optimizer = NoisyKFAC(model.parameters(), num_data=N, lr=alpha, **settings)
    run(model, optimizer, 5, x, y)
    for layer, mean in zip(layers, means, strict=True):
        own = torch.cat([layer.weight, layer.bias[:, None]], 1).detach()
        torch.testing.assert_close(own, mean.mT, rtol=1e-9, atol=1e-11)


def test_roots_are_computed_once_per_step_and_follow_the_factors(monkeypatch) -> None:
    model, (x, y) = net(), table()
    optimizer = NoisyKFAC(model.parameters(), num_data=N)
    factorise, calls = torch.linalg.cholesky_ex, []
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda *a, **k: (calls.append(1), factorise(*a, **k))[1])
    run(model, optimizer, 6, x, y)
    assert len(calls) == 6 * 2 * 2  # two factors of two layers
    (group,), weight = optimizer.param_groups, model[0].weight
    known = optimizer.roots(weight, group)
    assert all(a is b for a, b in zip(known, optimizer.roots(weight, group), strict=True))
    optimizer.state[weight]["inputs"].mul_(4)
    group["prior_std"] = 2.0
    moved = optimizer.roots(weight, group)
    for tril, factor in zip(moved, ("inputs", "outputs"), strict=True):
        rest = tril @ tril.mT - optimizer.state[weight][factor]
        torch.testing.assert_close(rest, rest[0, 0, 0] * torch.eye(len(rest[0])).double()[None], atol=1e-12, rtol=0)
    optimizer.state[weight]["outputs"].fill_(torch.nan)
    assert optimizer.roots(weight, group)[1].isnan().any()


@every
def test_means_come_back_even_from_an_error(kind) -> None:
    model, (x, y) = net(), table()
    optimizer = kind(model.parameters(), num_data=N)
    run(model, optimizer, 2, x, y)
    before = start(model)
    with pytest.raises(ZeroDivisionError), optimizer.sampled():
        assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        raise ZeroDivisionError
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    with pytest.raises(ConfigError, match="open already"), optimizer.sampled(), optimizer.sampled():
        pass
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert not nn.modules.module._global_forward_hooks


@every
def test_a_state_dict_goes_round(kind) -> None:
    first, (x, y) = net(), table()
    optimizer = kind(first.parameters(), num_data=N, lr=0.01)
    run(first, optimizer, 3, x, y)
    second = copy.deepcopy(first)
    other = kind(second.parameters(), num_data=N, lr=0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(first, optimizer, 3, x, y)
    run(second, other, 3, x, y)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@every
def test_a_closure_is_called_with_a_draw(kind) -> None:
    model, (x, y) = net(), table()
    optimizer = kind(model.parameters(), num_data=N, lr=0.01)
    other = net()
    run(other, kind(other.parameters(), num_data=N, lr=0.01), 2, x, y)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert float(optimizer.step(closure, rows=len(x)).detach()) > 0
    optimizer.step(closure, rows=len(x))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_they_learn(kind, dtype: torch.dtype) -> None:
    model, (x, y) = net(dtype), table(200, dtype)
    rate = {NoisyAdam: 0.2, Vadam: 0.5, VOGN: 0.1, NoisyKFAC: 0.1}[kind]
    optimizer = kind(model.parameters(), num_data=200, lr=rate)
    before = float(F.cross_entropy(model(x), y).detach())
    run(model, optimizer, 80, x, y)
    assert float(F.cross_entropy(model(x), y).detach()) < 0.6 * before


def test_squares_of_rows_on_layers_of_every_kind() -> None:
    """Convolution, norm, embedding-free bias, and a layer called twice: the squares are those row by row."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 3, 2)
            self.norm = nn.GroupNorm(1, 3)
            self.twice = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu_(self.norm(self.conv(x)))
            return self.twice(torch.tanh(self.twice(h.mean((2, 3)))))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Net().double()
    x = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.arange(6) % 3
    # A prior so narrow that draws are the means, and f starts at 0.
    optimizer = VOGN(model.parameters(), num_data=N, lr=1e-9, betas=(0.0, 0.5), prior_std=1e-8, initial_std=1.0)
    weights = start(model)
    run(model, optimizer, 1, x, y)
    for p, each in zip(model.parameters(), slopes(model, weights, x, y), strict=True):
        torch.testing.assert_close(optimizer.state[p]["fisher"], 0.5 * each.square().mean(0), rtol=1e-4, atol=1e-7)


class Bare(nn.Module):
    """A weight that a function without a rule reads, beside a layer that is covered."""

    def __init__(self, layer: bool = True) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64))
        self.layer = nn.Linear(1, 2, dtype=torch.float64) if layer else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = x @ torch.tanh(self.bare)[:, None]
        return torch.cat([hidden, -hidden], 1) if self.layer is None else self.layer(hidden)


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize(("kind", "rate"), [(VOGN, {"betas": (0.0, 0.5)}), (NoisyKFAC, {"beta": 0.5})])
def test_weights_without_a_rule_count_the_rows_they_saw(kind, rate, passes: int) -> None:
    """Rows that nobody told are those that layers were seen to read, in all passes of a step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Bare()
    (x, y), weights = table(), start(model)
    # A prior so narrow that draws are the means, and f starts at 0.
    optimizer = kind(model.parameters(), num_data=N, lr=1e-9, prior_std=1e-8, **rate)
    for a, b in zip(x.chunk(passes), y.chunk(passes), strict=True):
        with optimizer.sampled():
            (F.cross_entropy(model(a), b) * len(a) / len(x)).backward()
    optimizer.step()
    mean = slopes(model, weights, x, y)[0].mean(0)
    torch.testing.assert_close(optimizer.state[model.bare]["fisher"], 0.5 * 12 * mean.square(), rtol=1e-4, atol=1e-8)


@every
def test_rows_that_nobody_knows_are_asked_for(kind) -> None:
    model, (x, y) = Bare(layer=False), table()
    before, optimizer = start(model), kind(model.parameters(), num_data=N)
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
    with pytest.raises(ConfigError, match=r"step\(rows=len\(x\)\)"):
        optimizer.step()
    assert torch.equal(model.bare, before[0])
    optimizer.step(rows=12)
    assert not torch.equal(model.bare, before[0])
    with pytest.raises(ConfigError, match="rows must be"):
        optimizer.step(rows=0)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_noisy_kfac_starts_with_the_standard_deviation_it_is_given(bias: bool, steps: int) -> None:
    """Before the first step, and after it where next to nothing of the first factors is taken in."""
    model = nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 2, bias=bias)).double()
    means = start(model)
    optimizer = NoisyKFAC(model.parameters(), num_data=N, lr=1e-12, beta=1e-9, initial_std=0.03)
    run(model, optimizer, steps, *table())
    draws: list[list[Tensor]] = []
    for seed in range(2000):
        with optimizer.sampled(torch.Generator().manual_seed(seed), watched=False):
            draws.append(start(model))
    for mean, each in zip(means, zip(*draws, strict=True), strict=True):
        stds = (torch.stack(each) - mean).square().mean(0).sqrt()
        assert (stds / 0.03 - 1).abs().max() < 5.5 / 4000**0.5


def test_settings_are_checked() -> None:
    parameters = list(net().parameters())
    with pytest.raises(ConfigError, match="num_data"):
        Vadam(parameters, num_data=0)
    with pytest.raises(ConfigError, match="lr must be"):
        NoisyKFAC(parameters, num_data=5, lr=-1.0)
    with pytest.raises(ConfigError, match="beta2"):
        NoisyAdam(parameters, num_data=5, betas=(0.9, 1.5))
    with pytest.raises(ConfigError, match="prior_std"):
        VOGN(parameters, num_data=5, prior_std=0.0)
