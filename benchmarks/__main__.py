"""Run the benchmarks: `python -m benchmarks [--only name,name] [--rounds 7]`.

Without `--only`, or with `--store`, results go to `benchmarks/results/` (a file per run) and to the page
`docs/benchmarks.md`.
"""

import argparse
import importlib
import json
import platform
import statistics
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .bars import BENCHMARKS, Benchmark
from .page import RUNS, write_page

FOLDER = Path(__file__).parent
#: Files that are no benchmarks.
OTHERS = {"__init__", "__main__", "bars", "page", "peers", "peers_evidence", "versions"}


def discover() -> dict[str, Benchmark]:
    """All benchmarks of this folder by name."""
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem not in OTHERS:
            importlib.import_module(f"benchmarks.{path.stem}")
    return BENCHMARKS


def one(name: str, rounds: int) -> dict[str, Any]:
    """The bars of a benchmark, as they are in this process."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    benchmark = discover()[name]
    rows = {}
    for case, values in benchmark.measure(rounds).items():
        bar = benchmark.bars.get(case)
        rows[case] = {
            "median": round(statistics.median(values), 4),
            "least": round(min(values), 4),
            "rounds": len(values),
            "limit": bar.limit if bar else None,
            "unit": bar.unit if bar else "",
        }
    return rows


def separate(name: str, rounds: int) -> dict[str, Any] | None:
    """The same from a process of its own; None where it failed."""
    command = [sys.executable, "-m", "benchmarks", "--one", name, "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=FOLDER.parent)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def show(name: str, rows: dict[str, Any] | None) -> None:
    """Print the bars of a benchmark."""
    if rows is None:
        print(f"{name}: FAILED", flush=True)
    for case, row in (rows or {}).items():
        limit = row["limit"]
        verdict = "" if limit is None else f"  at most {limit:g}: {'yes' if row['median'] <= limit else 'NO'}"
        value = f"{row['median']:10.3f} (least {row['least']:.3f})"
        print(f"{name:24} {case:44} {value} {row['unit']}{verdict}", flush=True)


def commit() -> str:
    """The commit of the checkout, with a plus where it was changed."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=7", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, cwd=FOLDER).stdout.strip() or "unknown"


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names, separated by commas; nothing is written without --store")
    parser.add_argument("--store", action="store_true", help="write the results of a part, too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(one(asked.one, asked.rounds)))
        return
    names = asked.only.split(",") if asked.only else list(discover())
    moment, stored = datetime.now(UTC), asked.store or not asked.only
    run: dict[str, Any] = {
        "commit": commit(), "date": moment.isoformat(timespec="minutes"), "machine": platform.machine(),
        "python": platform.python_version(), "benchmarks": {},
    }  # fmt: skip
    path = RUNS / f"{moment:%Y-%m-%d-%H%M}-{run['commit'].rstrip('+')}.json"
    for name in names:
        rows = separate(name, asked.rounds)
        show(name, rows)
        run["benchmarks"][name] = rows
        if stored:  # what was measured is kept if the run is stopped
            RUNS.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(run, indent=1) + "\n")
    if stored:
        write_page()
        print(f"results: {path}; page: docs/benchmarks.md")


if __name__ == "__main__":
    main()
