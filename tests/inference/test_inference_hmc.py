"""Chains against an exact posterior, their diagnostics, and the refusal of chains that have not converged."""

import math

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import HMC, Categorical, ConfigError, DubitoWarning, Gaussian, StorageError, TrainingError
from dubito.inference.hmc import chains as hmc_chains
from dubito.inference.hmc.chains import diagnostics
from dubito.training.progress import listened

pytest.importorskip("pyro")
# Pyro asks torch for what torch will one day call otherwise.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

TINY = HMC(num_samples=4, warmup=2, chains=2)


def rows(*shape: int, seed: int = 0, dtype=torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture(scope="module")
def linear():
    """A linear network, whose posterior is known."""
    inputs = rows(30, 2, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-0.5]], dtype=torch.float64) + 0.3 + 0.4 * rows(30, 1, seed=1)
    net = nn.Linear(2, 1).double()
    method = HMC(num_samples=200, warmup=120, chains=2, prior_std=1.5)
    return method.fit(net, (inputs, targets), Gaussian(std=0.4), seed=3), inputs, targets


def test_draws_have_the_moments_of_the_exact_posterior(linear):
    posterior, inputs, targets = linear
    design = torch.cat([inputs, torch.ones(30, 1, dtype=torch.float64)], 1)
    precision = design.T @ design / 0.4**2 + torch.eye(3, dtype=torch.float64) / 1.5**2
    covariance = torch.linalg.inv(precision)
    mean = covariance @ design.T @ targets[:, 0] / 0.4**2
    kept = posterior.group("draws")
    draws = torch.cat([kept["weight"][:, 0], kept["bias"]], 1)  # [S, 3]
    worth = posterior.effective_sample_size
    error = (covariance.diag() / worth).sqrt()
    assert ((draws.mean(0) - mean).abs() < 4 * error).all()
    assert ((draws.var(0) / covariance.diag()).log().abs() < 4 * math.sqrt(2 / worth)).all()
    assert posterior.converged and posterior.reference() is posterior
    assert posterior.r_hat < 1.05 and worth > 100 and posterior.details["divergent"] == 0
    # the network holds the likeliest draw
    own = torch.cat([posterior.network.weight[0], posterior.network.bias])
    distance = ((draws - mean) @ precision * (draws - mean)).sum(1)
    torch.testing.assert_close(own, draws[distance.argmin()])


def test_it_is_a_posterior_like_any_other(linear, tmp_path):
    posterior, inputs, targets = linear
    assert posterior.num_atoms == 400
    prediction = posterior.predict(inputs)
    assert prediction.means.shape == (400, 30, 1)
    outputs = posterior.sample_outputs(inputs, 3)
    for index, own in enumerate(outputs):  # the chains in turn
        weight, bias = (posterior.group("draws")[name][index] for name in ("weight", "bias"))
        torch.testing.assert_close(own, inputs @ weight.T + bias)
    posterior.save(tmp_path / "h.safetensors")
    again = dubito.load(tmp_path / "h.safetensors", nn.Linear(2, 1))
    assert torch.equal(again.predict(inputs).mean, prediction.mean) and again.converged
    assert "400 draws of 2 chains" in str(posterior.summary())
    assert posterior.evaluate((inputs, targets))["rmse"] < 0.6


def test_chains_that_have_not_converged_are_no_reference(tmp_path):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3))
    inputs, labels = rows(12, 2), torch.arange(12) % 3
    with pytest.warns(DubitoWarning, match="have not converged"):
        posterior = TINY.fit(net, (inputs, labels), Categorical(), seed=1)
    assert not posterior.converged
    with pytest.raises(TrainingError, match=r"these chains are no reference: .*effective sample size"):
        posterior.reference()
    posterior.save(tmp_path / "u.safetensors")
    assert not dubito.load(tmp_path / "u.safetensors", net).converged
    with pytest.warns(DubitoWarning, match="a single chain"):
        HMC(num_samples=4, warmup=2, chains=1, trajectory=0.5).fit(net, (inputs, labels), Categorical())


def test_the_same_seed_the_same_chains_and_nothing_else_is_touched():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    data = (rows(10, 2), rows(10, 1, seed=2))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.warns(DubitoWarning):
        one, two = (TINY.fit(net, data, Gaussian(std=0.5), seed=9) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    for name, draws in one.group("draws").items():
        assert torch.equal(draws, two.group("draws")[name])


def test_finished_chains_are_kept_and_the_next_call_goes_on(tmp_path, monkeypatch):
    net, data = nn.Linear(2, 1), (rows(10, 2), rows(10, 1, seed=2))
    path, run_chain, steps = tmp_path / "chains.safetensors", hmc_chains.run_chain, []

    def fit(**options):
        return TINY.fit(net, data, Gaussian(std=0.5), seed=9, **options)

    def interrupted(method, target, number, *others):
        if number == 1:
            raise KeyboardInterrupt
        return run_chain(method, target, number, *others)

    def second_only(method, target, number, *others):
        assert number == 1
        return run_chain(method, target, number, *others)

    with pytest.warns(DubitoWarning, match="have not converged"):
        whole = fit()
    monkeypatch.setattr(hmc_chains, "run_chain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(checkpoint=path)
    monkeypatch.setattr(hmc_chains, "run_chain", second_only)
    with pytest.warns(DubitoWarning), listened(lambda reached: steps.append((reached.step, reached.total))):
        again = fit(checkpoint=path)
    assert steps == [(step, 12) for step in range(7, 13)]  # 2 of warm-up and 4 kept by each of two chains
    for name, draws in whole.group("draws").items():
        assert torch.equal(draws, again.group("draws")[name])
    with pytest.raises(StorageError, match="belongs to another run: data was"):
        TINY.fit(net, (data[0], data[1] + 1), Gaussian(std=0.5), seed=9, checkpoint=path)
    with pytest.raises(StorageError, match="does not exist"):
        fit(checkpoint=tmp_path / "nowhere" / "chains.safetensors")


def test_diagnostics_by_their_meaning():
    stream = torch.Generator().manual_seed(0)
    good = torch.randn(4, 500, 3, generator=stream)
    r_hat, worth = diagnostics(good)
    assert r_hat < 1.02 and worth > 1400  # independent draws are worth about as many as they are
    apart = good + torch.arange(4.0)[:, None, None]
    assert diagnostics(apart)[0] > 1.4
    # x_t = 0.9 x_{t−1} + e_t is worth (1 − 0.9)/(1 + 0.9) of its length
    noise, chain = torch.randn(4, 3000, 1, generator=stream), []
    value = torch.zeros(4, 1)
    for step in range(3000):
        value = 0.9 * value + noise[:, step]
        chain.append(value)
    worth = diagnostics(torch.stack(chain, 1))[1]
    assert worth == pytest.approx(12_000 * 0.1 / 1.9, rel=0.3)
    assert diagnostics(torch.zeros(2, 10, 1)) == (math.inf, 0.0)


def test_refusals():
    net, data = nn.Linear(2, 1), (rows(8, 2), rows(8, 1))
    with pytest.raises(ConfigError, match="known noise"):
        TINY.fit(net, data, Gaussian())
    with pytest.raises(ConfigError, match="trains nothing"):
        TINY.fit(net, data, Gaussian(std=1.0), training=dubito.Training(epochs=1))
    with pytest.raises(ConfigError, match="at most 10000 weights, got 20497"):
        big = nn.Sequential(nn.Linear(2, 100), nn.Linear(100, 198), nn.Linear(198, 1))
        TINY.fit(big, data, Gaussian(std=1.0))
    for wrong in ({"num_samples": 3}, {"chains": 0}, {"prior_std": 0.0}, {"trajectory": -1.0}, {"thin": 200}):
        with pytest.raises(ConfigError):
            HMC(**wrong)
