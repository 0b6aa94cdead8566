"""Callbacks that hand a fit's numbers to other libraries: TensorBoard, CSV files, Optuna."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, StorageError, require_count, require_extra
from ..training import Callback, RunFacts

#: Of a CSV file.
COLUMNS: tuple[str, ...] = (
    "run", "member", "event", "step", "epoch", "loss", "nll", "kl", "lr", "validation_nll",
)  # fmt: skip


class TensorBoard(Callback):
    """Writes the terms of steps and validations as scalars; members of an ensemble get folders of their own.

    A resumed run hides what an interrupted one wrote of steps that are made again.

    Args:
        folder: that TensorBoard reads.
        every: steps between two that are written.
    """

    def __init__(self, folder: str | os.PathLike[str], every: int = 1) -> None:
        require_extra("tensorboard", "tensorboard", "TensorBoard")
        require_count(every=every)
        self.folder, self.every, self._writers = Path(folder), every, {}

    def on_start(self, run: RunFacts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder if run.member is None else self.folder / f"member-{run.member}"
        self._writers[run] = SummaryWriter(str(folder), purge_step=run.done + 1 if run.done else None)

    def on_step(self, run: RunFacts, step: int, terms: Mapping[str, float]) -> None:
        if step % self.every == 0:
            for name, value in terms.items():
                self._writers[run].add_scalar(f"train/{name}", value, step)

    def on_validation(self, run: RunFacts, step: int, nll: float) -> None:
        self._writers[run].add_scalar("validation/nll", nll, step)

    def on_end(self, run: RunFacts, ended: str) -> None:
        self._writers.pop(run).close()


class CSV(Callback):
    """Writes steps, epochs and validations as rows of a table.

    The first run of a logger replaces the file, unless it resumes another: then the file goes on, without the rows of
    steps that are made again. Further runs, such as an ensemble's members, are added.

    Args:
        path: of the file.
        every: steps between two that are written.
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        require_count(every=every)
        self.path, self.every, self._open = Path(path), every, 0
        self._told: set[tuple[str, str]] = set()
        self._file = self._writer = None

    def on_start(self, run: RunFacts) -> None:
        names, rows = _names(run), []
        try:
            if self._file is not None:
                self._file.close()
            if (run.done or self._told) and self.path.exists():
                with self.path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            if names not in self._told:  # what an interrupted run wrote after it was saved comes again
                rows = [r for r in rows if (r["run"], r["member"]) != names or int(r["step"]) <= run.done]
            self._file = self.path.open("w", newline="", buffering=1)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error}") from error
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(rows)
        self._told.add(names)
        self._open += 1

    def on_step(self, run: RunFacts, step: int, terms: Mapping[str, float]) -> None:
        if step % self.every == 0:
            self._write(run, "step", step, terms)

    def on_epoch(self, run: RunFacts, record: Mapping[str, float]) -> None:
        self._write(run, "epoch", int(record["step"]), record)

    def on_validation(self, run: RunFacts, step: int, nll: float) -> None:
        self._write(run, "validation", step, {"validation_nll": nll})

    def on_end(self, run: RunFacts, ended: str) -> None:
        self._open -= 1
        if self._file is not None and not self._open:
            self._file.close()
            self._file = None

    def _write(self, run: RunFacts, event: str, step: int, values: Mapping[str, float]) -> None:
        assert self._writer is not None
        title, member = _names(run)
        known = {name: value for name, value in values.items() if name in COLUMNS}
        self._writer.writerow({**known, "run": title, "member": member, "event": event, "step": step})


class OptunaPruning(Callback):
    """Reports each validation to a trial of Optuna and ends the fit by `optuna.TrialPruned` where it should be pruned.

    Of an ensemble the first member is reported; of several runs of one fit, such as pilots, steps count on.

    Args:
        trial: `optuna.Trial`.
    """

    def __init__(self, trial: Any) -> None:
        self.trial, self._before, self._last = trial, 0, 0
        self._pruned = require_extra("optuna", "tune", "OptunaPruning").TrialPruned

    def on_start(self, run: RunFacts) -> None:
        if run.total is not None and not run.validates:
            raise ConfigError("OptunaPruning reports validations, and there are none: pass validation= to fit")
        if run.member in (None, 0):
            self._before = self._last

    def on_validation(self, run: RunFacts, step: int, nll: float) -> None:
        if run.member not in (None, 0):
            return
        self._last = self._before + step
        self.trial.report(nll, self._last)
        if self.trial.should_prune():
            raise self._pruned(f"validation nll {nll:.4g} at step {step}")


def _names(run: RunFacts) -> tuple[str, str]:
    return run.title, "" if run.member is None else str(run.member)
