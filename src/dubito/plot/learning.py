"""What labels buy: curves of active learning."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..active import Curve, mean_curve
from ..errors import DataError
from ..hints import checked
from .axes import axis_of, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@checked
def active_learning_curve(
    curves: Mapping[str, Curve | Sequence[Curve]], metric: str = "rmse", *, axis: "Axes | None" = None
) -> "Axes":
    """A metric against the number of labelled rows; where there are several splits, with standard errors.

    Args:
        curves: of each way to choose rows, by name: one, or those of several splits.
        metric: a name that `evaluate` gives.
        axis: to draw on.
    """
    if not isinstance(curves, Mapping) or not curves:
        raise DataError(f"curves must hold at least one by name, got {curves!r}")
    lines = {}
    for name, runs in curves.items():
        splits = [runs] if isinstance(runs, Curve) else list(runs)
        if len(splits) > 1:
            mean = mean_curve(splits, metric)
            errors = [estimate.standard_error for estimate in mean.values]
            lines[name] = mean.num_labelled, [estimate.value for estimate in mean.values], errors
        elif splits:
            steps = [point.num_labelled for point in splits[0].points]
            lines[name] = steps, splits[0].values(metric), None
        else:
            raise DataError(f"curves must hold at least one run of each, {name!r} has none")
    axis = axis_of(axis)
    for number, (name, (steps, values, errors)) in enumerate(lines.items()):
        axis.plot(list(steps), values, marker="o", markersize=3, color=colour(number), label=name)
        if errors is not None:
            lower, upper = ([v + sign * e for v, e in zip(values, errors, strict=True)] for sign in (-1, 1))
            axis.fill_between(list(steps), lower, upper, color=colour(number), alpha=0.2, linewidth=0)
    axis.set(xlabel="labelled rows", ylabel=metric)
    axis.legend()
    return axis
