"""Temperatures: the best by brute force, the same posterior otherwise, saved and loaded."""

import pytest
import scipy.optimize
import torch
from torch import nn

import dubito
from dubito import Bernoulli, Categorical, Gaussian, Training
from dubito.calibration import TemperedCategorical, temperature_scaled
from dubito.calibration.temperature import best
from dubito.likelihoods import GaussianLikelihood

QUICK = Training(epochs=15, batch_size=40, lr=2e-2)


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, outputs))


def rule(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()


def labels(x: torch.Tensor) -> torch.Tensor:
    """The rule's classes, a fifth of them replaced."""
    wrong = rows(len(x), seed=7) > 0.85
    return torch.where(wrong, (rule(x) + 1) % 3, rule(x))


@pytest.fixture(scope="module", params=["map", "mean-field", "deep-ensemble", "laplace-kfac", "mc-dropout"])
def fitted(request):
    method = dubito.methods()[request.param]
    x = rows(120, 4)
    return method.fit(net(), (x, rule(x)), Categorical(), training=QUICK, seed=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_temperature_is_the_best_by_scipy(fitted, dtype):
    posterior = fitted.to(dtype)
    x = rows(90, 4, seed=5).to(dtype)
    y = labels(x)
    draws = {"linearised": False} if posterior.has_form("linearised") else {}  # the closed form has no draws
    scaled = temperature_scaled(posterior, (x, y), num_samples=6, seed=2, **draws)
    outputs = posterior.sample_outputs(x, posterior.num_atoms or 6, seed=2, **draws)

    def score(log_t: float) -> float:
        probs = (outputs.double() / torch.tensor(log_t).exp()).softmax(-1).mean(0)
        return float(-probs[torch.arange(90), y].log().mean())

    found = scipy.optimize.minimize_scalar(score, bounds=(-3, 3.5), method="bounded")
    chosen = scaled.likelihood.settings.temperature
    assert score(torch.tensor(chosen).log().item()) == pytest.approx(found.fun, abs=2e-6)
    probs = (outputs / chosen).softmax(-1).mean(0)
    prediction = scaled.predict(x, 6, seed=2, **draws)
    torch.testing.assert_close(prediction.probs, probs, rtol=1e-4, atol=1e-6)
    assert prediction.probs.dtype == dtype
    assert torch.equal(scaled.sample_outputs(x, 3), posterior.sample_outputs(x, 3))  # the weights are as they were
    assert type(posterior.likelihood.settings) is Categorical


def test_saved_and_loaded(fitted, tmp_path):
    x = rows(90, 4, seed=5)
    y = labels(x)
    scaled = temperature_scaled(fitted.float(), (x, y), num_samples=4)
    scaled.save(tmp_path / "t.safetensors")
    again = dubito.load(tmp_path / "t.safetensors", net())
    assert again.likelihood.settings == scaled.likelihood.settings
    assert isinstance(again.likelihood.settings, TemperedCategorical)
    assert torch.equal(again.predict(x, 4).probs, scaled.predict(x, 4).probs)
    twice = temperature_scaled(again, (x, y), num_samples=4)  # replaced, not multiplied
    assert twice.likelihood.settings.temperature == pytest.approx(scaled.likelihood.settings.temperature)


def test_an_overconfident_network_is_cooled_down():
    x = rows(400, 4)
    truth = net()
    with torch.no_grad():
        logits = truth(x)
    y = drawn(2 * logits)
    with torch.no_grad():
        truth[2].weight.mul_(6)
        truth[2].bias.mul_(6)
    point = dubito.MAP().fit(truth, (x, y), Categorical(), training=Training(iterations=1, lr=1e-12))
    scaled = temperature_scaled(point, (x, y))
    assert scaled.likelihood.settings.temperature == pytest.approx(3.0, rel=0.2)  # logits are 6f, truth 2f
    before, after = point.evaluate((x, y)), scaled.evaluate((x, y))
    assert after["nll"] < before["nll"] and after["ece"] < before["ece"]
    assert after["accuracy"] == before["accuracy"]


def drawn(logits: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(8)).squeeze(1)


def test_linearised_and_pieces_of_rows():
    x = rows(120, 4)
    y = labels(x)
    posterior = dubito.methods()["laplace-diag"].fit(net(), (x, y), Categorical(), training=QUICK)
    for options in ({"linearised": True}, {"max_rows": 7}):
        scaled = temperature_scaled(posterior, (x, y), num_samples=3, **options)
        temperature = scaled.likelihood.settings.temperature
        nll = scaled.predict(x, 3, **options).log_prob(y).mean()
        for factor in (0.97, 1.03):
            other = temperature_scaled(posterior, (x, y), num_samples=3, **options)
            other.likelihood = TemperedCategorical(temperature=temperature * factor).build(None)
            assert other.predict(x, 3, **options).log_prob(y).mean() < nll
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=50)
    subset = torch.utils.data.Subset(loader.dataset, range(120))  # read in batches
    whole, parts = (temperature_scaled(posterior, data, num_samples=3) for data in ((x, y), subset))
    assert whole.likelihood.settings.temperature == pytest.approx(parts.likelihood.settings.temperature, rel=1e-3)


def test_marginal_predictions_come_in_pieces():
    x = rows(60, 4)
    y = labels(x)
    posterior = dubito.MeanField().fit(net(), (x, y), Categorical(), training=QUICK)
    options = {"marginal": True, "max_rows": 16}
    scaled = temperature_scaled(posterior, (x, y), num_samples=3, **options)
    best_nll = scaled.predict(x, 3, **options).log_prob(y).mean()
    for factor in (0.95, 1.05):
        scaled.likelihood = TemperedCategorical(temperature=factor * scaled.likelihood.settings.temperature).build(None)
        assert scaled.predict(x, 3, **options).log_prob(y).mean() < best_nll


def test_binary():
    x = rows(200, 4)
    y = (x[:, 0] > 0).long()
    flipped = torch.where(rows(200, seed=9) > 0.8, 1 - y, y)
    posterior = dubito.DeepEnsemble(members=2).fit(net(1), (x, y), Bernoulli(), training=QUICK)
    scaled = temperature_scaled(posterior, (x, flipped))
    assert scaled.evaluate((x, flipped))["nll"] <= posterior.evaluate((x, flipped))["nll"]
    scaled.likelihood.check_outputs(rows(2, 1))
    logits = posterior.sample_outputs(x, 2)
    probs = (logits / scaled.likelihood.settings.temperature).sigmoid().mean(0)
    torch.testing.assert_close(scaled.predict(x).probs, probs)


NOISES = {
    "learned": Gaussian(),
    "one": Gaussian(std=0.3),
    "each": Gaussian(std=(0.1, 0.5)),
    "full": Gaussian(covariance=((1.0, 0.2), (0.2, 0.5))),
}


@pytest.mark.parametrize("likelihood", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("name", ["deep-ensemble", "laplace-diag"])
def test_real_noise(likelihood, name, tmp_path):
    x = rows(80, 4)
    y = x[:, :2] + 0.5 * rows(80, 2, seed=4)
    posterior = dubito.methods()[name].fit(net(2), (x, y), likelihood, training=QUICK)
    scaled = temperature_scaled(posterior, (x, y), num_samples=5)
    assert isinstance(scaled.likelihood, GaussianLikelihood)
    nll = [float(p.predict(x, 5).log_prob(y).mean()) for p in (scaled, posterior)]
    assert nll[0] >= nll[1] - 1e-6
    ratios = scaled.predict(x, 5).aleatoric / posterior.predict(x, 5).aleatoric
    torch.testing.assert_close(ratios, ratios[:1, :1].expand_as(ratios))  # one factor for all
    if posterior.num_atoms:  # no doubt of its own but the members': the closed form is near for one member
        scaled.save(tmp_path / "r.safetensors")
        again = dubito.load(tmp_path / "r.safetensors", net(2))
        assert torch.equal(again.predict(x, 5).log_prob(y), scaled.predict(x, 5).log_prob(y))


def test_real_noise_of_a_point_in_closed_form():
    x, y = rows(80, 4), rows(80, 1, seed=4)
    posterior = dubito.MAP().fit(net(1), (x, y), Gaussian(std=0.2), training=QUICK)
    scaled = temperature_scaled(posterior, (x, y))
    rmse = (posterior.predict(x).mean - y).square().mean().sqrt()  # the best σ of Normal noise
    assert float(scaled.likelihood.std()) == pytest.approx(float(rmse), rel=2e-4)


def test_curvature_and_samples_follow_the_temperature():
    likelihood = TemperedCategorical(temperature=2.5).build(None)
    outputs = rows(4, 3).double().requires_grad_()
    hessian = torch.autograd.functional.hessian(
        lambda f: -likelihood.log_prob(f[None], torch.tensor([1])).sum(), outputs[0].detach()
    )
    root = likelihood.hessian_root(outputs[:1].detach())[0]
    torch.testing.assert_close(root @ root.mT, hessian)
    drawn = likelihood.sample(outputs[:1].detach().expand(40_000, 3), torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=3) / 40_000
    expected = (outputs[0].detach() / 2.5).softmax(-1)
    assert (share - expected).abs().max() < 4 * 0.5 / 200  # four standard errors
    with pytest.raises(dubito.ConfigError, match="temperature must be"):
        TemperedCategorical(temperature=0.0)


def test_the_search_finds_minima_and_says_where_it_ends():
    assert best(lambda t: (t - 3.3) ** 2) == pytest.approx(3.3, rel=1e-3)
    with pytest.warns(dubito.DubitoWarning, match="beyond"):
        best(lambda t: t)
