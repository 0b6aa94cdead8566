"""Tables of the user's own: files of text, .parquet, .xlsx and .npz files with a target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dubito.errors import DataError, unknown_name

from . import archives
from .columns import Column, described, encoded, numbers
from .frames import SUFFIXES, form_of, frame
from .registry import Raw, TaskKind

MOST_CLASSES = 20
ROWS_PER_CLASS = 5
#: Real targets, and their spread, whose squares single precision can hold.
LARGEST_TARGET = 1e18


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file as read, with the task of its target and why it is that.

    Attributes:
        raw: its numbers.
        task: what its target is.
        reason: why.
    """

    raw: Raw
    task: TaskKind
    reason: str


def prepared(paths: Sequence[Path], *, target: str, task: TaskKind, categories: Sequence[str]) -> Raw:
    """A prepared table of text with a header, read like one of one's own."""
    return read(paths[0], target, task, categories).raw


def read(path: Path, target: str, task: TaskKind | None, categories: Sequence[str] = ()) -> Table:
    """A file as numbers: inputs come from every column (of an archive: every array) but the target.

    Columns of words become categories; values that are missing are NaN, with a column that flags them; rows without
    a target are left out. `Raw.notes` says what was done.

    Args:
        path: the file.
        target: the name of the column or array to predict; several real ones are separated by commas.
        task: what the target is; None leaves it to `detected`.
        categories: columns whose numbers are names, each of them complete.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of a {', '.join(SUFFIXES)} file")
    if form_of(path) == "npz":
        inputs, columns, values, notes = _archived(archives.archive(path), target, path)
    else:
        table = frame(path)
        for name in categories:
            table[name] = "code " + table[name].astype(str)
        inputs, columns, values, notes = _framed(table, headings_of(target, table, path), path)
    if len(values) < 3:
        raise _too_few(path, len(values), of=len(values))
    if not np.all(np.any(values != values[:1], axis=0)):
        raise DataError(
            f"target {target!r} of {path} must vary, but all {len(values)} rows hold the same; choose another target"
        )
    if task is not None:
        reason = f"task={task!r} was asked for"
    elif values.ndim == 2:
        task, reason = "regression", f"{target!r} holds {values.shape[1]} targets"
    else:
        task, reason = detected(values, target)
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


def detected(values: np.ndarray, target: str) -> tuple[TaskKind, str]:
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


def _encoded(values: np.ndarray, task: TaskKind, target: str, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Real targets as they are; classes numbered in sorted order, with their names."""
    words = values.dtype.kind not in "fiub"
    if task == "regression":
        if not words:
            check_spread(values.astype(np.float64), target, path)
        if words:
            raise DataError(
                f"target {target!r} of {path} must hold numbers for regression, got {str(values.flat[0])!r} in "
                "row 1 (the header not counted); choose another task"
            )
        return values, ()
    if values.ndim == 2:
        raise DataError(
            f"{task} has one target, but {target!r} of {path} holds {values.shape[1]}; choose one, or regression"
        )
    if not words:
        broken = np.flatnonzero(values != np.floor(values))
        if broken.size:
            row = broken[0]
            raise DataError(
                f"target {target!r} of {path} must hold whole numbers or words for {task}, "
                f"got {values[row]:g} in row {row + 1}; choose task='regression'"
            )
    classes, numbers = np.unique(values, return_inverse=True)
    if task == "binary" and len(classes) != 2:
        raise DataError(
            f"target {target!r} of {path} must hold 2 classes for binary, got {len(classes)}; choose another task"
        )
    return numbers.reshape(-1), tuple(str(value) if words else f"{value:g}" for value in classes)


def headings_of(target: str, table: Any, path: Path) -> list[str]:
    """The columns that a target names: one, or several separated by commas."""
    if target in table.columns:
        return [target]
    names = [name.strip() for name in target.split(",")]
    for name in names:
        if name not in table.columns:
            raise unknown_name(f"target column of {path}:", name, table.columns)
    if len(set(names)) < len(names):
        raise DataError(f"each target must be named once, got {target!r}")
    return names


Read = tuple[np.ndarray, tuple[Column, ...], np.ndarray, tuple[str, ...]]


def _framed(table: Any, targets: list[str], path: Path) -> Read:
    """A frame with one column of targets, or several of real ones."""
    if twice := [name for name in table.attrs.get("twice", ()) if name in targets]:
        raise DataError(f"{path} has several columns called {twice[0]!r}, which is the target; rename the others")
    if len(table.columns) == len(targets):
        raise DataError(f"{path} must have columns beside the target {', '.join(map(repr, targets))}, got none")
    notes = table.attrs.get("notes", ())
    notes += tuple(
        f"{name}: several columns have this name; the others are called {name}.1 and so on"
        for name in table.attrs.get("twice", ())
    )
    there = table[targets].notna().all(axis=1)
    absent = int((~there).sum())
    if len(table) - absent < 3:
        raise _too_few(path, len(table) - absent, targets, len(table))
    if absent:
        notes += (f"{', '.join(targets)}: {absent} of {len(table)} rows have no target and are left out",)
        table = table[there]
    values = [_target(table[name], path) if len(targets) == 1 else numbers(table[name], str(path)) for name in targets]
    table = table.drop(columns=targets)
    columns, told = described(table, str(path))
    whole = values[0] if len(targets) == 1 else np.stack(values, axis=1)
    return encoded(table, columns, str(path)), columns, whole, (*notes, *told)


def _too_few(path: Path, rows: int, targets: Sequence[str] = (), of: int = 0) -> DataError:
    if rows == of:
        return DataError(f"{path} must hold at least 3 rows, to train and to test on, got {rows}")
    missing = f"the target {', '.join(map(repr, targets))} is missing in {of - rows} of the {of} rows of {path}"
    return DataError(f"{missing}, of which at least 3 must have it; fill it, or choose another target")


def check_spread(values: np.ndarray, target: str, path: Path) -> None:
    """Refuse real targets so large, or so near to each other, that squares of their spread are no numbers."""
    spread = np.std(np.clip(values, -1e150, 1e150), axis=0)
    if np.abs(values).max() > LARGEST_TARGET or spread.min() < 1 / LARGEST_TARGET:
        got = f"numbers up to {np.abs(values).max():.3g} with the standard deviation {spread.min():.3g}"
        raise DataError(
            f"target {target!r} of {path} must lie within ±{LARGEST_TARGET:g} and spread by at least "
            f"{1 / LARGEST_TARGET:g}, got {got}; choose other units"
        )


def _target(column: Any, path: Path) -> np.ndarray:
    """Numbers as float64; a column without any number is one of words."""
    import pandas

    if column.dtype.kind == "M":
        raise DataError(f"target {column.name!r} of {path} holds dates; predict a number, such as days since a date")
    words = column.dtype.kind == "m"  # which to_numeric would turn into nanoseconds
    if not words:
        readable: Any = pandas.to_numeric(column, errors="coerce")
        words = not readable.notna().any()
    return column.astype(str).to_numpy(str) if words else numbers(column, str(path))


def _archived(arrays: dict[str, np.ndarray], target: str, path: Path) -> Read:
    """One array of inputs [N, ...], or several of one or two axes that are joined as columns."""
    if target not in arrays:
        raise unknown_name(f"target array of {path}:", target, arrays)
    targets = arrays.pop(target)
    if not arrays:
        raise DataError(f"{path} must hold arrays beside the target {target!r}, got none")
    if targets.ndim == 2 and targets.shape[1] == 1:
        targets = targets[:, 0]
    if targets.ndim not in (1, 2):
        raise DataError(f"target {target!r} of {path} must be of shape [N] or [N, targets], got {list(targets.shape)}")
    for name, array in arrays.items():
        if array.ndim < 1 or len(array) != len(targets) or (array.ndim > 2 and len(arrays) > 1):
            raise DataError(
                f"array {name!r} of {path} must have one row for each of the {len(targets)} targets, and one or "
                f"two axes where there are several arrays; got the shape {list(array.shape)}"
            )
    first_name, first = next(iter(arrays.items()))
    if first.ndim > 2:
        inputs, notes = archives.images_or_series(first, first_name, path)
        return inputs, (), archives.target_of(targets, target, path), notes
    if all(archives.plain(array) for array in (*arrays.values(), targets)):  # no need of pandas
        joined = [array.reshape(len(array), -1).astype(np.float64) for array in arrays.values()]
        names = [name for key, array in arrays.items() for name in archives.names_of(key, array)]
        columns = tuple(Column(name=name, kind="number") for name in names)
        return np.concatenate(joined, axis=1), columns, targets.astype(np.float64), ()
    headings = archives.names_of(target, targets)
    return _framed(archives.archive_frame({**arrays, target: targets}), headings, path)
