"""Conformal intervals: at least a share `level` of new targets lie within theirs, for each output by itself.

The guarantee holds for rows exchangeable with the calibration rows, on average over both, whatever the network.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError, require_fraction
from ..hints import Checked, checked
from ..prediction import Prediction, RealPrediction, aligned
from .conformal import conformal_quantile


@dataclass(frozen=True, kw_only=True)
class ConformalIntervals:
    """A rule from predictions to intervals.

    Attributes:
        rule: the settings it was made with.
        thresholds: the largest score within an interval, one for each of a row's outputs, read in order.
        num_data: calibration rows.
    """

    rule: "IntervalRule"
    thresholds: tuple[float, ...]
    num_data: int

    @checked
    def intervals(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Lower and upper ends, each [B, ...]."""
        real = _real(prediction)
        row = real.means.shape[2:]
        if row.numel() != len(self.thresholds):
            raise DataError(
                f"the rule was made for {len(self.thresholds)} outputs of a row, got {row.numel()}, shape {list(row)}"
            )
        return self.rule.intervals(real, real.means.new_tensor(self.thresholds).reshape(row))


@dataclass(frozen=True, kw_only=True)
class IntervalRule(Checked, ABC):
    """How intervals are made conformal.

    Args:
        level: the share of new targets that is to lie within.
    """

    level: float = 0.9

    def __post_init__(self) -> None:
        require_fraction(zero=False, level=self.level)

    @checked
    def fit(self, prediction: Prediction, targets: Tensor) -> ConformalIntervals:
        """The rule for a network whose prediction of calibration rows this is.

        Args:
            prediction: of rows that were not trained on.
            targets: their values.
        """
        real = _real(prediction)
        values = aligned(targets, real.means[0])
        if not values.isfinite().all():
            raise DataError("targets must be finite, got NaN or infinity; remove such rows first")
        scores = self.scores(real, values)
        thresholds = conformal_quantile(scores.reshape(len(scores), -1), self.level)
        return ConformalIntervals(rule=self, thresholds=tuple(thresholds.tolist()), num_data=len(scores))

    @abstractmethod
    def scores(self, prediction: RealPrediction, targets: Tensor) -> Tensor:
        """How unlike the prediction targets are, [B, ...]."""

    @abstractmethod
    def intervals(self, prediction: RealPrediction, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        """All values whose score is at most the threshold."""


@dataclass(frozen=True, kw_only=True)
class ScaledResiduals(IntervalRule):
    """Mean ± q standard deviations, q from the residuals |y − mean| / std of calibration rows [Lei et al. 2018]."""

    def scores(self, prediction: RealPrediction, targets: Tensor) -> Tensor:
        return (targets - prediction.mean).abs() / prediction.std

    @checked
    def intervals(self, prediction: RealPrediction, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        mean, reach = prediction.mean, thresholds * prediction.std
        return mean - reach, mean + reach


@dataclass(frozen=True, kw_only=True)
class QuantileResiduals(IntervalRule):
    """The prediction's own central interval, both ends moved by q [Romano et al. 2019].

    It follows skewed mixtures; where q < 0 and an interval would turn inside out, it is its middle alone.
    """

    def scores(self, prediction: RealPrediction, targets: Tensor) -> Tensor:
        lower, upper = prediction.interval(self.level)
        return torch.maximum(lower - targets, targets - upper)  # how far outside, below 0 inside

    @checked
    def intervals(self, prediction: RealPrediction, thresholds: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = prediction.interval(self.level)
        middle = (lower + upper) / 2
        return torch.minimum(lower - thresholds, middle), torch.maximum(upper + thresholds, middle)


def _real(prediction: Prediction) -> RealPrediction:
    if not isinstance(prediction, RealPrediction):
        raise DataError(f"intervals are for reals, got {type(prediction).__name__}; classes have sets")
    return prediction
