"""Compare methods: those that are not finished are run, all are ranked; what is finished is kept at once."""

import platform
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .. import jobs as shared
from ..errors import Interrupted, require_count
from ..fitting import prepare
from ..jobs import Backend
from ..method import require_training
from ..registry import methods as known_methods
from ..storage import encode
from ..version import __version__
from . import words
from .folder import Folder, MethodRow, StoredResult
from .live import Board
from .new_rows import RowReader
from .settings import Settings, compared_method
from .shift import wanted
from .task import Task
from .work import task_of, work


@dataclass(frozen=True)
class Comparison:
    """All rows of a comparison, best negative log-likelihood first, failures last.

    Attributes:
        data: the data's name.
        task: what the targets are, and why.
        notes: what was done to a table of one's own.
        held_out: the classes that were unknown to all methods.
        rows: one per method.
        sentences: each method in one plain sentence.
        as_good: whether a method's likelihood is as good as the best one's, to chance.
        settings: all that decided the numbers.
    """

    data: str
    task: str
    notes: tuple[str, ...]
    held_out: tuple[str, ...]
    rows: tuple[MethodRow, ...]
    sentences: dict[str, str]
    as_good: dict[str, bool]
    settings: dict[str, Any]


def compare(
    settings: Settings | str,
    methods: Sequence[str] | None = None,
    *,
    out: Path | None = None,
    jobs: int | None = None,
    backend: Backend = "local",
    scheduler: str | None = None,
    threads: int = 1,
    console: Console | None = None,
    report: Callable[[MethodRow], None] = lambda row: None,
    begin: Callable[[Task], None] = lambda task: None,
) -> Comparison:
    """Compare methods on one data set.

    Args:
        settings: what decides the numbers, or the data's name alone.
        methods: command-line names; None takes all.
        out: the folder for results and posteriors, from which a second call goes on; None keeps nothing.
        jobs: methods trained at a time; None for one here, and as many as a cluster takes there.
        backend: "local" processes, or joblib's "dask" or "ray", whose workers must see the folder too.
        scheduler: the cluster's address.
        threads: of PyTorch, for each job.
        console: a terminal that shows all jobs live; None shows nothing.
        report: called with each row as soon as it is there.
        begin: called with the task before work starts.
    """
    if isinstance(settings, str):
        settings = Settings(data=settings)
    require_count(threads=threads)
    shared.check(jobs, backend, scheduler)
    chosen = {name: compared_method(name) for name in (methods or known_methods())}
    task = task_of(settings)
    check(task, settings)
    begin(task)
    if out is None:
        with tempfile.TemporaryDirectory() as scratch:
            options = (jobs, backend, scheduler, threads, console, report)
            return _compared(chosen, settings, task, Folder(Path(scratch)), *options)
    folder = Folder(out.resolve())
    return _compared(chosen, settings, task, folder, jobs, backend, scheduler, threads, console, report)


def check(task: Task, settings: Settings) -> None:
    """Find before any work starts what every method would stumble over."""
    rows = tuple(tensor[:8] for tensor in task.train)
    require_training(settings.training)
    prepare(task.network.build(settings.seed), rows, task.likelihood, seed=settings.seed, progress=False)


def _compared(
    chosen: dict[str, Any],
    settings: Settings,
    task: Task,
    folder: Folder,
    jobs: int | None,
    backend: Backend,
    scheduler: str | None,
    threads: int,
    console: Console | None,
    report: Callable[[MethodRow], None],
) -> Comparison:
    folder.write("task", facts(task, settings))
    digests = {name: settings.digest(method) for name, method in chosen.items()}
    results = {name: result for name in chosen if (result := folder.result(name, digests[name])) is not None}
    for result in results.values():
        report(result.row)
    waiting = [
        (name, settings, folder.path, digests[name], threads) for name in chosen if name not in results
    ]
    for name, *_ in waiting:
        folder.work(name, "progress").unlink(missing_ok=True)
    board = Board(folder, [name for name, *_ in waiting], console) if console and waiting else None
    try:
        with board.open() if board else nullcontext():
            for result in _results(waiting, jobs, backend, scheduler):
                results[result.row.method] = result
                if board:
                    board.ended(result.row.method, result.row.failure is not None)
                report(result.row)
                _summed(folder, task, settings, [results[name] for name in chosen if name in results])
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted after {len(results)} of {len(chosen)} methods, which are kept in {folder.path}; "
            "the same command goes on from there"
        ) from error
    return _summed(folder, task, settings, [results[name] for name in chosen])


def _results(waiting: list[Any], jobs: int | None, backend: Backend, scheduler: str | None) -> Any:
    """What each job left, as they end; a job whose process dies is a failure like any other."""
    if not waiting:
        return
    ended = set()
    try:
        for result in shared.each(work, waiting, jobs=jobs, backend=backend, scheduler=scheduler):
            ended.add(result.row.method)
            yield result
    except shared.worker_deaths():
        # Which one died is not told: those left are tried again, each in a pool of its own.
        for arguments in (arguments for arguments in waiting if arguments[0] not in ended):
            try:
                yield from shared.each(work, [arguments], jobs=2)
            except shared.worker_deaths() as error:
                yield StoredResult(MethodRow(arguments[0], {}, failure=_death(error)), {}, arguments[3])


def _death(error: Exception) -> str:
    """A worker's death in one line, with the signal that joblib's paragraph about it names."""
    codes = re.search(r"exit codes of the workers are \{(.*?)\}", str(error))
    return f"its process died{f' ({codes[1]})' if codes else ''}, perhaps for want of memory"


def _summed(folder: Folder, task: Task, settings: Settings, results: Sequence[StoredResult]) -> Comparison:
    """The comparison so far, written beside the rows."""
    rows = ranked([result.row for result in results])
    level = words.as_good([result for result in results if result.row.failure is None], settings.seed)
    comparison = Comparison(
        data=settings.data,
        task=f"{task.data.task}: {task.data.task_reason}",
        notes=task.data.notes,
        held_out=task.held_out,
        rows=rows,
        sentences=words.sentences(rows, level),
        as_good=level,
        settings={**encode(settings), "network": task.network.title, "versions": versions()},
    )
    folder.write("results", asdict(comparison))
    return comparison


def ranked(rows: Sequence[MethodRow]) -> tuple[MethodRow, ...]:
    """Best negative log-likelihood first, failures last."""
    return tuple(sorted(rows, key=lambda row: row.metrics.get("nll", float("inf"))))


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"dubito": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def facts(task: Task, settings: Settings) -> dict[str, Any]:
    """What a prediction for new rows needs, and what the page says of the data."""
    data = task.data
    scaling = data.target_scaling
    return {
        "data": settings.data,
        "task": data.task,
        "reason": data.task_reason,
        "target": data.target_name,
        "class_names": task.class_names,
        "held_out": task.held_out,
        "foreign": {name: len(rows) for name, rows in task.foreign.items()},
        "shifted": wanted(task, settings),
        "rows": {
            "training": len(task.train.targets),
            "validation": len(task.validation.targets),
            "test": len(task.test.targets),
        },
        "network": asdict(task.network),
        "network_title": task.network.title,
        "reader": RowReader.of(data).to_json(),
        "target_scaling": scaling and {"shift": scaling.shift.tolist(), "scale": scaling.scale.tolist()},
        "notes": data.notes,
        "source": data.source,
        "licence": data.licence,
        "num_samples": settings.num_samples,
        "seed": settings.seed,
    }
