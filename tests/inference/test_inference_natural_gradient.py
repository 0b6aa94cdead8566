"""Natural-gradient methods: their optimisers in the library's loop, and what they leave behind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import VOGN, Categorical, ConfigError, Gaussian, NoisyAdam, NoisyKFAC, Training, Vadam
from dubito.inference.natural_gradient.objective import NaturalStepper
from dubito.optim import NoisyOptimizer

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
    narrow = (
        {"kl_weight": 1e-9, "prior_std": 1e-6} if isinstance(method, NoisyKFAC) else {"initial_std": 1e-9}
    )
    method = replace(method, **narrow)
    fits = [
        method.fit(
            net(),
            table(),
            Gaussian(),
            training=Training(iterations=3, batch_size=size, accumulate=times, lr=1e-2),
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
    weights = torch.stack(
        [posterior.draw(s, torch.Generator().manual_seed(s))["0.weight"] for s in range(2000)]
    )
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
    posterior = method.fit(
        plain, (x, y), Categorical(), training=Training(iterations=80, batch_size=200, lr=rate)
    )
    assert posterior.evaluate((x, y))["accuracy"] > 0.85
    posterior.save(tmp_path / "p")
    again = dubito.load(tmp_path / "p", plain)
    assert torch.equal(again.sample_outputs(x, 3), posterior.sample_outputs(x, 3))


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="prior_std"):
        Vadam(prior_std=-1.0)
    with pytest.raises(ConfigError, match="beta must be"):
        NoisyKFAC(beta=0.0)
    with pytest.raises(ConfigError, match="kl_steps"):
        VOGN(kl_steps=-1)
    with pytest.raises(ConfigError, match="extrinsic_damping"):
        NoisyAdam(extrinsic_damping=-1.0)
    with pytest.raises(ConfigError, match='precision="full"'):
        Vadam().fit(net(), table(), Gaussian(), training=Training(iterations=1, precision="bf16"))
