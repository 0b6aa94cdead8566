"""Tables for the terminal, and the ranges of numbers it is given."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table as Shown
from rich.text import Text

from .experiment import Cell, Table
from .jobs import Finished
from .judge import Judged, Row, judged, outcomes, rows
from .store import Results


def listed(tables: Mapping[str, Table], results: Results) -> list[dict[str, Any]]:
    """Every table and scale: its jobs, its estimated cost, and how much is there."""
    return [
        {
            "name": table.name,
            "scale": name,
            "jobs": len(scale.cells),
            "finished": len(outcomes(table, name, results)),
            "cpu_seconds": scale.cpu_seconds(scale.cells),
            "title": table.title,
            "paper": table.paper,
            "smaller": scale.smaller,
        }
        for table in tables.values()
        for name, scale in table.scales.items()
    ]


def listing(tables: Mapping[str, Table], results: Results) -> Shown:
    """The list for the terminal."""
    shown = Shown("name", "scale", "jobs", "finished", "estimated CPU time", "what it shows")
    for row in listed(tables, results):
        what = f"{row['title']} ({row['paper']})"
        if row["smaller"]:
            what += f"; smaller: {row['smaller']}"
        counts = str(row["jobs"]), str(row["finished"])
        shown.add_row(row["name"], row["scale"], *counts, duration(row["cpu_seconds"]), Text(what))
    return shown


def duration(seconds: float) -> str:
    """A cost in words."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} seconds"


def line(finished: Finished) -> str:
    """How a job ended."""
    if finished.outcome is None:
        return f"{finished.cell}: failed: {finished.failure}"
    values = ", ".join(f"{name} {value:.4g}" for name, value in finished.outcome.metrics.items())
    return f"{finished.cell}: {values}, {finished.spent.cpu_seconds:.1f} CPU-seconds"


def comparison(table: Table, scale: str, results: Results, cells: tuple[Cell, ...]) -> Shown:
    """Our numbers beside the paper's, as far as they were run."""
    stored = [results.stored(table.experiment, scale, cell) for cell in cells]
    finished, every = sum(map(bool, stored)), len(table.experiment.scales[scale].cells)
    caption = f"{table.paper}. {finished} finished jobs of {every}; ours ± standard error over runs"
    if early := sum(not result.recorded for result in stored if result is not None):
        caption += f"; {early} of them were stored before the settings of all fits and the commit were kept"
    if not table.experiment.scales[scale].smaller:
        caption += f"; the paper's ±: {table.plus_minus}"
    if table.differs:
        caption += f". Other than in the paper: {table.differs}"
    shown = Shown(title=Text(table.heading(scale)), caption=Text(caption))
    for heading in ("data", "method", "metric"):
        shown.add_column(heading)
    for heading in ("ours", "n", "paper", "verdict"):
        shown.add_column(heading, justify="right")
    titles = {metric.name: metric.title for metric in table.metrics}
    for row in rows(table, scale, results, cells):
        paper = _number(row.paper, row.paper_se)
        ours = _number(row.ours, row.ours_se)
        shown.add_row(row.data, row.method, Text(titles[row.metric]), ours, str(row.n), paper, _words(row))
    return shown


def claims(table: Table, scale: str, results: Results, cells: tuple[Cell, ...]) -> Shown | None:
    """The paper's claims with what our runs say to them; None where it makes none here."""
    found = judged(table, scale, results, cells)
    if not found:
        return None
    shown = Shown("claim", "data", "difference, 95 % interval", "pairs", "verdict")
    for each in found:
        shown.add_row(Text(each.claim.text), each.data, _interval(each), str(each.n), each.verdict)
    return shown


def _number(value: float | None, error: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _words(row: Row) -> str:
    if row.verdict is None or row.ours is None or row.paper is None:
        return ""
    assert row.ours_se is not None and row.paper_se is not None
    distance = (row.ours - row.paper) / (row.ours_se**2 + row.paper_se**2) ** 0.5
    return f"{row.verdict} ({distance:+.1f})"


def _interval(each: Judged) -> str:
    if each.mean is None:
        return ""
    found = each.difference
    return f"{each.mean:+.3f}" + (f", {found.lower:+.3f} to {found.upper:+.3f}" if found is not None else "")
