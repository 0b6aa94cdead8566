"""Intervals of means over few runs: a bootstrap of three is far too narrow, Student's t is not."""

from collections.abc import Sequence
from math import sqrt
from statistics import variance

from scipy.stats import t as student

LEVEL = 0.95


def half_width(values: Sequence[float], *, share: float | None = None) -> float:
    """Half of the interval of a mean, by Student's t.

    Args:
        values: one per run, two at least.
        share: the variance of the mean over that of a value; None is 1/n, that of independent runs.
    """
    share = 1 / len(values) if share is None else share
    return quantile(len(values)) * sqrt(share * variance(values))


def quantile(runs: int) -> float:
    """How many standard errors an interval reaches, over so many runs."""
    return float(student.ppf((1 + LEVEL) / 2, runs - 1))
