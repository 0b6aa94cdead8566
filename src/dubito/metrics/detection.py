"""How well a score tells positives from negatives: out-of-distribution inputs, errors, or class 1 of two."""

import torch
from torch import Tensor

from dubito.errors import DataError

from ._checks import flags, vector


def auroc(scores: Tensor, positives: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counting half.

    Args:
        scores: Any real numbers [B], infinite ones too; higher means more positive.
        positives: Booleans, or whole numbers 0 and 1, [B]; both kinds must occur.
    """
    from torchmetrics.functional.classification import binary_auroc

    ranks, positives = _ranked(scores, positives, negatives_needed=True)
    return float(binary_auroc(ranks, positives, validate_args=False))


def average_precision(scores: Tensor, positives: Tensor) -> float:
    """Average precision: precision at each threshold weighted by the recall gained there.

    Args:
        scores: Any real numbers [B], infinite ones too; higher means more positive.
        positives: Booleans, or whole numbers 0 and 1, [B]; at least one positive. Without negatives it is 1.
    """
    from torchmetrics.functional.classification import binary_average_precision

    ranks, positives = _ranked(scores, positives, negatives_needed=False)
    return float(binary_average_precision(ranks, positives, validate_args=False))


def fpr95(scores: Tensor, positives: Tensor) -> float:
    """False-positive rate at the highest threshold that finds at least 95 % of the positives.

    A threshold takes all examples of one score or none, so ties are never split and nothing is interpolated.

    Args:
        scores: Any real numbers [B], infinite ones too; higher means more positive.
        positives: Booleans, or whole numbers 0 and 1, [B]; both kinds must occur.
    """
    from torchmetrics.functional.classification import binary_roc

    ranks, positives = _ranked(scores, positives, negatives_needed=True)
    fpr, tpr, _ = binary_roc(ranks, positives, validate_args=False)
    # FPR at min{threshold index: TPR >= 0.95}
    return float(fpr[tpr >= 0.95][0])


def _ranked(scores: Tensor, positives: Tensor, *, negatives_needed: bool) -> tuple[Tensor, Tensor]:
    """Scores as ranks in [0, 1] and positives as 0 and 1, once both are checked."""
    scores = vector("scores", scores)
    positives = flags("positives", positives, "scores", scores)
    num_positives = int(positives.sum())
    if num_positives == 0 or (negatives_needed and num_positives == len(positives)):
        kind = "positive" if num_positives == 0 else "negative"
        raise DataError(
            f"positives must name at least one {kind} among {len(positives)} examples, got none; "
            "without it this metric has no value"
        )
    # torchmetrics applies a sigmoid to scores outside [0, 1], which merges large ones, and subtracts
    # neighbours, which fails for infinities. Only order and ties matter: dense ranks over 2**24 keep both,
    # and float32 holds them exactly.
    ranks = torch.unique(scores, return_inverse=True)[1]
    return ranks.to(torch.float32) / 2**24, positives.long()
