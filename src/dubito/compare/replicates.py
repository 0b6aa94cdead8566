"""How sure a comparison is: metrics again on resampled rows and splits, alike for all methods.

Replicate b of a metric on a split sees the same resampled rows for every method, so that differences of replicates
are those of pairs. Over several splits a replicate draws splits, and within each of them a replicate of its rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import seeds
from ..prediction import ClassPrediction, RealPrediction, aligned, per_row

#: Replicates of every metric, the most counts held at once, and the share of rows that are the surest.
NUM_REPLICATES, MOST_COUNTS, SUREST = 1000, 2**21, 0.8


@dataclass(frozen=True)
class Interval:
    """A number with its 95 % interval, or one of another level.

    Attributes:
        value: of all rows and splits.
        lower: lower end.
        upper: upper end.
    """

    value: float
    lower: float
    upper: float

    @classmethod
    def of(cls, value: float, replicates: Tensor, level: float = 0.95) -> "Interval":
        """The percentile interval of replicates."""
        ends = replicates.new_tensor([(1 - level) / 2, (1 + level) / 2])
        return cls(value, *replicates.quantile(ends).tolist())

    @property
    def half_width(self) -> float:
        """Half of its width."""
        return (self.upper - self.lower) / 2

    def holds(self, value: float) -> bool:
        """Whether a value lies within."""
        return self.lower <= value <= self.upper


def counts(rows: int, seed: int, *labels: Any) -> Iterator[Tensor]:
    """How often each row is drawn in each replicate, [some replicates, rows], piece by piece."""
    stream = seeds.generator(seed, "compare", "replicates", *labels)
    for piece in torch.arange(NUM_REPLICATES).split(max(1, MOST_COUNTS // rows)):
        drawn = torch.randint(rows, (len(piece), rows), generator=stream)
        yield torch.zeros(drawn.shape, dtype=torch.float64).scatter_add_(
            1, drawn, torch.ones((), dtype=torch.float64).expand(drawn.shape)
        )


def replicates_of(seen: Any, score: Callable[[Any], Tensor], seed: int, split: int) -> dict[str, list[float]]:
    """Replicates of a method's metrics on one split, by name; metrics that are no finite numbers have none.

    Args:
        seen: a method's `JudgedPredictions`.
        score: of predictions, high for out-of-distribution rows.
        seed: of the draws.
        split: the split's number, which has draws of its own.
    """
    values = rows_of_metrics(seen)
    result = {}
    for name in ("nll", "accuracy", "coverage_90", "width_90"):
        if name in values and values[name].isfinite().all():
            pieces = counts(len(values[name]), seed, split)
            result[name] = torch.cat([weights @ values[name] / len(values[name]) for weights in pieces])
    if seen.shifts:
        losses = shifted_losses(seen)
        if losses.isfinite().all():
            pieces = counts(len(losses), seed, split, "shift")
            result["shift_nll"] = torch.cat([weights @ losses / len(losses) for weights in pieces])
    if "accuracy" in values:
        confidence = per_row(seen.test.confidence).double()
        pieces = counts(len(confidence), seed, split)
        result["surest_accuracy"] = torch.cat([surest(confidence, values["accuracy"], w) for w in pieces])
    if seen.foreign:
        inside, others = score(seen.test), seen.foreign.items()
        sets = [areas(inside, score(rows), seed, split, name) for name, rows in others]
        result["ood_auroc"] = torch.stack(sets).mean(0)
    return {name: [float(f"{value:.6g}") for value in numbers.tolist()] for name, numbers in result.items()}


def rows_of_metrics(seen: Any) -> dict[str, Tensor]:
    """The metrics that are means over test rows, row by row, [B] each."""
    test, targets = seen.test, seen.targets
    values = {"nll": -test.log_prob(targets)}
    if isinstance(test, RealPrediction):
        truth = aligned(targets, test.mean)
        lower, upper = test.interval(0.9)
        values["coverage_90"] = per_row(((lower <= truth) & (truth <= upper)).double())
        values["width_90"] = per_row(upper - lower)
    else:
        assert isinstance(test, ClassPrediction)
        labels = aligned(targets, test.labels) if targets.shape != test.labels.shape else targets
        values["accuracy"] = per_row((test.labels == labels).double())
    return {name: value.detach().cpu().double() for name, value in values.items()}


def shifted_losses(seen: Any) -> Tensor:
    """The negative log-likelihood of each shifted row, its mean over all shifts and severities, [B]."""
    losses = [
        -prediction.log_prob(seen.targets[: len(prediction)])
        for severities in seen.shifts.values()
        for prediction in severities
    ]
    return torch.stack(losses).mean(0).cpu().double()


def surest(confidence: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """The accuracy of the surest 80 % of rows, [replicates]; rows of equal confidence count their mean.

    Args:
        confidence: of each row, [B].
        right: whether its answer is, [B].
        weights: how often each row counts, [replicates, B].
    """
    levels, group = torch.unique(-confidence, return_inverse=True)
    zeros = weights.new_zeros(len(weights), len(levels))
    size, good = zeros.index_add(1, group, weights), zeros.index_add(1, group, weights * right)
    room = SUREST * weights.sum(1, keepdim=True)
    taken = (room - (size.cumsum(1) - size)).clamp(min=0).minimum(size)
    return (taken * good / size.clamp(min=1)).sum(1) / room[:, 0]


def areas(inside: Tensor, outside: Tensor, seed: int, split: int, name: str) -> Tensor:
    """Replicates of the area under the ROC curve, [replicates]: of test rows against a set of others."""
    inside, outside = inside.cpu().double(), outside.cpu().double()
    order = inside.argsort()
    below, upto = (torch.searchsorted(inside[order], outside, side=side) for side in ("left", "right"))
    pieces = []
    others = counts(len(outside), seed, split, name)
    outer = torch.cat([weights.float() for weights in others])  # as many replicates as the test rows have
    for weights in counts(len(inside), seed, split):
        sums = torch.nn.functional.pad(weights[:, order].cumsum(1), (1, 0))
        start = sum(map(len, pieces))
        shares = (sums[:, below] + sums[:, upto]) / (2 * len(inside))
        pieces.append((shares * outer[start : start + len(weights)]).mean(1))
    return torch.cat(pieces)


def pooled(splits: Sequence[Sequence[float]], seed: int) -> Tensor:
    """Replicates of a metric's mean over splits, [replicates]: splits are drawn, and a replicate of each."""
    values = torch.tensor(splits, dtype=torch.float64)  # [K, replicates]
    if len(values) == 1:
        return values[0]
    stream = seeds.generator(seed, "compare", "splits")
    size = (values.shape[1], len(values))
    which = torch.randint(len(values), size, generator=stream)
    return values[which, torch.randint(values.shape[1], size, generator=stream)].mean(1)


@dataclass(frozen=True)
class Standing:
    """Pooled metrics of methods with their replicates.

    Attributes:
        metrics: by method and name.
        replicates: likewise.
    """

    metrics: Mapping[str, Mapping[str, float]]
    replicates: Mapping[str, Mapping[str, Tensor]]

    def interval(self, method: str, metric: str) -> Interval | None:
        """A metric with its interval; None where there is none."""
        replicates = self.replicates[method].get(metric)
        return None if replicates is None else Interval.of(self.metrics[method][metric], replicates)

    def ahead(self, metric: str, first: str, second: str, level: float = 0.95) -> Interval | None:
        """By how much the first method is better than the second in a metric, paired; None where nothing tells.

        Of the coverage of intervals, by how much it is nearer to 90 %.
        """
        pair = [self.replicates[name].get(metric) for name in (first, second)]
        if pair[0] is None or pair[1] is None:
            return None
        values = [self.metrics[name][metric] for name in (first, second)]
        return Interval.of(
            _gain(metric, values[0]) - _gain(metric, values[1]),
            _gain(metric, pair[0]) - _gain(metric, pair[1]),
            level,
        )


def _gain(metric: str, value: Any) -> Any:
    """A metric turned so that more is better."""
    if metric == "coverage_90":
        return -abs(value - 0.9)
    return value if metric in ("accuracy", "surest_accuracy", "ood_auroc") else -value
