"""Write into the pages of the papers' methods which files a reader needs: `python docs/generate/reading.py`.

They are the files in which a function runs when the method is fitted to an MLP and predicts, beside what all methods
share. `tests/docs/test_reading_lists.py` compares the pages with what runs.
"""

import ast
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import dubito
from dubito import BALI, INF, Categorical, DubitoWarning, Implicit, KTied, Laplace, Rank1, Training
from dubito.method import Method

PACKAGE = Path(dubito.__file__).parent
PAGES = Path(__file__).parent.parent / "methods"
TITLE = "Read it in these files"
ROOMS = ("inference", "node_factors", "weight_normals", "curvature", "distributions", "layers")
#: What all methods share: the shell, the survey, kinds and forms of functions, records of passes.
SHARED = {
    f"layers/{name}.py"
    for name in (
        *("shell", "tree", "passes", "kinds", "context", "form", "linear"),
        *("layout", "uses", "dry_run", "reasons", "record", "declared", "sharded"),
    )
}
METHODS: dict[str, Method] = {
    "rank1": Rank1(),
    "implicit": Implicit(),
    "k-tied": KTied(),
    "bali": BALI(),
    "laplace": Laplace(structure=INF()),
}


@cache
def run(name: str) -> frozenset[str]:
    """The files of the package in which a function runs when the method is fitted to an MLP and predicts."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        inputs, targets = torch.randn(12, 4), torch.randint(2, (12,))
    profiler = sys.getprofile()
    sys.setprofile(note)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DubitoWarning)  # two epochs teach nothing, and it says so
            posterior = METHODS[name].fit(
                network, (inputs, targets), Categorical(), training=Training(epochs=2, batch_size=6)
            )
            posterior.predict(inputs)
    finally:
        sys.setprofile(profiler)
    paths = (Path(file) for file in files)
    return frozenset(path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE))


def read(name: str) -> dict[str, int]:
    """The files to read for the method, beside what all share, with their lines."""
    files = sorted(file for file in run(name) if file.split("/")[0] in ROOMS and file not in SHARED)
    return {file: len((PACKAGE / file).read_text().splitlines()) for file in files}


def section(name: str) -> str:
    """The section of a method's page."""
    files = read(name)
    method = METHODS[name]
    call = "Laplace(structure=INF())" if isinstance(method, Laplace) else f"{type(method).__name__}()"
    rows = [f"| `{file}` | {files[file]} | {_says(file)} |" for file in sorted(files, key=_place)]
    return (
        f"## {TITLE}\n\n{len(files)} files, {sum(files.values()):,} lines: all of `src/dubito` in which a function "
        f"runs when `{call}` is fitted to an MLP and predicts, beside what all methods share (the [shell, survey, "
        "kinds and forms](../architecture.md), the training loop, likelihoods and predictions).\n\n"
        "| file | lines | what stands there |\n|---|---:|---|\n" + "\n".join(rows) + "\n"
    )


def _place(file: str) -> tuple[int, bool, str]:
    """The method comes first, then the rooms it is built from."""
    return ROOMS.index(file.split("/")[0]), not file.endswith("method.py"), file


def _says(file: str) -> str:
    """The first sentence of a module."""
    text = ast.get_docstring(ast.parse((PACKAGE / file).read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("|", "\\|").rstrip(".")


def main() -> None:
    """Rewrite the section on each page, or put it before the defaults."""
    for name in METHODS:
        page = PAGES / f"{name}.md"
        text, fresh = page.read_text(), section(name)
        if f"## {TITLE}" in text:
            before, _, rest = text.partition(f"## {TITLE}")
            after = re.search(r"^## ", rest, re.MULTILINE)
            text = f"{before}{fresh}\n{rest[after.start() :] if after else ''}"
        else:
            text = text.replace("## Defaults", f"{fresh}\n## Defaults", 1)
        page.write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
