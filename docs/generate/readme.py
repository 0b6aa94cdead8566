"""Write what the reproductions say into the README: `python docs/generate/readme.py`."""

import re
from collections import Counter
from pathlib import Path

from dubito.reproduce import Results, rows, tables
from dubito.reproduce.judge import judged

ROOT = Path(__file__).parent.parent.parent
BEGIN, END = "<!-- reproductions: docs/generate/readme.py -->", "<!-- end of reproductions -->"


def summary() -> str:
    """One line per table that was run: how many numbers, how many near the paper's, what became of its claims."""
    results = Results(folder=ROOT / "results")
    lines = ["| table | what it shows | numbers | near the paper's | its claims |", "|---|---|---:|---:|---|"]
    for table in tables().values():
        for scale, settings in table.experiment.scales.items():
            found = [row for row in rows(table, scale, results, settings.cells) if row.ours is not None]
            if not found:
                continue
            judgeable = [row for row in found if row.verdict is not None]
            near = sum(row.verdict == "within 2" for row in judgeable)
            claims = Counter(
                one.verdict for one in judged(table, scale, results, settings.cells) if one.n > 1
            )
            told = ", ".join(
                f"{count} {verdict}" for verdict, count in claims.items() if verdict != "not run"
            )
            name = table.name if scale == "paper" else f"{table.name} ({scale})"
            share = f"{near} of {len(judgeable)}" if judgeable else ""
            lines.append(f"| `{name}` | {table.title} | {len(found)} | {share} | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    block = f"{BEGIN}\n{summary()}\n{END}"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: block, text, flags=re.DOTALL), encoding="utf-8")
