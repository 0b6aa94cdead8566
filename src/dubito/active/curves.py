"""What active learning gives: a curve per split, their mean with standard errors, and differences of pairs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..errors import ConfigError, DataError
from ..hints import checked
from ..metrics import Estimate, Over, PairedDifference, paired_bootstrap, standard_error_over_runs
from ..storage.schema import Recorded


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """One step.

    Attributes:
        num_labelled: rows with labels.
        metrics: of the test rows.
        chosen: rows of the pool whose labels were asked for next; none at the last step.
        fit_seconds: CPU seconds of the fit.
        acquisition_seconds: CPU seconds to choose the next rows.
    """

    num_labelled: int
    metrics: Mapping[str, Recorded]
    chosen: tuple[int, ...]
    fit_seconds: float
    acquisition_seconds: float


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run.

    Attributes:
        points: one per step, and one for the first rows.
    """

    points: tuple[CurvePoint, ...]

    @checked
    def values(self, metric: str) -> list[float]:
        """A metric along the curve."""
        known = self.points[0].metrics
        if metric not in known:
            raise ConfigError(f"metric must be one of {', '.join(known)}, got {metric!r}")
        return [point.metrics[metric] for point in self.points]

    def average(self, metric: str) -> float:
        """The mean of a metric over the steps that asked for labels, that is all points but the first."""
        return fmean(self.values(metric)[1:])

    @property
    def overhead(self) -> float:
        """What choosing rows adds to the cost of the fits, as a share of it."""
        return sum(p.acquisition_seconds for p in self.points) / sum(p.fit_seconds for p in self.points)


@dataclass(frozen=True, kw_only=True)
class MeanCurve:
    """The mean of curves over splits.

    Attributes:
        num_labelled: rows with labels at each point.
        values: means with standard errors over splits.
    """

    num_labelled: tuple[int, ...]
    values: tuple[Estimate, ...]


@checked
def mean_curve(curves: Sequence[Curve], metric: str) -> MeanCurve:
    """The mean curve of a metric, with standard errors over splits.

    Args:
        curves: of at least two splits, with the same steps.
        metric: a name that `evaluate` gives.
    """
    steps = _steps(curves)
    columns = zip(*(curve.values(metric) for curve in curves), strict=True)
    return MeanCurve(num_labelled=steps, values=tuple(standard_error_over_runs(column) for column in columns))


@checked
def paired_difference(first: Sequence[Curve], second: Sequence[Curve], metric: str) -> PairedDifference:
    """The mean over splits of how far the first's average lies above the second's.

    Args:
        first: curves of one acquisition function.
        second: those of another, on the same splits in the same order.
        metric: a name that `evaluate` gives.
    """
    if _steps(first) != _steps(second):
        raise DataError("both must have the same steps")
    averages = [[curve.average(metric) for curve in curves] for curves in (first, second)]
    return paired_bootstrap(*averages, over=Over.RUNS)


def _steps(curves: Sequence[Curve]) -> tuple[int, ...]:
    steps = {tuple(point.num_labelled for point in curve.points) for curve in curves}
    if len(steps) != 1:
        raise DataError(f"curves must have the same steps, got {len(steps)} kinds")
    return steps.pop()
