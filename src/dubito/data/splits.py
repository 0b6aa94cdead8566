"""Which rows train, validate and test."""

import numpy as np

from dubito import seeds
from dubito.errors import ConfigError


def split_rows(num_data: int, split: int, train_fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers for training and testing: the rule behind the UCI benchmark's published splits.

    Split i is the i-th permutation from numpy's `RandomState(1)`; its first part, rounded, trains
    [Hernandez-Lobato and Adams 2015, as published with Gal and Ghahramani 2016].
    """
    stream = np.random.RandomState(1)
    rows = stream.permutation(num_data)
    for _ in range(split):
        rows = stream.permutation(num_data)
    count = round(train_fraction * num_data)
    return rows[:count], rows[count:]


def validation_rows(num_data: int, fraction: float, *, name: str, split: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers that stay in training and those set aside, each in their old order, always the same."""
    count = round(fraction * num_data)
    if not 0 < count < num_data:
        raise ConfigError(
            f"validation={fraction:g} of {num_data} training rows sets {count} aside; "
            "it must leave at least 1 row on either side: choose another fraction, or 0 for none"
        )
    stream = np.random.default_rng(seeds.derived(split, "validation", name))
    aside = np.zeros(num_data, dtype=bool)
    aside[stream.permutation(num_data)[:count]] = True
    return np.flatnonzero(~aside), np.flatnonzero(aside)
