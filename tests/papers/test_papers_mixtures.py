"""Mixtures beside deep ensembles: cells on made-up rows, intervals against plain computations, the stored page."""

import math
import warnings

import pytest

from dubito.errors import DubitoWarning
from papers.mixtures import page
from papers.mixtures.tables import DATA, EXPERIMENT, SIZES, generate_cell
from papers.runner.experiment import Cell, Outcome


@pytest.mark.parametrize(
    ("data", "method"),
    [
        ("uci/concrete", "ensemble-4"),
        ("uci/concrete", "inf-4-shared"),
        ("digits", "kfac-4"),
        ("fashion-mnist", "inf-4"),
        ("imdb", "swag-4"),
        ("imdb", "inf-4"),
        ("digits", "rank1-4"),
    ],
)
def test_cells_run_on_made_up_rows(data, method):
    cell = Cell(data, method)
    with warnings.catch_warnings():  # networks after two steps rightly make some methods warn
        warnings.simplefilter("ignore", DubitoWarning)
        (outcome,) = EXPERIMENT.run([cell], [generate_cell(cell)], EXPERIMENT.settings("paper", cell), 2)
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert 0 <= outcome.metrics["auroc_total"] <= 1
    assert outcome.metrics["share_of_networks"] > 1.5  # two members in a rehearsal


def outcomes(losses: list[float], size: float) -> list[Outcome]:
    return [Outcome(metrics={"nll": loss, "share_of_networks": size}) for loss in losses]


def test_the_rival_has_as_many_bytes_and_differences_are_paired():
    rows = {f"ensemble-{size}": outcomes([1.0, 2.0, 3.0], size) for size in SIZES}
    rows |= {"inf-4": outcomes([0.9, 1.8, 2.9], 6.2), "kfac-4": outcomes([1.0, 2.0, 3.0], 40.0)}
    assert page.rival_of(rows, "inf-4") == ("ensemble-7", True)
    assert page.rival_of(rows, "kfac-4") == ("ensemble-20", False)
    mean, half = page.difference(rows, "inf-4", "ensemble-7")
    assert mean == pytest.approx(-0.4 / 3)
    spread = math.sqrt(((0.1 - 0.4 / 3) ** 2 * 2 + (0.2 - 0.4 / 3) ** 2) / 2)
    assert half == pytest.approx(4.302652729911275 * spread / math.sqrt(3))


def test_ten_splits_where_a_run_takes_a_minute_and_the_page_is_made_from_what_is_stored():
    assert {data: splits for data, splits in DATA.items() if splits == 10}.keys() == {
        "uci/concrete", "uci/energy", "digits",
    }  # fmt: skip
    assert page.PAGE.read_text() == page.page()
