"""A comparison as a table."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from .folder import MethodRow
from .run import Comparison
from .verdict import NEGLIGIBLE
from .words import readable, size

#: Columns in order: metric, heading, format, whether lower is better (None where neither is), what it is.
COLUMNS = (
    ("accuracy", "accuracy", "{:.2%}", False, "share of test rows whose likeliest class is the true one"),
    ("rmse", "RMSE", "", True, "root mean squared error of the mean, in the target's units"),
    ("nll", "NLL", "{:.4f}", True, "mean negative log-likelihood of the test rows, in nats"),
    ("crps", "CRPS", "", True, "continuous ranked probability score, in the target's units"),
    ("coverage_90", "90 % coverage", "{:.1%}", None, "share of test rows within their 90 % interval; 90 % is ideal"),
    ("width_90", "90 % width", "", None, "mean width of 90 % intervals; narrower is better where coverage is right"),
    ("ece", "ECE", "{:.4f}", True, "expected calibration error: mean gap between confidence and accuracy, 15 bins"),
    ("brier", "Brier", "{:.4f}", True, "squared error of the probabilities, summed over classes"),
    ("surest_accuracy", "surest 80 %", "{:.2%}", False, "selective accuracy: of the 80 % most confident test rows"),
    (
        "ood_auroc", "OOD AUROC", "{:.4f}", False,
        "chance that an out-of-distribution row is more uncertain than a test row; 0.5 is guessing",
    ),
    ("shift_nll", "NLL, shifted", "{:.4f}", True, "NLL of test rows under shift, mean over all kinds and severities"),
)  # fmt: skip
#: Sets of out-of-distribution rows that are made of a table's test rows.
SETS = {
    "shuffled": "columns of the test rows, each permuted by itself: every value is usual, their combination is not",
    "far": "rows far outside of the training rows' range",
}


def cell(value: float, form: str) -> str:
    """A metric as tables show it."""
    return form.format(value) if form else readable(value)


def nll_cell(comparison: Mapping[str, Any], row: MethodRow) -> str:
    """The NLL with half the width of its difference's interval."""
    text, half = cell(row.metrics["nll"], "{:.4f}"), comparison["half_widths"].get(row.method)
    return text if half is None else f"{text} ± {readable(half, 2)}"


def caption(comparison: Mapping[str, Any]) -> str:
    """What the signs in the column of NLL say."""
    told, reach = [], f"the 95 % interval of the difference reaches 0, or it is below {NEGLIGIBLE:g}"
    if comparison["half_widths"]:
        told.append(f"±: half the 95 % interval of the paired difference to {comparison['base']} in NLL")
    if sum(comparison["indistinguishable"].values()) > 1:
        told.append(f"≈: cannot be distinguished from the best in NLL {comparison['where']} ({reach})")
    if any("stopped" in sentence for sentence in comparison["verdict"]):
        told.append("stopped: by the budget")
    return ". ".join(told)


def training_words(row: MethodRow) -> str:
    """Steps and how training ended, of all splits together."""
    steps = [fit.steps for fit in row.fits]
    if not any(steps):
        return "none"
    text = f"{max(steps):,}" if min(steps) == max(steps) else f"{min(steps):,}–{max(steps):,}"
    if stopped := sum(fit.ended == "budget" for fit in row.fits):
        return f"{text}, stopped" + (f" {stopped} of {len(steps)}" if stopped < len(steps) else "")
    return f"{text}, early" if any(fit.ended == "patience" for fit in row.fits) else text


def columns(rows: tuple[MethodRow, ...]) -> list[tuple[str, str, str, bool | None, str]]:
    """The columns for which there are numbers."""
    return [column for column in COLUMNS if any(column[0] in row.metrics for row in rows)]


def best(rows: tuple[MethodRow, ...], metric: str, lower: bool | None) -> float | None:
    """The best value of a metric; None where better has no direction, or half of the methods share it."""
    values = [row.metrics[metric] for row in rows if metric in row.metrics]
    if lower is None or len(values) < 2:
        return None
    top = min(values) if lower else max(values)
    return None if 2 * values.count(top) > len(values) else top


def title(comparison: Comparison) -> str:
    """What was compared."""
    trials = comparison.settings.get("tune")
    text = comparison.data if trials is None else f"{comparison.data}, each method tuned by {trials} trials"
    return f"{text} (classes held out: {', '.join(comparison.held_out)})" if comparison.held_out else text


def table(comparison: Comparison) -> Table:
    """One line per method, ranked; the best of each column is bold."""
    content = vars(comparison)
    level = sum(comparison.indistinguishable.values())
    shown = Table(title=Text(title(comparison)), caption=caption(content) or None, row_styles=("", "dim"))
    shown.add_column("method", no_wrap=True)
    headings = [column for column in columns(comparison.rows) if column[0] not in ("brier", "crps")]
    for heading in (*(heading for _, heading, *_ in headings), "steps", "memory", "CPU s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in comparison.rows:
        if row.failure is not None:
            shown.add_row(row.method, *[""] * (len(headings) - 1), "failed", "", "", "", style="red")
            continue
        cells = []
        for metric, _, form, lower, _ in headings:
            if metric not in row.metrics:
                cells.append("–")
                continue
            text = nll_cell(content, row) if metric == "nll" else cell(row.metrics[metric], form)
            style = "bold" if row.metrics[metric] == best(comparison.rows, metric, lower) else ""
            if metric == "nll" and level > 1:
                text += " ≈" if comparison.indistinguishable.get(row.method) else "  "
            cells.append(Text(text, style))
        shown.add_row(row.method, *cells, training_words(row), size(row.nbytes), f"{row.seconds:.1f}")
    return shown
