"""Tables of the user's own: .csv, .parquet and .npz files with a target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dubito.errors import ConfigError, DataError, StorageError, unknown_name

from .columns import Column, described, encoded, numbers
from .parts import Task
from .readers import arrays
from .registry import Raw

SUFFIXES = (".csv", ".parquet", ".npz")
MOST_CLASSES = 20
ROWS_PER_CLASS = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file as read, with the task of its target and why it is that.

    Attributes:
        raw: its numbers.
        task: what its target is.
        reason: why.
    """

    raw: Raw
    task: Task
    reason: str


def read(path: Path, target: str, task: Task | None) -> Table:
    """A file as numbers: inputs come from every column (of an archive: every array) but the target.

    Columns of words become categories; values that are missing are NaN, with a column that flags them; rows without
    a target are left out. `Raw.notes` says what was done.

    Args:
        path: the file.
        target: the name of the column or array to predict.
        task: what the target is; None leaves it to `detected`.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of a {', '.join(SUFFIXES)} file")
    archive = path.suffix.lower() == ".npz"
    inputs, columns, values, notes = _npz(path, target) if archive else _framed(frame(path), target, path)
    if len(values) < 3:
        raise DataError(f"{path} must hold at least 3 rows, to train and to test on, got {len(values)}")
    if task is None:
        task, reason = detected(values, target)
    else:
        reason = f"task={task!r} was asked for"
    targets, class_names = _encoded(values, task, target, path)
    return Table(
        raw=Raw(
            train=(inputs, targets),
            feature_names=tuple(name for column in columns for name in column.features),
            class_names=class_names,
            columns=columns,
            notes=notes,
        ),
        task=task,
        reason=reason,
    )


def detected(values: np.ndarray, target: str) -> tuple[Task, str]:
    """The task a target column suggests, and the sentence that says why.

    Words are classes. So are whole numbers, if there are at most 20 different ones and at least 5 rows for each
    on average. Two classes are "binary". Anything else is "regression".
    """
    distinct = len(np.unique(values))
    words = values.dtype.kind not in "fiub"
    if not words:
        if (values != np.floor(values)).any():
            return "regression", f"{target!r} holds fractions"
        if distinct > MOST_CLASSES or len(values) < ROWS_PER_CLASS * distinct:
            return "regression", f"{target!r} holds {distinct} different whole numbers in {len(values)} rows"
    what = "words" if words else "whole numbers"
    reason = f"{target!r} holds {distinct} different {what} in {len(values)} rows"
    return ("binary" if distinct == 2 else "classification"), reason


def _encoded(values: np.ndarray, task: Task, target: str, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Real targets as they are; classes numbered in sorted order, with their names."""
    words = values.dtype.kind not in "fiub"
    if task == "regression":
        if words:
            raise DataError(
                f"target {target!r} of {path} must hold numbers for regression, got {str(values[0])!r} in "
                "row 1 (the header not counted); choose another task"
            )
        return values, ()
    if not words:
        broken = np.flatnonzero(values != np.floor(values))
        if broken.size:
            row = broken[0]
            raise DataError(
                f"target {target!r} of {path} must hold whole numbers or words for {task}, "
                f"got {values[row]:g} in row {row + 1}; choose task='regression'"
            )
    classes, numbers = np.unique(values, return_inverse=True)
    if len(classes) < 2 or (task == "binary" and len(classes) != 2):
        wanted = "2" if task == "binary" else "at least 2"
        raise DataError(
            f"target {target!r} of {path} must hold {wanted} classes for {task}, got {len(classes)}; "
            "choose another task"
        )
    return numbers.reshape(-1), tuple(str(value) if words else f"{value:g}" for value in classes)


def frame(path: Path) -> Any:
    """A .csv or .parquet file as a pandas frame with words for headings."""
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pandas, which is not installed: pip install dubito[tabular]"
        ) from error
    try:
        read = pandas.read_csv if path.suffix.lower() == ".csv" else pandas.read_parquet
        found = read(path, low_memory=False) if path.suffix.lower() == ".csv" else read(path)
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow, which is not installed: pip install dubito[tabular]"
        ) from error
    except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors, pyarrow's too
        raise StorageError(
            f"{path} should be a {path.suffix[1:]} table, reading it failed: {error}"
        ) from error
    found.columns = [str(column) for column in found.columns]
    return found.reset_index(drop=True)


Read = tuple[np.ndarray, tuple[Column, ...], np.ndarray, tuple[str, ...]]


def _framed(table: Any, target: str, path: Path) -> Read:
    if target not in table.columns:
        raise unknown_name(f"target column of {path}:", target, table.columns)
    if len(table.columns) == 1:
        raise DataError(f"{path} must have columns beside the target {target!r}, got none")
    notes: tuple[str, ...] = ()
    if absent := int(table[target].isna().sum()):
        notes = (f"{target}: {absent} of {len(table)} rows have no target and are left out",)
        table = table[table[target].notna()]
    if len(table) < 3:
        raise DataError(f"{path} must hold at least 3 rows, to train and to test on, got {len(table)}")
    targets = _target(table[target], path)
    table = table.drop(columns=target)
    columns, found = described(table, str(path))
    return encoded(table, columns, str(path)), columns, targets, (*notes, *found)


def _target(column: Any, path: Path) -> np.ndarray:
    """Numbers as float64; a column without any number is one of words."""
    import pandas

    words = column.dtype.kind in "mM"  # times, which to_numeric would turn into nanoseconds
    if not words:
        readable: Any = pandas.to_numeric(column, errors="coerce")
        words = not readable.notna().any()
    return column.astype(str).to_numpy(str) if words else numbers(column, str(path))


def _npz(path: Path, target: str) -> Read:
    """One array of inputs [N, ...], or several of one or two axes that are joined as columns."""
    found = archive(path)
    if target not in found:
        raise unknown_name(f"target array of {path}:", target, found)
    targets = found.pop(target)
    if not found:
        raise DataError(f"{path} must hold arrays beside the target {target!r}, got none")
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.ndim != 1:
        raise DataError(f"target {target!r} of {path} must be of shape [N], got {list(targets.shape)}")
    for name, array in found.items():
        if array.ndim < 1 or len(array) != len(targets) or (array.ndim > 2 and len(found) > 1):
            raise DataError(
                f"array {name!r} of {path} must have one row for each of the {len(targets)} targets, and one or "
                f"two axes where there are several arrays; got the shape {list(array.shape)}"
            )
    first_name, first = next(iter(found.items()))
    if first.ndim > 2:
        return _finite(first, first_name, path), (), _npz_target(targets, target, path), ()
    if all(_plain(array) for array in (*found.values(), targets)):  # no need of pandas
        joined = [array.reshape(len(array), -1).astype(np.float64) for array in found.values()]
        names = [name for key, array in found.items() for name in _names(key, array)]
        columns = tuple(Column(name=name, kind="number") for name in names)
        return np.concatenate(joined, axis=1), columns, targets.astype(np.float64), ()
    return _framed(archive_frame({**found, target: targets}), target, path)


def archive(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name."""
    try:
        return arrays(path)
    except Exception as error:  # numpy raises many kinds for what is not an archive of plain arrays
        raise StorageError(
            f"{path} should be an npz archive of plain arrays, reading it failed: {error}"
        ) from error


def archive_frame(found: dict[str, np.ndarray]) -> Any:
    """Arrays of one or two axes as the columns of a pandas frame."""
    import pandas

    columns = {}
    for key, array in found.items():
        for name, values in zip(_names(key, array), array.reshape(len(array), -1).T, strict=True):
            columns[name] = values.astype(np.float64) if values.dtype.kind in "fiub" else values.astype(str)
    return pandas.DataFrame(columns)


def _names(name: str, array: np.ndarray) -> list[str]:
    width = 1 if array.ndim == 1 else array.shape[1]
    return [name] if width == 1 else [f"{name}[{number}]" for number in range(width)]


def _plain(array: np.ndarray) -> bool:
    return array.dtype.kind in "fiub" and bool(np.isfinite(array).all())


def _npz_target(targets: np.ndarray, name: str, path: Path) -> np.ndarray:
    return targets if targets.dtype.kind in "US" else _finite(targets, name, path)


def _finite(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    if array.dtype.kind not in "fiub":
        raise DataError(
            f"array {name!r} of {path} must hold numbers, got {array.dtype} ({array.flat[0]!r} in row 1)"
        )
    values = array.astype(np.float64)
    wrong = np.argwhere(~np.isfinite(values))
    if wrong.size:
        place = tuple(wrong[0])
        raise DataError(
            f"array {name!r} of {path} must hold finite numbers, got {values[place]} in row {place[0] + 1}"
            f"{f', position {[int(i) for i in place[1:]]}' if len(place) > 1 else ''}"
        )
    return values
