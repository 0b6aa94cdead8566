"""Coverage, width and quantile calibration against counts and against distributions with known quantiles."""

import math

import pytest
import torch
from scipy.stats import norm

from dubito.errors import DataError
from dubito.metrics import interval_coverage, interval_width, quantile_calibration


def test_coverage_counts_both_ends() -> None:
    targets = torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0])
    lower, upper = torch.tensor([0.0, 0.0, 2.5, 1.0, 1.0]), torch.tensor([1.0, 1.0, 3.0, 2.0, 1.0])
    assert interval_coverage(targets, lower, upper) == 3 / 5
    assert interval_width(lower, upper) == pytest.approx((1 + 1 + 0.5 + 1 + 0) / 5)


def test_intervals_of_several_outputs_and_without_end() -> None:
    targets = torch.tensor([[0.0, 5.0], [1.0, 1.0]])
    lower, upper = torch.full((2, 2), -math.inf), torch.full((2, 2), 1.0)
    assert interval_coverage(targets, lower, upper) == 3 / 4
    assert interval_width(lower, upper) == math.inf


def test_coverage_of_the_true_distribution() -> None:
    # The targets are the (i + 1/2)/1000 quantiles themselves, so the central 90 % hold exactly 900.
    targets = torch.from_numpy(norm.ppf((torch.arange(1000) + 0.5) / 1000))
    end = float(norm.ppf(0.95))
    lower, upper = torch.full_like(targets, -end), torch.full_like(targets, end)
    assert interval_coverage(targets, lower, upper) == 0.9
    assert interval_width(lower, upper) == pytest.approx(2 * end, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quantile_calibration_against_known_quantiles(dtype: torch.dtype) -> None:
    targets = torch.from_numpy(norm.ppf((torch.arange(1000).double() + 0.5) / 1000)).to(dtype)
    levels = torch.tensor([0.1, 0.25, 0.5, 0.9], dtype=dtype)
    quantiles = torch.from_numpy(norm.ppf(levels.double())).to(dtype)[:, None].expand(4, 1000)
    right = quantile_calibration(targets, quantiles, levels)
    torch.testing.assert_close(right.observed, levels)
    assert right.error == pytest.approx(0, abs=1e-7)
    # Predicted twice too wide: y <= 2 q happens with probability Φ(2 q), to one example of a thousand.
    wide = quantile_calibration(targets, 2 * quantiles, levels)
    expected = torch.from_numpy(norm.cdf(2 * quantiles[:, 0].double())).to(dtype)
    torch.testing.assert_close(wide.observed, expected, atol=1e-3, rtol=0)
    assert wide.error == pytest.approx(float((wide.observed - levels).abs().mean()), rel=1e-6)
    assert wide.error > 0.08


def test_quantile_calibration_counts_ties_as_below() -> None:
    targets, levels = torch.tensor([1.0, 1.0, 2.0, 3.0]), torch.tensor([0.5])
    result = quantile_calibration(targets, torch.ones(1, 4), levels)
    assert (result.observed.item(), result.error, result.levels.item()) == (0.5, 0.0, 0.5)


def test_bad_inputs_are_refused() -> None:
    targets, low, high = torch.zeros(3), -torch.ones(3), torch.ones(3)
    with pytest.raises(DataError, match="3 of 3 with lower above"):
        interval_coverage(targets, high, low)
    with pytest.raises(DataError, match="wrong infinity"):
        interval_width(low + math.inf, high + math.inf)
    with pytest.raises(DataError, match="lower and upper must have one shape"):
        interval_width(low, high[:, None])
    with pytest.raises(DataError, match="targets and lower must have one shape"):
        interval_coverage(targets[:, None], low, high)
    with pytest.raises(DataError, match="NaN"):
        interval_coverage(targets * math.nan, low, high)
    quantiles = torch.zeros(2, 3)
    for levels in ([0.0, 0.5], [0.5, 1.0], [0.5, 0.5], [0.9, 0.1]):
        with pytest.raises(DataError, match="rise strictly"):
            quantile_calibration(targets, quantiles, torch.tensor(levels))
    with pytest.raises(DataError, match=r"here \[2, 3\]"):
        quantile_calibration(targets, quantiles.T, torch.tensor([0.1, 0.9]))
