"""Compare methods: those that are not finished are run, all are ranked; what is finished is kept at once."""

import platform
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from .. import jobs as shared
from ..data.loading import check_splits
from ..errors import Interrupted, require_count
from ..fitting import prepare
from ..jobs import Backend
from ..method import Method
from ..registry import methods as known_methods
from ..storage import encode
from ..training import AutoTraining
from ..version import __version__
from .folder import FitRecord, Folder, MethodRow, StoredResult
from .live import Board
from .new_rows import RowReader
from .plan import plan
from .replicates import Standing, pooled
from .settings import Settings
from .shift import wanted
from .task import Task
from .verdict import REFERENCE, Verdict, differences, rows_in_words
from .work import task_of, work

#: A fit: a method's name and a split's number.
Fit = tuple[str, int]


@dataclass(frozen=True)
class Comparison:
    """All rows of a comparison, best negative log-likelihood first, failures last.

    Attributes:
        data: the data's name.
        task: what the targets are, and why.
        notes: what was done to a table of one's own.
        held_out: the classes that were kept from training.
        rows: one per method, means over splits.
        verdict: which method to take, and why, in sentences.
        where: on how many rows and splits the verdict stands, in words.
        indistinguishable: whether a method cannot be distinguished from the best in NLL.
        base: the method that NLLs are measured against.
        half_widths: half the width of the 95 % interval of each method's difference to it in NLL.
        settings: all that decided the numbers.
    """

    data: str
    task: str
    notes: tuple[str, ...]
    held_out: tuple[str, ...]
    rows: tuple[MethodRow, ...]
    verdict: tuple[str, ...]
    where: str
    indistinguishable: Mapping[str, bool]
    base: str
    half_widths: Mapping[str, float]
    settings: dict[str, Any]


@dataclass(frozen=True)
class Runner:
    """How jobs are run; the attributes are arguments of `compare`."""

    jobs: int | None = None
    backend: Backend = "local"
    scheduler: str | None = None
    threads: int = 1
    console: Console | None = None

    @property
    def count(self) -> int:
        """Fits at a time, as far as it is known: a cluster's are not."""
        every = self.jobs == -1 and self.backend == "local"
        return shared.load_joblib().cpu_count() if every else max(1, self.jobs or 1)

    def each(self, fits: Sequence[tuple[Any, ...]]) -> Iterator[StoredResult]:
        """What each job left, as they end; a job whose process dies is a failure like any other."""
        left = {(name, settings.splits[0]): (name, settings, *others) for name, settings, *others in fits}
        try:
            options = {"jobs": self.jobs, "backend": self.backend, "scheduler": self.scheduler}
            for result in shared.each(work, fits, **options) if fits else ():  # pyright: ignore
                del left[fit_of(result)]
                yield result
        except shared.worker_deaths():
            # Which one died is not told: those left are tried again, each in a pool of its own.
            for (name, split), arguments in left.items():
                try:
                    yield from shared.each(work, [arguments], jobs=2)
                except shared.worker_deaths() as error:
                    row = MethodRow(name, {}, failure=_death(error), fits=(FitRecord(split=split),))
                    yield StoredResult(row, {}, arguments[3])


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
    begin: Callable[[Task, tuple[str, ...]], None] = lambda task, plan: None,
) -> Comparison:
    """Compare methods on one data set.

    Args:
        settings: what decides the numbers, or the data's name alone.
        methods: command-line names; None takes all.
        out: the folder for results and posteriors, from which a second call goes on; None keeps nothing.
        jobs: fits at a time; None for one here, and as many as a cluster takes there.
        backend: "local" processes, or joblib's "dask" or "ray", whose workers must see the folder too.
        scheduler: the cluster's address.
        threads: of PyTorch, for each job.
        console: a terminal that shows all jobs live; None shows nothing.
        report: called with each fit's row as soon as it is there.
        begin: called with the first split's task and the plan in sentences, before work starts.
    """
    if isinstance(settings, str):
        settings = Settings(data=settings)
    require_count(threads=threads)
    shared.check(jobs, backend, scheduler)
    check_splits(settings.data, settings.splits)
    known = known_methods()
    chosen = {name: known[name] for name in methods or known}
    task = task_of(settings.of_split(settings.splits[0], None))
    check(task, settings)
    runner = Runner(jobs, backend, scheduler, threads, console)
    with tempfile.TemporaryDirectory() if out is None else nullcontext(out.resolve()) as path:
        return Course(chosen, settings, task, Folder(Path(path)), runner).run(report, begin)


def check(task: Task, settings: Settings) -> None:
    """Find before any work starts what every method would stumble over."""
    rows = tuple(tensor[:8] for tensor in task.train)
    prepare(task.network.build(settings.seed), rows, task.likelihood, seed=settings.seed, progress=False)


class Course:
    """One comparison from its folder to its end.

    Args:
        chosen: methods by name.
        settings: what decides the numbers.
        task: of the first split.
        folder: where everything is kept.
        runner: how jobs are run.
    """

    def __init__(
        self, chosen: Mapping[str, Method], settings: Settings, task: Task, folder: Folder, runner: Runner
    ) -> None:
        self.standing = isinstance(settings.training, AutoTraining)  # on one MAP fit of each split
        if self.standing and REFERENCE not in chosen:
            chosen = {REFERENCE: known_methods()[REFERENCE], **chosen}
        self.chosen, self.settings, self.task = chosen, settings, task
        self.folder, self.runner, self.results = folder, runner, dict[Fit, StoredResult]()
        seconds = settings.fit_seconds(len(chosen), runner.count)
        self.fits: dict[Fit, tuple[Any, ...]] = {}  # with the arguments of their jobs
        for split in settings.splits:
            alone, path = settings.of_split(split, seconds), folder.of_split(split, settings.splits[0]).path
            for name, method in chosen.items():
                self.fits[name, split] = (name, alone, path, alone.digest(method), runner.threads)

    def run(
        self, report: Callable[[MethodRow], None], begin: Callable[[Task, tuple[str, ...]], None]
    ) -> Comparison:
        """Run what is not finished, and sum up."""
        for fit, (name, _, path, digest, _) in self.fits.items():
            if (result := Folder(path).result(name, digest)) is not None:
                self.results[fit] = result
        waiting = [fit for fit in self.fits if fit not in self.results]
        names, count = [name for name, _ in waiting], self.runner.count
        begin(self.task, plan(list(self.chosen), names, self.settings, self.task, self.folder, count))
        self.folder.write("task", facts(self.task, self.settings))
        for result in self.results.values():
            report(result.row)
        paths = {fit: Folder(self.fits[fit][2]).work(fit[0], "progress") for fit in waiting}
        for path in paths.values():
            path.unlink(missing_ok=True)
        board = Board(paths, self.runner.console) if self.runner.console and waiting else None
        first = [fit for fit in waiting if self.standing and fit[0] == REFERENCE]
        try:
            with board.open() if board else nullcontext():
                for fits in (first, [fit for fit in waiting if fit not in first]):
                    for result in self.runner.each([self.fits[fit] for fit in fits]):
                        self.results[fit_of(result)] = result
                        if board:
                            board.ended(fit_of(result), result.row.failure is not None)
                        report(result.row)
                        self.summed()
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted after {len(self.results)} of {len(self.fits)} fits; what is finished is kept in "
                f"{self.folder.path}, and the same command goes on from there"
            ) from error
        return self.summed()

    def summed(self) -> Comparison:
        """The comparison so far, written beside the rows: of the splits that all methods have finished."""
        settings, data = self.settings, self.task.data
        whole = [k for k in settings.splits if all((name, k) in self.results for name in self.chosen)]
        splits = whole or settings.splits[:1]
        fits = {name: [self.results.get((name, split)) for split in splits] for name in self.chosen}
        by_method = {name: results for name, results in fits.items() if None not in results}
        rows = ranked([pooled_row(results) for results in by_method.values()])  # pyright: ignore
        finished = [row for row in rows if row.failure is None]
        standing = Standing(
            {row.method: row.metrics for row in finished},
            {row.method: pooled_replicates(by_method[row.method], settings.seed) for row in finished},  # pyright: ignore
        )
        where = rows_in_words(len(self.task.test.targets), len(splits))
        verdict = Verdict(finished, standing, where, settings.fit_seconds(1) is not None)
        base, half_widths = differences(finished, standing)
        comparison = Comparison(
            data=settings.data,
            task=f"{data.task}: {data.task_reason}",
            notes=data.notes,
            held_out=self.task.held_out,
            rows=rows,
            verdict=verdict.sentences(),
            where=where,
            indistinguishable=verdict.level,
            base=base,
            half_widths=half_widths,
            settings={**encode(settings), "network": self.task.network.title, "versions": versions()},
        )
        self.folder.write("results", asdict(comparison))
        return comparison


def fit_of(result: StoredResult) -> Fit:
    """Which fit left a result."""
    return result.row.method, result.row.fits[0].split


def pooled_row(results: Sequence[StoredResult]) -> MethodRow:
    """One method's row: means over splits; a failure on any split is the method's."""
    rows = [result.row for result in results]
    fits = tuple(fit for row in rows for fit in row.fits)
    failed = next((row for row in rows if row.failure is not None), None)
    if failed is not None:
        where = f"on split {failed.fits[0].split}: " if len(rows) > 1 else ""
        return replace(failed, failure=f"{where}{failed.failure}", fits=fits)
    return replace(
        rows[0],
        metrics={name: fmean(row.metrics[name] for row in rows) for name in rows[0].metrics},
        seconds=fmean(row.seconds for row in rows),
        predict_seconds=fmean(row.predict_seconds for row in rows),
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
        fits=fits,
    )


def pooled_replicates(results: Sequence[StoredResult], seed: int) -> dict[str, torch.Tensor]:
    """Replicates of a method's metrics over splits, of those that every split has."""
    parts = [result.evidence.get("replicates", {}) for result in results]
    return {
        name: pooled([part[name] for part in parts], seed)
        for name in parts[0]
        if all(name in part for part in parts)
    }


def _death(error: Exception) -> str:
    """A worker's death in one line, with the signal that joblib's paragraph about it names."""
    codes = re.search(r"exit codes of the workers are \{(.*?)\}", str(error))
    return f"its process died{f' ({codes[1]})' if codes else ''}, perhaps for want of memory"


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
