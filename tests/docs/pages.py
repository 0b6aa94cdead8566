"""Pages of the documentation as programs: their blocks of Python in order, and the outputs that stand below them."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch

BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```)?", re.DOTALL)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")

#: Rounding differs between processors, and a thousand steps of training make up to 16 % of it in the standard
#: deviations (float64, and inputs moved by 1e-6, on README's example); what rounding leaves alone is asked for more
#: narrowly by the promises of each page.
TOLERANCE = 0.35


def run(page: Path, *, least_outputs: int = 1) -> dict:
    """Run a page; numbers printed are those that the page shows. The names that it leaves behind."""
    space: dict = {"__name__": "tutorial"}
    outputs = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in BLOCK.finditer(page.read_text()):
            printed = io.StringIO()
            with redirect_stdout(printed):
                exec(compile(block["code"], str(page), "exec"), space)
            if block["output"] is not None:
                outputs += 1
                compare(printed.getvalue(), block["output"])
    assert outputs >= least_outputs
    return space


def compare(printed: str, shown: str) -> None:
    """The same words, and the same numbers to the tolerance."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split()
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (printed, shown)]
    assert numbers[0] == pytest.approx(numbers[1], rel=TOLERANCE, abs=1e-3), printed
