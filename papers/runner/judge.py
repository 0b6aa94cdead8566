"""Our numbers beside the paper's: rows with verdicts, and claims judged among our own rows."""

from collections.abc import Collection
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from dubito.metrics import Estimate, Over, PairedDifference, standard_error_over_runs

from .experiment import Cell, Claim, Metric, Outcome, Table
from .intervals import LEVEL, half_width, quantile
from .store import Results

Verdict = Literal["within 2", "better", "worse"]
#: Pairs of runs below which nothing is claimed.
FEWEST = 3


@dataclass(frozen=True, kw_only=True)
class Row:
    """One number of a table.

    Attributes:
        data: the data set.
        method: the method.
        metric: the metric's name.
        ours: mean over our runs; None where nothing was run.
        ours_se: its standard error over runs; None for fewer than two.
        n: our runs.
        paper: the paper's number; None where it has none, or was run at a larger scale than ours.
        paper_se: its standard error, of the kind of ours; None else.
        verdict: the difference in combined standard errors; None where either side has no standard error.
    """

    data: str
    method: str
    metric: str
    ours: float | None
    ours_se: float | None
    n: int
    paper: float | None
    paper_se: float | None
    verdict: Verdict | None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What our runs say to a claim on one data set.

    Attributes:
        claim: what the paper says.
        data: where it was looked at.
        n: pairs of runs.
        mean: difference of the metric, first method less second, over pairs; None without pairs.
        difference: the same with Student's interval; None for fewer pairs than make a claim.
        verdict: "holds" or "contradicted" where the interval leaves 0 on one side, else "open"; "not run" without any.
    """

    claim: Claim
    data: str
    n: int
    mean: float | None
    difference: PairedDifference | None
    verdict: Literal["holds", "contradicted", "open", "not run"]


def rows(table: Table, scale: str, results: Results, cells: Collection[Cell] | None = None) -> list[Row]:
    """The rows of a table from the results that are there.

    Args:
        table: which.
        scale: of the experiment.
        results: where results are.
        cells: those to read; None reads all.
    """
    found = outcomes(table, scale, results, cells)
    pairs = dict.fromkeys((cell.data, cell.method) for cell in _all(table, scale, cells))
    return [_row(table, scale, data, method, metric, found) for data, method in pairs for metric in table.metrics]


def outcomes(table: Table, scale: str, results: Results, cells: Collection[Cell] | None = None) -> dict[Cell, Outcome]:
    """What was run with the settings of today."""
    read = {cell: results.read(table.experiment, scale, cell) for cell in _all(table, scale, cells)}
    return {cell: outcome for cell, outcome in read.items() if outcome is not None}


def _all(table: Table, scale: str, cells: Collection[Cell] | None) -> Collection[Cell]:
    return table.experiment.scales[scale].cells if cells is None else cells


def _row(table: Table, scale: str, data: str, method: str, metric: Metric, found: dict[Cell, Outcome]) -> Row:
    values = [
        outcome.metrics[metric.name]
        for cell, outcome in found.items()
        if (cell.data, cell.method) == (data, method) and metric.name in outcome.metrics
    ]
    ours = standard_error_over_runs(values) if len(values) > 1 else None
    # A smaller run is no reproduction of the paper's number, so the number does not stand beside it.
    comparable = not table.experiment.scales[scale].smaller
    published = table.published.get((data, method, metric.name)) if comparable else None
    paper = published.estimate if published else None
    if paper is not None and paper.over is not Over.RUNS:
        paper = None
    return Row(
        data=data,
        method=method,
        metric=metric.name,
        ours=ours.value if ours else (values[0] if values else None),
        ours_se=ours.standard_error if ours else None,
        n=len(values),
        paper=published.value if published else None,
        paper_se=paper.standard_error if paper else None,
        verdict=verdict(ours, paper, lower_is_better=metric.lower_is_better) if ours and paper else None,
    )


def verdict(ours: Estimate, paper: Estimate, *, lower_is_better: bool) -> Verdict:
    """The difference in combined standard errors: within 2, better or worse.

    Args:
        ours: our mean with its standard error.
        paper: the paper's, with one of the same kind; other kinds are refused.
        lower_is_better: which way is better.
    """
    difference = ours - paper
    if abs(difference.value) <= 2 * difference.standard_error:
        return "within 2"
    return "better" if (difference.value < 0) == lower_is_better else "worse"


def judged(table: Table, scale: str, results: Results, cells: Collection[Cell] | None = None) -> list[Judged]:
    """The claims of a table, judged by paired differences among our own runs.

    Args:
        table: which.
        scale: of the experiment.
        results: where results are.
        cells: those to read; None reads all.
    """
    found = outcomes(table, scale, results, cells)
    asked = {cell.data for cell in _all(table, scale, cells)}
    lower = {metric.name: metric.lower_is_better for metric in table.metrics}
    return [
        _judged(claim, data, found, lower[claim.metric])
        for claim in table.claims
        for data in claim.data
        if data in asked
    ]


def _judged(claim: Claim, data: str, found: dict[Cell, Outcome], lower_is_better: bool) -> Judged:
    pairs = [
        (outcome.metrics[claim.metric], other.metrics[claim.metric])
        for cell, outcome in found.items()
        if (cell.data, cell.method) == (data, claim.better)
        and claim.metric in outcome.metrics
        and (other := found.get(Cell(data, claim.than, cell.split, cell.seed))) is not None
    ]
    if not pairs:
        return Judged(claim=claim, data=data, n=0, mean=None, difference=None, verdict="not run")
    differences = [first - second for first, second in pairs]
    centre = mean(differences)
    if len(pairs) < FEWEST:
        return Judged(claim=claim, data=data, n=len(pairs), mean=centre, difference=None, verdict="open")
    half = half_width(differences)
    difference = PairedDifference(
        difference=centre,
        standard_error=half / quantile(len(pairs)),
        lower=centre - half,
        upper=centre + half,
        level=LEVEL,
        over=Over.RUNS,
    )
    below, above = difference.upper < 0, difference.lower > 0
    holds, contradicted = (below, above) if lower_is_better else (above, below)
    verdict = "holds" if holds else "contradicted" if contradicted else "open"
    return Judged(claim=claim, data=data, n=len(pairs), mean=centre, difference=difference, verdict=verdict)
