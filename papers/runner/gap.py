"""The gap splits of the UCI tables [Foong et al. 2019], from `uci_gap.npz` in a folder of DUBITO_DATA."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from dubito import seeds
from dubito.data import Data, Part
from dubito.data.assemble import assembled
from dubito.data.catalogue import ENTRIES
from dubito.data.locate import folders, obtain
from dubito.errors import DataError

#: Tables with their gap splits, one for each column.
GAP_SPLITS = {
    "boston": 13,
    "concrete": 8,
    "energy": 8,
    "kin8nm": 8,
    "naval": 16,
    "power": 4,
    "protein": 9,
    "wine-red": 11,
    "yacht": 6,
}
#: What the archive calls them.
ARCHIVE_NAMES = {
    "boston": "bostonHousing",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine-red": "wine-quality-red",
}


class Parted(NamedTuple):
    """Rows by what they are for, as numbers of the table's rows.

    Attributes:
        around: outside of the gap, to train on.
        inside: those in the gap.
        outside: kept back from the rows around the gap.
    """

    around: np.ndarray
    inside: np.ndarray
    outside: np.ndarray


class GapSplit(NamedTuple):
    """A table whose test rows are those in the gap and, after them, those kept back around it."""

    data: Data
    inside: Part
    outside: Part


def parted(name: str, split: int, kept_back: float = 0.0) -> Parted:
    """The rows of a table: those kept back are drawn by seed 0, whatever a method or a cell's seed.

    Args:
        name: of the table, as in `uci/<name>`.
        split: the number of the column.
        kept_back: the share of the rows around the gap to judge on.
    """
    path = next((path for folder in folders() if (path := folder / "uci_gap.npz").is_file()), None)
    if path is None:
        raise DataError("uci_gap.npz must lie in a folder of DUBITO_DATA, and was not found")
    with np.load(path) as archive:
        inside = archive[f"{ARCHIVE_NAMES.get(name, name)}.test_idx"][split].astype(int)
    return divided(len(obtain(f"uci/{name}", ENTRIES[f"uci/{name}"], download=False).train[0]), inside, kept_back)


def divided(rows: int, inside: np.ndarray, kept_back: float) -> Parted:
    """So many rows, parted.

    Args:
        rows: of the table.
        inside: numbers of those in the gap.
        kept_back: the share of the others to judge on.
    """
    around = np.setdiff1d(np.arange(rows), inside)
    order = torch.randperm(len(around), generator=seeds.generator(0, "rows outside the gap")).numpy()
    chosen = np.sort(order[: round(kept_back * len(around))])
    return Parted(np.delete(around, chosen), inside, around[chosen])


def gap_split(name: str, split: int, validation: float = 0.1, kept_back: float = 0.0) -> GapSplit:
    """A table with the middle third of its rows, in order of column `split`, as test rows.

    Args:
        name: of the table, as in `uci/<name>`.
        split: the number of the column.
        validation: the share of the rows to train on that is set aside; 0 sets none aside.
        kept_back: the share of the rows around the gap that are test rows too.
    """
    entry, rows = ENTRIES[f"uci/{name}"], parted(name, split, kept_back)
    raw = obtain(f"uci/{name}", entry, download=False)
    inputs, targets = raw.train
    tests = np.concatenate([rows.inside, rows.outside])
    data = assembled(
        replace(raw, train=(inputs[rows.around], targets[rows.around]), test=(inputs[tests], targets[tests])),
        entry,
        name=f"gap/{name}",
        split=split,
        standardise=True,
        validation=validation,
        input_scaling=None,
        dtype=torch.get_default_dtype(),
        task_reason="the data set's own",
    )
    count = len(rows.inside)
    inside, outside = (Part(*(tensor[some] for tensor in data.test)) for some in (slice(count), slice(count, None)))
    return GapSplit(data, inside, outside)
