"""What is gained by leaving the most uncertain examples to someone else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import flags, vector


@dataclass(frozen=True, kw_only=True, eq=False)
class RejectionCurve:
    """Accuracy on the examples kept, against the share rejected.

    Attributes:
        rejected: Share of examples rejected, [B]: 0, 1/B, …, (B - 1)/B.
        accuracy: Accuracy on the rest, [B].
    """

    rejected: Tensor
    accuracy: Tensor


def rejection_curve(uncertainty: Tensor, correct: Tensor) -> RejectionCurve:
    """Accuracy-rejection curve: the most uncertain examples go first.

    Among examples of equal uncertainty the curve is the mean over all orders they could be rejected in, so
    the order they come in does not matter.

    Args:
        uncertainty: Any real numbers [B], higher means rejected earlier.
        correct: Whether each prediction is right, booleans or whole numbers 0 and 1, [B]; see
            `correct_per_example`.
    """
    risk = _selective_risk(uncertainty, correct)
    rejected = torch.arange(len(risk), device=risk.device, dtype=risk.dtype) / len(risk)
    return RejectionCurve(rejected=rejected, accuracy=1 - risk.flip(0))


def aurc(uncertainty: Tensor, correct: Tensor) -> float:
    """Area under the risk-coverage curve: the error rate averaged over all numbers of examples kept.

    Lower is better; ties are handled as in `rejection_curve`. Every number kept, from 1 to B, counts alike. Libraries
    that integrate by trapezoids give the first and the last risk half a weight and divide by (B - 1): the results
    differ by at most 1 / (B - 1).

    Args:
        uncertainty: Any real numbers [B], higher means rejected earlier.
        correct: Whether each prediction is right, booleans or whole numbers 0 and 1, [B].
    """
    # AURC = 1/B Σ_k risk(k)   [Geifman et al. 2019]
    return float(_selective_risk(uncertainty, correct).mean())


def _selective_risk(uncertainty: Tensor, correct: Tensor) -> Tensor:
    """Error rate on the k most certain examples, for k = 1 to B."""
    uncertainty = vector("uncertainty", uncertainty)
    wrong = ~flags("correct", correct, "uncertainty", uncertainty)
    _, group, size = torch.unique(uncertainty, return_inverse=True, return_counts=True)  # groups of ties, ascending
    num_wrong = torch.bincount(group[wrong], minlength=len(size))
    # The mean over all orders of a group puts the group's error rate in each of its places.
    expected = (num_wrong.to(uncertainty.dtype) / size).repeat_interleave(size)
    # risk(k) = 1/k Σ_{i <= k} wrong_(i), in ascending order of uncertainty
    return expected.cumsum(0) / torch.arange(1, len(expected) + 1, device=expected.device)
