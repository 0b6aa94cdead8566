"""Reals whose doubt about weights is known in closed form: a spread beside the noise."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal, Normal

from dubito.evaluation import evaluate
from dubito.prediction import RealPrediction


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covariances(*shape: int, seed: int = 0) -> Tensor:
    roots = normal(*shape, shape[-1], seed=seed)
    return roots @ roots.mT + 0.1 * torch.eye(shape[-1]).double()


MEANS, SPREADS, VARIANCES = normal(4, 5, 3), covariances(4, 5, 3, seed=1), normal(3, seed=2).square() + 0.2
NOISE = {"diagonal": VARIANCES.diag(), "full": covariances(3, seed=3)}
TARGETS = normal(5, 3, seed=4)


def made(noise: str) -> RealPrediction:
    full = NOISE[noise]
    return RealPrediction(
        MEANS, full.diagonal().expand(1, 1, 3), full[None, None] if noise == "full" else None, SPREADS
    )


@pytest.mark.parametrize("noise", NOISE)
def test_moments_and_density_are_those_of_the_mixture(noise: str) -> None:
    prediction, full = made(noise), NOISE[noise]
    components = MultivariateNormal(MEANS.transpose(0, 1), (SPREADS + full).transpose(0, 1))
    truth = MixtureSameFamily(Categorical(logits=torch.zeros(5, 4)), components)
    torch.testing.assert_close(prediction.log_prob(TARGETS), truth.log_prob(TARGETS))
    torch.testing.assert_close(prediction.mean, truth.mean)
    torch.testing.assert_close(prediction.std**2, truth.variance)
    torch.testing.assert_close(prediction.aleatoric, full.diagonal().expand(5, 3))
    spread = SPREADS.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(prediction.epistemic, spread.mean(0) + MEANS.var(0, unbiased=False))
    torch.testing.assert_close(prediction.component_variances, spread + full.diagonal())
    torch.testing.assert_close(prediction.aleatoric_std**2 + prediction.epistemic_std**2, truth.variance)


@pytest.mark.parametrize("noise", NOISE)
def test_quantiles_and_intervals_hold_what_they_should(noise: str) -> None:
    prediction, full = made(noise), NOISE[noise]
    std = (SPREADS.diagonal(dim1=-2, dim2=-1) + full.diagonal()).sqrt().numpy()
    for level in (1e-6, 0.05, 0.5, 0.9, 1 - 1e-6):
        found = prediction.quantile(level).numpy()
        below = scipy.stats.norm(MEANS.numpy(), std).cdf(found).mean(0)
        np.testing.assert_allclose(below, level, rtol=1e-9, atol=1e-15)
    lower, upper = prediction.interval(0.9)
    torch.testing.assert_close(
        torch.stack([lower, upper]), prediction.quantile(torch.tensor([0.05, 0.95], dtype=torch.float64))
    )


@pytest.mark.parametrize("noise", NOISE)
def test_rescaling_changes_units_only(noise: str) -> None:
    prediction, shift, scale = made(noise), normal(3, seed=5), normal(3, seed=6).abs() + 0.5
    rescaled = prediction.rescaled(shift, scale)
    torch.testing.assert_close(rescaled.mean, prediction.mean * scale + shift)
    torch.testing.assert_close(rescaled.std, prediction.std * scale)
    torch.testing.assert_close(rescaled.epistemic, prediction.epistemic * scale**2)
    torch.testing.assert_close(rescaled.epistemic_std, prediction.epistemic_std * scale)
    torch.testing.assert_close(rescaled.aleatoric_std, prediction.aleatoric_std * scale)
    torch.testing.assert_close(
        rescaled.log_prob(TARGETS * scale + shift), prediction.log_prob(TARGETS) - scale.log().sum()
    )
    torch.testing.assert_close(rescaled.quantile(0.1), prediction.quantile(0.1) * scale + shift)
    twice = prediction.rescaled(0.0, 2.0)
    torch.testing.assert_close(twice.std, 2 * prediction.std)


@pytest.mark.parametrize("noise", NOISE)
def test_rows_can_be_taken_moved_and_joined(noise: str) -> None:
    prediction = made(noise)
    rows = torch.tensor([3, 1])
    part = prediction[rows]
    assert len(part) == 2 and prediction[-1].mean_covariances.shape == (4, 1, 3, 3)
    for name in ("mean", "std", "aleatoric", "epistemic", "aleatoric_std", "epistemic_std"):
        torch.testing.assert_close(getattr(part, name), getattr(prediction, name)[rows])
    torch.testing.assert_close(part.log_prob(TARGETS[rows]), prediction.log_prob(TARGETS)[rows])
    whole = RealPrediction.cat([prediction[:2], prediction[2:]])
    assert torch.equal(whole.mean_covariances, prediction.mean_covariances)
    single = prediction.to(torch.float32)
    assert single.mean_covariances.dtype == single.std.dtype == torch.float32
    assert set(prediction.to_numpy()) == {"mean", "std", "aleatoric_std", "epistemic_std"}


def test_outputs_of_every_shape() -> None:
    for shape in ((), (1,), (2, 3)):
        means, size = normal(2, 5, *shape), max(1, int(np.prod(shape)))
        spread = covariances(2, 5, size, seed=1)
        prediction = RealPrediction(means, torch.full((1, 1, *shape), 0.3).double(), None, spread)
        targets = normal(5, *shape, seed=4)
        truth = MultivariateNormal(means.reshape(2, 5, -1), spread + 0.3 * torch.eye(size).double())
        expected = truth.log_prob(targets.reshape(5, -1)).logsumexp(0) - np.log(2)
        torch.testing.assert_close(prediction.log_prob(targets), expected)
        assert prediction.epistemic.shape == prediction.std.shape == prediction.quantile(0.3).shape == (5, *shape)
        assert prediction.rescaled(1.0, 2.0).mean_covariances.shape == spread.shape


def test_metrics_see_the_spread() -> None:
    mean, spread = normal(1, 50, 1), covariances(1, 50, 1, seed=1)
    prediction = RealPrediction(mean, torch.full((1, 1, 1), 0.3).double(), None, spread)
    targets = normal(50, 1, seed=4)
    found = evaluate(prediction, targets)
    std = (spread[0, :, 0] + 0.3).sqrt()
    assert found["nll"] == pytest.approx(-float(Normal(mean[0], std).log_prob(targets).mean()))
    error = ((targets - mean[0]) / std).numpy()
    # CRPS of a Normal: σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π)
    crps = std.numpy() * (error * (2 * scipy.stats.norm.cdf(error) - 1) + 2 * scipy.stats.norm.pdf(error) - np.pi**-0.5)
    assert found["crps"] == pytest.approx(crps.mean())
    assert found["coverage"] == pytest.approx((np.abs(error) < 1.959964).mean())
