"""Plant every bug in a copy of the tree, one at a time, run its test, put the line back; a table of what was caught.

    python -m tests.mutants [words ...]

Words choose bugs by parts of their room, file or sentence. The working tree is never touched. The exit code is 1 where
a bug survives, raises instead of being wrong, or cannot be planted.
"""

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("src", "tests", "docs", "benchmarks", "pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md")
#: Seconds after which a test counts as having noticed: a bug may make a loop endless.
PATIENCE = 600
CAUGHT = "caught"


@dataclass(frozen=True)
class Outcome:
    """What became of a bug.

    Attributes:
        mutant: the bug.
        verdict: "caught", "survived", "raises" or "broken".
        detail: the test that failed, or what else there is to say.
        seconds: of its tests.
    """

    mutant: Mutant
    verdict: str
    detail: str
    seconds: float


def copied(folder: Path) -> Path:
    """A copy of the tree to plant bugs in."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def tested(tree: Path, tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the tree."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "PYTHONDONTWRITEBYTECODE": "1",  # a compiled file of the same second and size would hide a bug
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def judged(mutant: Mutant, tree: Path) -> Outcome:
    """Plant a bug, run its tests, and restore the file."""
    path, start = tree / mutant.file, time.monotonic()
    text = path.read_text(encoding="utf-8")
    planted = mutant.planted(text)
    path.write_text(planted, encoding="utf-8")
    try:
        run = tested(tree, list(mutant.tests))
        verdict, detail = read(run)
    except subprocess.TimeoutExpired:
        verdict, detail = CAUGHT, f"no end after {PATIENCE} s"
    finally:
        path.write_text(text, encoding="utf-8")
    return Outcome(mutant, verdict, detail, time.monotonic() - start)


def read(run: subprocess.CompletedProcess[str]) -> tuple[str, str]:
    """Whether a bug was caught, and by which test."""
    if run.returncode == 0:
        return "survived", ""
    failed = re.search(r"^FAILED (\S+::[^\n]*?)(?: - (.*))?$", run.stdout, re.MULTILINE)
    if run.returncode != 1 or failed is None:
        return "broken", (run.stdout + run.stderr).strip()[-1500:]
    errors = re.findall(r"^E\s+([\w.]*(?:Error|Exception|Warning|Failed))\b", run.stdout, re.MULTILINE)
    others = [error for error in errors if not error.endswith(("AssertionError", "Failed"))]
    if others and "AssertionError" not in run.stdout and "E       assert" not in run.stdout:
        return "raises", f"{others[0]} in {failed[1]}"
    return CAUGHT, failed[1]


def chosen(words: list[str]) -> list[Mutant]:
    """The bugs that any of the words speaks of; all where there are none."""
    return [m for m in MUTANTS if not words or any(word in f"{m.room} {m.file} {m.sentence}" for word in words)]


def main() -> int:
    """Plant, test, tell."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of a room, file or sentence")
    parser.add_argument("--jobs", type=int, default=2, help="bugs at a time (default: 2)")
    options = parser.parse_args()
    mutants = chosen(options.words)
    if not mutants:
        print(f"no bug speaks of {options.words}; rooms are {sorted({m.room for m in MUTANTS})}")
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            trees.put(copied(Path(folder) / str(number)))
        clean = tested(Path(folder) / "0", sorted({test for mutant in mutants for test in mutant.tests}))
        if clean.returncode:
            print(f"the tests fail without any bug:\n{clean.stdout[-3000:]}")
            return 1

        def turn(mutant: Mutant) -> Outcome:
            tree = trees.get()
            try:
                outcome = judged(mutant, tree)
            finally:
                trees.put(tree)
            start = f"{outcome.verdict:9s} {outcome.seconds:5.0f} s  {mutant.room:26s}"
            print(f"{start} {mutant.sentence}  [{outcome.detail}]", flush=True)
            return outcome

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(turn, mutants))
    wrong = [outcome for outcome in outcomes if outcome.verdict != CAUGHT]
    print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} bugs caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
