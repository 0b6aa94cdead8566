"""Jobs in parallel, here or on a cluster, handed out as they end; one thread of PyTorch each."""

import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import torch

from .errors import ConfigError, Interrupted, Terminated, require_count, require_extra, unknown_name

Backend = Literal["local", "dask", "ray"]

# Jobs seed PyTorch's global generator while they run, so threads of one process take turns.
turn = threading.Lock()

#: Seconds between two looks of a worker at its parent, and those it has to save itself.
WATCH, PATIENCE = 0.5, 10.0
#: The status of a process that SIGTERM has ended.
TERMINATED = 128 + signal.SIGTERM


def check(jobs: int | None, backend: str, scheduler: str | None) -> None:
    """Refuse arguments of `each` that cannot be run, before work starts; -1 job leaves it to the backend."""
    if jobs is not None and jobs != -1:
        require_count(jobs=jobs)
    known = ("local", "dask", "ray")
    if backend not in known:
        raise unknown_name("backend", backend, known)
    if backend == "local" and scheduler is not None:
        raise ConfigError(f"a scheduler is a cluster's, got {scheduler!r} with backend 'local'; choose dask or ray")
    if backend == "dask" and scheduler is None:
        raise ConfigError("backend 'dask' needs its scheduler's address, such as tcp://host:8786; got none")


def each(
    function: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    *,
    jobs: int | None = None,
    backend: Backend = "local",
    scheduler: str | None = None,
) -> Iterator[Any]:
    """What `function` returns for each tuple of arguments, in the order in which the jobs end.

    Args:
        function: importable where the jobs run.
        arguments: one tuple per job.
        jobs: how many at a time; None for one here, and as many as a cluster takes there.
        backend: "local" processes, or a cluster by joblib's "dask" or "ray" backend.
        scheduler: the cluster's address.
    """
    joblib = load_joblib()
    bound = (_bound, os.getpid(), function) if backend == "local" else (function,)
    tasks = [joblib.delayed(bound[0])(*bound[1:], *values) for values in arguments]
    count = jobs or (1 if backend == "local" else -1)
    with cluster(backend, scheduler):
        yield from as_they_end(joblib, tasks, count, backend)


def surviving(
    function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], workers: "Workers"
) -> Iterator[tuple[int, Any, str | None]]:
    """As `each`, with each job's number; one that raises, or whose process dies, has a reason in place of a result.

    Which job's process died is not told. Those left are tried again together as long as that finishes any, else one by
    one, until one has died alone.
    """
    left = {number: (number, function, *values) for number, values in enumerate(arguments)}
    while left:
        waiting = len(left)
        try:
            for number, *outcome in workers.each(_guarded, list(left.values())):
                del left[number]
                yield number, *outcome
        except worker_deaths():
            for number in list(left) if len(left) == waiting else ():
                values = left.pop(number)
                try:
                    yield from each(_guarded, [values], jobs=2)
                except worker_deaths() as error:
                    yield number, None, _death(error)
                    break


def _bound(parent: int, function: Callable[..., Any], *values: Any) -> Any:
    """A job in a process that ends with its parent; SIGTERM ends the process, not the jobs of all others."""
    if os.getpid() == parent:
        return function(*values)
    try:
        return function(*values)
    except Terminated:
        os._exit(TERMINATED)


@cache
def _watched(parent: int) -> None:
    """Let this process end, saved, soon after its parent has."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os._exit(TERMINATED)

    threading.Thread(target=watch, daemon=True).start()


def dismiss() -> None:
    """Ask the local workers for an end, and wait until they are saved; before they are killed."""
    workers = [child for child in multiprocessing.active_children() if child.name.startswith("Loky")]
    for worker in workers:
        worker.terminate()
    end = time.monotonic() + PATIENCE
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))


def _guarded(number: int, function: Callable[..., Any], *values: Any) -> tuple[int, Any, str | None]:
    try:
        return number, function(*values), None
    except Interrupted:
        raise
    except Exception as error:  # whatever it is, the other jobs go on
        return number, None, " ".join(f"{type(error).__name__}: {error}".split())


def _death(error: Exception) -> str:
    """A worker's death in one line, with the signal that joblib's paragraph about it names."""
    codes = re.search(r"exit codes of the workers are \{(.*?)\}", str(error))
    return f"its process died{f' ({codes[1]})' if codes else ''}, perhaps for want of memory"


@dataclass(frozen=True)
class Workers:
    """Where parts of one fit run as jobs; the attributes are arguments of `each`."""

    jobs: int | None
    backend: Backend
    scheduler: str | None

    @property
    def count(self) -> int:
        """Jobs at a time, as far as it is known: a cluster's are not."""
        every = self.jobs == -1 and self.backend == "local"
        return load_joblib().cpu_count() if every else max(1, self.jobs or 1)

    def shares(self, count: int) -> list[range]:
        """Numbers below `count`, in as many groups as there are jobs at a time."""
        groups = min(count, self.jobs) if self.jobs is not None and self.jobs > 0 else count
        return [range(first, count, groups) for first in range(groups)]

    def each(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """As `each`."""
        return each(function, arguments, jobs=self.jobs, backend=self.backend, scheduler=self.scheduler)


_workers: ContextVar[Workers | None] = ContextVar("workers", default=None)


@contextmanager
def pooled(jobs: int | None = None, *, backend: Backend = "local", scheduler: str | None = None) -> Iterator[None]:
    """While open, fits of this context whose parts need nothing of each other run these as jobs, by `each`."""
    check(jobs, backend, scheduler)
    token = _workers.set(Workers(jobs, backend, scheduler))
    try:
        yield
    finally:
        _workers.reset(token)


def workers() -> Workers | None:
    """That of the context, if one is open."""
    return _workers.get()


def as_they_end(joblib: Any, tasks: list[Any], count: int, backend: str) -> Iterator[Any]:
    """Results of joblib's tasks as soon as they are there."""
    if backend != "ray":
        # Workers watch their parent from their start: one may be killed before the first job comes.
        local = backend == "local" and joblib.effective_n_jobs(count) > 1
        options = {"initializer": _watched, "initargs": (os.getpid(),)} if local else {}
        yield from joblib.Parallel(n_jobs=count, return_as="generator_unordered", **options)(tasks)
        return
    # joblib's Ray backend hands results out only when all are there; rounds keep what is finished.
    most = joblib.effective_n_jobs(-1)
    size = most if count == -1 else min(count, most)
    with joblib.Parallel(n_jobs=size) as parallel:
        for start in range(0, len(tasks), size):
            yield from parallel(tasks[start : start + size])


def worker_deaths() -> tuple[type[Exception], ...]:
    """What is raised when a local worker's process dies."""
    return (import_module("joblib.externals.loky.process_executor").TerminatedWorkerError,)


@contextmanager
def alone(threads: int = 1) -> Iterator[None]:
    """One job at a time in this process, by default with one thread: small networks want no more, and jobs share it."""
    with turn:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def load_joblib() -> Any:
    """The module joblib, which an extra installs."""
    return require_extra("joblib", "cli", "running jobs")


@contextmanager
def cluster(backend: str, scheduler: str | None) -> Iterator[None]:
    """While open, joblib sends jobs to the backend."""
    if backend == "local":
        yield
    elif backend == "dask":
        client = require_extra("distributed", "cluster", "a cluster of Dask").Client(scheduler)
        with client, load_joblib().parallel_config(backend="dask"):
            yield
    else:
        ray = require_extra("ray", "cluster", "a cluster of Ray")
        import_module("ray.util.joblib").register_ray()
        ray.init(address=scheduler)
        try:
            with load_joblib().parallel_config(backend="ray"):
                yield
        finally:
            ray.shutdown()
