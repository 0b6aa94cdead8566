"""Write what was run into the README: `python docs/generate/readme.py [runs/demo]`.

Always the reproductions' summary; with a comparison's folder also its table and the picture of its page, for which a
Chromium and Pillow must be installed.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
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


def reproductions() -> str:
    """One line per table that was run: how many numbers, how many near the paper's, what became of its claims."""
    results = Results()
    lines = ["| table | what it shows | numbers | near the paper's | its claims |", "|---|---|---:|---:|---|"]
    for table in tables().values():
        if table.experiment.paper == "defaults":  # no paper's: they have a page of their own
            continue
        for scale, settings in table.experiment.scales.items():
            found = [row for row in rows(table, scale, results, settings.cells) if row.ours is not None]
            if not found:
                continue
            judgeable = [row for row in found if row.verdict is not None]
            near = sum(row.verdict == "within 2" for row in judgeable)
            claims = Counter(one.verdict for one in judged(table, scale, results, settings.cells))
            told = ", ".join(
                f"{count} {verdict}" for verdict, count in claims.items() if verdict != "not run"
            )
            name = table.name if scale == "paper" else f"{table.name} ({scale})"
            share = f"{near} of {len(judgeable)}" if judgeable else ""
            lines.append(f"| `{name}` | {table.title} | {len(found)} | {share} | {told} |")
    return "\n".join(lines)


def demo_table(folder: Path) -> str:
    """The table that a comparison printed."""
    content = json.loads((folder / "results.json").read_text())
    del content["format"]
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
    """Save as it is, or with as many colours as stay below the limit; rare ones, which tell methods apart, first."""
    from PIL import Image

    image = image.convert("RGB")
    image.save(out, optimize=True)
    for colours in (256, 128):
        if out.stat().st_size < MOST_BYTES:
            return
        image.quantize(colours, method=Image.Quantize.MAXCOVERAGE).save(out, optimize=True)


def replaced(text: str, name: str, block: str) -> str:
    """The README with what stands between a pair of marks replaced."""
    begin, end = f"<!-- {name}: docs/generate/readme.py -->", f"<!-- end of {name} -->"
    return re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{block}\n{end}", text, flags=re.DOTALL)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    written = replaced(readme.read_text(encoding="utf-8"), "reproductions", reproductions())
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        written = replaced(written, "demo", demo_table(folder))
        picture(folder / "report.html", ROOT / "docs" / "report.png")
    readme.write_text(written, encoding="utf-8")
