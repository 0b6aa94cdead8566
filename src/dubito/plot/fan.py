"""Real predictions with their bands."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DataError
from ..hints import checked
from ..prediction import RealPrediction, aligned
from .axes import axis_of, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@checked
def regression_fan(
    prediction: RealPrediction,
    inputs: Tensor | None = None,
    targets: Tensor | None = None,
    *,
    levels: Sequence[float] = (0.95, 0.5),
    axis: "Axes | None" = None,
) -> "Axes":
    """Mean and central intervals of one real output, over the only input or over rows in order of the mean.

    Args:
        prediction: with one output per row.
        inputs: one number per row, to draw over; None orders the rows by their mean.
        targets: the true values, drawn as dots.
        levels: of the bands, the widest first.
        axis: to draw on.
    """
    if not isinstance(prediction, RealPrediction) or prediction.mean.numel() != len(prediction):
        shape = tuple(prediction.mean.shape[1:]) if isinstance(prediction, RealPrediction) else ()
        raise DataError(f"a fan is of real predictions with one output, got {type(prediction).__name__} {shape}")
    mean = prediction.mean.flatten().cpu()
    if inputs is None:
        order, name = mean.argsort(), "rows, by their mean"
        x = torch.arange(len(mean))
    else:
        if inputs.numel() != len(mean):
            raise DataError(f"inputs must be one number per row, got {tuple(inputs.shape)} for {len(mean)} rows")
        order, name = inputs.flatten().cpu().argsort(), "input"
        x = inputs.flatten().cpu()[order]
    bands = [(level, prediction.interval(level)) for level in levels]
    axis = axis_of(axis)
    for level, (low, high) in bands:
        lower, upper = (end.flatten().cpu()[order].tolist() for end in (low, high))
        axis.fill_between(x.tolist(), lower, upper, color=colour(0), alpha=0.2, linewidth=0, label=f"{level:.0%}")
    axis.plot(x.tolist(), mean[order].tolist(), color=colour(0), label="mean")
    if targets is not None:
        truth = aligned(targets, prediction.mean).flatten().cpu()[order]
        axis.plot(x.tolist(), truth.tolist(), ".", color="black", markersize=4, alpha=0.6, label="true")
    axis.set(xlabel=name, ylabel="prediction")
    axis.legend()
    return axis
