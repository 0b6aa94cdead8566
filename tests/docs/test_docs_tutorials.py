"""Every tutorial runs as it stands, prints the numbers that it shows, and they speak for the method."""

import re
from pathlib import Path

import pytest
import torch

from tests.docs.pages import run

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.stem != "index")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorials_run_and_show_their_numbers(page, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    PROMISES[page.stem](run(page))
    assert (tmp_path / f"{page.stem}.svg").is_file()  # what docs/generate/figures.py takes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorials_begin_with_their_figure_and_stand_in_the_gallery(page):
    _, picture, *_ = page.read_text().split("\n\n")
    assert re.fullmatch(rf"!\[.+\]\(../figures/{page.stem}\.svg\)", picture)
    figure = DOCS / "figures" / f"{page.stem}.svg"
    assert figure.is_file() and figure.stat().st_size < 200_000
    assert f"({page.stem}.md)" in (DOCS / "tutorials" / "index.md").read_text()


def regression(space):
    gap = space["made"](-1.5, 1.5, 200)
    laplace, network = (space[name].evaluate(gap) for name in ("posterior", "network"))
    assert laplace["nll"] < network["nll"] and laplace["coverage"] > network["coverage"] + 0.2
    assert growing(space["posterior"].predict(places(2.5, 0.0, 10.0)).epistemic_std)


def prior(space):
    stds = [posterior.predict(space["places"]).epistemic_std for posterior in space["fits"].values()]
    assert all(growing(std) for std in stds) and growing(-torch.stack(stds)[:, 1])
    assert growing(space["by_rows"].predict(space["places"]).epistemic_std)


def own_layer(space):
    assert space["far"].function_variance.mean() > 5 * space["near"].function_variance.mean()


def segmentation(space):
    prediction, edge = space["prediction"], space["edge"]
    assert (prediction.labels == space["test"][1]).float().mean() > 0.98
    assert prediction.total[edge].mean() > 1.5 * prediction.total[~edge].mean()
    assert space["unseen"].function_variance.mean() > 10 * prediction.function_variance.mean()


def images(space):
    laplace, network = (space[name].evaluate(space["test"]) for name in ("posterior", "network"))
    assert laplace["nll"] < network["nll"] + 0.01 and laplace["accuracy"] >= network["accuracy"] - 0.01
    assert space["outside"].epistemic.mean() > 2 * space["inside"].epistemic.mean()


def own_loop(space):
    posterior = space["posterior"]
    assert posterior.evaluate((space["x"], space["y"]))["rmse"] < 0.15  # the noise is 0.1
    assert growing(posterior.predict(places(1.0, 4.0, 8.0)).epistemic_std)


def active_learning(space):
    assert space["gain"].upper < 0


def own_network(space):
    posterior, rows = space["posterior"], ((space["new_numbers"], space["new_flags"]), space["truth"])
    assert posterior.evaluate(rows)["nll"] < posterior.scaled(0).evaluate(rows)["nll"] + 0.01


def processes(space):
    x, posterior = space["x"], space["posterior"]
    near, far = (posterior.predict(factor * x).function_variance.mean() for factor in (1, 5))
    assert far > 5 * near and posterior.history[-1]["nll"] < 0.1


def text(space):
    posterior = space["posterior"]
    assert posterior.evaluate(space["test"])["accuracy"] == 1
    sentences = (space["test"][0], space["mixed"], space["strange"])
    assert growing(torch.stack([posterior.predict(words).epistemic.mean() for words in sentences]))


def places(*values):
    return torch.tensor(values)[:, None]


def growing(values):
    return bool((values.flatten().diff() > 0).all())


PROMISES = {
    "regression": regression,
    "prior": prior,
    "own-layer": own_layer,
    "segmentation": segmentation,
    "images": images,
    "own-loop": own_loop,
    "active-learning": active_learning,
    "own-network": own_network,
    "processes": processes,
    "text": text,
}


def test_every_method_has_a_page_and_a_place_in_the_choice():
    import dubito

    choice = (DOCS / "choose.md").read_text()
    pages = " ".join(path.read_text() for path in (DOCS / "methods").glob("*.md"))
    for name, method in {**dubito.methods(), "HMC": dubito.HMC(), "PBP": dubito.PBP()}.items():
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
        assert re.search(r"^\| .*(paper|symbol|draw).* \|", text, re.MULTILINE), "no table from symbols to names"
    assert "```python" in text
