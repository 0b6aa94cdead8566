"""The unfinished cells of all tables, ranked by the rows they close per CPU-hour."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..experiment import Cell, Experiment, Table
from ..jobs import batches
from ..store import Results

#: The least a cell is thought to cost: some measured costs are rounded to 0.
LEAST_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The cells of one method on one data set, which close the same rows together.

    Attributes:
        table: a table of the experiment, by whose name a worker finds it.
        experiment: whose cells.
        scale: at which size.
        data: the data set.
        method: the method.
        waiting: cells without a result.
        cell_seconds: CPU-seconds of one, by finished ones where there are, else as estimated.
        measured: whether there were.
        rows: rows of tables that are closed with the last of them.
    """

    table: str
    experiment: Experiment
    scale: str
    data: str
    method: str
    waiting: tuple[Cell, ...]
    cell_seconds: float
    measured: bool
    rows: int

    @property
    def cpu_seconds(self) -> float:
        """Expected cost of all that is waiting."""
        return self.cell_seconds * len(self.waiting)

    @property
    def rows_per_hour(self) -> float:
        """Rows closed per CPU-hour."""
        return self.rows * 3600 / self.cpu_seconds

    def __str__(self) -> str:
        return f"{self.experiment.name} ({self.scale}) {self.data} {self.method}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """Cells that one worker runs side by side.

    Attributes:
        group: to which they belong.
        cells: which.
    """

    group: Group
    cells: tuple[Cell, ...]

    @property
    def cpu_seconds(self) -> float:
        """Expected cost."""
        return self.group.cell_seconds * len(self.cells)

    @property
    def key(self) -> Hashable | None:
        """What the cells share with others; None where nothing."""
        shares = self.group.experiment.shares
        return shares and (self.group.experiment.paper, self.group.scale, shares(self.cells[0]))

    def __str__(self) -> str:
        splits, seeds = (_span(getattr(cell, name) for cell in self.cells) for name in ("split", "seed"))
        return f"{self.group} split {splits} seed {seeds}"


def _span(numbers: Iterable[int]) -> str:
    ordered = sorted(set(numbers))
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"


def ranked(
    tables: Mapping[str, Table], results: Results, *, scale: str | None = None, only: str | None = None
) -> list[Group]:
    """Groups with something to run, those that close most rows per CPU-hour first.

    Args:
        tables: by name.
        results: what is finished.
        scale: a scale's name; None for the one each experiment is run at where none is asked for, "all" for all.
        only: a pattern that "table scale data method" must match somewhere, such as "bali-*" or "figure".
    """
    by_experiment: dict[str, list[Table]] = {}
    for table in tables.values():
        by_experiment.setdefault(table.experiment.name, []).append(table)
    groups = [
        group
        for readers in by_experiment.values()
        for name in _scales(readers[0].experiment, scale)
        for group in _groups(readers, name, results, only)
    ]
    return sorted(groups, key=lambda group: -group.rows_per_hour)  # stable: in the order of the index where equal


def tasks(groups: Iterable[Group]) -> list[Task]:
    """The groups' cells, as many together as their experiment trains side by side."""
    return [
        Task(group=group, cells=tuple(batch)) for group in groups for batch in batches(group.experiment, group.waiting)
    ]


def _scales(experiment: Experiment, scale: str | None) -> list[str]:
    if scale == "all":
        return list(experiment.scales)
    name = experiment.scale(None) if scale is None else scale
    return [name] if name in experiment.scales else []


def _groups(readers: list[Table], scale: str, results: Results, only: str | None) -> list[Group]:
    experiment = readers[0].experiment
    # What cells have in common was paid by the first of them: estimates are right or wrong for all of them together.
    shared = _dearer(experiment, scale, results) if experiment.shares else None
    groups = []
    for (data, method), variant in experiment.scales[scale].variants.items():
        if only and not any(_matches(f"{table.name} {scale} {data} {method}", only) for table in readers):
            continue
        cells = experiment.scales[scale].select(data=[data], methods=[method])
        stored = {cell: results.stored(experiment, scale, cell) for cell in cells}
        seconds = [result.cpu_seconds for result in stored.values() if result is not None]
        if shared is not None:
            seconds = [shared * variant.cpu_seconds]
        waiting = tuple(cell for cell, result in stored.items() if result is None)
        if waiting:
            groups.append(
                Group(
                    table=readers[0].name,
                    experiment=experiment,
                    scale=scale,
                    data=data,
                    method=method,
                    waiting=waiting,
                    cell_seconds=max(LEAST_SECONDS, sum(seconds) / len(seconds) if seconds else variant.cpu_seconds),
                    measured=bool(seconds),
                    rows=sum(len(table.metrics) for table in readers),
                )
            )
    return groups


def _dearer(experiment: Experiment, scale: str, results: Results) -> float | None:
    """What finished cells took over what they were thought to take; None where there are none."""
    stored = {cell: results.stored(experiment, scale, cell) for cell in experiment.scales[scale].cells}
    spent = {cell: result.cpu_seconds for cell, result in stored.items() if result is not None}
    return sum(spent.values()) / experiment.scales[scale].cpu_seconds(spent) if spent else None


def _matches(words: str, pattern: str) -> bool:
    return fnmatchcase(words, f"*{pattern}*")
