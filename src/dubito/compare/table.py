"""A comparison as a table."""

from rich.table import Table

from .folder import MethodRow
from .run import Comparison
from .words import EQUAL

#: Columns in order: metric, heading, format, whether lower is better; None where neither is.
COLUMNS = (
    ("accuracy", "accuracy", "{:.2%}", False),
    ("rmse", "RMSE", "{:.4g}", True),
    ("mae", "MAE", "{:.4g}", True),
    ("nll", "NLL", "{:.4f}", True),
    ("crps", "CRPS", "{:.4g}", True),
    ("coverage", "95 % coverage", "{:.1%}", None),
    ("ece", "ECE", "{:.4f}", True),
    ("brier", "Brier", "{:.4f}", True),
    ("ood_auroc", "OOD AUROC", "{:.4f}", False),
    ("shift_nll", "NLL, shifted", "{:.4f}", True),
)


def columns(rows: tuple[MethodRow, ...]) -> list[tuple[str, str, str, bool | None]]:
    """The columns for which there are numbers."""
    return [column for column in COLUMNS if any(column[0] in row.metrics for row in rows)]


def best(rows: tuple[MethodRow, ...], metric: str, lower: bool | None) -> float | None:
    """The best value of a metric; None where better has no direction."""
    values = [row.metrics[metric] for row in rows if metric in row.metrics]
    if lower is None or len(values) < 2:
        return None
    return min(values) if lower else max(values)


def title(comparison: Comparison) -> str:
    """What was compared."""
    if comparison.held_out:
        return f"{comparison.data} (unknown to all: {', '.join(comparison.held_out)})"
    return comparison.data


def table(comparison: Comparison) -> Table:
    """One line per method, ranked; the best of each column is bold."""
    level = sum(comparison.as_good.values())
    caption = EQUAL if level > 1 else None
    shown = Table(title=title(comparison), caption=caption, row_styles=("", "dim"))
    shown.add_column("method")
    headings = columns(comparison.rows)
    for _, heading, *_ in headings:
        shown.add_column(heading, justify="right")
    for heading in ("bytes", "seconds"):
        shown.add_column(heading, justify="right")
    for row in comparison.rows:
        if row.failure is not None:
            shown.add_row(row.method, *[""] * (len(headings) - 1), "failed", "", "", style="red")
            continue
        cells = []
        for metric, _, form, lower in headings:
            text = form.format(row.metrics[metric])
            if row.metrics[metric] == best(comparison.rows, metric, lower):
                text = f"[bold]{text}[/bold]"
            if metric == "nll" and level > 1:
                text += " ≈" if comparison.as_good.get(row.method) else "  "
            cells.append(text)
        shown.add_row(row.method, *cells, f"{row.nbytes:,}", f"{row.seconds:.1f}")
    return shown
