"""Whether probabilities keep their word: of predictions made with probability p, a share p should come true.

torchmetrics has a calibration error too, but it gives a confidence of exactly 1 a bin of its own beyond the
last one, which changes the result of any saturated network; the bins here are those of Guo et al. (2017).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.errors import ConfigError, require_count

from ..hints import checked
from ._checks import classes

_BLOCK = 2**18  # probabilities binned at once


@dataclass(frozen=True, kw_only=True, eq=False)
class ReliabilityCurve:
    """Confidence against accuracy in M bins.

    Attributes:
        edges: Bin limits, [M + 1]; bin m holds the confidences in (edges[m], edges[m + 1]], the first also 0.
        count: Examples in each bin, [M].
        confidence: Mean confidence in each bin, [M]; NaN where `count` is 0.
        accuracy: Share of hits in each bin, [M]; NaN where `count` is 0.
    """

    edges: Tensor
    count: Tensor
    confidence: Tensor
    accuracy: Tensor


@checked
def reliability_curve(
    probs: Tensor, targets: Tensor, num_bins: int = 15, *, adaptive: bool = False, label: int | None = None
) -> ReliabilityCurve:
    """Confidence against accuracy, bin by bin; empty bins are NaN with count 0.

    Args:
        probs: Class probabilities [B, C], or those of class 1 of two, [B].
        targets: Labels [B].
        num_bins: Number of bins.
        adaptive: Bins of equal numbers of examples instead of equal width. Equal confidences stay in one
            bin, so ties can leave bins uneven or empty, and the order of the examples never matters.
        label: A class: its probability is then the confidence and its presence the hit. Without it, the
            confidence is the probability of the predicted class and a right prediction the hit.
    """
    require_count(num_bins=num_bins)
    probs, targets = classes(probs, targets)
    if label is None:
        confidence, predicted = probs.max(1)
        hits = predicted == targets
    else:
        require_count(minimum=0, label=label)
        if label >= probs.shape[1]:
            raise ConfigError(f"label must be a class from 0 to {probs.shape[1] - 1}, got {label}")
        confidence, hits = probs[:, label], targets == label
    curve = _binned(confidence[None], hits[None], num_bins, adaptive)
    return ReliabilityCurve(
        edges=curve.edges[0], count=curve.count[0], confidence=curve.confidence[0], accuracy=curve.accuracy[0]
    )


@checked
def ece(probs: Tensor, targets: Tensor, num_bins: int = 15, *, adaptive: bool = False) -> float:
    """Expected calibration error of the predicted class.

    Args:
        probs: Class probabilities [B, C], or those of class 1 of two, [B]: the confidence is then the greater
            of `probs` and `1 - probs`, from 0.5 to 1.
        targets: Labels [B].
        num_bins: Number of bins.
        adaptive: Bins of equal numbers of examples instead of equal width, as in `reliability_curve`.
    """
    return float(_gap(reliability_curve(probs, targets, num_bins, adaptive=adaptive)))


@checked
def classwise_ece(probs: Tensor, targets: Tensor, num_bins: int = 15, *, adaptive: bool = False) -> float:
    """Calibration error of every class's own probability, averaged over the C classes.

    A class absent from `targets` counts like any other: whatever probability it was given is error.

    Args:
        probs: Class probabilities [B, C], or those of class 1 of two, [B].
        targets: Labels [B].
        num_bins: Number of bins for each class.
        adaptive: Bins of equal numbers of examples instead of equal width, as in `reliability_curve`.
    """
    require_count(num_bins=num_bins)
    probs, targets = classes(probs, targets)
    labels = torch.arange(probs.shape[1], device=probs.device)
    gaps = []
    # A few classes at a time stay in cache: 4 s for 50 000 examples of 1000 classes, not 38.
    for some in labels.split(max(1, _BLOCK // len(probs))):
        hits = targets == some[:, None]  # [L, B]
        gaps.append(_gap(_binned(probs.T[some], hits, num_bins, adaptive)))
    # 1/C Σ_c Σ_m n_cm / B · |freq_cm - conf_cm|   [Kull et al. 2019]
    return float(torch.cat(gaps).mean())


def _gap(curve: ReliabilityCurve) -> Tensor:
    # ECE = Σ_m n_m / B · |acc_m - conf_m|, empty bins weighing nothing   [Guo et al. 2017]
    weight = curve.count.to(curve.confidence.dtype) / curve.count.sum(-1, keepdim=True)
    return (weight * (curve.accuracy - curve.confidence).abs()).nansum(-1)


def _binned(confidence: Tensor, hits: Tensor, num_bins: int, adaptive: bool) -> ReliabilityCurve:
    """Curves of L problems at once: `confidence` and `hits` are [L, B], each field has L in front."""
    confidence = confidence.contiguous()
    size = confidence.shape[1]
    inner = torch.arange(1, num_bins, device=confidence.device)
    if adaptive:
        # The m-th limit is the ⌈mB/M⌉-th smallest confidence.
        limits = confidence.sort(dim=1).values[:, (inner * size + num_bins - 1) // num_bins - 1]
    else:
        # m / M rounded once: a confidence written as 0.6 lies exactly on the edge 9/15, unlike with linspace.
        limits = (inner.to(confidence.dtype) / num_bins).expand(len(confidence), -1)
    index = torch.searchsorted(limits.contiguous(), confidence)  # limits[i - 1] < confidence <= limits[i]
    bins = []
    # A masked sum for each bin adds pairwise; index_add would add one by one and drift in float32.
    for m in range(num_bins):
        inside = index == m
        bins.append((inside.sum(1), (confidence * inside).sum(1), (hits & inside).sum(1)))
    count, total, num_hits = (torch.stack(sums, dim=1) for sums in zip(*bins, strict=True))  # each [L, M]
    ends = limits.new_tensor([0.0, 1.0]).expand(len(confidence), 2)
    return ReliabilityCurve(
        edges=torch.cat((ends[:, :1], limits, ends[:, 1:]), dim=1),
        count=count,
        confidence=total / count,
        accuracy=num_hits.to(confidence.dtype) / count,
    )
