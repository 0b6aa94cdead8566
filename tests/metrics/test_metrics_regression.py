"""Regression metrics against scikit-learn, SciPy and numerical integration of the definitions."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import logsumexp
from scipy.stats import norm
from sklearn.metrics import mean_absolute_error, root_mean_squared_error

from dubito.errors import DataError
from dubito.metrics import (
    crps_gaussian,
    crps_mixture,
    crps_mixture_per_example,
    mae,
    mixture_log_prob,
    mixture_log_prob_per_example,
    rmse,
)

# A few float32 roundings of terms of order 10.
TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-12}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def mixture(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Targets [B, ...], means and stds [S, B, ...], in float64."""
    generator = torch.Generator().manual_seed(seed)
    means = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    stds = 0.2 + torch.rand(shape, generator=generator, dtype=torch.float64)
    targets = 3 * torch.randn(shape[1:], generator=generator, dtype=torch.float64)
    return targets, means, stds


def crps_by_integration(target: float, means: np.ndarray, stds: np.ndarray) -> float:
    """∫ (F(x) - 1[x >= y])² dx, on both sides of y."""

    def cdf(x: float) -> float:
        return float(norm.cdf(x, means, stds).mean())

    low = min(target, (means - 12 * stds).min())
    high = max(target, (means + 12 * stds).max())
    marks = [float(mean) for mean in means]
    below, _ = quad(lambda x: cdf(x) ** 2, low, target, points=[m for m in marks if low < m < target], limit=500)
    above, _ = quad(
        lambda x: (cdf(x) - 1) ** 2, target, high, points=[m for m in marks if target < m < high], limit=500
    )
    return below + above


@DTYPES
@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_rmse_and_mae_against_scikit_learn(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randn(shape, generator=generator, dtype=dtype)
    mean = torch.randn(shape, generator=generator, dtype=dtype)
    flat = targets.double().flatten().numpy(), mean.double().flatten().numpy()
    assert rmse(targets, mean) == pytest.approx(root_mean_squared_error(*flat), rel=TOLERANCE[dtype])
    assert mae(targets, mean) == pytest.approx(mean_absolute_error(*flat), rel=TOLERANCE[dtype])


def test_rmse_and_mae_of_tensors_that_are_not_contiguous() -> None:
    targets, mean = torch.arange(6.0).view(2, 3).T, torch.zeros(3, 2)
    assert rmse(targets, mean) == pytest.approx(math.sqrt(55 / 6), rel=1e-6)
    assert mae(targets, mean) == 2.5


def test_whole_number_targets_and_exact_predictions() -> None:
    targets = torch.tensor([1, 2, 4])
    assert mae(targets, torch.tensor([1.0, 3.0, 6.0])) == 1.0
    assert rmse(targets, targets.double()) == 0.0


@DTYPES
def test_mixture_log_prob_against_scipy(dtype: torch.dtype) -> None:
    targets, means, stds = (tensor.to(dtype) for tensor in mixture(7, 40))
    y, m, s = (tensor.double().numpy() for tensor in (targets, means, stds))
    reference = logsumexp(norm.logpdf(y, m, s), axis=0) - np.log(7)
    values = mixture_log_prob_per_example(targets, means, stds)
    np.testing.assert_allclose(values.double(), reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert mixture_log_prob(targets, means, stds) == pytest.approx(reference.mean(), rel=TOLERANCE[dtype])


def test_mixture_of_several_outputs_is_joint() -> None:
    targets, means, stds = mixture(4, 10, 3)
    y, m, s = targets.numpy(), means.numpy(), stds.numpy()
    reference = np.log(np.mean(np.prod(norm.pdf(y, m, s), axis=2), axis=0))
    np.testing.assert_allclose(mixture_log_prob_per_example(targets, means, stds), reference, rtol=1e-9)


def test_mixture_log_prob_far_from_every_component_stays_finite() -> None:
    targets, means, stds = torch.tensor([1000.0]), torch.tensor([[0.0], [1.0]]), torch.tensor(1.0)
    # The nearer component carries all: log 1/2 + log N(1000; 1, 1).
    expected = math.log(0.5) - 999**2 / 2 - 0.5 * math.log(2 * math.pi)
    assert mixture_log_prob(targets, means, stds) == pytest.approx(expected, rel=1e-6)


def test_stds_broadcast_to_the_means() -> None:
    targets, means, _ = mixture(4, 10, 3)
    noise = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    for metric in (mixture_log_prob, crps_mixture):
        assert metric(targets, means, noise) == metric(targets, means, noise.expand(4, 10, 3).clone())


@DTYPES
def test_crps_of_a_mixture_against_integration(dtype: torch.dtype) -> None:
    targets, means, stds = (tensor.to(dtype) for tensor in mixture(4, 6))
    values = crps_mixture_per_example(targets, means, stds)
    columns = zip(targets.double(), means.double().T, stds.double().T, strict=True)
    reference = [crps_by_integration(float(y), m.numpy(), s.numpy()) for y, m, s in columns]
    # The quadrature itself is good to 1e-8.
    np.testing.assert_allclose(values, reference, atol=max(2e-8, TOLERANCE[dtype]))
    assert crps_mixture(targets, means, stds) == pytest.approx(np.mean(reference), abs=max(2e-8, TOLERANCE[dtype]))


@DTYPES
def test_crps_of_a_gaussian_against_its_closed_form(dtype: torch.dtype) -> None:
    targets, means, stds = (tensor.to(dtype) for tensor in mixture(1, 50))
    y, m, s = (tensor.double().numpy() for tensor in (targets, means[0], stds[0]))
    z = (y - m) / s
    reference = s * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    assert crps_gaussian(targets, means[0], stds[0]) == pytest.approx(reference.mean(), rel=TOLERANCE[dtype])
    constant = torch.tensor(0.7, dtype=dtype)
    assert crps_gaussian(targets, means[0], constant) == crps_gaussian(targets, means[0], constant.expand(50))


def test_crps_of_equal_components_is_that_of_one() -> None:
    targets, means, stds = mixture(1, 20)
    copies = means.expand(5, -1), stds.expand(5, -1)
    assert crps_mixture(targets, *copies) == pytest.approx(crps_gaussian(targets, means[0], stds[0]), rel=1e-12)


def test_crps_of_points_is_that_of_an_ensemble() -> None:
    targets, means, _ = mixture(6, 20)
    means[1] = means[0]  # two equal points: a mean and a variance of exactly 0
    # E|X − y| − ½ E|X − X'| over the points [Gneiting and Raftery 2007, Eq. 21]
    apart = np.abs(means.numpy()[:, None] - means.numpy()).mean((0, 1))
    reference = (np.abs(means.numpy() - targets.numpy()).mean(0) - apart / 2).mean()
    zero = torch.zeros((), dtype=torch.float64)
    assert crps_mixture(targets, means, zero) == pytest.approx(float(reference), rel=1e-12)
    assert crps_gaussian(targets, means[0], zero) == pytest.approx(mae(targets, means[0]), rel=1e-12)


def test_crps_averages_over_outputs() -> None:
    targets, means, stds = mixture(3, 8, 2)
    both = [crps_mixture_per_example(targets[:, c], means[:, :, c], stds[:, :, c]) for c in range(2)]
    torch.testing.assert_close(crps_mixture_per_example(targets, means, stds), (both[0] + both[1]) / 2)


def test_dtypes_may_differ() -> None:
    targets, means, stds = mixture(3, 8)
    exact = crps_mixture(targets, means.float().double(), stds)
    assert crps_mixture(targets, means.float(), stds) == exact


def test_bad_inputs_are_refused() -> None:
    targets, means, stds = mixture(3, 8)
    for metric in (rmse, mae):
        with pytest.raises(DataError, match="one shape"):
            metric(targets, means[0][:, None])  # broadcasting would compare every pair
        with pytest.raises(DataError, match="NaN"):
            metric(targets, means[0] * math.nan)
        with pytest.raises(DataError, match="infinite"):
            metric(targets, means[0] * math.inf)
        with pytest.raises(DataError, match="at least one value"):
            metric(targets[:0], means[0, :0])
    for metric in (mixture_log_prob, crps_mixture):
        with pytest.raises(DataError, match=r"means\[None\]"):
            metric(targets, means[0], stds)
        with pytest.raises(DataError, match="broadcast"):
            metric(targets, means, stds[:, :5])
        with pytest.raises(DataError, match="stds must be"):
            metric(targets, means, -stds)
    with pytest.raises(DataError, match="above 0"):
        mixture_log_prob(targets, means, 0 * stds)
    with pytest.raises(DataError, match="mean and targets must have one shape"):
        crps_gaussian(targets, means, stds)
