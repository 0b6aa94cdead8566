"""What the papers' pictures are drawn from."""

from collections.abc import Iterable

from .experiment import Cell, Experiment, Outcome
from .judge import outcomes
from .store import Results
from .tables import tables


def first_cells(
    experiment: Experiment, scale: str, keys: Iterable[tuple[str, str]], results: Results
) -> dict[tuple[str, str], dict]:
    """What the first cell of each data set and method kept; nothing unless all were run."""
    read = {key: results.read(experiment, scale, Cell(*key)) for key in keys}
    return {key: dict(one.details) for key, one in read.items() if one} if all(read.values()) else {}


def runs_by_method(name: str, results: Results) -> dict[str, list[Outcome]]:
    """Outcomes of a table's runs at its first scale, by method; those that are there."""
    table = tables()[name]
    runs: dict[str, list[Outcome]] = {}
    for cell, outcome in outcomes(table, table.experiment.scale(None), results).items():
        runs.setdefault(cell.method, []).append(outcome)
    return runs
