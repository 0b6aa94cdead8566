"""The README runs as it stands, each block continuing the ones before, and prints what it shows."""

from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, compare, run

ROOT = Path(__file__).parent.parent


def test_the_readme_runs_and_shows_its_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = run(ROOT / "README.md")
    assert type(space["plain"]) is type(space["net"])


def test_the_start_page_has_the_readmes_example():
    readme, index = (BLOCK.search((ROOT / name).read_text()) for name in ("README.md", "docs/index.md"))
    assert readme["code"] == index["code"] and readme["output"] == index["output"]


def test_shown_numbers_that_are_not_printed_are_noticed():
    compare("in the gap: ± 0.22\n", "in the gap: ± 0.20\n")
    for shown in ("in the gap: ± 0.40\n", "outside: ± 0.22\n", "in the gap: ± 0.22 0.22\n"):
        with pytest.raises(AssertionError):
            compare("in the gap: ± 0.22\n", shown)
