"""How a data set is described: its files, how they are read, and by which rule it is divided."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from .columns import Column

TaskKind = Literal["classification", "binary", "regression"]
Pair = tuple[np.ndarray, np.ndarray]
#: What one input is: a row of columns, an image [channels, height, width] of 0 to 255, word numbers,
#: or a series [time, channels] that brings its own statistics.
Kind = Literal["table", "image", "tokens", "series"]


@dataclass(frozen=True, kw_only=True)
class Raw:
    """What a reader gives, in original units and numpy arrays.

    Attributes:
        train: inputs and targets for training; the whole table where `test` is None.
        validation: the publisher's validation part, if there is one.
        test: the publisher's test part; None leaves the division to the split rule.
        feature_names: names of the columns or channels.
        class_names: names of the classes.
        statistics: shift and scale of the inputs where the training rows alone do not tell.
        columns: of a table of one's own, how each was read; its inputs may hold NaN, to be filled from training rows.
        notes: what the user should know of how it was read.
    """

    train: Pair
    validation: Pair | None = None
    test: Pair | None = None
    feature_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    statistics: Pair | None = None
    columns: tuple[Column, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class File:
    """One file of a data set.

    Attributes:
        path: where it lies below a data folder.
        size: its bytes.
        sha256: its checksum; None where only the checksum of its content is known (`StoredForm.content`).
        url: where its publisher offers it; fetched by us only where size and checksum are known.
    """

    path: str
    size: int | None = None
    sha256: str | None = None
    url: str | None = None

    @property
    def fetchable(self) -> bool:
        """Whether it can be downloaded and checked."""
        return None not in (self.url, self.size, self.sha256)


@dataclass(frozen=True, kw_only=True)
class StoredForm:
    """One form in which a data set is stored: its files and how to read them.

    Attributes:
        files: what must be there.
        read: from their paths, in order, to arrays.
        shapes: the shape of the inputs of each part that `read` must give.
        content: sha256 over the bytes of the inputs and targets, in the order of the parts.
    """

    files: tuple[File, ...]
    read: Callable[[Sequence[Path]], Raw]
    shapes: Mapping[str, tuple[int, ...]]
    content: str | None = None

    @property
    def rows(self) -> int:
        """Rows of all parts together."""
        return sum(shape[0] for shape in self.shapes.values())


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A named data set.

    Attributes:
        task: what its targets are.
        kind: what one of its inputs is.
        licence: what is known of its licence.
        source: where it comes from.
        target_name: what its targets are called.
        forms: how it may be stored, the fullest form first; none for sets that need no file.
        build: makes a set that needs no file, from the split and the number of points asked for.
        rows: rows of a set that needs no file.
        module: the package that a set without files needs.
        splits: how many splits its rule gives.
        train_fraction: the share of its rows that a split trains on.
        tail: how many of the last training rows are the customary validation part.
        standardise: whether it is customary to standardise it.
        sized: whether its number of points can be chosen.
        class_names: names of the classes, where no file brings them.
    """

    task: TaskKind
    kind: Kind = "table"
    licence: str
    source: str
    target_name: str
    forms: tuple[StoredForm, ...] = ()
    build: Callable[[int, int | None], Raw] | None = None
    rows: int = 0
    module: str | None = None
    splits: int = 1
    train_fraction: float = 0.8
    tail: int = 0
    standardise: bool = True
    sized: bool = False
    class_names: tuple[str, ...] = ()
