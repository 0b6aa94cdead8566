"""Tables of the user's own: .csv, .parquet and .npz files with a target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dubito.errors import ConfigError, DataError, StorageError, unknown_name

from .parts import Task
from .readers import arrays
from .registry import Raw

SUFFIXES = (".csv", ".parquet", ".npz")
MOST_CLASSES = 20
ROWS_PER_CLASS = 5


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file as read, with the task of its target and why it is that."""

    raw: Raw
    task: Task
    reason: str


def read(path: Path, target: str, task: Task | None) -> Table:
    """The numbers of a file: inputs are every column (of an archive: every array) but the target.

    Args:
        path: the file.
        target: the name of the column or array to predict.
        task: what the target is; None leaves it to `detected`.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of a {', '.join(SUFFIXES)} file")
    inputs, names, values = _npz(path, target) if path.suffix.lower() == ".npz" else _frame(path, target)
    if len(values) < 3:
        raise DataError(f"{path} must hold at least 3 rows, to train and to test on, got {len(values)}")
    if task is None:
        task, reason = detected(values, target)
    else:
        reason = f"task={task!r} was asked for"
    targets, class_names = _encoded(values, task, target, path)
    return Table(
        raw=Raw(train=(inputs, targets), feature_names=names, class_names=class_names),
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


def _frame(path: Path, target: str) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pandas, which is not installed: pip install dubito[tabular]"
        ) from error
    try:
        frame = (
            pandas.read_csv(path, low_memory=False)
            if path.suffix.lower() == ".csv"
            else pandas.read_parquet(path)
        )
    except ImportError as error:
        raise ConfigError(
            f"reading {path} needs pyarrow, which is not installed: pip install dubito[tabular]"
        ) from error
    except (ValueError, OSError) as error:  # pandas' parser errors are ValueErrors, pyarrow's too
        raise StorageError(
            f"{path} should be a {path.suffix[1:]} table, reading it failed: {error}"
        ) from error
    frame.columns = [str(column) for column in frame.columns]
    if target not in frame.columns:
        raise unknown_name(f"target column of {path}:", target, frame.columns)
    names = tuple(column for column in frame.columns if column != target)
    if not names:
        raise DataError(f"{path} must have columns beside the target {target!r}, got none")
    columns = [_numbers(frame[name], path, words=False) for name in names]
    return np.stack(columns, axis=1), names, _numbers(frame[target], path, words=True)


def _numbers(column: Any, path: Path, *, words: bool) -> np.ndarray:
    """A column as finite float64; where `words` may stand, a column without any number stays as it is."""
    import pandas

    missing = column.isna().to_numpy()
    if column.dtype.kind in "mM":  # times, which to_numeric would turn into nanoseconds
        column = column.astype(str)
    numeric: Any = pandas.to_numeric(column, errors="coerce")
    values = numeric.to_numpy(np.float64, na_value=np.nan)
    only_words = words and np.isnan(values).all() and not missing.all()
    if only_words and not missing.any():
        return column.astype(str).to_numpy(str)
    wrong = np.flatnonzero(missing if only_words else ~np.isfinite(values))
    if wrong.size:
        row = wrong[0]
        got = "nothing" if missing[row] else repr(column.iloc[row])
        raise DataError(
            f"column {column.name!r} of {path} must hold {'words' if only_words else 'finite numbers'}, got {got} "
            f"in row {row + 1} (the header not counted); turn words into numbers, and fill or drop what is missing"
        )
    return values


def _npz(path: Path, target: str) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """One array of inputs [N, ...], or several of one or two axes that are joined as columns."""
    try:
        found = arrays(path)
    except Exception as error:  # numpy raises many kinds for what is not an archive of plain arrays
        raise StorageError(
            f"{path} should be an npz archive of plain arrays, reading it failed: {error}"
        ) from error
    if target not in found:
        raise unknown_name(f"target array of {path}:", target, found)
    targets = found.pop(target)
    if not found:
        raise DataError(f"{path} must hold arrays beside the target {target!r}, got none")
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.ndim != 1:
        raise DataError(f"target {target!r} of {path} must be of shape [N], got {list(targets.shape)}")
    columns, names = [], []
    for name, array in found.items():
        if array.ndim < 1 or len(array) != len(targets) or (array.ndim > 2 and len(found) > 1):
            raise DataError(
                f"array {name!r} of {path} must have one row for each of the {len(targets)} targets, and one or "
                f"two axes where there are several arrays; got the shape {list(array.shape)}"
            )
        array = _finite(array[:, None] if array.ndim == 1 else array, name, path)
        columns.append(array)
        width = array.shape[1]
        names += [name] if width == 1 else [f"{name}[{number}]" for number in range(width)]
    if targets.dtype.kind not in "US":
        targets = _finite(targets, target, path)
    inputs = columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)
    return inputs, tuple(names), targets


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
