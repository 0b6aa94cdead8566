"""Stored notebooks are those of the generator, run again, and show what they show."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from tests.docs.pages import compare

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("matplotlib")
DOCS = Path(__file__).parent.parent.parent / "docs"
SPEC = importlib.util.spec_from_file_location("notebooks", DOCS / "generate" / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)  # pyright: ignore
SPEC.loader.exec_module(notebooks)  # pyright: ignore


def words(html: str) -> str:
    """A table's words and numbers, without its tags."""
    return re.sub(r"<style.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)


@pytest.mark.parametrize("name", notebooks.NOTEBOOKS)
def test_notebooks_show_what_they_compute(name):
    path = notebooks.FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 100_000
    stored, fresh = nbformat.read(path, 4), notebooks.written(notebooks.NOTEBOOKS[name])
    nbformat.validate(stored)
    assert [cell.source for cell in stored.cells] == [cell.source for cell in fresh.cells]
    with torch.random.fork_rng():
        notebooks.execute(fresh)
    compared = 0
    for cell, again in zip(stored.cells, fresh.cells, strict=True):
        for kept, new in zip(cell.get("outputs", []), again.get("outputs", []), strict=True):
            if kept.output_type == "stream":
                compare(new.text, kept.text)
            else:
                assert kept.data.keys() == new.data.keys()
                assert "image/png" in kept.data or words(kept.data["text/html"]).split()
            compared += 1
    assert compared >= 2


def test_the_folder_holds_no_others():
    assert {path.stem for path in notebooks.FOLDER.glob("*.ipynb")} == set(notebooks.NOTEBOOKS)
