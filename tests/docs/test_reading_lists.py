"""A paper's method reads in the files its page lists: those in which a function runs in `fit` and `predict`."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "docs" / "generate"))
import reading

ROW = re.compile(r"^\| `([\w/]+\.py)` \| (\d+) \|", re.MULTILINE)
TOTAL = re.compile(r"^(\d+) files, ([\d,]+) lines", re.MULTILINE)
REMEDY = "run `python docs/generate/reading.py`"


def section(name: str) -> str:
    """The section of the method's page that lists the files."""
    parts = re.split(r"^## ", (reading.PAGES / f"{name}.md").read_text(), flags=re.MULTILINE)
    return next(part for part in parts if part.startswith(reading.TITLE))


@pytest.mark.parametrize("name", reading.METHODS)
def test_a_page_lists_the_files_that_run(name):
    listed = {file: int(lines) for file, lines in ROW.findall(section(name))}
    files = reading.read(name)
    assert set(listed) == set(files), f"docs/methods/{name}.md lists other files than run; {REMEDY}"
    total = TOTAL.search(section(name))
    assert total and int(total[1]) == len(files), f"docs/methods/{name}.md counts files wrongly; {REMEDY}"
    assert int(total[2].replace(",", "")) == sum(listed.values())
    # Lines are stated for a reader's time: a comment more in a file does not make a page of another room untrue.
    assert {file: pytest.approx(lines, rel=0.1, abs=10) for file, lines in files.items()} == listed, REMEDY


def test_rank_1_reads_over_a_coffee():
    files = reading.read("rank1")
    # 1,400 for training and one draw after the other, and what draws all factors of a prediction at once; since then
    # the shapes that a file is checked against, factors that tracers follow, and the places where Normal weights may
    # stand beside factors.
    assert len(files) <= 8 and sum(files.values()) <= 1460, files


def test_what_is_shared_is_there_and_runs():
    assert all((reading.PACKAGE / file).is_file() for file in reading.SHARED)
    runs = frozenset[str]().union(*(reading.run(name) for name in reading.METHODS))
    assert runs >= reading.SHARED, f"no method runs these any more: {reading.SHARED - runs}"
