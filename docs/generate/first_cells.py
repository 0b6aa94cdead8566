"""What the scripts of this folder draw from."""

from collections.abc import Iterable

from dubito.reproduce import Cell, Results
from dubito.reproduce.experiment import Experiment


def first_cells(
    experiment: Experiment, scale: str, keys: Iterable[tuple[str, str]], results: Results
) -> dict[tuple[str, str], dict]:
    """What the first cell of each data set and method kept; nothing unless all were run."""
    read = {key: results.read(experiment, scale, Cell(*key)) for key in keys}
    return {key: dict(one.details) for key, one in read.items() if one} if all(read.values()) else {}
