"""What the page draws of a method that predicts real numbers: fans, coverage, errors without the most uncertain."""

from typing import Any

import torch
from torch import Tensor

from ..posterior import Posterior
from ..prediction import RealPrediction, aligned
from .evidence import (
    MOST_DOTS,
    MOST_POINTS,
    JudgedPredictions,
    evenly,
    histograms,
    roc,
    short,
    uncertainty,
    usual_epistemic,
)
from .settings import Settings
from .task import Task

#: Rows of a fan chart, targets whose uncertainty is drawn, and the levels at which intervals are checked.
MOST_ROWS, MOST_TARGETS, LEVELS = 80, 8, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


def real_evidence(seen: JudgedPredictions, task: Task, posterior: Posterior, settings: Settings) -> dict[str, Any]:
    """Fan chart, interval coverage, rejection curve, and uncertainty in and out of distribution."""
    prediction = seen.test
    assert isinstance(prediction, RealPrediction)
    targets = aligned(seen.targets, prediction.mean)
    drawn: dict[str, Any] = {
        **usual_epistemic(seen.validation),
        "decomposition_std": decomposition_std(seen, task.data.target_name),
        "coverage": {"levels": list(LEVELS), "observed": _coverage(prediction, targets)},
        "rejection": _rejection(prediction, targets),
        "roc": {name: roc(uncertainty(prediction), uncertainty(other)) for name, other in seen.ood.items()},
    }
    if prediction.mean.flatten(1).shape[1] == 1:
        drawn["fan"] = _fan(prediction, targets, task, posterior, settings)
    if seen.ood:
        high = 1.1 * max(float(uncertainty(rows).quantile(0.99)) for rows in (prediction, *seen.ood.values()))
        drawn["histograms"] = {"standard deviation": histograms(seen, uncertainty, 0.0, high)}
    return drawn


def decomposition_std(seen: JudgedPredictions, target: str) -> dict[str, dict[str, Any]]:
    """Both parts of the standard deviation, by target and set of rows, row by row, in that target's units."""
    parts: dict[str, dict[str, Any]] = {}
    for name, prediction in {"test": seen.test, **seen.ood}.items():
        rows = evenly(len(prediction), MOST_DOTS)
        aleatoric, epistemic = (
            std.flatten(1)[rows] if std.ndim > 1 else std[rows, None]
            for std in (prediction.aleatoric_std, prediction.epistemic_std)  # pyright: ignore
        )
        for place, output in enumerate(target_names(target, aleatoric.shape[1])[:MOST_TARGETS]):
            parts.setdefault(output, {})[name] = {
                "aleatoric_std": short(aleatoric[:, place], 3),
                "epistemic_std": short(epistemic[:, place], 3),
            }
    return parts


def target_names(target: str, count: int) -> list[str]:
    """The names of `count` targets, told as `u, v`; their numbers where several are one array."""
    if count == 1:
        return [target]
    names = [name.strip() for name in target.split(",")]
    return names if len(names) == count else [str(place) for place in range(count)]


def _coverage(prediction: RealPrediction, targets: Tensor) -> list[float | None]:
    shares = []
    for level in LEVELS:
        lower, upper = prediction.interval(level)
        shares.append(((lower <= targets) & (targets <= upper)).double().mean())
    return short(torch.stack(shares))


def _rejection(prediction: RealPrediction, targets: Tensor) -> dict[str, Any]:
    """Root mean squared error of the rows that are kept, against the share rejected."""
    _, group, size = torch.unique(uncertainty(prediction), return_inverse=True, return_counts=True)
    squares = (prediction.mean - targets).square().flatten(1).mean(1)
    count = len(squares)
    # Rows of equal uncertainty, such as those of a single network, are left out in any order: each counts their mean.
    means = torch.zeros(len(size), dtype=squares.dtype).index_add(0, group, squares) / size
    remaining = torch.arange(1, count + 1)
    errors = (means.repeat_interleave(size).cumsum(0) / remaining).sqrt().flip(0)  # the first is that of all rows
    rejected = 1 - remaining.flip(0) / count
    places = evenly(count, MOST_POINTS)
    places = places[rejected[places] <= 0.95]
    return {"rejected": short(rejected[places]), "kept": short(errors[places])}


def _fan(
    prediction: RealPrediction, targets: Tensor, task: Task, posterior: Posterior, settings: Settings
) -> dict[str, Any]:
    """Bands of 50 % and 95 %: over the only input where there is one, else over the test rows in order."""
    scaling, target_scaling = task.data.input_scaling, task.data.target_scaling
    if tuple(task.train.inputs.shape[1:]) == (1,) and scaling is not None and target_scaling is not None:
        low, high = (float(value) for value in task.train.inputs.aminmax())
        reach = (high - low) / 2
        grid = torch.linspace(low - reach, high + reach, MOST_ROWS)[:, None].to(task.train.inputs.dtype)
        shown = posterior.predict(grid, num_samples=settings.num_samples, seed=settings.seed)
        assert isinstance(shown, RealPrediction)
        dots = evenly(len(task.train.targets), 150)
        return {
            "name": (*task.data.feature_names, "input")[0],
            "x": short(scaling.undo(grid.double()), 15),
            **_bands(shown.to(torch.float64).rescaled(*target_scaling)),
            "dots_x": short(scaling.undo(task.train.inputs[dots].double()), 15),
            "dots": short(target_scaling.undo(task.train.targets[dots].double())),
        }
    order = prediction.mean.flatten().argsort()
    places = order[evenly(len(order), MOST_ROWS)]
    ranks = torch.arange(len(places))
    return {
        "name": "test rows, by their prediction",
        "x": short(ranks),
        **_bands(prediction[places]),
        "dots_x": short(ranks),
        "dots": short(targets[places]),
    }


def _bands(prediction: RealPrediction) -> dict[str, list[float | None]]:
    (low95, high95), (low50, high50) = prediction.interval(0.95), prediction.interval(0.5)
    bands = {"mean": prediction.mean, "low95": low95, "high95": high95, "low50": low50, "high50": high50}
    return {name: short(values) for name, values in bands.items()}
