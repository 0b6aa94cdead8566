"""Arrays of .npz files of the user's own, as numbers or as the columns of a table."""

from pathlib import Path
from typing import Any

import numpy as np

from dubito.errors import DataError, StorageError, require_extra

from .columns import LARGEST
from .readers import arrays
from .spelling import typed


def archive(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name."""
    try:
        return arrays(path)
    except Exception as error:  # numpy raises many kinds for what is not an archive of plain arrays
        raise StorageError(f"{path} should be an npz archive of plain arrays, reading it failed: {error}") from error


def archive_frame(arrays_by_name: dict[str, np.ndarray]) -> Any:
    """Arrays of one or two axes as the columns of a pandas frame."""
    pandas, columns = require_extra("pandas", "tabular", "an archive with columns"), {}
    for key, array in arrays_by_name.items():
        for name, values in zip(names_of(key, array), array.reshape(len(array), -1).T, strict=True):
            columns[name] = values.astype(np.float64) if values.dtype.kind in "fiub" else values.astype(str)
    return typed(pandas.DataFrame(columns), "the archive", {})[0]


def names_of(name: str, array: np.ndarray) -> list[str]:
    """The names of the columns that an array becomes."""
    width = 1 if array.ndim == 1 else array.shape[1]
    return [name] if width == 1 else [f"{name}[{number}]" for number in range(width)]


def plain(array: np.ndarray) -> bool:
    """Whether an array holds numbers alone that can be scaled."""
    return array.dtype.kind in "fiub" and bool((np.abs(array.astype(np.float64)) <= LARGEST).all())


def target_of(targets: np.ndarray, name: str, path: Path) -> np.ndarray:
    """Targets as words or finite numbers."""
    return targets if targets.dtype.kind in "US" else finite(targets, name, path)


def finite(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    """An array as float64; what is no finite number is named and refused."""
    if array.dtype.kind not in "fiub":
        raise DataError(f"array {name!r} of {path} must hold numbers, got {array.dtype} ({array.flat[0]!r} in row 1)")
    values = array.astype(np.float64)
    wrong = np.argwhere(~(np.abs(values) <= LARGEST))
    if wrong.size:
        place = tuple(wrong[0])
        raise DataError(
            f"array {name!r} of {path} must hold finite numbers up to {LARGEST:g}, got {values[place]} in row "
            f"{place[0] + 1}"
            f"{f', position {[int(i) for i in place[1:]]}' if len(place) > 1 else ''}"
        )
    return values


def images_or_series(array: np.ndarray, name: str, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Inputs of more than one axis as float64, and what the user should know of how they were read."""
    values, shape = finite(array, name, path), list(array.shape[1:])
    if array.ndim == 3:
        return values, (
            f"{name}: {len(array)} arrays of {shape}, taken for series of {shape[0]} steps with {shape[1]} values "
            "each; grey images are [N, 1, height, width]",
        )
    if array.ndim == 4 and array.dtype.kind in "iu":
        return values / 255, (f"{name}: whole numbers, taken for the bytes of images, from 0 to 255",)
    if array.ndim == 4 and shape[0] == shape[1] != shape[2]:
        return values, (
            f"{name}: {len(array)} arrays of {shape}, taken for images of {shape[0]} channels; where channels come "
            "last, move them: [N, channels, height, width]",
        )
    return values, ()
