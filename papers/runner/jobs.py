"""Run what is not finished: one job per cell, in parallel, here or on a cluster; each result is kept at once."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dubito import jobs as shared
from dubito.errors import DubitoError, Interrupted, StorageError, interruption
from dubito.jobs import Backend

from .experiment import Cell, Experiment, Outcome
from .provenance import Provenance, commit, recording
from .store import Results, Spent


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A job that ended.

    Attributes:
        cell: which.
        outcome: what it found; None where it failed.
        spent: what it cost.
        failure: why it failed, else None.
        provenance: what made it.
    """

    cell: Cell
    outcome: Outcome | None
    spent: Spent
    failure: str | None = None
    provenance: Provenance | None = None


def run(
    experiment: Experiment,
    scale: str,
    cells: Sequence[Cell],
    results: Results,
    *,
    jobs: int | None = None,
    backend: Backend = "local",
    scheduler: str | None = None,
    report: Callable[[Finished], None] = lambda finished: None,
) -> list[Finished]:
    """Run the cells that have no result yet and write each result as it comes; returns the failures.

    Args:
        experiment: whose cells.
        scale: at which size.
        cells: what to run; finished ones are left alone.
        results: where results are and go.
        jobs: how many at a time; None for one here, and as many as a cluster takes there.
        backend: "local" processes, or a cluster by joblib's "dask" or "ray" backend.
        scheduler: the cluster's address.
        report: called with each job as it ends.
    """
    shared.check(jobs, backend, scheduler)
    waiting = [cell for cell in cells if results.read(experiment, scale, cell) is None]
    if not waiting:
        return []
    failures = []
    tasks = [(experiment, scale, batch) for batch in batches(experiment, waiting)]
    done = 0
    try:
        for number, batch, death in shared.surviving(work, tasks, shared.Workers(jobs, backend, scheduler)):
            for finished in batch or [lost(cell, str(death)) for cell in tasks[number][2]]:
                finished = written(experiment, scale, finished, results)
                done += 1
                if finished.failure is not None:
                    failures.append(finished)
                report(finished)
    except KeyboardInterrupt as error:
        raise interruption(
            error,
            f"interrupted after {done} of {len(waiting)} jobs, which are kept in {results.folder}; "
            "the same command goes on from there",
        ) from error
    return failures


def lost(cell: Cell, reason: str) -> Finished:
    """A job without an outcome."""
    spent = Spent(cpu_seconds=0.0, peak_memory_bytes=None, together=())
    return Finished(cell=cell, outcome=None, spent=spent, failure=reason)


def batches(experiment: Experiment, cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that one call of the experiment takes: neighbouring splits, as many as it trains side by side."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = cell.data, cell.method, cell.seed, cell.split // experiment.together
        groups.setdefault(key, []).append(cell)
    return list(groups.values())


def work(experiment: Experiment, scale: str, cells: Sequence[Cell]) -> list[Finished]:
    """Run the jobs of some cells in this process, with one thread."""
    with shared.alone():
        start = time.process_time()
        failure, outcomes = None, [None] * len(cells)
        with recording() as fits:
            try:
                data = [experiment.load(cell) for cell in cells]
                outcomes = experiment.run(cells, data, experiment.settings(scale, cells[0]), None)
            except Interrupted:
                raise
            except DubitoError as error:
                failure = str(error)
        spent = Spent(
            cpu_seconds=round((time.process_time() - start) / len(cells), 2),
            peak_memory_bytes=peak_memory_bytes(),
            together=tuple(cell.split for cell in cells),
        )
    made = Provenance(fits=fits, commit=commit())
    return [
        Finished(cell=cell, outcome=outcome, spent=spent, failure=failure, provenance=made)
        for cell, outcome in zip(cells, outcomes, strict=True)
    ]


def peak_memory_bytes() -> int | None:
    """The most memory this process has held; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def written(experiment: Experiment, scale: str, finished: Finished, results: Results) -> Finished:
    """A job whose outcome was written, or which failed because that was not possible."""
    if finished.outcome is None:
        return finished
    try:
        results.write(experiment, scale, finished.cell, finished.outcome, finished.spent, finished.provenance)
    except StorageError as error:
        return replace(finished, outcome=None, failure=str(error))
    return finished
