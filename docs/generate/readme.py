"""Write what was run into README, docs/reproduced.md and docs/compare.md: `python docs/generate/readme.py [runs/demo]`.

Always the reproductions; with a comparison's folder also its table and the picture of its page, for which a Chromium
and Pillow must be installed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console

from dubito.compare.folder import MethodRow
from dubito.compare.run import Comparison
from dubito.compare.table import table as shown

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))  # for the papers, which are not installed

from papers.runner import Results, judged, rows, tables  # noqa: E402

MOST_BYTES = 300_000


@dataclass(frozen=True)
class Reproduction:
    """What became of one table at one scale: numbers run, those near the paper's, and verdicts on its claims."""

    name: str
    title: str
    numbers: int
    judgeable: int
    near: int
    claims: Counter[str]

    @property
    def row(self) -> str:
        """As a line of the table."""
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in self.claims.items())
        share = f"{self.near} of {self.judgeable}" if self.judgeable else ""
        return f"| `{self.name}` | {self.title} | {self.numbers} | {share} | {verdicts} |"


def reproductions() -> list[Reproduction]:
    """Every paper's table that was run."""
    results, runs = Results(), []
    for table in tables().values():
        if table.experiment.paper in ("defaults", "mixtures", "references"):  # they have pages of their own
            continue
        for scale, settings in table.scales.items():
            cells = [row for row in rows(table, scale, results, settings.cells) if row.ours is not None]
            if not cells:
                continue
            verdicts = [row.verdict for row in cells if row.verdict is not None]
            claims = Counter(claim.verdict for claim in judged(table, scale, results, settings.cells))
            del claims["not run"]
            name = table.name if scale == "paper" else f"{table.name} ({scale})"
            near = verdicts.count("within 2")
            runs.append(Reproduction(name, table.title, len(cells), len(verdicts), near, claims))
    return runs


def summary_table(runs: list[Reproduction]) -> str:
    """One line per table that was run."""
    head = ["| table | what it shows | numbers | near the paper's | its claims |", "|---|---|---:|---:|---|"]
    return "\n".join([*head, *(run.row for run in runs)])


def sentence(runs: list[Reproduction]) -> str:
    """What was reproduced, in one sentence."""
    claims = sum((run.claims for run in runs), Counter[str]())
    near, judgeable = sum(run.near for run in runs), sum(run.judgeable for run in runs)
    return (
        f"**Reproduced**: {len(runs)} tables and figures of the papers, {sum(run.numbers for run in runs)} numbers; "
        f"{near} of the {judgeable} that a paper gives with an error lie within two standard errors of it; of its claims "
        f"{claims['holds']} hold, {claims['contradicted']} are contradicted and {claims['open']} are open "
        "([all of them](docs/reproduced.md), with what is smaller than in the paper)."
    )


def demo_table(folder: Path) -> str:
    """The table that a comparison printed."""
    content = json.loads((folder / "results.json").read_text())
    for name in ("format", "sha256"):  # the file's, not the comparison's
        content.pop(name, None)
    content["rows"] = tuple(MethodRow.from_json(row) for row in content["rows"])
    text, comparison = StringIO(), Comparison(**content)
    console = Console(file=text, width=145, highlight=False)
    for sentence in comparison.verdict:
        console.print(sentence)
    console.print(shown(comparison))
    return "```\n" + "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n```"


def picture(page: Path, out: Path) -> None:
    """The top of a page as a small PNG."""
    from PIL import Image

    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("a picture needs a browser: apt-get install chromium")
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "page.png"
        size = ["--window-size=1280,2000", "--hide-scrollbars", f"--user-data-dir={scratch}/profile"]
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={raw}", *size]
        subprocess.run([browser, *options, f"file://{page.resolve()}"], check=True, capture_output=True)
        small(Image.open(raw), out)


def small(image, out: Path) -> None:
    """Save as it is, or with as many colours as stay below the limit; rare ones, which distinguish methods, first."""
    from PIL import Image

    image = image.convert("RGB")
    image.save(out, optimize=True)
    for colours in (256, 128):
        if out.stat().st_size < MOST_BYTES:
            return
        image.quantize(colours, method=Image.Quantize.MAXCOVERAGE).save(out, optimize=True)


def replace(page: Path, name: str, block: str) -> None:
    """Put a block between its pair of marks."""
    begin, end = f"<!-- {name}: docs/generate/readme.py -->", f"<!-- end of {name} -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        sys.exit(f"{page} has no marks for {name}")
    written = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{block}\n{end}", text, flags=re.DOTALL)
    page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    runs = reproductions()
    replace(ROOT / "README.md", "reproductions", sentence(runs))
    replace(ROOT / "docs" / "reproduced.md", "summary", summary_table(runs))
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        replace(ROOT / "docs" / "compare.md", "demo", demo_table(folder))
        picture(folder / "report.html", ROOT / "docs" / "report.png")
