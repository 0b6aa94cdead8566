"""How far to trust a metric itself: two kinds of standard error, kept apart.

Over runs: how much a metric varies from seed to seed, or from split to split. Over examples: how much it
would vary from test set to test set for one trained posterior. They answer different questions, so each
`Estimate` knows its kind and refuses the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import hypot, sqrt

import torch
from torch import Tensor

from dubito.errors import ConfigError, DataError, require_count, require_fraction
from dubito.hints import checked
from dubito.seeds import generator

_MOST_DRAWS_AT_ONCE = 2**22  # indices held at once while resampling, 32 MB


class Over(Enum):
    """What a standard error was taken over."""

    RUNS = "runs"
    EXAMPLES = "examples"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean with its standard error and the kind of that error.

    Two estimates of one kind can be subtracted if they are independent: other seeds, or other test sets.
    Results on the same seeds, splits or examples are not; compare those with `paired_bootstrap`.

    Attributes:
        value: The mean.
        standard_error: Standard error of the mean.
        over: What the standard error was taken over.
    """

    value: float
    standard_error: float
    over: Over

    def __sub__(self, other: "Estimate") -> "Estimate":
        if not isinstance(other, Estimate):
            return NotImplemented
        if self.over is not other.over:
            raise DataError(
                f"both standard errors must be of one kind, got one over {self.over.value} and one over "
                f"{other.over.value}; take both over runs or both over examples"
            )
        # Var(a - b) = Var(a) + Var(b) for independent a and b
        error = hypot(self.standard_error, other.standard_error)
        return Estimate(value=self.value - other.value, standard_error=error, over=self.over)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Mean of a - b over pairs, with a bootstrap standard error and percentile interval.

    Attributes:
        difference: The mean difference.
        standard_error: Standard deviation of the resampled means.
        lower: Lower end of the interval.
        upper: Upper end of the interval.
        level: Share of the resampled means within the interval.
        over: What the pairs are: runs or examples.
    """

    difference: float
    standard_error: float
    lower: float
    upper: float
    level: float
    over: Over


@checked
def standard_error_over_runs(values: Sequence[float] | Tensor) -> Estimate:
    """Mean and standard error of one metric over independent runs.

    Splits of one data set share examples, so over splits the standard error comes out somewhat too small.

    Args:
        values: The metric's value in each run, a seed or a split; at least two.
    """
    return _estimate("values", values, Over.RUNS)


@checked
def standard_error_over_examples(values: Tensor) -> Estimate:
    """Mean and standard error of one run's metric over its test examples.

    It means something for metrics that are means over examples: accuracy, nll, brier, log-likelihood, CRPS.

    Args:
        values: The metric's value for each test example, [B], from a `..._per_example` function; at least
            two, all finite.
    """
    return _estimate("values", values, Over.EXAMPLES)


@checked
def paired_bootstrap(
    values_a: Sequence[float] | Tensor,
    values_b: Sequence[float] | Tensor,
    *,
    over: Over,
    num_resamples: int = 2_000,
    level: float = 0.95,
    seed: int = 0,
) -> PairedDifference:
    """Mean of `values_a - values_b` and its uncertainty, by resampling the pairs.

    Args:
        values_a: One value for each example (or run) under the first method.
        values_b: Those of the same examples (or runs), in the same order, under the second.
        over: What a pair is, `Over.EXAMPLES` or `Over.RUNS`.
        num_resamples: Number of resamples.
        level: Share of the resampled means within the interval.
        seed: Seed of the resampling.
    """
    if not isinstance(over, Over):
        raise ConfigError(f"over must be Over.EXAMPLES or Over.RUNS, got {over!r}")
    require_count(minimum=2, num_resamples=num_resamples)
    require_fraction(zero=False, level=level)
    first, second = _series("values_a", values_a), _series("values_b", values_b)
    if len(first) != len(second):
        raise DataError(
            f"values_a and values_b must pair up, got {len(first)} and {len(second)} values; "
            "give both methods the same examples or runs"
        )
    differences = first - second
    size = len(differences)
    draws = generator(seed, "paired bootstrap")
    means = []
    for rows in torch.arange(num_resamples).split(max(1, _MOST_DRAWS_AT_ONCE // size)):
        picked = torch.randint(size, (len(rows), size), generator=draws)
        means.append(differences[picked].mean(1))
    means = torch.cat(means)
    # Percentile interval: the (1 - level)/2 and (1 + level)/2 quantiles of the resampled means.
    lower, upper = means.quantile(means.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
    return PairedDifference(
        difference=float(differences.mean()),
        standard_error=float(means.std()),
        lower=lower,
        upper=upper,
        level=level,
        over=over,
    )


def _estimate(name: str, values: Sequence[float] | Tensor, over: Over) -> Estimate:
    series = _series(name, values)
    # SE = s / √n, with s² = Σ (x - x̄)² / (n - 1)
    return Estimate(value=float(series.mean()), standard_error=float(series.std()) / sqrt(len(series)), over=over)


def _series(name: str, values: Sequence[float] | Tensor) -> Tensor:
    """`values` as finite float64 on the CPU, where they are few and every device can send them."""
    if not isinstance(values, Tensor):
        values = torch.tensor([float(value) for value in values], dtype=torch.float64)
    series = values.detach().cpu().to(torch.float64)
    if series.ndim != 1 or len(series) < 2:
        raise DataError(
            f"{name} must be at least two numbers in one row, got shape {list(series.shape)}; "
            "a single one has no standard error"
        )
    if not series.isfinite().all():
        raise DataError(
            f"{name} must be finite, got {int((~series.isfinite()).sum())} values that are not; "
            "a probability of exactly 0 has an infinite nll, whose mean has no standard error"
        )
    return series
