"""Whether predicted intervals and quantiles hold the share of targets they claim."""

from dataclasses import dataclass

from torch import Tensor

from dubito.errors import DataError

from ._checks import finite, real, same_shape, vector


def interval_coverage(targets: Tensor, lower: Tensor, upper: Tensor) -> float:
    """Share of targets within their interval, ends included.

    Args:
        targets: Real numbers [B, ...].
        lower: Lower ends, of the same shape, possibly -inf.
        upper: Upper ends, of the same shape, possibly inf.
    """
    lower, upper = _interval(lower, upper)
    targets = finite("targets", targets).to(lower.device)
    same_shape("targets", targets, "lower", lower)
    inside = (lower <= targets) & (targets <= upper)
    return int(inside.sum()) / inside.numel()


def interval_width(lower: Tensor, upper: Tensor) -> float:
    """Mean width of intervals; inf where one of them has no end.

    Args:
        lower: Lower ends [B, ...], possibly -inf.
        upper: Upper ends, of the same shape, possibly inf.
    """
    lower, upper = _interval(lower, upper)
    return float((upper - lower).mean())


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileCalibration:
    """How often targets lie at or below predicted quantiles.

    Attributes:
        levels: Levels of the quantiles, [Q].
        observed: Share of targets at or below each quantile, [Q]; equal to `levels` when calibrated.
        error: Mean over the levels of |observed - level|.
    """

    levels: Tensor
    observed: Tensor
    error: float


def quantile_calibration(targets: Tensor, quantiles: Tensor, levels: Tensor) -> QuantileCalibration:
    """Observed against nominal levels of predicted quantiles.

    Args:
        targets: Real numbers [B, ...].
        quantiles: Predicted quantiles [Q, B, ...], one row for each level.
        levels: Levels [Q], rising, strictly between 0 and 1.
    """
    quantiles, targets = real("quantiles", quantiles), finite("targets", targets)
    levels = vector("levels", levels).to(quantiles.device)
    if levels.min() <= 0 or levels.max() >= 1 or (levels.diff() <= 0).any():
        raise DataError(f"levels must rise strictly within (0, 1), got {levels.tolist()}")
    if quantiles.shape != (len(levels), *targets.shape):
        raise DataError(
            f"quantiles must have shape [Q, B, ...], here {[len(levels), *targets.shape]}, for "
            f"{len(levels)} levels and targets of shape {list(targets.shape)}, got {list(quantiles.shape)}"
        )
    below = targets.to(quantiles.device) <= quantiles  # [Q, B, ...]
    # observed_q = 1/B Σ_b 1[y_b <= F_b⁻¹(level_q)]   [Kuleshov et al. 2018]
    observed = below.reshape(len(levels), -1).to(levels.dtype).mean(1)
    return QuantileCalibration(levels=levels, observed=observed, error=float((observed - levels).abs().mean()))


def _interval(lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    lower, upper = real("lower", lower), real("upper", upper)
    upper = upper.to(lower.device)
    same_shape("lower", lower, "upper", upper)
    bad = (lower > upper) | (lower == float("inf")) | (upper == -float("inf"))
    if bad.any():
        raise DataError(
            f"each interval must run from lower to upper, got {int(bad.sum())} of {bad.numel()} with lower "
            "above upper or at the wrong infinity; check the order of the arguments"
        )
    return lower, upper
