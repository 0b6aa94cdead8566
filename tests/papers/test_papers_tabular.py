"""Tables against other tools: scores against closed forms, cells on made-up rows, the page on planted results."""

import math
import warnings

import numpy as np
import pytest
import torch

from dubito.errors import ConfigError, DubitoWarning
from dubito.metrics import crps_gaussian
from papers.references import tabular_page, tabular_tools
from papers.references.tabular import CLASSES, OURS, REALS, TABLES, generate_cell
from papers.references.tabular_scores import (
    LEVELS,
    Classes,
    Reals,
    crps_of_quantiles,
    of_classes,
    of_normal,
    of_reals,
    smallest_sets,
)
from papers.runner.experiment import Cell, Outcome
from papers.runner.judge import rows
from papers.runner.store import Results, Spent

EXPERIMENTS = {table.name: table.experiment for table in TABLES}
NORMAL = torch.distributions.Normal(torch.tensor(0.3, dtype=torch.float64), 1.7)


@pytest.mark.parametrize("target", [-4.0, 0.3, 1.1, 6.0])
def test_the_crps_of_many_quantiles_is_that_of_the_normal(target):
    levels = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    targets = torch.tensor([target], dtype=torch.float64)
    score = crps_of_quantiles(targets, NORMAL.icdf(levels).unsqueeze(1))
    exact = crps_gaussian(targets, torch.tensor([0.3], dtype=torch.float64), torch.tensor([1.7]))
    assert float(score) == pytest.approx(exact, rel=1e-3)


def test_the_crps_of_ten_quantiles_is_that_of_ten_points_and_a_little_above_the_normals():
    quantiles = NORMAL.icdf(torch.tensor(LEVELS, dtype=torch.float64))
    target = torch.tensor([1.1], dtype=torch.float64)
    # E|X − y| − ½ E|X − X'| of the ten points
    spread = (quantiles[:, None] - quantiles).abs().mean() / 2
    points = float((quantiles - target).abs().mean() - spread)
    assert float(crps_of_quantiles(target, quantiles.unsqueeze(1))) == pytest.approx(points)
    grid = NORMAL.icdf((torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000)
    mean = float(crps_of_quantiles(grid, quantiles.unsqueeze(1).expand(-1, len(grid))).mean())
    # the expected CRPS of a Normal under itself is σ/√π; the page says by how much ten points exceed it
    assert mean / (1.7 / math.sqrt(math.pi)) == pytest.approx(1.007, abs=5e-4)


def test_a_normal_is_scored_by_its_closed_forms():
    mean, std = torch.tensor([0.0, 1.0], dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64)
    targets = torch.tensor([0.5, 9.0], dtype=torch.float64)
    wide = of_normal(mean, 3 * std)
    metrics = of_reals(of_normal(mean, std), wide, targets)
    law = torch.distributions.Normal(mean, std)
    assert metrics["nll"] == pytest.approx(-float(law.log_prob(targets).mean()))
    assert metrics["crps"] == pytest.approx(crps_gaussian(targets, mean, std))
    assert metrics["coverage_90"] == 0.5 and metrics["auroc"] == 1.0  # 9 is four standard deviations away
    assert metrics["width_90"] == pytest.approx(2 * 1.6448536 * 1.5, rel=1e-6)
    assert metrics["rmse"] == pytest.approx(math.sqrt((0.25 + 64) / 2))
    alone = of_reals(Reals(of_normal(mean, std).quantiles), wide, targets)
    assert "nll" not in alone and alone["crps"] == alone["crps_quantiles"] == metrics["crps_quantiles"]


def test_sets_of_classes_are_the_smallest_that_hold_the_level():
    probs = torch.tensor([[0.05, 0.92, 0.03], [0.5, 0.1, 0.4], [0.3, 0.3, 0.4]], dtype=torch.float64)
    assert smallest_sets(probs).tolist() == [[False, True, False], [True, False, True], [True, True, True]]
    answer, even = Classes(probs), Classes(torch.full((3, 3), 1 / 3, dtype=torch.float64))
    metrics = of_classes(answer, even, torch.tensor([1, 1, 2]))
    assert metrics["coverage_90"] == pytest.approx(2 / 3) and metrics["set_size_90"] == 2
    assert metrics["nll"] == pytest.approx(-(math.log(0.92) + math.log(0.1) + math.log(0.4)) / 3)
    assert metrics["accuracy"] == pytest.approx(2 / 3) and metrics["auroc"] == 1.0
    named = Classes(probs, torch.zeros(3, 3, dtype=torch.bool))
    assert of_classes(named, even, torch.tensor([1, 1, 2]))["coverage_90"] == 0


CELLS = [
    *(("uci/yacht", name) for name in ("boosting", "boosting-mapie", "gaussian-process", "laplace-inf", "rank1")),
    *(("german-credit", name) for name in ("boosting", "boosting-mapie", "gaussian-process", "deep-ensemble")),
    ("uci/yacht", "ngboost"),
    ("german-credit", "ngboost"),
]


@pytest.mark.parametrize(("data", "method"), CELLS)
def test_cells_run_on_made_up_rows(data, method):
    if method == "ngboost":
        try:
            tabular_tools.peers_python()
        except ConfigError as error:
            pytest.skip(str(error))
    experiment = EXPERIMENTS["tabular-reals" if data in REALS else "tabular-classes"]
    cell = Cell(data, method)
    with warnings.catch_warnings():  # networks after two steps rightly make some methods warn
        warnings.simplefilter("ignore", DubitoWarning)
        (outcome,) = experiment.run([cell], [generate_cell(cell)], experiment.settings("paper", cell), 2)
    wanted = {metric.name for table in TABLES if table.experiment is experiment for metric in table.metrics}
    if data in REALS and method.startswith("boosting"):
        wanted -= {"nll"}
    assert wanted <= outcome.metrics.keys()
    assert all(math.isfinite(value) for value in outcome.metrics.values())
    assert outcome.metrics["bytes"] > 1000 and outcome.details["train_rows"] == 150


def test_conformal_quantiles_are_moved_by_the_scores_of_the_watched_rows():
    cell = Cell("uci/yacht", "boosting-mapie")
    ground, settings = generate_cell(cell), EXPERIMENTS["tabular-reals"].settings("paper", cell)
    answer = tabular_tools.answered(cell, ground, settings, 2)
    assert isinstance(answer.test, Reals)
    fitted = tabular_tools.boosted(cell, ground, settings, 2)
    inputs, targets = fitted.watched
    ends = []
    for level, model in zip(LEVELS, fitted.models, strict=True):
        sign = 1 if level < 0.5 else -1
        scores = np.sort(sign * (model.predict(inputs) - targets))
        rank = math.ceil((1 - min(level, 1 - level)) * (len(scores) + 1))  # [Romano et al. 2019], each end alone
        ends.append(model.predict(ground.test_inputs) - sign * scores[rank - 1])
    expected = np.sort(np.stack(ends), axis=0)
    assert answer.test.quantiles.numpy() == pytest.approx(expected)


def test_without_the_peers_environment_ngboost_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv(tabular_tools.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"no .*nowhere.*`make bench-env`, or name another by DUBITO_PEERS"):
        tabular_tools.peers_python()


def test_a_process_stands_only_where_rows_are_few_and_every_table_has_all_methods():
    taken = {
        data
        for made in EXPERIMENTS.values()
        for data, name in made.scales["paper"].variants
        if name == "gaussian-process"
    }
    assert taken == {
        "uci/yacht", "uci/boston", "uci/energy", "uci/concrete", "uci/wine-red", "german-credit",
    }  # fmt: skip
    assert len(REALS) + len(CLASSES) == 15 and len(OURS) == 8
    for made in EXPERIMENTS.values():
        for data in {data for data, _ in made.scales["paper"].variants}:
            assert {*OURS, "boosting", "boosting-mapie", "ngboost"} <= {
                name for other, name in made.scales["paper"].variants if other == data
            }


# -- the page -----------------------------------------------------------------------------------------------------


def outcome(crps: float) -> Outcome:
    names = ("crps", "crps_quantiles", "rmse", "coverage_90", "width_90", "auroc", "cpu_seconds", "bytes")
    return Outcome(metrics=dict.fromkeys(names, crps), details={"train_rows": 90, "test_rows": 10})


def test_differences_are_paired_and_their_variance_is_that_of_overlapping_splits():
    planted = {
        "boosting": {0: outcome(1.0), 1: outcome(2.0), 2: outcome(3.0)},
        "map": {0: outcome(0.9), 1: outcome(1.8), 2: outcome(2.9), 4: outcome(50.0)},
        "swag": {0: outcome(0.5)},
    }
    pair = tabular_page.difference(planted, "map", "boosting", "crps")
    assert pair is not None
    centre, half = pair
    assert centre == pytest.approx(-0.4 / 3)
    spread = ((0.1 - 0.4 / 3) ** 2 * 2 + (0.2 - 0.4 / 3) ** 2) / 2
    assert half == pytest.approx(4.302653 * math.sqrt((1 / 3 + 10 / 90) * spread))
    assert tabular_page.difference(planted, "swag", "boosting", "crps") is None


def test_losses_are_shown_as_losses(tmp_path):
    results, experiment = Results(folder=tmp_path), EXPERIMENTS["tabular-reals"]
    spent = Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=(0,))
    shifts = {"boosting": 0.0, "map": 0.3, "swag": -0.3, "rank1": 0.0}
    for name, shift in shifts.items():
        for split in range(3):
            noise = (-1) ** split * (0.1 if name == "rank1" else 0.001 * (name != "boosting"))
            results.write(experiment, "paper", Cell("ames", name, split), outcome(1 + shift + noise), spent)
    lines = tabular_page.page(results).splitlines()
    verdicts = {
        name: next(line for line in lines if line.startswith(f"| {name} |")) for name in shifts if name != "boosting"
    }
    assert verdicts["map"].split(" | ")[2:6] == ["–", "–", "–", "ames"]
    assert verdicts["swag"].split(" | ")[2:6] == ["ames", "–", "–", "–"]
    assert verdicts["rank1"].split(" | ")[2:6] == ["–", "–", "ames", "–"]
    assert any(line.startswith("| boosting | 1.000 | – |") for line in lines)  # no density, no NLL
    row = next(r for r in rows(TABLES[0], "paper", results) if (r.data, r.method, r.metric) == ("ames", "map", "nll"))
    assert row.ours is None and row.n == 0


def test_the_page_without_results_says_what_to_run(tmp_path):
    text = tabular_page.page(Results(folder=tmp_path))
    assert "make runs RUNS=\"--only 'tabular-reals *'\"" in text and "tabular-classes *" in text
    assert "|---|" not in text
