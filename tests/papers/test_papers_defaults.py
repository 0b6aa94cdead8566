"""The tables behind the defaults: bounds against plain computations, cells on made-up rows, and the stored page."""

import numpy as np
import pytest
import torch

from dubito import methods
from papers.defaults import page
from papers.defaults.bounds import harmed, mean_bound, replicates, table_bound
from papers.defaults.fits import METHODS, POST_HOC
from papers.defaults.tables import CHOSEN_ON, CONFIRMED_ON, EXPERIMENT, GAP_EXPERIMENT, generate_cell
from papers.runner.experiment import Cell
from papers.runner.scores import packed, unpacked


def rows(mean: float, splits: int = 4, count: int = 300, std: float = 1.0, seed: int = 0) -> list[np.ndarray]:
    stream = np.random.default_rng(seed)
    return [mean + std * stream.standard_normal(count) for _ in range(splits)]


def test_bounds_are_those_of_normal_theory():
    """Many rows in many splits: the bound of a mean is 1.645 standard errors above it."""
    drawn = rows(0.2, splits=40, count=500)
    error = np.std([split.mean() for split in drawn]) / 40**0.5
    bound = table_bound(drawn)
    assert bound.mean == pytest.approx(np.mean(drawn))
    # rows and splits are both drawn: twice the variance where splits differ by their rows alone
    assert bound.upper - bound.mean == pytest.approx(1.645 * 2**0.5 * error, rel=0.1)
    two = mean_bound({"a": rows(0.0, seed=1), "b": rows(1.0, seed=2)})
    assert two.mean == pytest.approx(0.5, abs=0.1) and two.upper > two.mean
    assert np.array_equal(replicates(drawn[:2]), replicates(drawn[:2]))


def test_only_what_is_shown_to_be_worse_is_named():
    pairs = {("bad", "t"): rows(0.5), ("fine", "t"): rows(0.0), ("noisy", "t"): rows(0.5, count=5, std=9.0)}
    assert harmed(pairs, {"t": 0.05}) == [("bad", "t")]
    assert harmed(pairs, {"t": 0.9}) == []


def test_numbers_survive_their_text():
    values = torch.tensor([0.0, -1.5, 3e-3, 700.0], dtype=torch.float64)
    assert np.allclose(unpacked(packed(values)), values.numpy(), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
@pytest.mark.parametrize("method", ["map", "mean-field", "deep-ensemble", "laplace-kfac", POST_HOC])
@pytest.mark.parametrize("data", ["digits", "uci/concrete"])
def test_cells_run_on_made_up_rows(data, method):
    cell = Cell(data, method)
    (outcome,) = EXPERIMENT.run([cell], [generate_cell(cell)], EXPERIMENT.settings("paper", cell), 3)
    differences = unpacked(outcome.details["differences"])
    assert outcome.metrics["difference"] == pytest.approx(differences.mean(), abs=2e-3)
    assert outcome.metrics["nll"] - outcome.metrics["map_nll"] == pytest.approx(outcome.metrics["difference"])
    assert 0 <= outcome.metrics["auroc_total"] <= 1


def test_every_registered_method_is_judged_on_the_tables_asked_for():
    assert set(METHODS) == {*methods(), POST_HOC}
    assert len(CHOSEN_ON) == len(CONFIRMED_ON) == 8 and not set(CHOSEN_ON) & set(CONFIRMED_ON)
    cells = EXPERIMENT.scales["paper"].cells
    assert {cell.data for cell in cells} == {*CHOSEN_ON, *CONFIRMED_ON}
    assert all(cell.data.startswith("gap/") for cell in GAP_EXPERIMENT.scales["paper"].cells)


def test_the_page_names_every_method_and_every_default():
    """What does not come from stored cells is today's."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.HEAD in text and page.protocol_section() in text and page.methods_section() in text
