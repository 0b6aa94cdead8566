"""The gap splits of the UCI tables [Foong et al. 2019], from `uci_gap.npz` in a folder of DUBITO_DATA."""

from dataclasses import replace

import numpy as np
import torch

from dubito.data import Data
from dubito.data.assemble import assembled
from dubito.data.catalogue import ENTRIES
from dubito.data.locate import folders, obtain
from dubito.errors import DataError

#: Tables with their gap splits, one for each column; tables of more than 10,000 rows are left out.
GAP_SPLITS = {"boston": 13, "concrete": 8, "energy": 8, "power": 4, "wine-red": 11, "yacht": 6}
#: What the archive calls them.
ARCHIVE_NAMES = {"boston": "bostonHousing", "power": "power-plant", "wine-red": "wine-quality-red"}


def gap_split(name: str, split: int, validation: float = 0.1) -> Data:
    """A table with the middle third of its rows, in order of column `split`, as test rows.

    Args:
        name: of the table, as in `uci/<name>`.
        split: the number of the column.
        validation: the share of the other rows that is set aside.
    """
    entry = ENTRIES[f"uci/{name}"]
    path = next((path for folder in folders() if (path := folder / "uci_gap.npz").is_file()), None)
    if path is None:
        raise DataError("uci_gap.npz must lie in a folder of DUBITO_DATA, and was not found")
    with np.load(path) as archive:
        test = archive[f"{ARCHIVE_NAMES.get(name, name)}.test_idx"][split].astype(int)
    raw = obtain(f"uci/{name}", entry, download=False)
    inputs, targets = raw.train
    inside = np.zeros(len(inputs), bool)
    inside[test] = True
    parted = replace(raw, train=(inputs[~inside], targets[~inside]), test=(inputs[inside], targets[inside]))
    return assembled(
        parted,
        entry,
        name=f"gap/{name}",
        split=split,
        standardise=True,
        validation=validation,
        input_scaling=None,
        dtype=torch.get_default_dtype(),
        task_reason="the data set's own",
    )
