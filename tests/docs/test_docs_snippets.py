"""Every block of Python in README and docs runs, or says that it is a fragment; every line of it fits the page."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import run

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))}
FENCE = re.compile(r"^( *)```(python[^\n]*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
FRAGMENT = 'python title="fragment"'
#: Run elsewhere: README and its copy by tests/test_readme.py, tutorials by test_docs_tutorials.py, the translations by
#: test_coming_from.py, the recipes by test_docs_trainers.py.
ELSEWHERE = {"README.md", "docs/index.md", "docs/coming-from.md", "docs/trainers.md"}
ALONE = [
    name
    for name, path in PAGES.items()
    if "```python\n" in path.read_text() and name not in ELSEWHERE and path.parent.name != "tutorials"
]
WIDTH = 88


def snippets(path: Path) -> list[tuple[str, str]]:
    """Every block of Python: what stands behind its fence, and its text."""
    return [(found[2], found[3]) for found in FENCE.finditer(path.read_text())]


@pytest.mark.parametrize("name", PAGES)
def test_blocks_are_run_or_marked_parse_and_fit(name):
    for info, text in snippets(PAGES[name]):
        assert info in ("python", FRAGMENT), f"{name}: a block is either run or marked as a fragment, got {info!r}"
        ast.parse(text)
        long = [line for line in text.splitlines() if len(line) > WIDTH]
        assert not long, f"{name}: lines of more than {WIDTH} characters do not fit the page: {long}"


@pytest.mark.parametrize("name", ALONE)
def test_pages_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(PAGES[name], least_outputs=0)


def test_every_page_of_a_method_runs_but_the_references():
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")}
    assert {Path(name).stem for name in ALONE} >= pages - {"hmc"}


def test_guides_with_python_run_but_that_of_other_devices():
    guides = {name for name, path in PAGES.items() if path.parent == DOCS and snippets(path)} - ELSEWHERE
    assert guides - set(ALONE) == {"docs/devices.md"}
