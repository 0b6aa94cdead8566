"""What the page draws of a method: curves, histograms, uncertain rows; plain numbers, few enough for a page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import metrics
from ..evaluation import evaluate
from ..posterior import Posterior
from ..prediction import ClassPrediction, Prediction, RealPrediction, per_row, std_per_row
from ..storage import encode
from . import pictures, replicates
from .settings import Settings
from .task import Task
from .words import readable, with_error

#: Points of a curve, dots of a scatter, bars of a histogram, most uncertain rows.
MOST_POINTS, MOST_DOTS, NUM_BARS, MOST_UNCERTAIN = 60, 200, 20, 8


@dataclass(frozen=True, kw_only=True)
class JudgedPredictions:
    """All predictions of a method that are judged, in original units.

    Attributes:
        test: of the test rows.
        targets: of the test rows.
        validation: of validation rows.
        ood: of out-of-distribution rows, by name.
        shifts: of the first test rows under each shift, from severity 1 on.
    """

    test: Prediction
    targets: Tensor
    validation: Prediction
    ood: Mapping[str, Prediction]
    shifts: Mapping[str, Sequence[Prediction]]


def metrics_of(seen: JudgedPredictions) -> dict[str, float]:
    """Metrics on the test rows, of the surest of them, at out-of-distribution rows, and their mean under shift."""
    values = evaluate(seen.test, seen.targets)
    rows = replicates.rows_of_metrics(seen)
    values |= {name: float(rows[name].mean()) for name in ("coverage_90", "width_90") if name in rows}
    if "accuracy" in rows:
        right, once = rows["accuracy"], torch.ones(1, len(seen.targets), dtype=torch.float64)
        values["surest_accuracy"] = float(replicates.surest(confidence_of(seen.test).cpu().double(), right, once))
    inside = uncertainty(seen.test)
    areas = [area(inside, uncertainty(other)) for other in seen.ood.values()]
    if areas:
        values["ood_auroc"] = sum(areas) / len(areas)
    if seen.shifts:
        values["shift_nll"] = float(replicates.shifted_losses(seen).mean())
    return values


def uncertainty(prediction: Prediction) -> Tensor:
    """The score that should be high for out-of-distribution rows, [B]: total entropy, or the standard deviation."""
    if isinstance(prediction, RealPrediction):
        return std_per_row(prediction.std)
    assert isinstance(prediction, ClassPrediction)
    return per_row(prediction.total)


def epistemic(prediction: Prediction) -> dict[str, Tensor]:
    """The epistemic uncertainty of each row, [B]: of classes in nats, and as the variance of their centred logits.

    Of reals it is `epistemic_std`, in the target's units; of several targets, whose units may differ, the geometric
    mean: a score that ranks rows alike in any units.
    """
    if isinstance(prediction, RealPrediction):
        return {"epistemic_std": std_per_row(prediction.epistemic_std)}
    assert isinstance(prediction, ClassPrediction)
    return {name: per_row(getattr(prediction, name)) for name in ("epistemic", "function_variance")}


def usual_epistemic(prediction: Prediction) -> dict[str, float]:
    """The epistemic uncertainty that 99 % of the rows stay below, `usual_...`; 0 where all of it is rounding.

    That is of reals a thousandth of the standard deviation, in whatever units; of classes a millionth of a nat, and a
    standard deviation of 1e-4 of their logits.
    """
    rounding = {"epistemic_std": 1e-3 * float(uncertainty(prediction).median())}
    rounding |= {"epistemic": 1e-6, "function_variance": 1e-8}
    usual = {name: float(scores.quantile(0.99)) for name, scores in epistemic(prediction).items()}
    return {f"usual_{name}": value if value > rounding[name] else 0.0 for name, value in usual.items()}


def unlike(prediction: Prediction, limits: Mapping[str, float]) -> Tensor:
    """Rows with an epistemic uncertainty above its limit, where that is above 0, booleans [B].

    Entropies of classes vanish far from the data, where all draws are sure; the variance of logits grows there, unless
    the network saturates.
    """
    flags = [scores > limits[name] for name, scores in epistemic(prediction).items() if limits.get(name)]
    return torch.stack(flags).any(0) if flags else torch.zeros(len(prediction), dtype=torch.bool)


def area(inside: Tensor, outside: Tensor) -> float:
    """The area under the ROC curve of a score that detects out-of-distribution rows."""
    return metrics.auroc(*_scored(inside, outside))


def _scored(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """Scores of all rows, and which of them are out of distribution."""
    which = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
    return torch.cat([inside, outside]), which


def evidence(seen: JudgedPredictions, task: Task, posterior: Posterior, settings: Settings) -> dict[str, Any]:
    """Everything the page draws of a method."""
    if isinstance(seen.test, RealPrediction):
        from .evidence_real import real_evidence

        drawn = real_evidence(seen, task, posterior, settings)
    else:
        drawn = class_evidence(seen)
    return {
        **drawn,
        "replicates": replicates.replicates_of(seen, uncertainty, settings.seed, settings.splits[0]),
        "training": curve_of_training(posterior.history),
        "training_settings": encode(settings.training),
        "shifts": {name: shift_curve(seen, severities) for name, severities in seen.shifts.items()},
        "least_certain": least_certain(seen, task),
    }


def class_evidence(seen: JudgedPredictions) -> dict[str, Any]:
    """Reliability, confusions, accuracy without the most uncertain; confidence and entropy in and out of distribution.

    Both parts of the entropy are in nats.
    """
    assert isinstance(seen.test, ClassPrediction)
    probs, labels = seen.test.flat(seen.targets)
    curve = metrics.reliability_curve(probs, labels, 10)
    (confidence, predicted), classes = probs.max(1), probs.shape[1]
    most = float(torch.log(torch.tensor(float(classes))))
    rejection = metrics.rejection_curve(1 - confidence, predicted == labels)
    places = evenly(len(rejection.rejected), MOST_POINTS)
    places = places[rejection.rejected[places] <= 0.95]  # the last few rows say nothing
    by_variance = ", by the variance of logits", lambda seen: epistemic(seen)["function_variance"]
    return {
        **usual_epistemic(seen.validation),
        "decomposition": {
            name: class_parts(prediction) for name, prediction in {"test": seen.test, **seen.ood}.items()
        },
        "reliability": {
            "count": curve.count.tolist(),
            "confidence": short(curve.confidence),
            "accuracy": short(curve.accuracy),
        },
        # by true class, how often each class was predicted
        "confusion": torch.bincount(labels * classes + predicted, minlength=classes**2).view(-1, classes).tolist(),
        "rejection": {"rejected": short(rejection.rejected[places]), "kept": short(rejection.accuracy[places])},
        "histograms": {
            "confidence": histograms(seen, confidence_of, 0.0, 1.0),
            "entropy": histograms(seen, uncertainty, 0.0, most),
        },
        "roc": {
            f"{name}{by}": roc(score(seen.test), score(other))
            for name, other in seen.ood.items()
            for by, score in (("", uncertainty), by_variance)
        },
    }


def confidence_of(prediction: Any) -> Tensor:
    """The probability of the likeliest class, [B]."""
    return per_row(prediction.confidence)


def histograms(seen: JudgedPredictions, score: Any, low: float, high: float) -> dict[str, Any]:
    """Shares of the test rows and of every other set in bars from `low` to `high`, what lies beyond in the last."""
    sets = {"test": seen.test, **seen.ood}
    counts = {
        name: torch.histc(score(prediction).float().clamp(low, high), NUM_BARS, low, high)
        for name, prediction in sets.items()
    }
    shares = {name: short(count / count.sum().clamp(min=1), 3) for name, count in counts.items()}
    return {"low": low, "high": high, "shares": shares}


def roc(inside: Tensor, outside: Tensor) -> dict[str, Any]:
    """The ROC curve of a score as a detector of out-of-distribution rows."""
    from torchmetrics.functional.classification import binary_roc

    scores, which = _scored(inside, outside)
    ranks = torch.unique(scores, return_inverse=True)[1].float() / 2**24  # only the order counts
    fpr, tpr, _ = binary_roc(ranks, which.long(), validate_args=False)
    places = evenly(len(fpr), MOST_POINTS)
    return {"fpr": short(fpr[places]), "tpr": short(tpr[places]), "area": round(area(inside, outside), 4)}


def shift_curve(seen: JudgedPredictions, severities: Sequence[Prediction]) -> dict[str, list[float | None]]:
    """Metrics from the untouched rows to the strongest shift of the same rows."""
    count = len(severities[0])
    curve = [evaluate(prediction, seen.targets[:count]) for prediction in (seen.test[:count], *severities)]
    return {name: short(torch.tensor([values[name] for values in curve])) for name in curve[0]}


def class_parts(prediction: Any) -> dict[str, list[float | None]]:
    """Both parts of the entropy, row by row, in nats."""
    rows = evenly(len(prediction), MOST_DOTS)
    return {name: short(per_row(getattr(prediction, name))[rows], 3) for name in ("aleatoric", "epistemic")}


def least_certain(seen: JudgedPredictions, task: Task) -> list[dict[str, Any]]:
    """The test rows of highest uncertainty, with what was said and what is true."""
    scores = uncertainty(seen.test)
    if scores.ndim != 1 or seen.targets.flatten().shape[0] != len(scores):
        return []
    entries = []
    for row in scores.topk(min(MOST_UNCERTAIN, len(scores))).indices.tolist():
        prediction: Any = seen.test[row]
        real = isinstance(prediction, RealPrediction)
        parts = ("aleatoric_std", "epistemic_std") if real else ("aleatoric", "epistemic")
        entry: dict[str, Any] = {"row": row}
        entry |= {name: short(getattr(prediction, name), 3)[0] for name in parts}
        entry |= pictures.shown(task, row)
        if real:
            entry |= {"said": with_error(float(prediction.mean), float(prediction.std))}
            entry |= {"true": readable(float(seen.targets[row]))}
        else:
            label, truth = int(prediction.labels.flatten()[0]), int(seen.targets[row])
            share = f"{float(prediction.confidence.flatten()[0]):.0%}"
            entry |= {"said": f"{task.class_names[label]} ({share})", "true": task.class_names[truth]}
            entry["right"] = label == truth
        entries.append(entry)
    return entries


def curve_of_training(history: list[dict[str, float]]) -> dict[str, list[float | None]]:
    """The losses of each epoch, thinned out; where several networks were trained, one after the other, their mean."""
    epochs: dict[float, list[dict[str, float]]] = {}
    for entry in history:
        epochs.setdefault(entry["epoch"], []).append(entry)
    together = list(epochs.values())
    if not together:
        return {}
    places = evenly(len(together), MOST_POINTS).tolist()
    names = [name for name in ("epoch", "nll", "kl", "validation_nll") if name in history[0]]
    means = {
        name: [sum(entry[name] for entry in together[place]) / len(together[place]) for place in places]
        for name in names
    }
    return {name: short(torch.tensor(values)) for name, values in means.items()}


def evenly(count: int, most: int) -> Tensor:
    """At most `most` places from 0 to count − 1, both ends among them."""
    return torch.linspace(0, count - 1, min(count, most)).round().long()


def short(values: Tensor, digits: int = 4) -> list[float | None]:
    """Numbers with few digits; None where there is none."""
    plain = values.detach().cpu().flatten().tolist()
    return [float(f"{value:.{digits}g}") if abs(value) < float("inf") else None for value in plain]
