"""The metrics every evaluation reports, from a prediction and its targets."""

import torch
from torch import Tensor

from .errors import DataError
from .inputs import weighted
from .prediction import CategoricalPrediction, ClassPrediction, OutputPrediction, Prediction, RealPrediction, aligned

#: Bins of the calibration error.
BINS = 15


def evaluate(prediction: Prediction, targets: Tensor, weights: Tensor | None = None) -> dict[str, float]:
    """Metrics by name: for classes accuracy, nll, brier, ece; for reals rmse, mae, nll, crps, coverage.

    `nll` is the mean over rows; where rows have several labels, `nll_per_label` is that over labels.

    Args:
        prediction: of some rows.
        targets: of the same rows.
        weights: how often each row counts in all means, [B]; None for once.
    """
    from . import metrics  # a dozen modules that fits and predictions do without

    nll = -weighted_mean(prediction.log_prob(targets), weights)
    if isinstance(prediction, RealPrediction):
        return {"nll": nll, **real_metrics(prediction, targets, weights)}
    if isinstance(prediction, OutputPrediction):
        return {"nll": nll}
    assert isinstance(prediction, ClassPrediction)
    probs, labels = prediction.flat(targets)
    ignored = getattr(prediction, "ignore_index", None)
    seen = torch.ones_like(targets, dtype=torch.bool) if ignored is None else targets != ignored
    counts = seen.reshape(len(seen), -1).sum(1).cpu()  # of labels in each row
    losses = {"nll": nll}
    if isinstance(prediction, CategoricalPrediction) and targets.ndim > 1:
        losses["nll_per_label"] = nll / weighted_mean(counts, weights)
    if weights is not None:
        spread = weights.repeat_interleave(counts.to(weights.device))
        return {**losses, **_weighted_metrics(probs, labels, spread)}
    return {
        **losses,
        "accuracy": metrics.accuracy(probs, labels),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.ece(probs, labels),
    }


def weighted_mean(values: Tensor, weights: Tensor | None) -> float:
    """Σ w v / Σ w over rows and their positions, [B, ...]; the plain mean without weights."""
    values = values.detach().cpu().double()
    if weights is not None and not float(weights.sum()) > 0:
        raise DataError("weights must be at least 0, with a sum above it, got a sum of 0")
    if weights is None:
        return float(values.mean())
    counts = weights > 0  # a row that weighs nothing may have an infinite loss
    values, weights = values[counts.cpu()], weights[counts]
    return float(weighted(values, weights / weights.mean()).mean())


def _weighted_metrics(probs: Tensor, labels: Tensor, weights: Tensor) -> dict[str, float]:
    """Metrics of classes, of rows with weights: a row counts w times in every bin of the calibration error."""
    confidence, predicted = probs.max(1)
    hits = (predicted == labels).to(probs)
    truth = torch.nn.functional.one_hot(labels, probs.shape[1])
    edges = torch.arange(1, BINS, device=probs.device).to(probs) / BINS
    gaps = weighted(hits - confidence, weights / weights.sum())
    binned = gaps.new_zeros(BINS).index_add(0, torch.searchsorted(edges, confidence.contiguous()), gaps)
    return {
        "accuracy": weighted_mean(hits, weights),
        "brier": weighted_mean((probs - truth).square().sum(1), weights),
        "ece": float(binned.abs().sum()),
    }


def real_metrics(prediction: RealPrediction, targets: Tensor, weights: Tensor | None = None) -> dict[str, float]:
    """Errors of the mean, and how well the whole distribution fits; the arguments are those of `evaluate`."""
    from . import metrics

    targets = aligned(targets, prediction.mean)
    lower, upper = prediction.interval(0.95)
    if weights is not None:
        errors = prediction.mean - targets
        return {
            "rmse": weighted_mean(errors.square(), weights) ** 0.5,
            "mae": weighted_mean(errors.abs(), weights),
            "crps": weighted_mean(prediction.crps(targets), weights),
            "coverage": weighted_mean((lower <= targets) & (targets <= upper), weights),
        }
    return {
        "rmse": metrics.rmse(prediction.mean, targets),
        "mae": metrics.mae(prediction.mean, targets),
        "crps": float(prediction.crps(targets).mean()),
        "coverage": metrics.interval_coverage(targets, lower, upper),
    }
