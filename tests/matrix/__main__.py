"""`python -m tests.matrix oldest tests/storage -n 2`: make the environment, then run pytest in it.

Oldest: every requirement of `pyproject.toml` at its floor. Newest: every one at its latest release, but for PyTorch,
which `constraints.txt` names so that no CUDA packages are pulled in.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from .standins import stand_in

ROOT = Path(__file__).parents[2]


def floors(project: dict) -> dict[str, str]:
    """By package, the highest of the lowest versions that its requirements allow."""
    extras = project["optional-dependencies"].values()
    lowest: dict[str, str] = {}
    for requirement in (*project["dependencies"], *(line for lines in extras for line in lines)):
        match = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\d.]+).*", requirement)
        if match:
            name, version = match.groups()
            lowest[name] = max(lowest.get(name, "0"), version, key=lambda text: [*map(int, text.split("."))])
    return lowest


def make(environment: Path, oldest: bool) -> Path:
    """The environment's Python, with everything installed that the tests import."""
    python = environment / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)

    def install(*arguments: str | Path) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    if not oldest:
        install("--upgrade", "--upgrade-strategy=eager", "-c", ROOT / "constraints.txt", "-e", f"{ROOT}[dev]")
        return python
    lowest = floors(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])
    constraints = environment / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in lowest.items()))
    install("--no-deps", "-c", constraints, "torch")
    if small := stand_in(environment):
        install("--no-deps", *small)
    install("-c", constraints, "-e", f"{ROOT}[dev]")
    return python


def main() -> int:
    """Make one of the two environments and run pytest in it with the arguments that are left."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("which", choices=("oldest", "newest"))
    chosen, arguments = parser.parse_known_args()
    python = make(ROOT / f".venv-{chosen.which}", chosen.which == "oldest")
    if chosen.which == "oldest":  # what old packages say of their newer neighbours is not ours to mend
        arguments = ["-W", "default", "-W", "error::dubito.errors.DubitoWarning", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
