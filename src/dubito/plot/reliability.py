"""Whether confidence keeps its word."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import DataError
from ..hints import checked
from ..metrics import ece, reliability_curve
from ..prediction import ClassPrediction
from .axes import axis_of, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@checked
def reliability(
    predictions: ClassPrediction | Mapping[str, ClassPrediction],
    targets: Tensor,
    *,
    num_bins: int = 15,
    axis: "Axes | None" = None,
) -> "Axes":
    """Share of right answers against confidence, with the expected calibration error of each prediction.

    Args:
        predictions: of classes, one or several by name.
        targets: the true classes.
        num_bins: bins of equal width.
        axis: to draw on.
    """
    named = predictions if isinstance(predictions, Mapping) else {"": predictions}
    curves = {}
    for name, prediction in named.items():
        if not isinstance(prediction, ClassPrediction):
            raise DataError(f"reliability is of predictions of classes, got {type(prediction).__name__}")
        probs, labels = prediction.flat(targets)
        curves[name] = reliability_curve(probs, labels, num_bins), ece(probs, labels, num_bins)
    axis = axis_of(axis)
    axis.plot([0, 1], [0, 1], color="0.6", linestyle=":", linewidth=1)
    for number, (name, (curve, error)) in enumerate(curves.items()):
        there = curve.count > 0
        label = f"{name}, ECE {error:.3f}" if name else f"ECE {error:.3f}"
        x, y = curve.confidence[there].tolist(), curve.accuracy[there].tolist()
        axis.plot(x, y, marker="o", markersize=4, color=colour(number), label=label)
    axis.set(xlabel="confidence", ylabel="share of right answers", xlim=(0, 1), ylim=(0, 1.02))
    axis.legend()
    return axis
