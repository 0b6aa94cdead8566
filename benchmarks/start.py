"""What a newcomer waits for: the import, and commands that compute nothing."""

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage

from .bars import Bar, Values, benchmark

SECONDS = "CPU-seconds"
OPENED = "import time, torch; t = time.process_time(); import dubito; dubito.Laplace; print(time.process_time() - t)"


def spent(code: str) -> float:
    """CPU seconds of a process that runs some code."""
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def printed(code: str) -> str:
    """What a process prints that runs some code."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def command(*words: str) -> str:
    """Code that does what `dubito <words>` does."""
    return f"import sys; sys.argv[1:] = {list(words)}; from dubito.cli import main; sys.exit(main())"


@benchmark(
    {
        "dubito --help": Bar(0.2, SECONDS),
        "dubito data list": Bar(None, SECONDS),
        "import dubito; dubito.Laplace, beyond torch": Bar(0.15, SECONDS),
    }
)
def start(rounds: int) -> Values:
    values: dict[str, list[float]] = {
        "dubito --help": [], "dubito data list": [], "import dubito; dubito.Laplace, beyond torch": [],
    }  # fmt: skip
    for number in range(rounds + 1):
        shown, listed = spent(command("--help")), spent(command("data", "list"))
        opened = float(printed(OPENED))
        if number:  # the first round reads files from the disk
            for name, value in zip(values, (shown, listed, opened), strict=True):
                values[name].append(value)
    return values
