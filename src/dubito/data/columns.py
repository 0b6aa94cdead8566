"""Columns of a table of one's own: which hold numbers, categories or dates, and how they become inputs.

A category becomes one column of zeros and ones for each of its levels. A date becomes its year, with fractions, the
season and the hour as points on a circle, and the day of the week as a category, as far as they vary. Where a value
is missing, a number takes the median of the training rows, a category no level at all, and a column of its own says
so.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from dubito.errors import DataError

from .spelling import words_of

MOST_LEVELS = 50
#: Numbers beyond it cannot be scaled in single precision.
LARGEST = 1e30
#: The form of a column of True and False.
BOOLEAN = "boolean"
#: A number with a sign before it or a unit behind it, such as $1,234 or 45%.
AMOUNT = re.compile(r"[^\w\s]\s?[-+]?\d[\d.,]*|[-+]?\d[\d.,]*\s?[^\d\s.,]\D{0,4}")
#: Headings of columns that count the rows.
COUNTERS = ("", "id", "index", "idx", "row", "row id", "row name", "row number", "rownum", "no", "nr", "number", "#")
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
#: What a date becomes.
PARTS = {
    "year": ("year",),
    "season": ("season, sine", "season, cosine"),
    "weekday": DAYS,
    "hour": ("hour, sine", "hour, cosine"),
}


@dataclass(frozen=True, kw_only=True)
class Column:
    """How one column of a table is read.

    Attributes:
        name: its heading.
        kind: what it holds; an ignored one becomes no input.
        levels: of a category, in order; words that are not among them share the level "other"; of a date its `PARTS`.
        other: whether there is such a level.
        flagged: whether a column of zeros and ones says where a value is missing.
        form: how numbers or dates are written, where that is not plain; `BOOLEAN` where all were True or False.
    """

    name: str
    kind: Literal["number", "category", "date", "ignored"]
    levels: tuple[str, ...] = ()
    other: bool = False
    flagged: bool = False
    form: str = ""

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the inputs it becomes."""
        if self.kind == "ignored":
            return ()
        if self.kind == "date":
            names = [f"{self.name}: {part}" for level in self.levels for part in PARTS[level]]
        else:
            names = [f"{self.name}={level}" for level in self.levels] or [self.name]
        names += [f"{self.name}=(other)"] if self.other else []
        return (*names, f"{self.name} is missing") if self.flagged else tuple(names)


def described(frame: Any, where: str, *, constant: bool = False) -> tuple[tuple[Column, ...], tuple[str, ...]]:
    """How each column of a frame is to be read, and what the user should know about that.

    Args:
        frame: a pandas frame without the target.
        where: the table's name, for messages.
        constant: whether columns that are the same in all rows stay.
    """
    columns, notes = [], []
    for name in frame.columns:
        column, note = _described(frame[name], constant)
        columns.append(replace(column, form=frame.attrs.get("forms", {}).get(name, column.form)))
        notes += note
    if not any(column.features for column in columns):
        raise DataError(f"{where} must have a column to learn from beside the target: {'; '.join(notes)}")
    return tuple(columns), tuple(notes)


def _described(values: Any, constant: bool) -> tuple[Column, list[str]]:
    name, missing = str(values.name), int(values.isna().sum())
    if missing == len(values):
        return Column(name=name, kind="ignored"), [f"{name}: empty, left out"]
    if not (constant or missing) and (words_of(values) if values.dtype.kind == "O" else values).nunique() == 1:
        return Column(name=name, kind="ignored"), [f"{name}: the same in all {len(values)} rows, left out"]
    share = f"{missing} of {len(values)} values missing"
    if values.dtype.kind == "M":
        parts = date_parts(values)
        note = [f"{name}: dates, which become {', '.join(parts)}{f'; {share}, flagged' if missing else ''}"]
        if len(values) > 2 and values.is_monotonic_increasing and values.nunique() > 2:
            note.append(
                f"{name}: rows are in order of time, but are split at random: a test of filling gaps, not of forecasts"
            )
        return Column(name=name, kind="date", levels=parts, flagged=missing > 0), note
    if _numeric(values):
        if not missing and _counts_rows(values):
            return Column(name=name, kind="ignored"), [f"{name}: counts the rows, left out; rename it if it does not"]
        note = [f"{name}: {share}, filled with the training rows' median and flagged"] if missing else []
        return Column(name=name, kind="number", flagged=missing > 0, form=BOOLEAN if _boolean(values) else ""), note
    counts = words_of(values).value_counts()  # the most frequent first
    if len(counts) > MOST_LEVELS and 2 * len(counts) > len(values) - missing:
        note = f"{name}: {len(counts)} different words in {len(values)} rows, left out as a name or text"
        amounts = [word for word in counts.index if AMOUNT.fullmatch(word)]
        if 2 * len(amounts) >= len(counts):
            note += (
                f"; write amounts such as {amounts[0]!r} as plain numbers, without signs or units, to have them used"
            )
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
        yield numbers(values, where, boolean=column.form == BOOLEAN)
    elif column.kind == "date":
        yield from _date_inputs(values, column, where)
    else:
        words = words_of(values).reindex(values.index).to_numpy(object, na_value="")
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
        raise DataError(f"{where} lacks columns that training had: {', '.join(lacking)}{beside}; add or rename them")
    told = [f"not used, for training did not have it: {name}" for name in extra]
    for column in needed:
        values = frame[column.name]
        if (missing := int(values.isna().sum())) and not column.flagged:
            told.append(f"{column.name}: {missing} values missing, where training had all")
        if column.kind == "category" and not column.other:
            new = sorted(set(words_of(values)) - set(column.levels))
            if new:
                shown = ", ".join(map(repr, new[:5])) + (", …" if len(new) > 5 else "")
                told.append(f"{column.name}: {shown} did not occur in training")
    return told


def date_parts(values: Any) -> tuple[str, ...]:
    """Which `PARTS` of a column's dates vary: the season where they are not all of one month, and so on."""
    there = _in_utc(values.dropna())
    dates = there.dt
    hours = (dates.normalize() != there).any()
    varies = {"season": dates.month.nunique() > 1, "weekday": dates.day.nunique() > 1, "hour": hours}
    return ("year", *(part for part, there in varies.items() if there))


def _in_utc(dates: Any) -> Any:
    """Dates without a zone; those that have one as the time in UTC."""
    plain = dates if getattr(dates.dtype, "tz", None) is None else dates.dt.tz_convert(None)
    return plain.astype("datetime64[us]")


def _date_inputs(values: Any, column: Column, where: str) -> Iterator[np.ndarray]:
    """The parts of dates, NaN where one is missing."""
    if values.dtype.kind != "M" and values.notna().any():
        raise DataError(
            f"column {column.name!r} of {where} must hold dates as in training, got {values.dropna().iloc[0]!r}"
        )
    values = _in_utc(values)
    dates = values.dt
    length = 365 + dates.is_leap_year
    day = (dates.normalize() - values).dt.total_seconds() / -86400
    season = (dates.day_of_year - 1 + day) / length
    for part in column.levels:
        if part == "year":
            yield (dates.year + season).to_numpy(np.float64)
        elif part == "weekday":
            yield from ((dates.day_of_week == number).where(values.notna()).to_numpy(np.float64) for number in range(7))
        else:
            turn = 2 * np.pi * (season if part == "season" else day).to_numpy(np.float64)
            yield from (np.sin(turn), np.cos(turn))


def date_of(year: float) -> str:
    """The date behind a year with fractions."""
    start = datetime(int(year), 1, 1)
    return f"{start + (year - start.year) * (datetime(start.year + 1, 1, 1) - start):%Y-%m-%d}"


def numbers(values: Any, where: str, boolean: bool = False) -> np.ndarray:
    """A column as float64, NaN where nothing stands; a word among them, or what is too large, is named and refused.

    Args:
        values: the column.
        where: the table's name, for messages.
        boolean: whether training had True and False, which are 1 and 0.
    """
    import pandas

    missing, plain = values.isna().to_numpy(), values
    if boolean and values.dtype.kind not in "fiub":
        plain = words_of(values).str.lower().replace({"true": "1", "false": "0"}).reindex(values.index)
    numeric: Any = pandas.to_numeric(plain, errors="coerce")
    parsed = numeric.to_numpy(np.float64, na_value=np.nan)
    wrong = np.flatnonzero(~(np.abs(parsed) <= LARGEST) & ~missing)
    if wrong.size:
        row, told = values.index[wrong[0]], values.iloc[wrong[0]]
        told = told.item() if isinstance(told, np.generic) else told
        bounds = f" from -{LARGEST:g} to {LARGEST:g}" if np.isfinite(parsed[wrong[0]]) else ""
        wanted = "True and False, as in training" if boolean else f"finite numbers{bounds}"
        raise DataError(
            f"column {values.name!r} of {where} must hold {wanted}, got {told!r} in row {row + 1} (the header not "
            "counted); correct it, or leave it empty where the value is missing"
        )
    return parsed


def _boolean(values: Any) -> bool:
    """Whether all that stands in a column is True or False."""
    import pandas

    return pandas.api.types.infer_dtype(values, skipna=True) == "boolean"


def _counts_rows(values: Any) -> bool:
    """Whether a column says nothing but which row it is in."""
    heading = re.sub(r"[\W_]+", " ", str(values.name)).strip().lower()
    if heading not in COUNTERS and not heading.startswith("unnamed "):
        return False
    numeric = np.asarray(values, dtype=object)
    return len(numeric) > 2 and all(after - before == 1 for before, after in pairwise(numeric.tolist()))


def _numeric(values: Any) -> bool:
    """Whether a column is one of numbers: at least half of what stands in it reads as such."""
    import pandas

    if values.dtype.kind in "fiub":
        return True
    if values.dtype.kind == "m":  # which to_numeric would turn into nanoseconds
        return False
    there = values.dropna()
    readable: Any = pandas.to_numeric(there, errors="coerce")
    return 2 * int(readable.notna().sum()) >= len(there)


def filled(inputs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Inputs whose missing numbers are replaced column by column."""
    return np.where(np.isnan(inputs), values, inputs)


def medians(inputs: np.ndarray) -> np.ndarray:
    """The median of each column's present numbers, [F]; 0 where none is present."""
    empty = np.isnan(inputs).all(0)
    return np.where(empty, 0.0, np.nanmedian(np.where(empty, 0.0, inputs), axis=0))


def from_json(content: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """The columns behind `dataclasses.asdict` of each."""
    names = {item.name for item in fields(Column)}
    plain = [{name: value for name, value in column.items() if name in names} for column in content]
    return tuple(Column(**{**column, "levels": tuple(column["levels"])}) for column in plain)
