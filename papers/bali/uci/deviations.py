"""How far BALI's numbers lie from the paper's on the UCI tables, in one row: `python -m papers.bali.uci.deviations`.

z is the difference over the combined standard error of both sides, with + for worse, over the cells of Tables 1 and 7.
An exact replica has a mean of 0 and a mean of |z| of √(2/π) = 0.8. The rows go into docs/methods/bali.md.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ...runner.judge import rows
from ...runner.store import Results
from .tables_1_7 import EXPERIMENT, TABLES

PAGE = Path(__file__).parents[3] / "docs/methods/bali.md"
START, END = "<!-- deviations: python -m papers.bali.uci.deviations -->", "<!-- end of deviations -->"
METHODS = (
    "bali",
    "bali-ruled",
    "noisy-kfac",
    "mean-field",
    "noisy-kfac-tuned",
    "vadam-tuned",
    "mean-field-tuned",
    "pbp",
    "mc-dropout",
)


@dataclass(frozen=True, kw_only=True)
class Deviations:
    """Of one method.

    Attributes:
        method: which.
        values: z by table and metric.
    """

    method: str
    values: dict[tuple[str, str], float]

    @property
    def row(self) -> str:
        """As a line of the table."""
        (worst, metric), largest = max(self.values.items(), key=lambda item: item[1])
        signed, absolute = mean(self.values.values()), mean(abs(value) for value in self.values.values())
        name = {"rmse": "RMSE", "log_likelihood": "log-likelihood"}[metric]
        where = f"{largest:.1f} ({worst}, {name})"
        return f"| `{self.method}` | {len(self.values)} of 14 | {signed:+.2f} | {absolute:.2f} | {where} |"


def deviations(method: str, results: Results) -> Deviations:
    """The z of every cell of both tables whose splits were all run, protein's five published ones at least.

    Args:
        method: which.
        results: where results are.
    """
    values = {}
    scale = EXPERIMENT.scales["paper"]
    for table in TABLES:
        (metric,) = table.metrics
        for row in rows(table, "paper", results):
            if row.method != method:
                continue
            splits = scale.splits_of(row.data, method)
            if row.n < (min(5, splits) if row.data == "protein" else splits):
                continue
            if row.ours is None or row.ours_se is None or row.paper is None or row.paper_se is None:
                continue
            z = (row.ours - row.paper) / (row.ours_se**2 + row.paper_se**2) ** 0.5
            values[row.data, row.metric] = z if metric.lower_is_better else -z
    return Deviations(method=method, values=values)


def summary(results: Results | None = None) -> str:
    """The table of the page."""
    found = [deviations(method, results or Results()) for method in METHODS]
    head = ["| method | cells | mean of z | mean of \\|z\\| | worst z |", "|---|---:|---:|---:|---|"]
    return "\n".join([*head, *(each.row for each in found if each.values)])


def main() -> None:
    """Write the rows into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    _, after = rest.split(END)
    PAGE.write_text(f"{before}{START}\n\n{summary()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
