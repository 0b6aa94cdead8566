"""`python -m papers.k_tied.page` writes what was run into docs/methods/k-tied.md: tables, claims, pictures.

All is made from stored results and drawn pictures; tables that were not run are named with the command that runs them.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dubito.errors import StorageError
from dubito.storage import write_text

from .. import pictures
from ..runner.experiment import Table
from ..runner.judge import Row, judged, rows
from ..runner.store import Results
from ..runner.tables import tables

PAGE = Path(__file__).parents[2] / "docs" / "methods" / "k-tied.md"
BEGIN, END = "<!-- runs: papers/k_tied/page.py -->", "<!-- end of runs -->"
#: What a picture shows, by the number of its figure.
CAPTIONS = {
    "3": "shares of singular values of standard deviations (solid) and means (dashed), plain above, centred below",
    "4": "standard deviations of LeNet's first dense layer and their approximations of rank 1 and 2, at some weights",
    "5": "shares of singular values of a ResNet's standard deviations and means under a standard Normal prior",
    "6": "signal to noise of σ gradients of the MLP's second layer along training: ratio of means, and median",
    "7": "validation −ELBO along training, mean field and three ranks",
    "9": "shares of singular values of a ResNet's standard deviations and means under the He prior",
    "10": "mean σ of a ResNet's layers along training, annealed in the shaded part",
    "11": "standard deviations of a ResNet's kernels and their approximations of rank 1 and 2, at some weights",
}


def part(shown: Iterable[Table], results: Results, pictures: Path) -> str:
    """What was run, the pictures that were drawn, and what was not run."""
    blocks = {table.name: block(table, results) for table in shown}
    missing = [name for name, text in blocks.items() if not text]
    drawn = [
        f"![{caption}](../../papers/k_tied/pictures/figure-{number}.png)\n\nFigure {number}: {caption}."
        for number, caption in CAPTIONS.items()
        if (pictures / f"figure-{number}.png").exists()
    ]
    parts = [*(text for text in blocks.values() if text), *drawn]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        parts.append(f"Not run yet: {names}. `make runs RUNS=\"--only 'ktied-*'\"` runs them.")
    return "\n\n".join(parts)


def block(table: Table, results: Results) -> str:
    """One table in Markdown, a column for each method, with its differences from the paper; empty where not run."""
    scale = table.experiment.scale(None)
    made = [row for row in rows(table, scale, results) if row.ours is not None]
    if not made:
        return ""
    titles = {metric.name: metric.title for metric in table.metrics}
    methods = list(dict.fromkeys(row.method for row in made))
    grid: dict[tuple[str, str], dict[str, str]] = {}
    for row in made:
        grid.setdefault((row.data, titles[row.metric]), {})[row.method] = number(row)
    least, most = min(row.n for row in made), max(row.n for row in made)
    counted = "" if most == 1 else f"; {least if least == most else f'{least} to {most}'} runs, ± their standard error"
    smaller = table.experiment.scales[scale].smaller
    lines = [
        f"**`{table.name}`** ({table.paper}): {table.title}{counted}."
        + (f" Smaller than the paper's: {smaller}." if smaller else "")
        + (f" Otherwise than in the paper: {table.differs}." if table.differs else ""),
        "",
        f"| | | {' | '.join(methods)} |",
        f"|---|---|{'---:|' * len(methods)}",
        *(
            f"| {data} | {title} | {' | '.join(cells.get(method, '') for method in methods)} |"
            for (data, title), cells in grid.items()
        ),
    ]
    return "\n".join(lines) + claims(table, scale, results)


def claims(table: Table, scale: str, results: Results) -> str:
    """How many of the paper's claims hold, are contradicted, or stay open."""
    verdicts = Counter(claim.verdict for claim in judged(table, scale, results))
    if not verdicts:
        return ""
    return "\n\nThe paper's claims here: " + ", ".join(f"{count} {word}" for word, count in verdicts.items()) + "."


def number(row: Row) -> str:
    """Our number with its standard error, and the paper's where both are of one size."""
    error = "" if row.ours_se is None else f" ± {row.ours_se:.1g}"
    return spelled(row.ours) + error + ("" if row.paper is None else f" ({spelled(row.paper)})")


def spelled(value: float | None) -> str:
    """A number of four digits; counts in full."""
    assert value is not None
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def write(page: Path, text: str) -> None:
    """Put the part between its marks."""
    content = page.read_text(encoding="utf-8")
    if BEGIN not in content or END not in content:
        raise StorageError(f"{page} must have the marks {BEGIN} and {END}; put them back")
    write_text(page, re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n{text}\n{END}", content, flags=re.DOTALL))


def main() -> None:
    """Write the page from the results that are there."""
    results = Results(folder=Path(sys.argv[1])) if len(sys.argv) > 1 else Results()
    shown = (table for table in tables().values() if table.experiment.paper == "k_tied")
    write(PAGE, part(shown, results, pictures.folder("k_tied")))


if __name__ == "__main__":
    main()
