"""Columns of a table of one's own: which hold numbers and which categories, and how both become inputs.

A category becomes one column of zeros and ones for each of its levels. Where a value is missing, a number takes the
median of the training rows, a category no level at all, and a column of its own says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dubito.errors import DataError

MOST_LEVELS = 50


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one column of a table is read.

    Attributes:
        name: its heading.
        kind: what it holds; an ignored one becomes no input.
        levels: of a category, in order; words that are not among them share the level "other".
        other: whether there is such a level.
        flagged: whether a column of zeros and ones says where a value is missing.
    """

    name: str
    kind: Literal["number", "category", "ignored"]
    levels: tuple[str, ...] = ()
    other: bool = False
    flagged: bool = False

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs it becomes."""
        if self.kind == "ignored":
            return ()
        names = [self.name] if self.kind == "number" else [f"{self.name}={level}" for level in self.levels]
        names += [f"{self.name}=(other)"] if self.other else []
        return (*names, f"{self.name} is missing") if self.flagged else tuple(names)


def described(frame: Any, where: str) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """How each column of a frame is to be read, and what the user should know about that.

    Args:
        frame: a pandas frame without the target.
        where: the table's name, for messages.
    """
    columns, notes = [], []
    for name in frame.columns:
        column, note = _described(frame[name], where)
        columns.append(column)
        notes += note
    if not any(column.features for column in columns):
        raise DataError(f"{where} must have a column to learn from beside the target: {'; '.join(notes)}")
    return tuple(columns), tuple(notes)


def _described(values: Any, where: str) -> tuple[Column, list[str]]:
    name, missing = str(values.name), int(values.isna().sum())
    if missing == len(values):
        return Column(name=name, kind="ignored"), [f"{name}: empty, left out"]
    share = f"{missing} of {len(values)} values missing"
    if _numeric(values, where):
        note = [f"{name}: {share}, filled with the training rows' median and flagged"] if missing else []
        return Column(name=name, kind="number", flagged=missing > 0), note
    counts = _words(values).value_counts()  # the most frequent first
    if len(counts) > MOST_LEVELS and 2 * len(counts) > len(values) - missing:
        note = f"{name}: {len(counts)} different words in {len(values)} rows, left out as a name or text"
        return Column(name=name, kind="ignored"), [note]
    levels = tuple(sorted(counts.index[:MOST_LEVELS]))
    other = len(counts) > MOST_LEVELS
    note = [f"{name}: {share}, flagged"] if missing else []
    if other:
        note.append(f"{name}: {len(counts)} different words, of which the {MOST_LEVELS} most frequent count")
    return Column(name=name, kind="category", levels=levels, other=other, flagged=missing > 0), note


def encoded(frame: Any, columns: Sequence[Column], where: str) -> np.ndarray:
    """The inputs of a frame [N, F], with NaN where a number is missing."""
    return np.stack([values for column in columns for values in _encoded(frame, column, where)], axis=1)


def _encoded(frame: Any, column: Column, where: str) -> Iterator[np.ndarray]:
    if column.kind == "ignored":
        return
    values = frame[column.name]
    missing = values.isna().to_numpy()
    if column.kind == "number":
        yield numbers(values, where)
    else:
        words = _words(values).reindex(values.index).to_numpy(object, na_value="")
        known = np.zeros(len(values), dtype=bool)
        for level in column.levels:
            here = (words == level) & ~missing
            known |= here
            yield here.astype(np.float64)
        if column.other:
            yield (~known & ~missing).astype(np.float64)
    if column.flagged:
        yield missing.astype(np.float64)


def differences(frame: Any, columns: Sequence[Column], where: str) -> list[str]:
    """What a table has otherwise than the one that was trained on, in words; columns that lack are an error.

    Args:
        frame: new rows.
        columns: those trained on.
        where: the table's name, for messages.
    """
    needed = [column for column in columns if column.kind != "ignored"]
    lacking = [column.name for column in needed if column.name not in frame.columns]
    names = {column.name for column in columns}
    extra = [str(name) for name in frame.columns if name not in names]
    if lacking:
        beside = f"; it has {', '.join(extra)} instead" if extra else ""
        raise DataError(
            f"{where} lacks columns that training had: {', '.join(lacking)}{beside}; add or rename them"
        )
    told = [f"not used, for training did not have it: {name}" for name in extra]
    for column in needed:
        values = frame[column.name]
        if (missing := int(values.isna().sum())) and not column.flagged:
            told.append(f"{column.name}: {missing} values missing, where training had all")
        if column.kind == "category" and not column.other:
            new = sorted(set(_words(values)) - set(column.levels))
            if new:
                shown = ", ".join(map(repr, new[:5])) + (", …" if len(new) > 5 else "")
                told.append(f"{column.name}: {shown} did not occur in training")
    return told


def numbers(values: Any, where: str) -> np.ndarray:
    """A column as float64, NaN where nothing stands; a word among them, or an infinity, is named and refused."""
    import pandas

    missing = values.isna().to_numpy()
    numeric: Any = pandas.to_numeric(values, errors="coerce")
    parsed = numeric.to_numpy(np.float64, na_value=np.nan)
    wrong = np.flatnonzero(~np.isfinite(parsed) & ~missing)
    if wrong.size:
        row, told = wrong[0], values.iloc[wrong[0]]
        told = told.item() if isinstance(told, np.generic) else told
        raise DataError(
            f"column {values.name!r} of {where} must hold finite numbers, got {told!r} in row {row + 1} "
            "(the header not counted); correct it, or leave it empty where the value is missing"
        )
    return parsed


def _numeric(values: Any, where: str) -> bool:
    """Whether a column is one of numbers: at least half of what stands in it reads as such."""
    import pandas

    if values.dtype.kind in "fiub":
        return True
    if values.dtype.kind in "mM":  # times, which to_numeric would turn into nanoseconds
        return False
    there = values.dropna()
    readable: Any = pandas.to_numeric(there, errors="coerce")
    return 2 * int(readable.notna().sum()) >= len(there)


def _words(values: Any) -> Any:
    return values.dropna().astype(str).str.strip()


def filled(inputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Inputs whose missing numbers are replaced column by column."""
    return np.where(np.isnan(inputs), values, inputs)


def medians(inputs: np.ndarray) -> np.ndarray:
    """The median of each column's present numbers, [F]; 0 where none is present."""
    empty = np.isnan(inputs).all(0)
    return np.where(empty, 0.0, np.nanmedian(np.where(empty, 0.0, inputs), axis=0))


def from_json(content: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The columns behind `dataclasses.asdict` of each."""
    return tuple(Column(**{**column, "levels": tuple(column["levels"])}) for column in content)
