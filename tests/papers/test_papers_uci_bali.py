"""BALI on the UCI tables: original units, settings of the paper's Table 4, splits side by side."""

import math
from dataclasses import replace

import numpy
import pytest
import torch

from dubito.data import Part
from dubito.errors import ConfigError, TrainingError
from dubito.inference.bali import BALI
from papers.bali.uci import deviations
from papers.bali.uci.choice import ENGINES, Choice, apart, ranking, run_choice, scored
from papers.bali.uci.columns import SHAPES
from papers.bali.uci.layerwise import LayerwiseRun, run_layerwise
from papers.bali.uci.tables_1_7 import EXPERIMENT, later_split
from papers.runner.experiment import Cell, Outcome
from papers.runner.store import Results, Spent


def part(rows: int, seed: int) -> Part:
    stream = torch.Generator().manual_seed(seed)
    inputs = 5 + 2 * torch.randn(rows, 3, generator=stream, dtype=torch.float64)
    noise = 0.5 * torch.randn(rows, 1, generator=stream, dtype=torch.float64)
    return Part(inputs, 100 + 10 * inputs[:, :1] + noise)


def test_numbers_are_in_original_units():
    """Nearly linear data: the error is near the noise of 0.5, and the likelihood near that of such a Gaussian."""
    settings = LayerwiseRun(
        method=BALI(effective_data=200.0, output_floor=1e-5, initial_std=1.0),
        iterations=400,
        batch_size=200,
        hidden=20,
        num_samples=64,
    )
    trains, tests = [part(200, 0), part(200, 1)], [part(60, 2), part(60, 3)]
    outcomes = run_layerwise(trains, tests, settings, seeds_of_parts=[1, 2])
    for outcome in outcomes:
        rmse = outcome.metrics["rmse"]
        assert 0.35 < rmse < 1.5
        best = -math.log(rmse) - 0.5 * math.log(2 * math.pi) - 0.5  # of a Gaussian with just this error
        assert best - 0.6 < outcome.metrics["log_likelihood"] < best + 0.2
        assert 0.2 < outcome.details["noise"] < 2
    assert outcomes[0].metrics != outcomes[1].metrics


def test_settings_are_those_of_table_4():
    scale = EXPERIMENT.scales["paper"]
    kin8nm, protein, yacht = (scale.variants[data, "bali"].settings for data in ("kin8nm", "protein", "yacht"))
    assert (kin8nm.iterations, protein.iterations) == (20_000, 30_000)
    assert kin8nm.method.effective_data == pytest.approx(0.9 * 8192 / 4, abs=1)
    assert yacht.method.effective_data == 277
    assert (protein.method.update_rate, protein.method.prior_scale, protein.hidden) == (0.1, 20.0, 100)
    assert (yacht.method.update_rate, yacht.method.prior_scale, yacht.hidden) == (0.2, 40.0, 50)
    assert sum(cell.method == "bali" for cell in scale.cells) == 7 * 20
    assert Cell("protein", "bali", 19) in scale.cells and Cell("protein", "bali", 20) not in scale.cells
    long = scale.variants["concrete", "bali-long"].settings
    assert (long.method.step_size, long.iterations, long.method.effective_data) == (1.0, 60_000, 927)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="iterations"):
        LayerwiseRun(method=BALI(), iterations=0)


def test_every_table_has_the_same_rule_for_step_size_and_effective_data():
    variants = EXPERIMENT.scales["paper"].variants
    for data, (rows, _) in SHAPES.items():
        choice = variants[data, "bali-ruled"].settings
        grid = [(run.method.step_size, run.method.effective_data / round(0.9 * rows)) for run in choice.candidates]
        assert grid == [(0.3, 0.25), (0.3, 1.0), (1.0, 0.25), (1.0, 1.0)]
        assert (choice.trial_iterations, choice.kept_back) == (3000, 0.1)


def test_a_split_chooses_by_rows_kept_back_and_trains_on_all():
    """With almost no effective data the prior rules: the other candidate is chosen, and run as if it stood alone."""
    good = LayerwiseRun(
        method=BALI(effective_data=200.0, output_floor=1e-5, initial_std=1.0),
        iterations=300,
        batch_size=200,
        hidden=20,
        num_samples=16,
    )
    bad = replace(good, method=replace(good.method, effective_data=1.0))
    trains, tests = [part(200, 0), part(200, 1)], [part(60, 2), part(60, 3)]
    choice = Choice(candidates=(bad, good), trial_iterations=200)
    outcomes = run_choice(trains, tests, choice, seeds_of_parts=[1, 2])
    alone = run_layerwise(trains, tests, good, seeds_of_parts=[1, 2])
    for outcome, expected in zip(outcomes, alone, strict=True):
        assert outcome.metrics == expected.metrics
        assert outcome.details["chosen"]["method"]["effective_data"] == 200.0
        assert outcome.details["kept_back"][0] < outcome.details["kept_back"][1]


def test_rows_kept_back_are_rows_of_training_and_train_nothing():
    rows = Part(torch.arange(50.0)[:, None], torch.arange(50.0)[:, None])
    fitting, judging = apart(rows, 0.1, seed=3)
    assert len(judging.targets) == 5
    assert sorted(torch.cat([fitting.targets, judging.targets]).flatten().tolist()) == rows.targets.flatten().tolist()
    assert not torch.equal(judging.targets, apart(rows, 0.1, seed=4)[1].targets)


def test_candidates_that_fail_are_not_chosen():
    def engine(trains, tests, run, **options):
        if run == "fails":
            raise TrainingError("no number")
        return [Outcome(metrics={"log_likelihood": value}) for value in (math.nan, -2.0)]

    rows = [part(20, 0), part(20, 1)]
    assert scored(engine, rows, rows, "fails") == [-math.inf, -math.inf]
    assert scored(engine, rows, rows, "runs") == [-math.inf, -2.0]


def test_splits_that_choose_together_take_the_best_mean_and_others_their_own():
    scores = [[-1.0, -5.0, -math.inf], [-2.0, -2.0, -2.0], [-math.inf, -1.0, -1.5]]
    assert ranking(scores, shared=False) == [[0, 1], [2, 1, 0], [2, 1]]
    assert ranking(scores, shared=True) == [[1], [1], [1]]  # the only one that ran on all


def test_where_the_whole_run_fails_the_next_candidate_is_taken(monkeypatch):
    good = LayerwiseRun(method=BALI(), iterations=20)
    bad = replace(good, iterations=30)

    def engine(trains, tests, run, **options):
        if run.iterations == 30:
            raise TrainingError("no number")
        return [Outcome(metrics={"log_likelihood": float(run.hidden)}) for _ in trains]

    monkeypatch.setitem(ENGINES, LayerwiseRun, engine)
    rows = [part(20, 0), part(20, 1)]
    choice = Choice(candidates=(good, replace(bad, hidden=60)), trial_iterations=5)
    for outcome in run_choice(rows, rows, choice, seeds_of_parts=[1, 2]):
        assert outcome.details["kept_back"] == [50.0, 60.0] and outcome.details["chosen"]["iterations"] == 20
    with pytest.raises(TrainingError, match="rates of the grid"):
        run_choice(rows, rows, Choice(candidates=(bad,), trial_iterations=5), seeds_of_parts=[1, 2])


def test_what_costs_most_is_run_on_fewer_splits():
    cells = EXPERIMENT.scales["paper"].cells
    count = {key: sum((cell.data, cell.method) == key for cell in cells) for key in EXPERIMENT.scales["paper"].variants}
    assert count["protein", "bali-ruled"] == count["power", "mc-dropout"] == count["power", "pbp"] == 20
    assert count["protein", "mc-dropout"] == count["protein", "pbp"] == 5
    assert {number for (_, method), number in count.items() if method.endswith("-tuned")} == {10}


def test_splits_beyond_the_published_ones_follow_their_rule():
    """By the rule as it stands with the published splits: RandomState(1), its i-th choice of all rows."""
    inputs = torch.arange(40.0, dtype=torch.float64)[:, None]
    stream = numpy.random.RandomState(1)
    orders = [torch.from_numpy(stream.choice(range(40), 40, replace=False)) for _ in range(8)]
    splits = [(Part(inputs[o[:36]], inputs[o[:36]]), Part(inputs[o[36:]], inputs[o[36:]])) for o in orders]
    train, test = later_split(*splits[0], 7)
    assert torch.equal(train.inputs, splits[7][0].inputs) and torch.equal(test.targets, splits[7][1].targets)


def test_deviations_are_counted_in_combined_standard_errors_with_plus_for_worse(tmp_path):
    """Made-up results of 20 splits, 0.1 either side of a number that is worse than the paper's."""
    results, settings = Results(folder=tmp_path), Spent(cpu_seconds=1.0, peak_memory_bytes=None, together=())
    for split in range(20):
        noise = 0.1 if split % 2 else -0.1
        outcome = Outcome(metrics={"rmse": 0.742 + noise, "log_likelihood": -0.545 + noise})
        results.write(EXPERIMENT, "paper", Cell("yacht", "bali", split), outcome, settings)
    found = deviations.deviations("bali", results).values
    error = 0.1 / 19**0.5  # of our mean; the paper's 0.642 ± 0.042 and -0.745 ± 0.033
    assert found["yacht", "rmse"] == pytest.approx(0.1 / math.hypot(error, 0.042))
    assert found["yacht", "log_likelihood"] == pytest.approx(-0.2 / math.hypot(error, 0.033))
    assert len(found) == 2


def test_the_page_has_the_deviations_of_what_was_run():
    assert deviations.summary() in deviations.PAGE.read_text(encoding="utf-8")
