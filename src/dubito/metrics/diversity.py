"""How much the members of an ensemble, or draws of a posterior, differ in what they predict."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dubito.errors import DataError

from ._checks import labels, probabilities, real


@dataclass(frozen=True, kw_only=True, eq=False)
class Disagreement:
    """Pairwise disagreement over (1 - accuracy).

    Attributes:
        pairs: The ratio for each pair of members, [S, S], symmetric with a diagonal of 0.
        mean: Its mean over the pairs of two different members.
    """

    pairs: Tensor
    mean: float


def disagreement(probs: Tensor, targets: Tensor) -> Disagreement:
    """Share of examples on which two members predict different classes, over the members' mean error rate.

    The error rate is there because less accurate members disagree more by chance alone. Where every member is
    right everywhere it is 0 and the ratio has no value: the result is NaN.

    Args:
        probs: Class probabilities of each member [S, B, C], or those of class 1 of two, [S, B]; S at least 2.
        targets: Labels [B].
    """
    probs = real("probs", probs)
    if probs.ndim not in (2, 3) or len(probs) < 2:
        raise DataError(
            f"probs must have shape [S, B, C], or [S, B] for class 1 of two, with S of at least 2 members, "
            f"got {list(probs.shape)}"
        )
    checked = probabilities(probs.flatten(0, 1))  # [S B, C]
    targets = labels(targets, probs.shape[1], checked.shape[1], checked.device)
    predicted = checked.argmax(-1).view(probs.shape[:2])  # [S, B]
    error_rate = (predicted != targets).to(probs.dtype).mean()
    # d_st = 1/B Σ_b 1[ŷ_sb ≠ ŷ_tb] / (1 - accuracy)   [Fort et al. 2019]; one row at a time: S·B, not S²·B
    pairs = torch.stack([(predicted != row).to(probs.dtype).mean(1) for row in predicted]) / error_rate
    num_pairs = len(probs) * (len(probs) - 1)
    return Disagreement(pairs=pairs, mean=float(pairs.sum() / num_pairs))
