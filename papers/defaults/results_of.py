"""Stored cells as numbers: by table and method, what every split gave."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..runner.experiment import Cell, Experiment, Outcome
from ..runner.scores import unpacked
from ..runner.store import Results
from .fits import METHODS


@dataclass(frozen=True)
class Stored:
    """The finished splits of a method on a table."""

    outcomes: tuple[Outcome, ...]

    @property
    def differences(self) -> list[np.ndarray]:
        """NLL less MAP's of every test row, by split."""
        return [unpacked(outcome.details["differences"]) for outcome in self.outcomes]

    @property
    def protocols(self) -> list[dict[str, Any]]:
        """What the protocol did, by split."""
        return [outcome.details["protocol"] for outcome in self.outcomes]

    def mean(self, metric: str) -> float:
        """The mean of a metric over splits; NaN where no split has it."""
        values = [outcome.metrics[metric] for outcome in self.outcomes if metric in outcome.metrics]
        return float(np.mean(values)) if values else float("nan")

    def column(self, metric: str) -> np.ndarray:
        """A metric by split."""
        return np.array([outcome.metrics[metric] for outcome in self.outcomes])

    @property
    def without_uncertainty(self) -> int:
        """How many fits ended with less than 1 % of their uncertainty epistemic."""
        return sum(outcome.metrics["epistemic_share"] < 0.01 for outcome in self.outcomes)


def stored(experiment: Experiment, results: Results | None = None) -> dict[str, dict[str, Stored]]:
    """Finished splits by table and method; tables that lack a split of some method are left out."""
    results, scale = results or Results(), "paper"
    tables: dict[str, dict[str, Stored]] = {}
    for data in dict.fromkeys(cell.data for cell in experiment.scales[scale].cells):
        splits = range(experiment.scales[scale].splits_of(data))
        methods = {}
        for method in METHODS:
            read = [results.read(experiment, scale, Cell(data, method, split)) for split in splits]
            if all(read):
                methods[method] = Stored(tuple(outcome for outcome in read if outcome))
        if len(methods) == len(METHODS):
            tables[data] = methods
    return tables


def splits_by_table(
    tables: Mapping[str, Mapping[str, Stored]], method: str, names: Mapping[str, int] | set[str]
) -> dict[str, list[np.ndarray]]:
    """Differences of one method on some tables."""
    return {data: methods[method].differences for data, methods in tables.items() if data in names}
