"""What the papers' pictures are drawn from."""

from collections.abc import Iterable

from .experiment import Cell, Experiment
from .store import Results


def first_cells(
    experiment: Experiment, scale: str, keys: Iterable[tuple[str, str]], results: Results
) -> dict[tuple[str, str], dict]:
    """What the first cell of each data set and method kept; nothing unless all were run."""
    read = {key: results.read(experiment, scale, Cell(*key)) for key in keys}
    return {key: dict(one.details) for key, one in read.items() if one} if all(read.values()) else {}
