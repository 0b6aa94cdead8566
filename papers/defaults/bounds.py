"""How much worse than MAP may a method be? Bounds from paired differences in test NLL, by bootstrap.

Tables are fixed and weigh alike; splits are drawn within a table, test rows within a split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

#: Differences of the test rows of each split of a table.
Splits = Sequence[np.ndarray]
DRAWS = 2000


@dataclass(frozen=True)
class Bound:
    """A mean difference and its one-sided 95 % upper bound, in nats."""

    mean: float
    upper: float


def replicates(splits: Splits, seed: int = 0, draws: int = DRAWS) -> np.ndarray:
    """Bootstrap means of a table's difference, [draws]: splits drawn anew, and rows within each."""
    stream = np.random.default_rng(seed)
    picked = stream.integers(len(splits), size=(draws, len(splits)))
    means = np.empty(picked.shape)
    for number, rows in enumerate(splits):
        chosen = picked == number
        means[chosen] = np.asarray(rows)[stream.integers(len(rows), size=(chosen.sum(), len(rows)))].mean(1)
    return means.mean(1)


def mean_bound(tables: Mapping[str, Splits]) -> Bound:
    """The mean over tables of their mean differences."""
    means = [np.mean([np.mean(rows) for rows in splits]) for splits in tables.values()]
    together = np.mean([replicates(splits, seed) for seed, splits in enumerate(tables.values())], 0)
    return Bound(float(np.mean(means)), float(np.quantile(together, 0.95)))


def table_bound(splits: Splits) -> Bound:
    """The mean difference of one table."""
    mean = float(np.mean([np.mean(rows) for rows in splits]))
    return Bound(mean, float(np.quantile(replicates(splits), 0.95)))


def harmed(tables: Mapping[tuple[str, str], Splits], limits: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs (method, table) that are shown to be worse than their limit: 95 %, Holm over all pairs.

    Args:
        tables: differences by method and table.
        limits: by table, in nats.
    """
    values = {}
    for pair, splits in tables.items():
        drawn = replicates(splits)
        values[pair] = (1 + np.sum(drawn <= limits[pair[1]])) / (1 + len(drawn))
    shown: list[tuple[str, str]] = []
    for rank, pair in enumerate(sorted(values, key=lambda pair: values[pair])):
        if values[pair] > 0.05 / (len(values) - rank):
            break
        shown.append(pair)
    return shown
