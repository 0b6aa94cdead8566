"""Out-of-distribution detection: how well scores of uncertainty separate other rows from the data set's."""

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
    """How well one score detects out-of-distribution rows (the positives).

    Attributes:
        auroc: the chance that an out-of-distribution row scores above an in-distribution one.
        aupr: average precision for out-of-distribution rows.
        fpr95: the share of in-distribution rows above the score that 95 % of the others exceed.
        inside: mean score in distribution.
        outside: mean score out of distribution.
    """

    auroc: float
    aupr: float
    fpr95: float
    inside: float
    outside: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Histogram:
    """A score's histograms in and out of distribution, on the same bins.

    Attributes:
        edges: limits of the bins, [M + 1].
        inside: shares of in-distribution rows, [M].
        outside: shares of out-of-distribution rows, [M].
    """

    edges: Tensor
    inside: Tensor
    outside: Tensor


@checked
def scores(prediction: Prediction) -> dict[str, Tensor]:
    """Scores by name, one number per row, [B]; higher means more likely out of distribution.

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
        return {"total": std_per_row(prediction.std), "epistemic": std_per_row(prediction.epistemic_std)}
    raise DataError(f"scores need a Prediction, got {type(prediction).__name__}")


@checked
def detection(inside: Prediction | None, outside: Prediction | None) -> dict[str, Detection]:
    """How well each score of `scores` detects out-of-distribution rows.

    A posterior that is uncertain everywhere detects every such row, so both predictions are needed, made by the same
    posterior with the same settings.

    Args:
        inside: the prediction of rows from the data set, best its test rows.
        outside: that of out-of-distribution rows.
    """
    _require_both(inside, outside)
    assert inside is not None and outside is not None
    known, others = scores(inside), scores(outside)
    positives = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
    detections = {}
    for name, value in known.items():
        other = others[name].to(value)
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
    """Histograms of a score in and out of distribution.

    Args:
        inside: the prediction of rows from the data set.
        outside: that of out-of-distribution rows.
        score: a name that `scores` gives.
        num_bins: bins of equal width, from 0 to the largest score.
    """
    _require_both(inside, outside)
    assert inside is not None and outside is not None
    require_count(num_bins=num_bins)
    known, others = scores(inside), scores(outside)
    if score not in known:
        raise ConfigError(f"score must be one of {', '.join(known)}, got {score!r}")
    values = [group[score].float().cpu() for group in (known, others)]
    top = float(torch.cat(values).max()) or 1.0
    shares: Mapping[str, Tensor] = {
        name: torch.histc(value, num_bins, 0, top) / len(value)
        for name, value in zip(("inside", "outside"), values, strict=True)
    }
    return Histogram(edges=torch.linspace(0, top, num_bins + 1), **shares)


def _require_both(inside: Prediction | None, outside: Prediction | None) -> None:
    for name, value in (("inside", inside), ("outside", outside)):
        if not isinstance(value, Prediction) or not len(value):
            raise DataError(
                f"{name} must be a Prediction with at least one row, got {type(value).__name__}: uncertainty of "
                "out-of-distribution rows says nothing unless compared with that of the data set's rows; give both"
            )
    if type(inside) is not type(outside):
        raise DataError(
            f"inside and outside must come from one posterior, got {type(inside).__name__} and {type(outside).__name__}"
        )
