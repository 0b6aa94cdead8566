"""Natural-gradient methods: their optimisers in the library's loop, and what they leave behind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import VOGN, Categorical, ConfigError, Gaussian, NoisyAdam, NoisyKFAC, Training, Vadam
from dubito.inference.natural_gradient.objective import NaturalStepper
from dubito.method import Method
from dubito.optim import NoisyOptimizer
from dubito.training import Cosine

METHODS = (NoisyAdam(), Vadam(), VOGN(kl_start=0.1, kl_steps=5), NoisyKFAC())
every = pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
QUICK = Training(iterations=9, batch_size=16, lr=0.01)


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).double()


def table(rows: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)


@every
def test_passes_of_a_step_add_up(method) -> None:
    """With draws of no width, one batch or four passes over it are the same."""
    narrow = {"kl_weight": 1e-9, "prior_std": 1e-6} if isinstance(method, NoisyKFAC) else {"initial_std": 1e-9}
    method = replace(method, **narrow)
    fits = [
        method.fit(
            net(), table(), Gaussian(), training=Training(iterations=3, batch_size=size, accumulate=times, lr=1e-2)
        )
        for size, times in ((40, 1), (10, 4))
    ]
    for (name, a), b in zip(fits[0].named_parameters(), fits[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@every
def test_a_run_goes_on_from_its_checkpoint(method, tmp_path, monkeypatch) -> None:
    data = table()
    whole = method.fit(net(), data, Gaussian(), training=QUICK)
    step = NaturalStepper.step

    def broken(self, number, *rest):
        if number == 5:
            raise KeyboardInterrupt
        return step(self, number, *rest)

    monkeypatch.setattr(NaturalStepper, "step", broken)
    often = replace(QUICK, checkpoint_minutes=0.0)
    with pytest.raises(KeyboardInterrupt):
        method.fit(net(), data, Gaussian(), training=often, checkpoint=tmp_path / "c")
    monkeypatch.setattr(NaturalStepper, "step", step)
    again = method.fit(net(), data, Gaussian(), training=often, checkpoint=tmp_path / "c")
    for (name, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


@every
def test_the_posterior_is_the_optimisers(method, monkeypatch) -> None:
    """The posterior's draws have the spreads that the optimiser draws with."""
    made: list[NoisyOptimizer] = []
    kind = type(method)
    build = kind.optimizer
    monkeypatch.setattr(kind, "optimizer", lambda self, *args: made.append(build(self, *args)) or made[-1])
    posterior = method.fit(net(), table(), Gaussian(), training=QUICK)
    (optimizer,) = made
    (group,) = optimizer.param_groups
    draws: dict[str, list[Tensor]] = {name: [] for name in posterior.weights()}
    own: list[list[Tensor]] = []
    for s in range(1000):
        for name, value in posterior.draw(s, torch.Generator().manual_seed(s)).items():
            draws[name].append(value)
        with optimizer.sampled(torch.Generator().manual_seed(10_000 + s)):
            own.append([p.detach().clone() for p in group["params"]])
    for place, (name, mean) in enumerate(posterior.weights().items()):
        mine = torch.stack(draws[name])
        theirs = torch.stack([each[place] for each in own])
        ratio = mine.var(0) / theirs.var(0)
        assert (ratio - 1).abs().max() < 6 * (4 / 1000) ** 0.5, name
        assert ((mine.mean(0) - mean).abs() < 6 * mine.std(0) / 1000**0.5 + 1e-12).all(), name


def test_layers_get_factors_and_others_a_diagonal() -> None:
    posterior = NoisyKFAC().fit(net(), table(), Gaussian(), training=QUICK)
    held = {row.name: row.holds for row in posterior.summary().rows}
    assert held["0.weight"] == held["0.bias"] == held["3.weight"] == "matrix normal"
    assert held["1.weight"] == "Normal, own std"
    right, left = posterior.group("input_tril")["0.weight"][0], posterior.group("output_tril")["0.weight"][0]
    weights = torch.stack([posterior.draw(s, torch.Generator().manual_seed(s))["0.weight"] for s in range(2000)])
    truth = torch.kron(
        torch.linalg.inv(left @ left.mT).contiguous(), torch.linalg.inv(right @ right.mT)[:3, :3].contiguous()
    )
    flat = (weights - posterior.weights()["0.weight"]).flatten(1)
    error = (truth.square() + truth.diagonal().outer(truth.diagonal())).div(2000).sqrt()
    assert ((flat.mT @ flat / 2000 - truth).abs() < 5.5 * error).all()


@every
def test_they_learn_in_the_librarys_loop(method, tmp_path) -> None:
    x, _ = table(200)
    y = (x[:, 0] > 0).long()
    plain = nn.Sequential(net()[0], nn.Tanh(), net()[3])
    rate = {NoisyAdam: 0.2, Vadam: 0.3, VOGN: 0.1, NoisyKFAC: 0.1}[type(method)]
    posterior = method.fit(plain, (x, y), Categorical(), training=Training(iterations=80, batch_size=200, lr=rate))
    assert posterior.evaluate((x, y))["accuracy"] > 0.85
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", plain)
    assert torch.equal(again.sample_outputs(x, 3), posterior.sample_outputs(x, 3))


# -- a regression whose posterior is known: 4,096 rows, 64 a step ------------------------------------------------

ROWS, BATCH, NOISE = 4096, 64, 0.5
TRUE = torch.tensor([0.3, -0.2, 0.1, 0.4], dtype=torch.float64)


def regression() -> tuple[nn.Linear, Tensor, Tensor, Tensor]:
    """A linear model at the true weights, inputs, targets, and the exact precision under a standard Normal prior."""
    stream = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 4, generator=stream, dtype=torch.float64) * torch.tensor([1.0, 0.5, 2.0, 1.0])
    y = x @ TRUE + NOISE * torch.randn(ROWS, generator=stream, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(TRUE)
    return model, x, y[:, None], x.mT @ x / NOISE**2 + torch.eye(4, dtype=torch.float64)


def stationary_std(method: Method, iterations: int, lr: float) -> Tensor:
    model, x, y, _ = regression()
    posterior = method.fit(
        model,
        (x, y),
        Gaussian(std=NOISE),
        training=Training(iterations=iterations, batch_size=BATCH, lr=lr, schedule=Cosine()),
    )
    if not isinstance(method, NoisyKFAC):
        return posterior.group("std")["weight"][0]
    right, left = (posterior.group(key)["weight"][0] for key in ("input_tril", "output_tril"))
    return (torch.linalg.inv(right @ right.mT).diagonal() * torch.linalg.inv(left @ left.mT)).sqrt()[0]


@pytest.mark.parametrize(
    ("method", "iterations", "lr"),
    [
        (NoisyAdam(betas=(0.9, 0.998), initial_std=0.02), 2500, 1e-2),
        (Vadam(betas=(0.9, 0.998), initial_std=0.02), 2500, 1e-3),
        (VOGN(betas=(0.9, 0.003), initial_std=0.02), 1500, 1e-2),
        (NoisyKFAC(), 600, 1e-2),
    ],
    ids=["NoisyAdam", "Vadam", "VOGN", "NoisyKFAC"],
)
def test_standard_deviations_are_the_posteriors(method: Method, iterations: int, lr: float) -> None:
    """A diagonal Gaussian has one over the roots of the precision's diagonal, a matrix normal the marginal ones.

    An average over 500 steps (20 of Noisy K-FAC, of a square over 64 rows) of squares, which have a relative error of
    √2 for a step, is known to √2 / √1000: 4.5 %, and standard deviations to half of it; 10 % are four of these.
    """
    precision = regression()[3]
    covariance = torch.linalg.inv(precision)
    exact = covariance.diagonal().sqrt() if isinstance(method, NoisyKFAC) else precision.diagonal().rsqrt()
    assert (stationary_std(method, iterations, lr) / exact - 1).abs().max() < 0.1


@pytest.mark.parametrize(
    ("method", "lr"),
    [
        (NoisyAdam(betas=(0.9, 0.998), initial_std=0.02, count_rows=False), 1e-2),
        (Vadam(betas=(0.9, 0.998), initial_std=0.02, count_rows=False, correct_start=True), 1e-3),
    ],
    ids=["NoisyAdam", "Vadam"],
)
def test_without_the_rows_standard_deviations_are_far_too_wide(method: Method, lr: float) -> None:
    """f = F u with u = 1/B + 1/(N u): the squares of a batch's mean gradient, and of the full one at draws so wide.

    u is 1/B, and standard deviations √B times too wide, where N is far above B²; here 6.3 times of 8.
    """
    share = (1 / BATCH + (1 / BATCH**2 + 4 / ROWS) ** 0.5) / 2
    wide = regression()[3].diagonal().rsqrt() / share**0.5
    assert (stationary_std(method, 2500, lr) / wide - 1).abs().max() < 0.1


def test_recommended_rates_are_the_optimisers_own() -> None:
    assert {type(method).__name__: method.recommended_lr for method in METHODS} == {
        "NoisyAdam": 3e-2,
        "Vadam": 5e-3,
        "VOGN": 1e-2,
        "NoisyKFAC": 2e-2,
    }
    for method in METHODS:
        kind = type(method).optimizer_type
        assert kind(list(net().parameters()), num_data=5).param_groups[0]["lr"] == method.recommended_lr


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="prior_std"):
        Vadam(prior_std=-1.0)
    with pytest.raises(ConfigError, match="beta must be"):
        NoisyKFAC(beta=0.0)
    with pytest.raises(ConfigError, match="kl_steps"):
        VOGN(kl_steps=-1)
    with pytest.raises(ConfigError, match="extrinsic_damping"):
        NoisyAdam(extrinsic_damping=-1.0)
    with pytest.raises(ConfigError, match="count_rows must be True or False"):
        NoisyAdam(count_rows=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="initial_std"):
        NoisyKFAC(initial_std=0.0)
    with pytest.raises(ConfigError, match='precision="full"'):
        Vadam().fit(net(), table(), Gaussian(), training=Training(iterations=1, precision="bf16"))


def test_a_noisy_kfac_run_that_was_killed_before_its_first_step_goes_on(tmp_path, monkeypatch):
    """The first checkpoint is written before any step, and knows no Kronecker factors yet."""
    from dubito.training import checkpoint

    saved = checkpoint.save

    def killed(*args):
        saved(*args)
        raise RuntimeError("killed")

    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    call = {"data": (inputs, (inputs[:, 0] > 0).long()), "likelihood": dubito.Categorical()}
    call["training"] = dubito.Training(epochs=1, batch_size=10)
    whole = dubito.NoisyKFAC().fit(net, **call)
    monkeypatch.setattr(checkpoint, "save", killed)
    with pytest.raises(RuntimeError, match="killed"):
        dubito.NoisyKFAC().fit(net, **call, checkpoint=tmp_path / "c")
    monkeypatch.setattr(checkpoint, "save", saved)
    again = dubito.NoisyKFAC().fit(net, **call, checkpoint=tmp_path / "c")
    assert all(torch.equal(again.stored()[name], tensor) for name, tensor in whole.stored().items())
