"""The page with every bar, its value and its history: `python -m benchmarks.page`, from the runs that are stored."""

import json
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent / "results" / "runs"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
#: Runs whose medians are shown beside the latest.
HISTORY = 5
HEAD = """# Benchmarks

`make bench` measures every bar below and writes this page. Times are CPU times of one thread; the cases of a benchmark
take turns in every round, and a value is the median over rounds of a ratio within the round ("least" is the smallest).
Differences under 10 % mean nothing. Cases without a limit stand for comparison; other libraries are measured where
they are installed. The code is in `benchmarks/`, the values of every run in `benchmarks/results/runs/`.
"""


def stored() -> list[dict[str, Any]]:
    """All runs, the latest first."""
    return [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"), reverse=True)]


def write_page() -> None:
    """Write the page from the stored runs."""
    runs = stored()
    names = dict.fromkeys(name for run in runs for name in run["benchmarks"])
    parts = [HEAD, *(section(name, runs) for name in names)]
    PAGE.write_text("\n".join(parts))


def section(name: str, runs: list[dict[str, Any]]) -> str:
    """A benchmark's table: the latest values, and the medians of the runs before."""
    measured = [(run, run["benchmarks"][name]) for run in runs if run["benchmarks"].get(name)]
    if not measured:
        return f"## {name.replace('_', ' ').capitalize()}\n\nNot measured: it failed in every run.\n"
    (latest, rows), before = measured[0], measured[1 : HISTORY + 1]
    lines = [
        f"## {name.replace('_', ' ').capitalize()}\n",
        f"Commit {latest['commit']}, {latest['date'][:10]}.\n",
        "| case | value | least | at most | met | unit | before |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, row in rows.items():
        limit = row["limit"]
        met = "" if limit is None else "yes" if row["median"] <= limit else "**no**"
        past = ", ".join(
            f"{old[case]['median']:.4g} ({run['commit']}, {run['date'][5:10]})" for run, old in before if case in old
        )
        most = "" if limit is None else f"{limit:g}"
        cells = [case, f"{row['median']:.4g}", f"{row['least']:.4g}", most, met, row["unit"], past]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_page()
