"""The sets that scikit-learn brings along: no download."""

from collections.abc import Callable
from functools import partial

import numpy as np

from dubito.errors import require_extra

from .registry import Raw


def _build(loader: str, split: int, num_data: int | None, **options: bool) -> Raw:
    datasets = require_extra("sklearn.datasets", "cli", "this data set")
    bunch = getattr(datasets, loader)(**options)
    return Raw(
        train=(np.asarray(bunch.data), np.asarray(bunch.target)),
        feature_names=tuple(map(str, bunch.feature_names)),
        class_names=tuple(map(str, bunch.get("target_names", ()))),
    )


def from_sklearn(loader: str, **options: bool) -> Callable[[int, int | None], Raw]:
    """The builder around one of scikit-learn's loaders."""
    return partial(_build, loader, **options)
