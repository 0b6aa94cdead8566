"""Cells, selections, costs and digests; every paper scale rehearsed."""

import math
import warnings

import papers_examples
import pytest
from papers_examples import experiment, table

from dubito.errors import ConfigError, DubitoWarning, UnknownNameError
from dubito.metrics import Over
from papers.runner import Cell, Experiment, Published, Scale, tables


def test_cells_are_data_by_method_by_split_by_seed():
    made = experiment(splits=3, seeds=2)
    cells = made.scales["paper"].cells
    assert len(cells) == len(set(cells)) == 2 * 2 * 3 * 2
    assert cells[0] == Cell("alpha", "one", 0, 0)
    assert Cell("beta", "two", 2, 1) in cells


def test_selections_take_parts_and_refuse_what_is_not_there():
    scale = experiment().scales["paper"]
    assert scale.select(data=["beta"], splits=[1, 3], methods=["one"]) == (
        Cell("beta", "one", 1),
        Cell("beta", "one", 3),
    )
    assert scale.select() == scale.cells
    with pytest.raises(UnknownNameError, match=r"unknown data 'gamma'.*alpha, beta"):
        scale.select(data=["gamma"])
    with pytest.raises(UnknownNameError, match="unknown method 'three'"):
        scale.select(methods=["three"])
    with pytest.raises(ConfigError, match="split must be from 0 to 3 here, got 4"):
        scale.select(splits=[4])


def test_costs_add_up_over_the_selected_cells():
    scale = experiment().scales["paper"]
    assert scale.cpu_seconds(scale.cells) == 30 * 16
    assert scale.cpu_seconds(scale.select(data=["alpha"], splits=[0])) == 60


def test_a_digest_changes_with_all_that_decides_the_numbers():
    cell = Cell("alpha", "one")
    digests = {
        experiment().digest("paper", cell),
        experiment().digest("small", cell),
        experiment().digest("paper", Cell("alpha", "one", split=1)),
        experiment().digest("paper", Cell("alpha", "one", seed=1)),
        experiment(base=1.5).digest("paper", cell),
        experiment(revision=2).digest("paper", cell),
    }
    assert len(digests) == 6
    assert experiment().digest("paper", cell) == experiment(wait=0.0).digest("paper", cell)


def test_the_first_scale_is_the_one_to_run_and_unknown_ones_are_refused():
    made = experiment()
    assert made.scale(None) == "paper"
    assert made.scale("small") == "small"
    with pytest.raises(UnknownNameError, match=r"unknown scale of toy 'large'.*paper, small"):
        made.scale("large")


def test_the_paper_scale_must_be_there_and_whole():
    fields = {"paper": "toys", "name": "x", "load": None, "generate": None, "run": None}
    with pytest.raises(ConfigError, match="must have the scale 'paper'"):
        Experiment(scales={"small": Scale(variants={})}, **fields)
    with pytest.raises(ConfigError, match="nothing in it may be smaller"):
        Experiment(scales={"paper": Scale(variants={}, smaller="all")}, **fields)


def test_a_published_error_needs_its_kind():
    with pytest.raises(ConfigError, match="go together"):
        Published(1.0, 0.1)
    assert Published(1.0).estimate is None
    assert Published(1.0, 0.1, Over.RUNS).estimate is not None


def test_the_heading_says_what_is_smaller():
    assert table().heading("paper") == "toy-table: errors of toys"
    assert table().heading("small").endswith("; smaller than the paper's: 2 splits for 4")


def test_unknown_tables_list_the_known():
    with pytest.raises(UnknownNameError, match=r"unknown table or figure 'bali-table-20'.*Known: .*bali-table-1"):
        tables()["bali-table-20"]


#: All but those of the defaults, of mixtures and of most references, whose variants share their code: tests of their
#: own run some.
EXPERIMENTS = {
    table.experiment.name: table.experiment
    for table in tables().values()
    if table.experiment.paper not in ("defaults", "mixtures", "references") or table.name == "sbc"
}


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # after two steps it is not
@pytest.mark.parametrize(("name", "scale"), [(n, scale) for n, made in EXPERIMENTS.items() for scale in made.scales])
def test_every_experiment_runs_two_steps_of_its_scales_on_made_up_data(name, scale, monkeypatch):
    monkeypatch.setattr("papers.bali.uci.ivon.package", lambda: papers_examples)  # GPL, and mostly not installed
    made = EXPERIMENTS[name]
    with warnings.catch_warnings():  # networks after two steps rightly make some methods warn
        warnings.simplefilter("ignore", DubitoWarning)
        outcomes = made.rehearse(scale)
    assert outcomes.keys() == made.scales[scale].variants.keys()
    wanted = {m.name for t in tables().values() if t.experiment is made and scale in t.scales for m in t.metrics}
    for outcome in outcomes.values():
        assert wanted <= outcome.metrics.keys()
        assert all(math.isfinite(value) for value in outcome.metrics.values())


@pytest.mark.parametrize("name", tables())
def test_published_numbers_and_claims_fit_their_tables(name):
    shown = tables()[name]
    metrics = {metric.name for metric in shown.metrics}
    data = {data for data, _ in shown.experiment.scales["paper"].variants}
    if shown.published:  # a picture or a missing supplement has no numbers
        assert {metric for _, _, metric in shown.published} <= metrics  # ours may be more than the paper's
        assert data <= {data for data, _, _ in shown.published}
    for claim in shown.claims:
        assert claim.metric in metrics and claim.better != claim.than


def test_the_dropout_columns_are_the_papers():
    rmse, likelihood = tables()["bali-table-1"].published, tables()["bali-table-7"].published
    data = ("yacht", "energy", "concrete", "wine-red")
    assert [rmse[name, "mc-dropout", "rmse"].value for name in data] == [0.666, 0.539, 4.826, 0.622]
    assert [rmse[name, "mc-dropout", "rmse"].error for name in data] == [0.049, 0.014, 0.161, 0.008]
    found = [likelihood[name, "mc-dropout", "log_likelihood"].value for name in data]
    assert found == [-1.250, -1.212, -2.937, -0.928]
    # BALI's also stand beside its three variants, those of three rivals beside their tuned rows.
    assert len(rmse) == len(likelihood) == 7 * 6 - 1 + 3 * 7 + 3 * 7 - 1
