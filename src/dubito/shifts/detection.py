"""Out of distribution: how well doubt tells foreign rows from a data set's own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import metrics
from ..errors import ConfigError, DataError, require_count
from ..hints import checked
from ..prediction import ClassPrediction, Prediction, RealPrediction, per_row, std_per_row


@dataclass(frozen=True, kw_only=True)
class Detection:
    """How well one score tells foreign rows (the positives) from the data set's own.

    Attributes:
        auroc: the chance that a foreign row scores above an own one.
        aupr: average precision for foreign rows.
        fpr95: the share of own rows taken for foreign where 95 % of the foreign are found.
        inside: mean score of own rows.
        outside: mean score of foreign rows.
    """

    auroc: float
    aupr: float
    fpr95: float
    inside: float
    outside: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """A score's histograms over own and foreign rows, on the same bins.

    Attributes:
        edges: limits of the bins, [M + 1].
        inside: shares of own rows, [M].
        outside: shares of foreign rows, [M].
    """

    edges: Tensor
    inside: Tensor
    outside: Tensor


@checked
def scores(prediction: Prediction) -> dict[str, Tensor]:
    """Scores by name, one number per row, [B]; higher means more foreign.

    Classes: "total" (entropy), "epistemic" (mutual information), "function_variance" (of centred logits, which alone
    grows far from the data) and "confidence" (1 − the likeliest class's probability), means over a row's positions.
    Reals: "total" (`std`) and "epistemic" (`epistemic_std`), in the target's units; of several outputs, whose units may
    differ, geometric means.
    """
    if isinstance(prediction, ClassPrediction):
        return {
            "total": per_row(prediction.total),
            "epistemic": per_row(prediction.epistemic),
            "function_variance": per_row(prediction.function_variance),
            "confidence": per_row(1 - prediction.confidence),
        }
    if isinstance(prediction, RealPrediction):
        return {
            "total": std_per_row(prediction.std),
            "epistemic": std_per_row(prediction.epistemic_std),
        }
    raise DataError(f"scores need a Prediction, got {type(prediction).__name__}")


@checked
def detection(inside: Prediction | None, outside: Prediction | None) -> dict[str, Detection]:
    """How well each score of `scores` tells foreign rows from own ones.

    A posterior that doubts everything finds every foreign row; it is judged on own rows of the same size of doubt,
    so both predictions are needed, made by the same posterior with the same settings.

    Args:
        inside: the prediction of rows from the data set, best its test rows.
        outside: that of foreign rows.
    """
    _require_both(inside, outside)
    assert inside is not None and outside is not None
    known, foreign = scores(inside), scores(outside)
    positives = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
    detections = {}
    for name, value in known.items():
        other = foreign[name].to(value)
        both = torch.cat([value, other])
        flags = positives.to(both.device)
        detections[name] = Detection(
            auroc=metrics.auroc(both, flags),
            aupr=metrics.average_precision(both, flags),
            fpr95=metrics.fpr95(both, flags),
            inside=float(value.double().mean()),
            outside=float(other.double().mean()),
        )
    return detections


@checked
def histogram(
    inside: Prediction | None, outside: Prediction | None, score: str = "total", *, num_bins: int = 30
) -> Histogram:
    """Histograms of a score over own and foreign rows.

    Args:
        inside: the prediction of rows from the data set.
        outside: that of foreign rows.
        score: a name that `scores` gives.
        num_bins: bins of equal width, from 0 to the largest score.
    """
    _require_both(inside, outside)
    assert inside is not None and outside is not None
    require_count(num_bins=num_bins)
    known, foreign = scores(inside), scores(outside)
    if score not in known:
        raise ConfigError(f"score must be one of {', '.join(known)}, got {score!r}")
    values, others = known[score].float().cpu(), foreign[score].float().cpu()
    top = float(torch.cat([values, others]).max()) or 1.0
    shares: Mapping[str, Tensor] = {
        name: torch.histc(value, num_bins, 0, top) / len(value)
        for name, value in (("inside", values), ("outside", others))
    }
    return Histogram(edges=torch.linspace(0, top, num_bins + 1), **shares)


def _require_both(inside: Prediction | None, outside: Prediction | None) -> None:
    for name, value in (("inside", inside), ("outside", outside)):
        if not isinstance(value, Prediction) or not len(value):
            raise DataError(
                f"{name} must be a Prediction with at least one row, got {type(value).__name__}: doubt about foreign "
                "rows alone says nothing, it must be compared with that about rows of the data set; give both"
            )
    if type(inside) is not type(outside):
        raise DataError(
            f"inside and outside must come from one posterior, got {type(inside).__name__} and {type(outside).__name__}"
        )
