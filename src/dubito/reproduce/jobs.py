"""Run what is not finished: one job per cell, in parallel, here or on a cluster; each result is kept at once."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import torch

from ..errors import ConfigError, DubitoError, Interrupted, StorageError, require_count, unknown_name
from .experiment import Cell, Experiment, Outcome
from .store import Results, Spent

Backend = Literal["local", "dask", "ray"]

# Jobs seed PyTorch's global generator while they run, so threads of one process take turns.
_turn = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A job that ended.

    Attributes:
        cell: which.
        outcome: what it found; None where it failed.
        spent: what it cost.
        failure: why it failed, else None.
    """

    cell: Cell
    outcome: Outcome | None
    spent: Spent
    failure: str | None = None


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
    if jobs is not None and jobs != -1:
        require_count(jobs=jobs)
    _check(backend, scheduler)
    waiting = [cell for cell in cells if results.read(experiment, scale, cell) is None]
    if not waiting:
        return []
    joblib = _joblib()
    failures = []
    tasks = [joblib.delayed(work)(experiment, scale, batch) for batch in batches(experiment, waiting)]
    count = jobs or (1 if backend == "local" else -1)
    done = 0
    try:
        with _cluster(backend, scheduler):
            for batch in _as_they_end(joblib, tasks, count, backend):
                for finished in batch:
                    finished = _kept(experiment, scale, finished, results)
                    done += 1
                    if finished.failure is not None:
                        failures.append(finished)
                    report(finished)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted after {done} of {len(waiting)} jobs, which are kept in {results.folder}; "
            "the same command goes on from there"
        ) from error
    return failures


def _as_they_end(joblib: Any, tasks: list[Any], count: int, backend: str) -> Iterator[list[Finished]]:
    if backend != "ray":
        yield from joblib.Parallel(n_jobs=count, return_as="generator_unordered")(tasks)
        return
    # joblib's Ray backend hands results out only when all are there; rounds keep what is finished.
    most = joblib.effective_n_jobs(-1)
    size = most if count == -1 else min(count, most)
    with joblib.Parallel(n_jobs=size) as parallel:
        for start in range(0, len(tasks), size):
            yield from parallel(tasks[start : start + size])


def batches(experiment: Experiment, cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that one call of the experiment takes: neighbouring splits, as many as it trains side by side."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = cell.data, cell.method, cell.seed, cell.split // experiment.together
        groups.setdefault(key, []).append(cell)
    return list(groups.values())


def work(experiment: Experiment, scale: str, cells: Sequence[Cell]) -> list[Finished]:
    """Run the jobs of some cells in this process, with one thread."""
    with _turn, _one_thread():
        start = time.process_time()
        failure, outcomes = None, [None] * len(cells)
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
    return [
        Finished(cell=cell, outcome=outcome, spent=spent, failure=failure)
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


def _kept(experiment: Experiment, scale: str, finished: Finished, results: Results) -> Finished:
    if finished.outcome is None:
        return finished
    try:
        results.write(experiment, scale, finished.cell, finished.outcome, finished.spent)
    except StorageError as error:
        return Finished(cell=finished.cell, outcome=None, spent=finished.spent, failure=str(error))
    return finished


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of PyTorch: small networks want no more, and jobs share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(backend: str, scheduler: str | None) -> None:
    known = ("local", "dask", "ray")
    if backend not in known:
        raise unknown_name("backend", backend, known)
    if backend == "local" and scheduler is not None:
        raise ConfigError(
            f"a scheduler is a cluster's, got {scheduler!r} with backend 'local'; choose dask or ray"
        )
    if backend == "dask" and scheduler is None:
        raise ConfigError("backend 'dask' needs its scheduler's address, such as tcp://host:8786; got none")


def _joblib() -> Any:
    try:
        return import_module("joblib")
    except ImportError as error:
        raise ConfigError(
            "jobs are run with joblib, which is not installed: pip install 'dubito[cli]'"
        ) from error


@contextmanager
def _cluster(backend: str, scheduler: str | None) -> Iterator[None]:
    """While open, joblib sends jobs to the backend."""
    if backend == "local":
        yield
    elif backend == "dask":
        client = _extra("distributed").Client(scheduler)
        with client, _joblib().parallel_config(backend="dask"):
            yield
    else:
        ray = _extra("ray")
        _extra("ray.util.joblib").register_ray()
        ray.init(address=scheduler)
        try:
            with _joblib().parallel_config(backend="ray"):
                yield
        finally:
            ray.shutdown()


def _extra(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{error}; clusters need an extra: pip install 'dubito[cluster]'") from error
