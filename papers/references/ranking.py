"""How close to the true posterior each method is: stored results of several tables as ranks, and a sentence for each.

`SOURCES` names the tables and their metrics, at this one place. A table without results, or that is not there at all,
is said to be missing. Sentences say what intervals allow: the nearest is that of the least mean; a method ties with it
where the 95 % interval of their paired difference lies within a margin that nobody would act on, no difference is shown
where the interval holds 0, and it is farther where it does not.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, variance
from typing import Literal

from dubito.compare.words import readable, times

from ..runner import tables
from ..runner.intervals import quantile
from ..runner.store import Results
from .bdl_fits import REFERENCE, SHIPPED

#: Metrics of what a method costs.
BYTES, SECONDS = "bytes", "seconds"

Key = tuple[str, int, int]
Status = Literal["nearest", "ties", "open", "farther", "one run"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A metric of a table that tells how far predictions are from those of the true posterior.

    Args:
        table: its name.
        metric: the name in its results.
        title: in words.
        margin: a difference that nobody would act on.
        lower_is_better: which way is nearer.
        floor: the row of the reference itself, run once more; it has no rank.
        data: the one data set that counts, where a table has several kinds of rows; None for all.
    """

    table: str
    metric: str
    title: str
    margin: float
    lower_is_better: bool = True
    floor: str | None = None
    data: str | None = None


#: The two rows of every method against the references of the competition.
KINDS = {REFERENCE: "as the reference's posterior", SHIPPED: "as shipped"}


def competition(table: str, words: str, data: str) -> tuple[Source, Source]:
    """Both distances of a table."""
    near, same = f"total variation from HMC on {words}", f"agreement with HMC on {words}, in per cent"
    return (
        Source(table=table, data=data, metric="total_variation", title=near, margin=0.005),
        Source(table=table, data=data, metric="agreement", title=same, margin=0.5, lower_is_better=False),
    )


SOURCES = (
    *(source for data, kind in KINDS.items() for source in competition("bdl-imdb", f"IMDB, {kind}", data)),
    *competition("bdl-cifar10", "CIFAR-10", REFERENCE),
    *(
        Source(
            table="uci-gap-hmc",
            metric=f"w2_{where}",
            title=f"Wasserstein-2 distance from HMC {where} the gaps of UCI tables",
            margin=0.01,
            floor="hmc",
        )
        for where in ("inside", "outside")
    ),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of one method.

    Attributes:
        values: the metric by data set, split and seed.
        nbytes: mean over runs; None where the table does not tell.
        seconds: of CPU time, likewise.
    """

    values: Mapping[Key, float]
    nbytes: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Span:
    """A mean over runs, with half of its 95 % interval where there are at least two runs of every data set."""

    value: float
    half: float | None

    @property
    def ends(self) -> tuple[float, float]:
        """Of the interval; both are the mean where there is none."""
        half = self.half or 0.0
        return self.value - half, self.value + half


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A method's place.

    Attributes:
        method: its name.
        row: what was measured.
        span: the metric.
        rank: 1 for the nearest; 0 for the floor.
        gap: how much farther than the nearest, paired; None for the nearest and the floor.
        status: what the gap's interval allows to say.
    """

    method: str
    row: Row
    span: Span
    rank: int
    gap: Span | None = None
    status: Status = "nearest"


@dataclass(frozen=True, kw_only=True)
class Board:
    """The methods of one source, the nearest first.

    Attributes:
        source: what is measured.
        standings: of all methods that have all data sets.
        floor: the reference against itself, where it was run.
        incomplete: methods that lack a data set.
        data: the data sets that a mean is over.
    """

    source: Source
    standings: Sequence[Standing]
    floor: Standing | None
    incomplete: Sequence[str]
    data: Sequence[str]


def spanned(values: Mapping[Key, float]) -> Span:
    """The mean over data sets of means over runs, with an interval of Student's t.

    Variances of means add up over data sets; the degrees of freedom are those of the data set with the fewest runs.
    """
    groups: dict[str, list[float]] = {}
    for (data, *_), value in values.items():
        groups.setdefault(data, []).append(value)
    centre, fewest = mean(map(mean, groups.values())), min(map(len, groups.values()))
    if fewest < 2:
        return Span(value=centre, half=None)
    error = math.sqrt(sum(variance(runs) / len(runs) for runs in groups.values())) / len(groups)
    return Span(value=centre, half=quantile(fewest) * error)


def ranked(source: Source, rows: Mapping[str, Row]) -> Board:
    """The methods of a source in order.

    Args:
        source: what is measured.
        rows: by method.
    """
    data = sorted({key[0] for row in rows.values() for key in row.values})
    complete = {name: row for name, row in rows.items() if {key[0] for key in row.values} == {*data}}
    sign = 1 if source.lower_is_better else -1
    spans = {name: spanned(row.values) for name, row in complete.items()}
    order = sorted((name for name in spans if name != source.floor), key=lambda name: sign * spans[name].value)
    standings = []
    for rank, name in enumerate(order, 1):
        gap, status = (None, "nearest") if rank == 1 else _gap(source, rows[name], rows[order[0]], sign)
        standings.append(Standing(method=name, row=rows[name], span=spans[name], rank=rank, gap=gap, status=status))
    floor = None
    if source.floor in spans:
        floor = Standing(method=source.floor, row=rows[source.floor], span=spans[source.floor], rank=0)
    incomplete = [name for name in rows if name not in complete]
    return Board(source=source, standings=standings, floor=floor, incomplete=incomplete, data=data)


def _gap(source: Source, row: Row, nearest: Row, sign: int) -> tuple[Span | None, Status]:
    """How much farther a method is than the nearest on the runs that both have."""
    pairs = {key: sign * (value - nearest.values[key]) for key, value in row.values.items() if key in nearest.values}
    if {key[0] for key in pairs} != {key[0] for key in row.values}:
        return None, "one run"
    gap = spanned(pairs)
    if gap.half is None:
        return gap, "one run"
    low, high = gap.ends
    if max(abs(low), abs(high)) <= source.margin:
        return gap, "ties"
    return gap, "farther" if low > 0 else "open"


def boards(results: Results | None = None, sources: Sequence[Source] = SOURCES) -> list[Board]:
    """Every source that has results."""
    made = []
    for source in sources:
        rows = rows_of(source, results or Results())
        if rows.keys() - {source.floor}:
            made.append(ranked(source, rows))
    return made


def missing(made: Sequence[Board], sources: Sequence[Source] = SOURCES) -> list[str]:
    """Tables without results."""
    told = {board.source.table for board in made}
    return [name for name in dict.fromkeys(source.table for source in sources) if name not in told]


def command(table: str) -> str:
    """What runs a table."""
    return f"make runs RUNS=\"--only '{table} *'\""


def rows_of(source: Source, results: Results) -> dict[str, Row]:
    """What is stored of a source, at the first scale that has something."""
    known = tables()
    if source.table not in known:
        return {}
    experiment = known[source.table].experiment
    for name, scale in experiment.scales.items():
        cells = [cell for cell in scale.cells if source.data in (None, cell.data)]
        stored = {cell: results.stored(experiment, name, cell) for cell in cells}
        rows: dict[str, Row] = {}
        for method in dict.fromkeys(cell.method for cell in stored):
            runs = {
                (cell.data, cell.split, cell.seed): result
                for cell, result in stored.items()
                if cell.method == method and result and source.metric in result.outcome.metrics
            }
            if runs:
                metrics = [result.outcome.metrics for result in runs.values()]
                sizes = [told[BYTES] for told in metrics if BYTES in told]
                spent = [told.get(SECONDS, run.cpu_seconds) for told, run in zip(metrics, runs.values(), strict=True)]
                rows[method] = Row(
                    values={key: run.outcome.metrics[source.metric] for key, run in runs.items()},
                    nbytes=mean(sizes) if sizes else None,
                    seconds=mean(spent),
                )
        if rows:
            return rows
    return {}


# -- sentences ----------------------------------------------------------------------------------------------------


def sentence(standing: Standing, board: Board) -> str:
    """What a reader takes away of a method; its numbers stand beside it."""
    return " ".join(filter(None, (_place(standing, board), _room(standing, board))))


def measured(span: Span, runs: int) -> str:
    """A mean with its interval and the number of runs."""
    if span.half is None:
        return f"{readable(span.value, 3)} ({runs} run{'s' * (runs > 1)}, no interval)"
    low, high = span.ends
    return f"{readable(span.value, 3)} ({readable(low, 3)} to {readable(high, 3)}, {runs} runs)"


def _place(standing: Standing, board: Board) -> str:
    if standing.status == "nearest":
        far = ""
        if board.floor is not None and board.floor.span.value > 0:
            far = f", {times(standing.span.value / board.floor.span.value)} as far as the reference is from itself"
        return f"Closest of {len(board.standings)}{far}."
    nearest, gap = board.standings[0].method, standing.gap
    if gap is None:
        return f"Shares no runs with {nearest}, the closest."
    if gap.half is None:
        way = "farther" if gap.value >= 0 else "closer on the runs that both have"
        return f"By {readable(abs(gap.value), 3)} {way} than {nearest}: too few runs to show a difference."
    if standing.status == "ties":
        return f"Ties with {nearest}: a difference within {board.source.margin:g}."
    if standing.status == "open":
        return f"No difference from {nearest} shown."
    low, high = (readable(end, 3) for end in gap.ends)
    return f"Farther than {nearest} by {low} to {high}."


def _room(standing: Standing, board: Board) -> str:
    """Which method is closer at no more bytes, and at no more time, by the means."""
    if standing.rank == 1:
        return ""
    closer: dict[str, str | None] = {}
    for name, words in (("nbytes", "small"), ("seconds", "fast")):
        price = getattr(standing.row, name)
        if price is not None:
            closer[words] = next(
                (
                    other.method
                    for other in board.standings[: standing.rank - 1]
                    if other.span.value != standing.span.value
                    and (paid := getattr(other.row, name)) is not None
                    and paid <= price
                ),
                None,
            )
    frontier = [words for words, method in closer.items() if method is None]
    beaten = {words: method for words, method in closer.items() if method is not None}
    told = [f"nothing as {' or as '.join(frontier)} is closer"] if frontier else []
    if len({*beaten.values()}) == 1:
        told.append(f"{next(iter(beaten.values()))} is closer and as {' and as '.join(beaten)}")
    else:
        told += [f"{method} is closer and as {words}" for words, method in beaten.items()]
    text = "; ".join(told)
    return f"By the means, {text}." if text else ""
