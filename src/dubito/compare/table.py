"""A comparison as a table."""

from rich.table import Table

from .run import Comparison, Row

#: Columns in order: metric, heading, format.
COLUMNS = (
    ("accuracy", "accuracy", "{:.2%}"),
    ("nll", "NLL", "{:.4f}"),
    ("ece", "ECE", "{:.4f}"),
    ("brier", "Brier", "{:.4f}"),
    ("rmse", "RMSE", "{:.4g}"),
    ("mae", "MAE", "{:.4g}"),
    ("crps", "CRPS", "{:.4g}"),
    ("coverage", "95 % interval holds", "{:.1%}"),
    ("ood_auroc", "OOD AUROC", "{:.4f}"),
)


def table(comparison: Comparison) -> Table:
    """The ranked rows; best negative log-likelihood first."""
    present = {name for row in comparison.rows for name in row.metrics}
    columns = [column for column in COLUMNS if column[0] in present]
    title = comparison.data
    if comparison.held_out:
        title += f" (unknown to all: {', '.join(comparison.held_out)})"
    shown = Table(title=title, caption="ranked by NLL")
    shown.add_column("method")
    for _, heading, _ in columns:
        shown.add_column(heading, justify="right")
    for heading in ("parameters", "bytes", "seconds"):
        shown.add_column(heading, justify="right")
    for row in comparison.rows:
        if row.failure is not None:
            shown.add_row(row.method, f"failed: {row.failure}", *[""] * (len(columns) + 2))
        else:
            shown.add_row(row.method, *_cells(row, columns))
    return shown


def _cells(row: Row, columns: list[tuple[str, str, str]]) -> list[str]:
    values = [form.format(row.metrics[name]) if name in row.metrics else "" for name, _, form in columns]
    return [*values, f"{row.num_parameters:,}", f"{row.nbytes:,}", f"{row.seconds:.1f}"]
