"""How sure a comparison is: metrics again on resampled rows and splits, alike for all methods.

Replicate b of a metric on a split sees the same resampled rows for every method, so that differences of replicates
are those of pairs. Over several splits a replicate draws splits, and within each of them a replicate of its rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import metrics, seeds
from ..prediction import ClassPrediction, MixturePrediction, RealPrediction, aligned, per_row

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


def counts(rows: int, seed: int, *labels: Any, most: int = 0) -> Iterator[Tensor]:
    """How often each row is drawn in each replicate, [some replicates, rows], in pieces that suit `most` rows too."""
    stream = seeds.generator(seed, "compare", "replicates", *labels)
    for piece in torch.arange(NUM_REPLICATES).split(max(1, MOST_COUNTS // max(rows, most))):
        drawn = torch.randint(rows, (len(piece), rows), generator=stream)
        ones = torch.ones(drawn.shape, dtype=torch.float64)
        yield torch.zeros_like(ones).scatter_add_(1, drawn, ones)


def replicates_of(seen: Any, score: Callable[[Any], Tensor], seed: int, split: int) -> dict[str, list[float]]:
    """Replicates of a method's metrics on one split, by name; metrics that are no finite numbers have none.

    Args:
        seen: a method's `JudgedPredictions`.
        score: of predictions, high for out-of-distribution rows.
        seed: of the draws.
        split: the split's number, which has draws of its own.
    """
    values = rows_of_metrics(seen)
    result = {name: _means(rows, seed, split) for name, rows in values.items() if rows.isfinite().all()}
    if "squares" in result:
        result["rmse"] = result.pop("squares").sqrt()
    if seen.shifts and (losses := shifted_losses(seen)).isfinite().all():
        result["shift_nll"] = _means(losses, seed, split, "shift")
    if "accuracy" in values:
        confidence = per_row(seen.test.confidence).cpu().double()
        right, pieces = values["accuracy"], list(counts(len(confidence), seed, split))
        result["surest_accuracy"] = torch.cat([surest(confidence, right, weights) for weights in pieces])
        result["ece"] = torch.cat([calibration_errors(confidence, right, weights) for weights in pieces])
    if seen.ood:
        inside, others = score(seen.test), seen.ood.items()
        sets = [areas(inside, score(rows), seed, split, name) for name, rows in others]
        result["ood_auroc"] = torch.stack(sets).mean(0)
    return {name: [float(f"{value:.6g}") for value in numbers.tolist()] for name, numbers in result.items()}


def _means(rows: Tensor, seed: int, *labels: Any) -> Tensor:
    return torch.cat([weights @ rows / len(rows) for weights in counts(len(rows), seed, *labels)])


def rows_of_metrics(seen: Any) -> dict[str, Tensor]:
    """The metrics that are means over test rows, row by row, [B] each."""
    test, targets = seen.test, seen.targets
    values = {"nll": -test.log_prob(targets)}
    if isinstance(test, RealPrediction):
        truth = aligned(targets, test.mean)
        lower, upper = test.interval(0.9)
        values["squares"] = per_row((test.mean - truth).square())
        if isinstance(test, MixturePrediction):  # no Gaussians
            values["crps"] = test.crps(truth)
        else:
            stds = test.component_variances.sqrt()
            values["crps"] = metrics.crps_mixture_per_example(truth, test.means, stds)
        values["coverage_90"] = per_row(((lower <= truth) & (truth <= upper)).double())
        values["width_90"] = per_row(upper - lower)
    else:
        assert isinstance(test, ClassPrediction)
        labels = aligned(targets, test.labels) if targets.shape != test.labels.shape else targets
        values["accuracy"] = per_row((test.labels == labels).double())
        values["brier"] = metrics.brier_per_example(*test.flat(targets)).view(len(test), -1).mean(1)
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


def calibration_errors(confidence: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """The expected calibration error in 15 bins, [replicates]; the arguments are those of `surest`."""
    bins = torch.bucketize(confidence, torch.linspace(0, 1, 16, dtype=confidence.dtype)[1:-1])
    gaps = (right - confidence)[:, None] * torch.nn.functional.one_hot(bins, 15)
    return (weights @ gaps).abs().sum(1) / len(confidence)


def areas(inside: Tensor, outside: Tensor, seed: int, split: int, name: str) -> Tensor:
    """Replicates of the area under the ROC curve, [replicates]: of test rows against a set of others."""
    inside, outside = inside.cpu().double(), outside.cpu().double()
    order = inside.argsort()
    below, upto = (torch.searchsorted(inside[order], outside, side=side) for side in ("left", "right"))
    most, pieces = max(len(inside), len(outside)), []
    others = counts(len(outside), seed, split, name, most=most)
    for weights, outer in zip(counts(len(inside), seed, split, most=most), others, strict=True):
        sums = torch.nn.functional.pad(weights[:, order].cumsum(1), (1, 0))
        pieces.append(((sums[:, below] + sums[:, upto]) * outer).mean(1) / (2 * len(inside)))
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

    def intervals(self) -> dict[str, dict[str, tuple[float, float]]]:
        """The ends of the 95 % interval of every metric that has replicates, by method and name."""
        ends: dict[str, dict[str, tuple[float, float]]] = {}
        for method, replicates in self.replicates.items():
            for name, numbers in replicates.items():
                value = self.metrics[method][name]
                if name == "ece":  # that of resampled rows is too large: their gaps have more noise
                    numbers = (numbers - numbers.mean() + value).clamp(min=0)
                interval = Interval.of(value, numbers)
                ends.setdefault(method, {})[name] = (interval.lower, interval.upper)
        return ends

    def ahead(self, metric: str, first: str, second: str, level: float = 0.95) -> Interval | None:
        """By how much the first method is better than the second in a metric, paired; None where nothing tells.

        Of the coverage of intervals, by how much it is nearer to 90 %.
        """
        sides = [(self.metrics[name].get(metric), self.replicates[name].get(metric)) for name in (first, second)]
        if any(replicates is None for _, replicates in sides):
            return None
        first_gains, second_gains = [[_gain(metric, value) for value in side] for side in sides]
        value, replicates = (a - b for a, b in zip(first_gains, second_gains, strict=True))
        return Interval.of(value, replicates, level)


def _gain(metric: str, value: Any) -> Any:
    """A metric turned so that more is better."""
    if metric == "coverage_90":
        return -abs(value - 0.9)
    return value if metric in ("accuracy", "surest_accuracy", "ood_auroc") else -value
