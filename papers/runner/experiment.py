"""What a reproduction is made of: cells to run, scales to run them at, tables to read from them."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dubito.errors import ConfigError, require_count, require_positive, unknown_name
from dubito.metrics import Estimate, Over
from dubito.storage import encode
from dubito.storage.files import json_checksum

from ..settings import decisive


@dataclass(frozen=True, order=True)
class Cell:
    """One job: a method on one split of a data set, with one seed."""

    data: str
    method: str
    split: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.data} {self.method} split {self.split} seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a job found.

    Attributes:
        metrics: numbers by name, in the units of the paper.
        details: plain facts worth keeping, such as what a search chose.
    """

    metrics: Mapping[str, float]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How one method is run on one data set.

    Args:
        settings: a frozen dataclass with all that decides the numbers.
        cpu_seconds: estimated cost of one job.
        splits: the first so many of the data set's splits that it is run on; None for all of them.
    """

    settings: Any
    cpu_seconds: float
    splits: int | None = None

    def __post_init__(self) -> None:
        require_positive(cpu_seconds=self.cpu_seconds)
        if self.splits is not None:
            require_count(splits=self.splits)


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A size at which an experiment is run.

    Args:
        variants: by data and method.
        splits: splits of every data set, or of each by name.
        seeds: seeds per split.
        smaller: what is smaller than in the paper, in words; empty where nothing is.
    """

    variants: Mapping[tuple[str, str], Variant]
    splits: int | Mapping[str, int] = 1
    seeds: int = 1
    smaller: str = ""

    def __post_init__(self) -> None:
        for data, method in self.variants:
            require_count(splits=self.splits_of(data, method), seeds=self.seeds)

    def splits_of(self, data: str, method: str | None = None) -> int:
        """The number of splits of one data set, or of those that a method is run on."""
        splits = self.splits if isinstance(self.splits, int) else self.splits[data]
        limit = None if method is None else self.variants[data, method].splits
        return splits if limit is None else min(limit, splits)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every job, in order."""
        return tuple(
            Cell(data, method, split, seed)
            for data, method in self.variants
            for split in range(self.splits_of(data, method))
            for seed in range(self.seeds)
        )

    def select(
        self,
        data: Collection[str] | None = None,
        methods: Collection[str] | None = None,
        splits: Collection[int] | None = None,
        seeds: Collection[int] | None = None,
    ) -> tuple[Cell, ...]:
        """The jobs asked for; None takes all.

        Args:
            data: names of data sets.
            methods: names of methods.
            splits: numbers of splits.
            seeds: seeds.
        """
        wanted = {"data": data, "method": methods, "split": splits, "seed": seeds}
        for name, chosen in wanted.items():
            known = dict.fromkeys(getattr(cell, name) for cell in self.cells)
            for value in chosen or ():
                if value not in known and name in ("data", "method"):
                    raise unknown_name(name, value, map(str, known))
                if value not in known:
                    raise ConfigError(f"{name} must be from {min(known)} to {max(known)} here, got {value}")
        return tuple(
            cell
            for cell in self.cells
            if all(chosen is None or getattr(cell, name) in chosen for name, chosen in wanted.items())
        )

    def cpu_seconds(self, cells: Collection[Cell]) -> float:
        """Estimated cost of some jobs."""
        return sum(self.variants[cell.data, cell.method].cpu_seconds for cell in cells)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Jobs that one or more tables are read from.

    Args:
        paper: the folder of the paper it belongs to.
        name: of the folder of its results.
        scales: by name; the first is the one to run where none is asked for. "paper" is the paper's own network,
            optimiser and schedule, "small" what two CPU cores do.
        load: the data of a cell.
        generate: made-up data of the same form, for rehearsals.
        run: from cells that share data set and method, the data of each, and their settings, to one outcome
            each. A number of steps, where given, ends every training after so many and every prediction after
            as many draws.
        together: how many splits one call of `run` may train side by side, where networks are so small that
            this is much cheaper; the results of each are kept on their own.
        derived: numbers that follow from what an outcome kept, such as a curve; they are computed whenever it is read.
        shares: what costly work (a training, chains) cells have in common, whatever their method or data: a queue runs
            those of one key one after the other, on one worker.
        revision: to be raised when a change of the code changes the numbers, so that old results no longer count.
    """

    paper: str
    name: str
    scales: Mapping[str, Scale]
    load: Callable[[Cell], Any]
    generate: Callable[[Cell], Any]
    run: Callable[[Sequence[Cell], Sequence[Any], Any, int | None], Sequence[Outcome]]
    together: int = 1
    derived: Callable[[Outcome], Mapping[str, float]] | None = None
    shares: Callable[[Cell], Hashable] | None = None
    revision: int = 1

    def __post_init__(self) -> None:
        require_count(together=self.together, revision=self.revision)
        if "paper" not in self.scales:
            raise ConfigError(f"an experiment must have the scale 'paper', got {list(self.scales)}")
        if self.scales["paper"].smaller:
            raise ConfigError("the scale 'paper' is the paper's own: nothing in it may be smaller")

    def scale(self, name: str | None) -> str:
        """The name of a scale this experiment has; None takes the first."""
        if name is None:
            return next(iter(self.scales))
        if name not in self.scales:
            raise unknown_name(f"scale of {self.name}", name, self.scales)
        return name

    def settings(self, scale: str, cell: Cell) -> Any:
        """The settings of a cell."""
        return self.scales[scale].variants[cell.data, cell.method].settings

    def digest(self, scale: str, cell: Cell) -> str:
        """A checksum of all that decides a cell's numbers."""
        settings = decisive(encode(self.settings(scale, cell)))
        return json_checksum([self.name, self.revision, scale, encode(cell), settings])

    def completed(self, outcome: Outcome) -> Outcome:
        """An outcome with the numbers that follow from it."""
        if self.derived is None:
            return outcome
        return replace(outcome, metrics={**outcome.metrics, **self.derived(outcome)})

    def rehearse(self, scale: str, steps: int = 2) -> dict[tuple[str, str], Outcome]:
        """Run every variant for a few steps on made-up data, so that what nobody runs daily does not rot."""
        outcomes = {}
        for (data, method), variant in self.scales[scale].variants.items():
            cell = Cell(data, method)
            (outcome,) = self.run([cell], [self.generate(cell)], variant.settings, steps)
            outcomes[data, method] = self.completed(outcome)
        return outcomes


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of numbers.

    Args:
        name: of the metric in the results.
        title: as shown.
        lower_is_better: which way is better.
    """

    name: str
    title: str
    lower_is_better: bool


@dataclass(frozen=True)
class Published:
    """A number of the paper.

    Args:
        value: as printed.
        error: its standard error, where the paper's ± is one.
        over: what the standard error was taken over.
    """

    value: float
    error: float | None = None
    over: Over | None = None

    def __post_init__(self) -> None:
        if (self.error is None) != (self.over is None):
            raise ConfigError(f"a standard error and what it is over go together, got {self!r}")

    @property
    def estimate(self) -> Estimate | None:
        """The number with its standard error, where it has one."""
        if self.error is None or self.over is None:
            return None
        return Estimate(value=self.value, standard_error=self.error, over=self.over)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says of two methods: on these data sets the first is better.

    Args:
        text: in words.
        metric: by which.
        better: the method said to be better.
        than: the other.
        data: where.
    """

    text: str
    metric: str
    better: str
    than: str
    data: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table or figure of a paper.

    Args:
        name: as asked for on the command line.
        title: what it shows.
        paper: where it stands.
        plus_minus: what the paper's ± means, in words.
        experiment: the jobs behind it.
        metrics: its columns.
        published: the paper's numbers by data, method and metric.
        claims: what the paper concludes.
        differs: what was done otherwise than in the paper without being smaller, in words.
        sizes: the scales it is read at; None reads all of the experiment's.
    """

    name: str
    title: str
    paper: str
    plus_minus: str
    experiment: Experiment
    metrics: tuple[Metric, ...]
    published: Mapping[tuple[str, str, str], Published]
    claims: tuple[Claim, ...] = ()
    differs: str = ""
    sizes: tuple[str, ...] | None = None

    @property
    def scales(self) -> dict[str, Scale]:
        """The scales it is read at, by name."""
        known = self.experiment.scales
        return {name: scale for name, scale in known.items() if self.sizes is None or name in self.sizes}

    def heading(self, scale: str) -> str:
        """The title, which says what is smaller than in the paper."""
        smaller = self.experiment.scales[scale].smaller
        return f"{self.name}: {self.title}" + (f"; smaller than the paper's: {smaller}" if smaller else "")
