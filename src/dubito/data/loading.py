"""`load`: any data set by its name or path."""

import os
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any, get_args

import torch

from dubito.errors import ConfigError, DataError, UnknownNameError, require_count, require_fraction, unknown_name

from . import tabular
from .assemble import assembled
from .catalogue import ENTRIES
from .locate import obtain
from .parts import Data, Scaling
from .registry import Entry, TaskKind

OWN_SPLITS = 20


def load(
    name: str | os.PathLike[str],
    split: int = 0,
    *,
    target: str | None = None,
    task: TaskKind | None = None,
    standardise: bool | None = None,
    validation: float | None = None,
    num_data: int | None = None,
    input_scaling: Scaling | None = None,
    dtype: torch.dtype | None = None,
    download: bool = True,
) -> Data:
    """A data set as training, validation and test tensors, scaled by the statistics of its training rows.

    Named sets are those of `listing()`. Their files are looked for in the folders of the path list DUBITO_DATA,
    then in the user's cache, then downloaded into it where the publisher's file can be checked. A path ending in
    .csv, .tsv, .txt, .parquet, .xlsx or .npz, or of any file that is there, is read as a table of one's own: words
    become categories, dates numbers, missing values are filled and flagged, and `Data.notes` says where.

    Args:
        name: a data set's name, or the path of a table.
        split: which of the set's splits, or of a synthetic set's draws.
        target: for a table of one's own, the name of the column (of an .npz file, the array) to predict; several
            real ones are separated by commas (in an .npz file: one array [N, targets]).
        task: for a table of one's own, what the target is; left out, it is detected and `Data.task_reason`
            says why.
        standardise: whether inputs and real targets are standardised; left out, all but synthetic sets are.
        validation: the fraction of the training rows set aside to validate on, by a rule that depends on name
            and split alone; 0 for none. Left out, what is customary: the last 10,000 training images of the sets
            in MNIST's format and of CIFAR-100, the last 5,000 reviews of IMDB, PhysioNet's set b, else none.
        num_data: for a synthetic set, the number of training points; left out, the paper's.
        input_scaling: statistics to scale the inputs by instead of the training rows' own, such as those of
            the data set that a network was trained on, when this one is out of distribution for it.
        dtype: of inputs and real targets; left out, torch's default.
        download: whether missing files may be downloaded.

    Returns:
        The data set.
    """
    _check(validation, dtype, input_scaling)
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(name, str | os.PathLike):
        raise unknown_name("data set", name, ENTRIES)
    name = os.fspath(name)
    entry = check_splits(name, [split])
    if num_data is not None and not (entry and entry.sized):
        raise ConfigError(
            f"num_data is for synthetic sets, whose size can be chosen; {name!r} has its own: leave it out"
        )
    if num_data is not None:
        require_count(num_data=num_data)
    common: dict[str, Any] = {
        "name": name,
        "split": int(split),
        "standardise": standardise,
        "validation": validation,
        "input_scaling": input_scaling,
        "dtype": dtype,
    }
    if entry is None:
        table, entry = _table(name, target, task)
        return assembled(table.raw, entry, task_reason=table.reason, **common)
    if target is not None or task is not None:
        raise ConfigError(f"target and task are for files of your own; {name!r} has its own: leave them out")
    if entry.kind == "tokens" and input_scaling is not None:
        raise ConfigError(f"inputs of {name!r} are word numbers, which cannot be scaled: leave input_scaling out")
    raw = entry.build(int(split), num_data) if entry.build else obtain(name, entry, download=download)
    return assembled(raw, entry, task_reason="the data set's own", **common)


def check_splits(name: str, splits: Iterable[int]) -> Entry | None:
    """What describes a named data set, None for a table of one's own, once it is sure to have the splits."""
    entry = None if is_table(name) else _named(name)
    count = OWN_SPLITS if entry is None else entry.splits
    for split in splits:
        if isinstance(split, bool) or not isinstance(split, Integral) or not 0 <= split < count:
            raise ConfigError(f"split of {name!r} must be a whole number from 0 to {count - 1}, got {split!r}")
    return entry


def is_table(name: str) -> bool:
    """Whether data is a table of one's own: by its ending, or because there is such a file and no set of that name."""
    return Path(name).suffix.lower() in tabular.SUFFIXES or (name not in ENTRIES and Path(name).is_file())


def _check(validation: float | None, dtype: torch.dtype | None, input_scaling: Scaling | None) -> None:
    if validation is not None:
        require_fraction(validation=validation)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating point type such as torch.float32, got {dtype!r}")
    if input_scaling is not None and not isinstance(input_scaling, Scaling):
        raise ConfigError(
            f"input_scaling must be a Scaling, such as another data set's input_scaling, got {input_scaling!r}"
        )


def _named(name: str) -> Entry:
    if name in ENTRIES:
        return ENTRIES[name]
    suffix = Path(name).suffix
    if suffix:
        raise DataError(
            f"there is no file {name}, nor a data set of that name; tables end in {', '.join(tabular.SUFFIXES)}"
        )
    if name.lower() in ENTRIES:  # nothing else is near enough in capitals
        raise UnknownNameError(f"unknown data set {name!r}, did you mean {name.lower()!r}? Names are lower case")
    raise unknown_name("data set", name, ENTRIES)


def _table(name: str, target: str | None, task: TaskKind | None) -> tuple[tabular.Table, Entry]:
    if target is None:
        raise ConfigError(f"a file of your own needs target=, the name of what to predict; got none for {name!r}")
    if task is not None and task not in get_args(TaskKind):
        raise unknown_name("task", task, get_args(TaskKind))
    table = tabular.read(Path(name), target, task)
    entry = Entry(task=table.task, licence="your own", source=name, target_name=target, splits=OWN_SPLITS)
    return table, entry
