"""Bars: what is measured, and the most it may be. All of them: `make bench`.

A benchmark lives in a file of this folder and returns the values of its bars, one for every round:

    @benchmark({"rank1, one row": Bar(10, "bare passes")})
    def draws_made_once(rounds: int) -> Values:
        seconds = interleaved({"bare": bare, "rank1, one row": rank1}, rounds)
        return {"rank1, one row": ratios(seconds, "rank1, one row", "bare")}

`python -m benchmarks --only draws_made_once --rounds 3` runs it alone and writes nothing. Times are CPU times of one
thread; the cases of a benchmark take turns in every round, and what is compared is a ratio of the same round. Every
benchmark runs in a process of its own. One that needs another library asks `importable` and leaves its bars out.
"""

import gc
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: What a bar was in every round.
Values = Mapping[str, Sequence[float]]
Work = Callable[[], object]
#: The commit whose fits and steps are units of bars.
BASE = "ae056a8"
ROOT = Path(__file__).parent.parent


class Bar(NamedTuple):
    """The most that a median may be.

    Attributes:
        limit: None for what is shown beside others without a limit.
        unit: in words.
    """

    limit: float | None
    unit: str


class Benchmark(NamedTuple):
    """A function that measures, and its bars."""

    name: str
    bars: Mapping[str, Bar]
    measure: Callable[[int], Values]


#: By name, in the order of definition.
BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(
    bars: Mapping[str, Bar], name: str | None = None
) -> Callable[[Callable[[int], Values]], Callable[[int], Values]]:
    """Enter a function from the number of rounds to the values of these bars, under its name or another."""

    def enter(measure: Callable[[int], Values]) -> Callable[[int], Values]:
        label = name or measure.__name__
        BENCHMARKS[label] = Benchmark(label, bars, measure)
        return measure

    return enter


def cpu_seconds(work: Work, repeats: int = 1) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats


def interleaved(
    works: Mapping[str, Work], rounds: int, *, warm: int = 2, least: float = 0.02
) -> dict[str, list[float]]:
    """CPU seconds per call of every case in every round, the cases taking turns.

    Args:
        works: by name.
        rounds: that count.
        warm: rounds before, in which memory is mapped and caches are filled.
        least: seconds that a measurement lasts at least, by repeated calls.
    """
    repeats = {}
    for name, work in works.items():
        for _ in range(warm):
            work()
        repeats[name] = max(1, round(least / max(cpu_seconds(work), 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    for _ in range(rounds):
        for name, work in works.items():
            seconds[name].append(cpu_seconds(work, repeats[name]))
    return seconds


def ratios(seconds: Values, name: str, to: str) -> list[float]:
    """A case over another, round by round."""
    return [value / unit for value, unit in zip(seconds[name], seconds[to], strict=True)]


def base_source() -> Path:
    """The package as it was when the bars were set, out of the repository's history."""
    folder = Path(tempfile.gettempdir()) / f"dubito-{BASE}"
    if not (folder / "src").exists():
        archive = subprocess.run(["git", "archive", BASE, "src"], cwd=ROOT, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
            packed.extractall(folder, filter="data")
    return folder / "src"


def importable(package: str) -> bool:
    """Whether another library is installed."""
    return importlib.util.find_spec(package) is not None


def peak_mebibytes(work: Work) -> float:
    """By how much the peak memory of some work exceeds what was held before it, by Linux's count."""
    gc.collect()
    before = _status("VmRSS")
    return highest_mebibytes(work) - before


def highest_mebibytes(work: Work) -> float:
    """The peak memory of the process during some work."""
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory so far is that of now
    work()
    return _status("VmHWM")


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


class Other:
    """A process that holds another version of the package, or another library, and measures when it is asked.

    The script defines `works`, a dict of functions by name, and may use what `benchmarks.bars` offers.

    Args:
        script: Python code.
        source: the folder that holds the other version of the package.
    """

    def __init__(self, script: str, source: Path | None = None) -> None:
        paths = [] if source is None else [str(source)]
        code = f"import sys\nsys.path[:0] = {paths}\n{script}\nfrom benchmarks.bars import serve\nserve(works)\n"
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.names: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the other process ended; its message stands above")
        return json.loads(line)

    def seconds(self, name: str, repeats: int = 1) -> float:
        """CPU seconds of one call of a work there."""
        assert self.process.stdin is not None
        print(json.dumps([name, repeats]), file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def serve(works: Mapping[str, Work]) -> None:
    """In the other process: the names, then the seconds of a work for every line of input."""
    print(json.dumps(list(works)), flush=True)
    for line in sys.stdin:
        name, repeats = json.loads(line)
        print(json.dumps(cpu_seconds(works[name], repeats)), flush=True)


def interleaved_with(other: Other, works: Mapping[str, Work], rounds: int, *, warm: int = 1) -> dict[str, list[float]]:
    """As `interleaved`, with the works of another process among them, one call each per round."""
    seconds: dict[str, list[float]] = {name: [] for name in (*other.names, *works)}
    for number in range(-warm, rounds):
        for name in seconds:
            spent = cpu_seconds(works[name]) if name in works else other.seconds(name)
            if number >= 0:
                seconds[name].append(spent)
    return seconds
