"""How uncertain predictions are, and whether epistemic or aleatoric."""

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..errors import DataError, require_count, unknown_name
from ..hints import checked
from ..prediction import ClassPrediction, Prediction, RealPrediction
from .axes import axis_of, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Score = Literal["total", "aleatoric", "epistemic", "function_variance", "confidence"]


@checked
def ood_histogram(
    inside: Prediction, outside: Prediction, *, score: Score = "total", num_bins: int = 30, axis: "Axes | None" = None
) -> "Axes":
    """Uncertainty in and out of distribution; the less the two overlap, the better it detects the latter.

    Args:
        inside: of rows like those trained on.
        outside: of out-of-distribution rows.
        score: which uncertainty; of reals a standard deviation, "function_variance" and "confidence" of classes alone.
        num_bins: bars.
        axis: to draw on.
    """
    require_count(num_bins=num_bins)
    values = [scored(prediction, score) for prediction in (inside, outside)]
    low, high = (float(value) for value in torch.cat(values).aminmax())
    edges = torch.linspace(low, high if high > low else low + 1, num_bins + 1).tolist()
    axis = axis_of(axis)
    for number, (name, rows) in enumerate(zip(("in distribution", "out of distribution"), values, strict=True)):
        options: dict[str, Any] = {"alpha": 0.4} if number == 0 else {"histtype": "step", "linewidth": 1.5}
        share = torch.full_like(rows, 1 / len(rows)).tolist()
        axis.hist(rows.tolist(), edges, weights=share, color=colour(number), label=name, **options)
    axis.set(xlabel=_title(inside, score), ylabel="share of rows")
    axis.legend()
    return axis


@checked
def decomposition(
    prediction: Prediction,
    targets: Tensor | None = None,
    *,
    outside: Prediction | None = None,
    axis: "Axes | None" = None,
) -> "Axes":
    """Aleatoric against epistemic uncertainty, row by row; of reals as standard deviations, in the target's units.

    Args:
        prediction: of some rows.
        targets: the true classes; wrong answers are then crosses.
        outside: of out-of-distribution rows, drawn beside them.
        axis: to draw on.
    """
    wrong = torch.zeros(len(prediction), dtype=torch.bool)
    if targets is not None:
        if not isinstance(prediction, ClassPrediction):
            raise DataError(f"targets say what is wrong of classes, got {type(prediction).__name__}; leave them out")
        labels = prediction.labels.cpu()
        truth = targets.cpu().reshape(labels.shape)
        missed = (labels != truth) & (truth != getattr(prediction, "ignore_index", None))
        wrong = missed.reshape(len(missed), -1).any(1)
    groups = [("right" if targets is not None else "rows", "o", prediction, ~wrong)]
    if targets is not None:
        groups.append(("wrong", "x", prediction, wrong))
    if outside is not None:
        groups.append(("out of distribution", "^", outside, torch.ones(len(outside), dtype=torch.bool)))
    drawn = [
        (name, mark, *(scored(group, score)[rows].tolist() for score in ("aleatoric", "epistemic")))
        for name, mark, group, rows in groups
    ]
    axis = axis_of(axis)
    for number, (name, mark, x, y) in enumerate(drawn):
        axis.scatter(x, y, s=16, marker=mark, alpha=0.6, color=colour(number), label=name)
    axis.set(xlabel=_title(prediction, "aleatoric"), ylabel=_title(prediction, "epistemic"))
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.legend()
    return axis


def scored(prediction: Prediction, score: str) -> Tensor:
    """One number per row: the mean over its outputs, of reals the root of that."""
    known = ("total", "aleatoric", "epistemic") + (
        ("function_variance", "confidence") if isinstance(prediction, ClassPrediction) else ()
    )
    if score not in known:
        raise unknown_name("score", score, known)
    if isinstance(prediction, RealPrediction):
        values = prediction.std.square() if score == "total" else getattr(prediction, score)
    elif isinstance(prediction, ClassPrediction):
        values = getattr(prediction, score)
    else:
        raise DataError(f"uncertainty is of predictions of classes or reals, got {type(prediction).__name__}")
    values = values.flatten(1).mean(1) if values.ndim > 1 else values
    return (values.sqrt() if isinstance(prediction, RealPrediction) else values).detach().float().cpu()


def _title(prediction: Prediction, score: str) -> str:
    if score in ("function_variance", "confidence"):
        return score.replace("_", " ")
    return f"{score}, {'standard deviation' if isinstance(prediction, RealPrediction) else 'nats'}"
