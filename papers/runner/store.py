"""Results on disk: one small JSON file per cell, whole or not there, and read only if its settings still hold."""

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch

from dubito.errors import StorageError
from dubito.storage import encode, write_text
from dubito.version import __version__

from .experiment import Cell, Experiment, Outcome
from .provenance import Provenance

FORMAT = 1


#: The folder of all papers, each with its results.
PAPERS = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What a job cost.

    Attributes:
        cpu_seconds: of this cell; cells trained side by side share theirs out equally.
        peak_memory_bytes: the most its process had held when the job ended; None where the system does not tell.
        together: the splits that were trained side by side.
    """

    cpu_seconds: float
    peak_memory_bytes: int | None
    together: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A stored result.

    Attributes:
        outcome: what the job gave.
        cpu_seconds: what it cost.
        recorded: whether settings of all fits and the commit are stored beside it; early results have neither.
    """

    outcome: Outcome
    cpu_seconds: float
    recorded: bool


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results by paper, experiment and cell.

    Args:
        folder: of all papers; what is missing of it is made when the first result is written.
    """

    folder: Path = PAPERS

    def path(self, experiment: Experiment, scale: str, cell: Cell) -> Path:
        """The file of a cell; scales other than the paper's have folders of their own."""
        name = experiment.name if scale == "paper" else f"{experiment.name}-{scale}"
        folder = self.folder / experiment.paper / "results" / name / cell.data / cell.method
        return folder / f"split-{cell.split}-seed-{cell.seed}.json"

    def read(self, experiment: Experiment, scale: str, cell: Cell) -> Outcome | None:
        """A cell's outcome; None where it was not run, or not with these settings."""
        result = self.stored(experiment, scale, cell)
        return None if result is None else result.outcome

    def stored(self, experiment: Experiment, scale: str, cell: Cell) -> Stored | None:
        """A cell's outcome and what is known of its run; None where it was not run, or not with these settings."""
        path = self.path(experiment, scale, cell)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StorageError(
                f"{path} should be a result in JSON, but reading it failed ({error}); remove it"
            ) from error
        form = content.get("format") if isinstance(content, dict) else None
        if form != FORMAT:
            raise StorageError(
                f"{path} should be a result of format {FORMAT}, got {form!r}; remove it, or upgrade dubito"
            )
        try:
            if content["settings_sha256"] != experiment.digest(scale, cell):
                return None
            metrics = {str(name): float(value) for name, value in content["metrics"].items()}
            return Stored(
                outcome=experiment.completed(Outcome(metrics=metrics, details=dict(content["details"]))),
                cpu_seconds=float(content["cpu_seconds"]),
                recorded=content.get("fits") is not None,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(
                f"{path} should be the result of {cell}, but is altered ({error!r}); remove it"
            ) from error

    def write(
        self,
        experiment: Experiment,
        scale: str,
        cell: Cell,
        outcome: Outcome,
        spent: Spent,
        provenance: Provenance | None = None,
    ) -> Path:
        """Write a cell's outcome; the file appears whole or not at all.

        Args:
            experiment: the cell's.
            scale: at which it was run.
            cell: which.
            outcome: what it gave.
            spent: what it cost.
            provenance: settings of its fits and the commit; None where nobody wrote them down.
        """
        path = self.path(experiment, scale, cell)
        content = {
            **({} if provenance is None else asdict(provenance)),
            "format": FORMAT,
            "experiment": experiment.name,
            "scale": scale,
            "cell": asdict(cell),
            "metrics": dict(outcome.metrics),
            "details": dict(outcome.details),
            "settings": encode(experiment.settings(scale, cell)),
            "settings_sha256": experiment.digest(scale, cell),
            "versions": {
                "dubito": __version__,
                "numpy": numpy.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
            },
            **asdict(spent),
        }
        try:
            text = json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"
        except ValueError as error:
            raise StorageError(
                f"the result of {cell} holds numbers that are not finite, so it is not kept: {dict(outcome.metrics)}"
            ) from error
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except (OSError, StorageError) as error:
            raise StorageError(f"cannot write {path}: {error}; choose a folder with --results") from error
        return path
