"""What test rows say of a tool that answers a distribution, quantiles alone, or probabilities of classes.

The CRPS is twice the integral of the pinball loss over all levels. Of ten quantiles at the levels 0.05, 0.15, … 0.95
the midpoint rule makes it 2/10 Σ ρ_τ(y − q_τ), the exact CRPS of ten points of equal weight. It is a little above that
of the distribution the quantiles are of (for a Normal that is right by 0.7 %), so `crps_quantiles` is taken of
every tool by this rule, and tools are compared by it; `crps` is exact where there is a distribution.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dubito.metrics import accuracy, interval_coverage, interval_width, nll, normalised_entropy_per_example, rmse
from dubito.prediction import RealPrediction

from ..runner.scores import area

LEVELS = tuple((place + 0.5) / 10 for place in range(10))
#: The probability that intervals, and sets of classes, promise: of the outermost levels.
LEVEL = 0.9


class Reals(NamedTuple):
    """An answer for rows with a real target.

    Attributes:
        quantiles: at `LEVELS`, rising, [10, B].
        distribution: where there is more than quantiles.
    """

    quantiles: Tensor
    distribution: RealPrediction | None = None


class Classes(NamedTuple):
    """An answer for rows of classes.

    Attributes:
        probs: [B, C].
        sets: the classes that a conformal tool names, [B, C]; None takes the fewest that have 90 % together.
    """

    probs: Tensor
    sets: Tensor | None = None


def of_distribution(prediction: RealPrediction) -> Reals:
    """The quantiles of a distribution, and itself."""
    quantiles = prediction.quantile(torch.tensor(LEVELS, dtype=torch.float64))
    return Reals(quantiles.reshape(len(LEVELS), -1), prediction)


def of_normal(mean: Tensor, std: Tensor) -> Reals:
    """A Normal for every row, [B]."""
    return of_distribution(RealPrediction(mean.reshape(1, -1, 1), std.square().reshape(1, -1, 1)))


def crps_of_quantiles(targets: Tensor, quantiles: Tensor) -> Tensor:
    """The CRPS of points of equal weight at evenly spaced levels, [B].

    Args:
        targets: [B].
        quantiles: at the levels (k + ½) / Q, [Q, B].
    """
    levels = (torch.arange(len(quantiles), dtype=quantiles.dtype) + 0.5) / len(quantiles)
    errors = targets - quantiles
    # ρ_τ(u) = u (τ − 1[u < 0])
    pinball = errors * (levels.unsqueeze(1) - (errors < 0).to(errors))
    return 2 * pinball.mean(0)


def of_reals(answer: Reals, unknown: Reals, targets: Tensor) -> dict[str, float]:
    """Metrics in standard deviations of the training targets; rows are called unknown by the width of intervals.

    Args:
        answer: for test rows.
        unknown: for rows whose columns were shuffled apart.
        targets: of the test rows, standardised, [B].
    """
    low, high = answer.quantiles[0], answer.quantiles[-1]
    scores = crps_of_quantiles(targets, answer.quantiles)
    exact, mean = scores, answer.quantiles.mean(0)
    metrics = {}
    if answer.distribution is not None:
        column = targets.unsqueeze(1)
        exact, mean = answer.distribution.crps(column), answer.distribution.mean.flatten()
        metrics["nll"] = -float(answer.distribution.log_prob(column).mean())
    return {
        **metrics,
        "crps": float(exact.mean()),
        "crps_quantiles": float(scores.mean()),
        "rmse": rmse(targets, mean),
        "coverage_90": interval_coverage(targets, low, high),
        "width_90": interval_width(low, high),
        "auroc": area(high - low, unknown.quantiles[-1] - unknown.quantiles[0]),
    }


def smallest_sets(probs: Tensor, level: float = LEVEL) -> Tensor:
    """The fewest classes of each row that have so much probability together, [B, C]."""
    ordered, order = probs.sort(1, descending=True)
    before = ordered.cumsum(1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, before < level)


def of_classes(answer: Classes, unknown: Classes, targets: Tensor) -> dict[str, float]:
    """Metrics of classes; rows are called unknown by their entropy, sets stand for intervals.

    Args:
        answer: for test rows.
        unknown: for rows whose columns were shuffled apart.
        targets: classes of the test rows, [B].
    """
    probs = answer.probs
    sets = smallest_sets(probs) if answer.sets is None else answer.sets
    rows = torch.arange(len(targets))
    tiny = torch.finfo(probs.dtype).tiny  # a probability of 0 would make a mean of nothing else
    return {
        "nll": nll(probs.clamp(min=tiny), targets),
        "accuracy": accuracy(probs, targets),
        "coverage_90": float(sets[rows, targets].double().mean()),
        "set_size_90": float(sets.sum(1).double().mean()),
        "auroc": area(*(normalised_entropy_per_example(part.probs) for part in (answer, unknown))),
    }
