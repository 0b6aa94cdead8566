"""The README runs as it stands, prints what it shows, and is no longer than two screens."""

import re
from pathlib import Path

import pytest

from tests.docs.pages import BLOCK, compare, run

ROOT = Path(__file__).parent.parent


def test_the_readme_runs_and_shows_its_numbers():
    space = run(ROOT / "README.md")
    assert space["on_data"] < 0.1 < space["gap"] < space["far"]


def test_the_readme_has_two_screens_a_picture_and_links_that_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    links = set(re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", text))
    assert "docs/figures/readme.svg" in links
    assert not [link for link in sorted(links) if not (ROOT / link).is_file()]


def test_the_start_page_has_the_readmes_example():
    readme, index = (BLOCK.search((ROOT / name).read_text()) for name in ("README.md", "docs/index.md"))
    assert readme["code"] == index["code"] and readme["output"] == index["output"]


def test_shown_numbers_that_are_not_printed_are_noticed():
    compare("in the gap: ± 0.22\n", "in the gap: ± 0.20\n")
    for shown in ("in the gap: ± 0.40\n", "outside: ± 0.22\n", "in the gap: ± 0.22 0.22\n"):
        with pytest.raises(AssertionError):
            compare("in the gap: ± 0.22\n", shown)
