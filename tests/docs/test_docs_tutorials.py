"""Every tutorial, and the start page, runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = [DOCS / "index.md", *sorted((DOCS / "tutorials").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorials_run(page, tmp_path, monkeypatch, capsys):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    if any("plot" in block for block in blocks):
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        space: dict = {"__name__": "tutorial"}
        for block in blocks:
            exec(compile(block, str(page), "exec"), space)
    assert capsys.readouterr().out


def test_every_method_has_a_page_and_a_place_in_the_choice():
    import dubito

    choice = (DOCS / "choose.md").read_text()
    pages = " ".join(path.read_text() for path in (DOCS / "methods").glob("*.md"))
    for name, method in {**dubito.methods(), "HMC": dubito.HMC()}.items():
        assert f"`{name}`" in choice, f"docs/choose.md does not name {name}"
        settings = repr(type(method)())
        assert settings in pages, f"no page under docs/methods states today's defaults: {settings}"


@pytest.mark.parametrize("page", sorted((DOCS / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_pages_of_methods_say_what_a_reader_asks(page):
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    assert "Defaults" in headings and "When not to use it" in headings
    if page.stem != "hmc":  # which is the reference, by its textbook
        assert any(re.fullmatch(r"Where .*mathematics disagree", heading) for heading in headings)
        assert re.search(r"^\| .*(paper|symbol|draw).* \|", text, re.MULTILINE), (
            "no table from symbols to names"
        )
    assert "```python" in text
