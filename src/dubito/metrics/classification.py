"""How good class probabilities are.

Everywhere in `dubito.metrics`, `probs` of shape [B, C] are probabilities of C classes, and `probs` of shape
[B] are probabilities of class 1 of two, and mean just what the columns (1 - probs, probs) mean. The number of
axes alone decides, never the values; logits are refused. Where two classes tie, the lower label is predicted.
"""

import math

import torch
from torch import Tensor

from ._checks import classes, probabilities


def correct_per_example(probs: Tensor, targets: Tensor) -> Tensor:
    """Whether the most probable class is the target, as booleans [B]."""
    probs, targets = classes(probs, targets)
    return probs.argmax(-1) == targets


def accuracy(probs: Tensor, targets: Tensor) -> float:
    """Share of examples whose most probable class is the target."""
    correct = correct_per_example(probs, targets)
    # torchmetrics divides the two counts in float32, which gives 2/3 as 0.66666669; whole numbers are exact.
    return int(correct.sum()) / len(correct)


def nll_per_example(probs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target, in nats, [B]; inf where its probability is exactly 0."""
    probs, targets = classes(probs, targets)
    # nll_b = -log p_b[y_b]
    return -probs.gather(1, targets[:, None]).squeeze(1).log()


def nll(probs: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood of the targets, in nats.

    A target given a probability of exactly 0 makes the result inf: nothing is clamped. To bound it, clamp the
    probabilities, in sight, before the call.
    """
    return float(nll_per_example(probs, targets).mean())


def brier_per_example(probs: Tensor, targets: Tensor) -> Tensor:
    """Brier score of each example, [B], from 0 to 2."""
    probs, targets = classes(probs, targets)
    # brier_b = Σ_c (p_bc - 1[y_b = c])²   [Brier 1950]
    return (probs - torch.nn.functional.one_hot(targets, probs.shape[1])).square().sum(1)


def brier(probs: Tensor, targets: Tensor) -> float:
    """Mean Brier score in the sum-of-squares form, over all classes: from 0 to 2.

    The definition for any number of classes: for two it is twice the one-column form mean((p - y)²), which
    scikit-learn's `brier_score_loss` gives by default. Halve it to compare.
    """
    return float(brier_per_example(probs, targets).mean())


def normalised_entropy_per_example(probs: Tensor) -> Tensor:
    """Entropy of each row of `probs` over that of the uniform distribution, [B], from 0 to 1."""
    probs = probabilities(probs)
    # H(p) / log C = -Σ_c p_c log p_c / log C, with 0 log 0 = 0
    return torch.special.entr(probs).sum(1) / math.log(probs.shape[1])


def normalised_entropy(probs: Tensor) -> float:
    """Mean entropy over log C: 0 where every prediction is certain, 1 where every one is uniform."""
    return float(normalised_entropy_per_example(probs).mean())
