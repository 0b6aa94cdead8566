"""Compare methods: those that are not finished are run, all are ranked; what is finished is kept at once."""

import platform
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console

from .. import jobs as shared
from ..data.loading import check_splits
from ..errors import ConfigError, interruption, require_count
from ..fitting import prepare
from ..jobs import Backend
from ..method import Method
from ..notebook import html
from ..registry import methods as known_methods
from ..storage import encode
from ..training import AutoTraining
from ..version import __version__
from . import baselines, tune
from .folder import BASELINES, FitRecord, Folder, MethodRow, StoredResult
from .live import Board
from .new_rows import RowReader
from .plan import plan
from .replicates import Standing, pooled
from .settings import Settings
from .shift import wanted
from .task import Task
from .verdict import REFERENCE, Verdict, differences, rows_in_words
from .work import targets_in_units, task_of, work

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
        intervals: the ends of the 95 % interval of each method's metrics.
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
    intervals: Mapping[str, Mapping[str, tuple[float, float]]]
    settings: dict[str, Any]

    def _repr_html_(self) -> str:
        from .table import table  # which reads comparisons

        shown = table(self)
        return html(shown, [*self.verdict, str(shown.caption or "")], markup=True)


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
    say: Callable[[str], None] = lambda text: None,
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
        say: called with lines about trials, where settings are tuned.
    """
    if isinstance(settings, str):
        settings = Settings(data=settings)
    require_count(threads=threads)
    shared.check(jobs, backend, scheduler)
    check_splits(settings.data, settings.splits)
    task = task_of(settings.of_split(settings.splits[0], None))
    chosen = chosen_methods(methods, task)
    check(task, settings)
    workers = shared.Workers(jobs, backend, scheduler)
    with tempfile.TemporaryDirectory() if out is None else nullcontext(out.resolve()) as path:
        course = Course(chosen, settings, task, Folder(Path(path)), workers, threads, report, say)
        return course.run(console, begin)


def chosen_methods(names: Sequence[str] | None, task: Task) -> dict[str, Method | str]:
    """Methods by name, and the models beside them by name alone; None takes all that suit the task."""
    models, reason = baselines.offered(task)
    names = (*known_methods(), *models) if names is None else names
    if misfits := [name for name in names if name in BASELINES and name not in models]:
        raise ConfigError(reason or f"{misfits[0]} is not for {task.data.task}; choose {' or '.join(models)}")
    return {name: name if name in BASELINES else known_methods()[name] for name in names}


def check(task: Task, settings: Settings) -> None:
    """Find before any work starts what every method would stumble over."""
    rows = tuple(tensor[:8] for tensor in task.train)
    prepare(task.network.build(settings.seed), rows, task.likelihood, seed=settings.seed, progress=False)


@dataclass
class Course:
    """One comparison from its folder to its end; the attributes are arguments of `compare`, and what came of them."""

    chosen: dict[str, Method | str]
    settings: Settings
    task: Task
    folder: Folder
    workers: shared.Workers
    threads: int
    report: Callable[[MethodRow], None]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        splits = self.settings.splits
        self.standing = isinstance(self.settings.training, AutoTraining)  # on one MAP fit of each split
        if self.standing and REFERENCE not in self.chosen:
            self.chosen = {REFERENCE: known_methods()[REFERENCE], **self.chosen}
        self.methods = [name for name in self.chosen if name not in BASELINES]
        seconds = self.settings.fit_seconds(len(self.methods), self.workers.count)
        self.folders = {split: self.folder.of_split(split, splits[0]) for split in splits}
        self.fits = {(name, k): self.settings.of_split(k, seconds) for k in splits for name in self.chosen}
        self.results: dict[Fit, StoredResult] = {}

    def run(self, console: Console | None, begin: Callable[[Task, tuple[str, ...]], None]) -> Comparison:
        """Run what is not finished, and sum up."""
        names = [name for name, _ in self._waiting(self.fits) if name in self.methods]
        begin(self.task, plan(self.methods, names, self.settings, self.task, self.folder, self.workers.count))
        self.folder.write("task", facts(self.task, self.settings))
        first = [fit for fit in self.fits if self.standing and fit[0] == REFERENCE]
        try:
            for stage in (first, [fit for fit in self.fits if fit not in first]):
                if self.settings.tune is not None:
                    self._tune([fit for fit in stage if fit[0] in self.methods])
                self._run(stage, console)
        except KeyboardInterrupt as error:
            raise interruption(
                error,
                f"interrupted after {len(self.results)} of {len(self.fits)} fits; what is finished is kept in "
                f"{self.folder.path}, and the same command goes on from there",
            ) from error
        return self.summed()

    def _waiting(self, fits: Iterable[Fit]) -> list[Fit]:
        """Read the results that are there; the other fits wait."""
        for fit in fits:
            self.results.pop(fit, None)
            if result := self.folders[fit[1]].result(fit[0], self._digest(fit)):
                self.results[fit] = result
        return [fit for fit in fits if fit not in self.results]

    def _tune(self, fits: Sequence[Fit]) -> None:
        """Let trials choose the settings of fits; what those of the first stage are decides the others too."""
        for name, split in fits:
            point = self.fits[REFERENCE, split].overrides if self.standing else ()
            self.fits[name, split] = replace(self.fits[name, split], point=point, overrides=())
        searches = [(name, self.fits[name, split], self.folders[split].path) for name, split in fits]
        self.fits |= zip(fits, tune.search(searches, self.workers, self.threads, self.say), strict=True)

    def _run(self, stage: Sequence[Fit], console: Console | None) -> None:
        waiting = self._waiting(stage)
        for fit in stage:
            if fit in self.results:
                self.report(self.results[fit].row)
        paths = {fit: self.folders[fit[1]].work(fit[0], "progress") for fit in waiting}
        for path in paths.values():
            path.unlink(missing_ok=True)
        board = Board(paths, console) if console and waiting else None
        with board.open() if board else nullcontext():
            for number, result, failure in shared.surviving(work, [*map(self._job, waiting)], self.workers):
                fit = waiting[number]
                row = MethodRow(fit[0], {}, failure=failure, fits=(FitRecord(split=fit[1]),))
                self.results[fit] = result or StoredResult(row, {}, self._digest(fit))
                if board:
                    board.ended(fit, self.results[fit].row.failure is not None)
                self.report(self.results[fit].row)
                self.summed()

    def _digest(self, fit: Fit) -> str:
        return self.fits[fit].digest(self.chosen[fit[0]])

    def _job(self, fit: Fit) -> tuple[Any, ...]:
        return fit[0], self.fits[fit], self.folders[fit[1]].path, self._digest(fit), self.threads

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
            intervals=standing.intervals(),
            settings={**encode(settings), "network": self.task.network.title, "versions": versions()},
        )
        self.folder.write("results", asdict(comparison))
        return comparison


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
        metrics={
            name: fmean(row.metrics[name] for row in rows)
            for name in rows[0].metrics
            if all(name in row.metrics for row in rows)
        },
        seconds=fmean(row.seconds for row in rows),
        predict_seconds=fmean(row.predict_seconds for row in rows),
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
        fits=fits,
    )


def pooled_replicates(results: Sequence[StoredResult], seed: int) -> dict[str, torch.Tensor]:
    """Replicates of a method's metrics over splits, of those that every split has."""
    parts = [result.evidence.get("replicates", {}) for result in results]
    return {
        name: pooled([part[name] for part in parts], seed) for name in parts[0] if all(name in part for part in parts)
    }


def ranked(rows: Sequence[MethodRow]) -> tuple[MethodRow, ...]:
    """Best negative log-likelihood first, failures last."""
    return tuple(sorted(rows, key=lambda row: row.metrics.get("nll", float("inf"))))


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"dubito": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def spread(task: Task) -> dict[str, Any]:
    """How often each class occurs in a part, or, of the first real target, in 30 bars from its 0.5 to 99.5 %."""
    parts = {"training": task.train.targets, "test": task.test.targets}
    if task.class_names:
        return {
            name: torch.bincount(part.flatten(), minlength=len(task.class_names)).tolist()
            for name, part in parts.items()
        }
    values = {name: targets_in_units(part, task)[:, 0].double() for name, part in parts.items()}
    ends = torch.cat(list(values.values())).quantile(torch.tensor([0.005, 0.995], dtype=torch.float64)).tolist()
    return {"low": ends[0], "high": ends[1]} | {
        name: torch.histc(part, 30, *ends).int().tolist() for name, part in values.items()
    }


def facts(task: Task, settings: Settings) -> dict[str, Any]:
    """What a prediction for new rows needs, and what the page says of the data."""
    data = task.data
    scaling = data.target_scaling
    return {
        "data": settings.data,
        "task": data.task,
        "reason": data.task_reason,
        "likelihood": task.likelihood_reason,
        "target": data.target_name,
        "class_names": task.class_names,
        "held_out": task.held_out,
        "ood": {name: len(rows) for name, rows in task.ood.items()},
        "shifted": wanted(task, settings),
        "rows": {
            "training": len(task.train.targets),
            "validation": len(task.validation.targets),
            "test": len(task.test.targets),
        },
        "spread": spread(task),
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
