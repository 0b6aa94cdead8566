"""The metrics every evaluation reports, from a prediction and its targets."""

from torch import Tensor

from .prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    OutputPrediction,
    Prediction,
    RealPrediction,
    aligned,
)


def evaluate(prediction: Prediction, targets: Tensor) -> dict[str, float]:
    """Metrics by name: for classes accuracy, nll, brier, ece; for reals rmse, mae, nll, crps, coverage.

    `nll` is the mean over rows; where rows have several labels, `nll_per_label` is that over labels.
    """
    from . import metrics  # a dozen modules that fits and predictions do without

    log_probs = prediction.log_prob(targets).cpu().double()
    nll = -float(log_probs.mean())
    if isinstance(prediction, RealPrediction):
        return {"nll": nll, **real_metrics(prediction, targets)}
    if isinstance(prediction, OutputPrediction):
        return {"nll": nll}
    if isinstance(prediction, CategoricalPrediction):
        probs, labels = prediction.flat(targets)
    else:
        assert isinstance(prediction, BernoulliPrediction)
        probs = prediction.probs.flatten()
        labels = aligned(targets, prediction.probs).long().flatten()
    several = isinstance(prediction, CategoricalPrediction) and targets.ndim > 1
    return {
        "nll": nll,
        **({"nll_per_label": -float(log_probs.sum()) / len(labels)} if several else {}),
        "accuracy": metrics.accuracy(probs, labels),
        "brier": metrics.brier(probs, labels),
        "ece": metrics.ece(probs, labels),
    }


def real_metrics(prediction: RealPrediction, targets: Tensor) -> dict[str, float]:
    """Errors of the mean, and how well the whole distribution fits."""
    from . import metrics

    targets = aligned(targets, prediction.mean)
    lower, upper = prediction.interval(0.95)
    return {
        "rmse": metrics.rmse(prediction.mean, targets),
        "mae": metrics.mae(prediction.mean, targets),
        "crps": float(prediction.crps(targets).mean()),
        "coverage": metrics.interval_coverage(targets, lower, upper),
    }
