"""docs/coming-from.md on both sides: other libraries today against what is stored, and ours against that."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .bars import ROOT, Bar, Values, benchmark
from .peers import OUT

#: The environment of `make bench-env`; without it their side is left out.
PEERS = ROOT / ".venv-peers" / "bin" / "python"
TESTS = "tests/docs/test_coming_from.py"
LIBRARIES = {"laplace-torch": 1e-6, "bayesian-torch": 1e-3, "torch-uncertainty": 1e-3}


def numbers(answers: Any) -> Iterator[float]:
    """All numbers of nested answers, in order."""
    if isinstance(answers, dict | list):
        for part in answers.values() if isinstance(answers, dict) else answers:
            yield from numbers(part)
    elif isinstance(answers, int | float):
        yield float(answers)


def farthest(answers: Any, stored: Any) -> float:
    """The largest difference, relative to the stored number or to 1 where that is smaller."""
    return max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(numbers(answers), numbers(stored), strict=True))


@benchmark(
    {
        **{f"{name} today, off what is stored": Bar(limit, "relative") for name, limit in LIBRARIES.items()},
        "our half, failed": Bar(0.5, "tests"),
    }
)
def translations(rounds: int) -> Values:
    values: dict[str, list[float]] = {}
    if PEERS.is_file():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "peers.json"
            subprocess.run([PEERS, "-P", ROOT / "benchmarks" / "peers.py", out], check=True, stdout=subprocess.DEVNULL)
            today, stored = (json.loads(path.read_text(encoding="utf-8")) for path in (out, OUT))
        values = {
            f"{name} today, off what is stored": [farthest(today[name], stored[name])] * rounds for name in LIBRARIES
        }
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", TESTS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    failed = sum(line.startswith(("FAILED", "ERROR")) for line in done.stdout.splitlines())
    return {**values, "our half, failed": [float(max(failed, done.returncode != 0))] * rounds}
