"""The PhysioNet challenge of 2012: irregular observations of intensive care as hourly series.

Each stay becomes [48 hours, channels]: per variable the mean of the hour's values, carried forward to hours
without one, and a mask channel that says whether the hour had one; then what is known of the patient, the same
in every hour. Before a variable's first value, and where a patient's is unknown, set a's mean stands in. Values
are first clipped to set a's quantiles 0.001 and 0.999: the source holds a pH of 735 and temperatures of −18.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .readers import arrays
from .registry import Pair, Raw

HOURS = 48
STATIC = ("Age", "Gender", "Height", "Weight")
UNITS = (1, 2, 3, 4)  # ICUType: coronary care, cardiac surgery recovery, medical, surgical
QUANTILES = (0.001, 0.999)

Stays = dict[str, np.ndarray]


def hourly(stays: Stays, low: np.ndarray, high: np.ndarray) -> Pair:
    """Means of each hour's clipped values [N, 48, V], 0 where there are none, and which hours have one."""
    num_stays, num_variables = len(stays["offset"]) - 1, len(low)
    variable = stays["param"].astype(np.int64)
    stay = np.repeat(np.arange(num_stays), np.diff(stays["offset"].astype(np.int64)))
    hour = np.minimum(stays["minute"].astype(np.int64) // 60, HOURS - 1)  # minute 2880 ends the last hour
    cell = (stay * HOURS + hour) * num_variables + variable
    values = np.clip(stays["value"], low[variable], high[variable])
    size = num_stays * HOURS * num_variables
    counts = np.bincount(cell, minlength=size)
    means = np.bincount(cell, weights=values, minlength=size) / np.maximum(counts, 1)
    shape = (num_stays, HOURS, num_variables)
    return means.reshape(shape), counts.reshape(shape) > 0


def carried_forward(means: np.ndarray, observed: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Each hour's mean, or the last one before it, or `before` where none came yet."""
    hours = np.arange(means.shape[1])[:, None]
    last = np.maximum.accumulate(np.where(observed, hours, -1), axis=1)
    carried = np.take_along_axis(means, np.maximum(last, 0), axis=1)
    return np.where(last >= 0, carried, before)


def moments(values: np.ndarray, known: np.ndarray) -> Pair:
    """Mean and standard deviation of the known values along all axes but the last; 1 for a constant's."""
    axes = tuple(range(values.ndim - 1))
    mean = values.mean(axes, where=known)
    std = values.std(axes, where=known)
    return mean, np.where(std > 1e-9 * np.abs(mean), std, 1.0)


def _static(stays: Stays) -> Pair:
    names = list(map(str, stays["static_names"]))
    values = stays["static"][:, [names.index(name) for name in STATIC]].astype(np.float64)
    return values, values != -1  # -1 is the source's sign for unknown


def _units(stays: Stays) -> np.ndarray:
    unit = stays["static"][:, list(map(str, stays["static_names"])).index("ICUType")]
    return unit[:, None] == np.array(UNITS)


def _series(stays: Stays, limits: Pair, shift: np.ndarray, static_limits: Pair, static_shift: np.ndarray) -> Pair:
    means, observed = hourly(stays, *limits)
    static, known = _static(stays)
    fixed = np.concatenate(
        [np.where(known, np.clip(static, *static_limits), static_shift), known, _units(stays)], axis=1
    )
    fixed = np.broadcast_to(fixed[:, None], (*means.shape[:2], fixed.shape[1]))
    series = np.concatenate([carried_forward(means, observed, shift), observed, fixed], axis=2, dtype=np.float32)
    return series, stays["in_hospital_death"].astype(np.int64)


def read(paths: Sequence[Path]) -> Raw:
    """Sets a, b and c as training, validation and test series, with set a's statistics."""
    sets = [arrays(path) for path in paths]
    first = sets[0]
    variables = tuple(map(str, first["param_names"]))
    by_variable = [first["value"][first["param"] == number] for number in range(len(variables))]
    low, high = np.array([np.quantile(values, QUANTILES) for values in by_variable], np.float64).T
    shift, scale = moments(*hourly(first, low, high))

    static, known = _static(first)
    static_low, static_high = np.nanquantile(np.where(known, static, np.nan), QUANTILES, axis=0)
    static_shift, static_scale = moments(np.clip(static, static_low, static_high), known)

    train, validation, test = (
        _series(stays, (low, high), shift, (static_low, static_high), static_shift) for stays in sets
    )
    marks, flags = np.zeros(len(variables)), np.zeros(len(STATIC) + len(UNITS))
    return Raw(
        train=train,
        validation=validation,
        test=test,
        feature_names=(
            *variables,
            *(f"{name} observed" for name in variables),
            *STATIC,
            *(f"{name} known" for name in STATIC),
            *(f"ICUType {unit}" for unit in UNITS),
        ),
        statistics=(
            np.concatenate([shift, marks, static_shift, flags]),
            np.concatenate([scale, marks + 1, static_scale, flags + 1]),
        ),
    )
