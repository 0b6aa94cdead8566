"""Several splits: pooled numbers and intervals against plain NumPy, budgets and shares, what goes on and what not."""

import dataclasses
import json

import numpy as np
import pytest
import torch

import dubito
from dubito import ConfigError, Training, jobs, metrics
from dubito.compare import Settings, compare
from dubito.compare import replicates as bootstrap
from dubito.compare.evidence import JudgedPredictions, uncertainty
from dubito.compare.folder import Folder
from dubito.compare.plan import most_steps, plan
from dubito.compare.predict import predict
from dubito.compare.task import make_task
from dubito.compare.work import ended, steps_of
from dubito.prediction import RealPrediction
from dubito.report import write_page

QUICK = Training(iterations=30, batch_size=64, lr=5e-3)


def quick(data="wine", **options):
    return Settings(data=data, **{"training": QUICK, "num_samples": 4, **options})


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    out, rows, plans = tmp_path_factory.mktemp("splits"), [], []
    settings = quick(splits=(2, 0, 1))
    result = compare(
        settings, ["map", "swag"], out=out, report=rows.append, begin=lambda task, plan: plans.append(plan)
    )
    return settings, out, result, rows, plans


def test_rows_are_means_over_splits_and_intervals_are_those_of_a_plain_bootstrap(pooled):
    settings, _, result, rows, _ = pooled
    assert [(row.method, row.fits[0].split) for row in rows] == [
        (name, split) for split in (2, 0, 1) for name in ("map", "swag")
    ]
    by_split = {(row.method, row.fits[0].split): row for row in rows}
    for row in result.rows:
        assert [fit.split for fit in row.fits] == [2, 0, 1]
        for name, value in row.metrics.items():
            alone = [by_split[row.method, split].metrics[name] for split in settings.splits]
            assert value == pytest.approx(np.mean(alone), rel=1e-12)
    # The paired difference by NumPy, from the posteriors' losses: splits drawn, rows drawn within.
    losses = {}
    for name in ("map", "swag"):
        for split in settings.splits:
            task = make_task(settings.of_split(split, None))
            folder = pooled[1] if split == 2 else pooled[1] / f"split-{split}"
            posterior = dubito.load(folder / f"{name}.safetensors", task.network.build())
            prediction = posterior.predict(task.test.inputs, num_samples=4, seed=0)
            losses[name, split] = -prediction.log_prob(task.test.targets).double().numpy()
    stream, means = np.random.default_rng(0), []
    for _ in range(4000):
        draws = []
        for split in stream.choice(settings.splits, 3):
            difference = losses["swag", split] - losses["map", split]
            draws.append(difference[stream.integers(len(difference), size=len(difference))].mean())
        means.append(np.mean(draws))
    low, high = np.quantile(means, (0.025, 0.975))
    assert result.half_widths["swag"] == pytest.approx((high - low) / 2, rel=0.12)  # Monte Carlo error of quantiles
    assert result.base == "map" and result.where == "on 3 splits of 36 test rows"


def test_the_first_split_is_what_predictions_are_made_with(pooled, tmp_path):
    settings, out, *_ = pooled
    task = make_task(settings.of_split(2, None))
    inputs = task.data.input_scaling.undo(task.test.inputs)
    text = ",".join(task.data.feature_names) + "\n"
    text += "\n".join(",".join(f"{value:.9g}" for value in row) for row in inputs.tolist())
    (tmp_path / "new.csv").write_text(text)
    told = predict(out / "map.safetensors", tmp_path / "new.csv")
    posterior = dubito.load(out / "map.safetensors", task.network.build())
    expected = posterior.predict(task.test.inputs).confidence
    assert told.columns["confidence"] == pytest.approx(expected.tolist(), rel=1e-4)
    page = write_page(out).read_text()
    assert "Numbers are means over 3 splits; charts show the first of them." in page


def test_the_plan_says_what_comes_and_a_second_call_fits_only_what_is_new(pooled, monkeypatch):
    settings, out, _, _, plans = pooled
    (first,) = plans
    assert first[0] == "2 methods × 3 splits = 6 fits of at most 30 steps each"
    assert first[1].startswith("expected: about ")
    fits = []
    fitted = dubito.SWAG.fit_prepared
    monkeypatch.setattr(dubito.SWAG, "fit_prepared", lambda *args: fits.append(1) or fitted(*args))
    more = quick(splits=(2, 0, 1, 3))
    again = compare(more, ["swag"], out=out, begin=lambda task, plan: plans.append(plan))
    assert len(fits) == 1 and plans[1][0].endswith("4 fits of at most 30 steps each, 3 of them finished before")
    assert [fit.split for fit in again.rows[0].fits] == [2, 0, 1, 3]
    task = make_task(settings.of_split(2, None))
    assert most_steps(Training(epochs=3, batch_size=64), task) == 3 * -(-len(task.train.targets) // 64)
    told = plan(["map"], [], quick(budget=60.0), task, Folder(out), 2)
    assert told[1].startswith("budget: 60 seconds shared equally: 96 seconds of CPU time for the training of each fit")


def test_splits_that_data_do_not_have_are_refused_before_work():
    with pytest.raises(ConfigError, match="split of 'mnist' must be a whole number from 0 to 0, got 1"):
        compare(quick("mnist", splits=(0, 1)), ["map"])
    with pytest.raises(ConfigError, match="split of 'wine' must be a whole number from 0 to 19, got 20"):
        compare(quick("wine", splits=(20,)), ["map"])
    for splits in ((), (1, 1)):
        with pytest.raises(ConfigError, match="splits must be different numbers, at least one"):
            quick(splits=splits)


def test_a_failure_on_one_split_is_the_methods(monkeypatch):
    fitted = dubito.SWAG.fit_prepared

    def sometimes(self, prepared, training):
        if prepared.example.inputs[0, 0] == first[0, 0]:
            raise RuntimeError("no")
        return fitted(self, prepared, training)

    first = make_task(quick(splits=(1,))).train.inputs
    monkeypatch.setattr(dubito.SWAG, "fit_prepared", sometimes)
    result = compare(quick(splits=(0, 1)), ["swag", "map"])
    assert [row.failure for row in result.rows] == [None, "on split 1: RuntimeError: no"]
    assert result.verdict[0].startswith("Only map was compared")


# -- resampling --------------------------------------------------------------------------------------------------------


def judged(seed=0):
    stream = torch.Generator().manual_seed(seed)
    predictive = dubito.Categorical().build(None).predictive
    other = predictive(0.5 * torch.randn(1, 30, 3, generator=stream))
    test = predictive(torch.randn(1, 40, 3, generator=stream))
    targets = torch.randint(3, (40,), generator=stream)
    shifts = {"noise": [test[:20], other[:20]]}
    return JudgedPredictions(test=test, targets=targets, validation=test, ood={"other": other}, shifts=shifts)


def test_replicates_are_metrics_of_the_drawn_rows():
    seen = judged()
    found = bootstrap.replicates_of(seen, uncertainty, 3, 1)
    inner = torch.cat(list(bootstrap.counts(40, 3, 1)))
    outer = torch.cat(list(bootstrap.counts(30, 3, 1, "other")))
    moved = torch.cat(list(bootstrap.counts(20, 3, 1, "shift")))
    assert inner.sum(1).eq(40).all() and inner.shape == (bootstrap.NUM_REPLICATES, 40)
    probs = seen.test.probs.double()
    losses = -seen.test.log_prob(seen.targets).double().numpy()
    right = (seen.test.labels == seen.targets).double().numpy()
    confidence = seen.test.confidence.double().numpy()
    inside, outside = (uncertainty(rows).double().numpy() for rows in (seen.test, seen.ood["other"]))
    shifted = np.mean([-p.log_prob(seen.targets[:20]).double().numpy() for p in seen.shifts["noise"]], 0)
    for number in (0, 7, 999):
        rows = np.repeat(np.arange(40), inner[number].int().numpy())
        others = np.repeat(np.arange(30), outer[number].int().numpy())
        again = np.repeat(np.arange(20), moved[number].int().numpy())
        assert found["nll"][number] == pytest.approx(losses[rows].mean(), rel=1e-5)
        assert found["accuracy"][number] == pytest.approx(right[rows].mean(), rel=1e-5)
        assert found["brier"][number] == pytest.approx(metrics.brier(probs[rows], seen.targets[rows]), rel=1e-5)
        assert found["ece"][number] == pytest.approx(metrics.ece(probs[rows], seen.targets[rows]), abs=1e-5)
        assert found["shift_nll"][number] == pytest.approx(shifted[again].mean(), rel=1e-5)
        pairs = outside[others][:, None] - inside[rows][None]
        assert found["ood_auroc"][number] == pytest.approx(np.mean(pairs > 0) + np.mean(pairs == 0) / 2, abs=1e-5)
        # Rows drawn twice have equal confidence: those at the edge of the surest 32 count their mean.
        order = rows[np.argsort(-confidence[rows], kind="stable")]
        edge = confidence[order[31]]
        sure, level = order[confidence[order] > edge], order[confidence[order] == edge]
        expected = (right[sure].sum() + (32 - len(sure)) * right[level].mean()) / 32
        assert found["surest_accuracy"][number] == pytest.approx(expected, rel=1e-5)


def test_intervals_of_reals_are_resampled_too():
    test = RealPrediction(torch.zeros(1, 50, 1), torch.ones(1, 50, 1))
    targets = torch.linspace(-2, 2, 50)[:, None]
    seen = JudgedPredictions(test=test, targets=targets, validation=test, ood={}, shifts={})
    found = bootstrap.replicates_of(seen, uncertainty, 0, 0)
    assert set(found) == {"nll", "coverage_90", "width_90", "rmse", "crps"}
    inside = (targets[:, 0].abs() <= 1.6449).double()
    draws = torch.cat(list(bootstrap.counts(50, 0, 0)))
    torch.testing.assert_close(torch.tensor(found["coverage_90"]).double(), draws @ inside / 50, atol=1e-5, rtol=1e-5)
    squares = draws @ targets[:, 0].double().square() / 50
    torch.testing.assert_close(torch.tensor(found["rmse"]).double(), squares.sqrt(), atol=1e-5, rtol=1e-5)
    rows = torch.repeat_interleave(torch.arange(50), draws[7].long())
    expected = metrics.crps_gaussian(targets[rows], torch.zeros(50, 1), torch.ones(50, 1))
    assert found["crps"][7] == pytest.approx(expected, rel=1e-4)
    assert found["width_90"] == pytest.approx([2 * 1.64485] * bootstrap.NUM_REPLICATES, rel=1e-4)


def test_infinite_losses_have_no_interval():
    seen = judged()
    sure = torch.full((1, 40, 3), -torch.inf).scatter(2, (seen.targets[None, :, None] + 1) % 3, 0.0)
    wrong = dubito.Categorical().build(None).predictive(sure)
    found = bootstrap.replicates_of(dataclasses.replace(seen, test=wrong), uncertainty, 0, 0)
    assert set(found) == {"accuracy", "surest_accuracy", "ood_auroc", "shift_nll", "brier", "ece"}


def test_intervals_hold_their_value_and_those_of_calibration_are_centred():
    seen = judged()
    values = {"nll": 1.0, "ece": metrics.ece(seen.test.probs, seen.targets)}
    replicates = bootstrap.replicates_of(seen, uncertainty, 3, 1)
    standing = bootstrap.Standing({"m": values}, {"m": {name: torch.tensor(replicates[name]) for name in values}})
    intervals = standing.intervals()["m"]
    assert intervals["nll"] == pytest.approx(np.quantile(replicates["nll"], [0.025, 0.975]), rel=1e-5)
    assert intervals["ece"][0] < values["ece"] < intervals["ece"][1]
    width = np.subtract(*np.quantile(replicates["ece"], [0.975, 0.025]))
    assert intervals["ece"][1] - intervals["ece"][0] == pytest.approx(width, rel=1e-5)


def test_over_splits_the_spread_of_splits_counts():
    stream = np.random.default_rng(0)
    one = stream.normal(0, 0.01, 1000)
    assert torch.equal(bootstrap.pooled([one.tolist()], 0), torch.tensor(one))
    apart = [(centre + stream.normal(0, 0.01, 1000)).tolist() for centre in (-1.0, 1.0)]
    spread = bootstrap.pooled(apart, 0)
    # the mean of two drawn with replacement from −1 and 1: −1, 0, 0 or 1
    assert float(spread.var()) == pytest.approx(0.5, rel=0.1)
    shifted = bootstrap.pooled([[value + 0.25 for value in values] for values in apart], 0)
    torch.testing.assert_close(shifted - spread, torch.full_like(spread, 0.25))  # paired: the same draws for all


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_budgets_are_shared_equally():
    settings = quick(splits=(0, 1, 2), budget=600.0)
    assert settings.fit_seconds(10, jobs=1) == pytest.approx(0.8 * 600 / 30)
    assert settings.fit_seconds(10, jobs=2) == pytest.approx(0.8 * 1200 / 30)
    assert quick(splits=(0, 1), budget_per_method=60.0).fit_seconds(10, jobs=2) == 30
    assert quick().fit_seconds(10) is None
    with pytest.raises(ConfigError, match="give budget or budget_per_method, got both"):
        quick(budget=1.0, budget_per_method=1.0)
    with pytest.raises(ConfigError, match="budget must be"):
        quick(budget=-1.0)
    one, other = settings.of_split(1, 2.0), settings.of_split(1, 3.0)
    assert one.digest(dubito.MAP()) != other.digest(dubito.MAP())  # another share is another result
    assert one.digest(dubito.MAP()) == quick(splits=(1,), budget_per_method=2.0).digest(dubito.MAP())
    assert [jobs.Workers(count, "local", None).count for count in (3, None)] == [3, 1]


def test_a_budget_stops_fits_and_the_rows_say_so(tmp_path):
    # far more steps than time: what is stopped is judged all the same
    training = Training(iterations=10**6, batch_size=64, lr=5e-3)
    settings = quick(training=training, budget_per_method=0.4)
    result = compare(settings, ["map", "swag"], out=tmp_path)
    for row in result.rows:
        (fit,) = row.fits
        assert row.failure is None and fit.ended == "budget" and 0 < fit.steps < 10**6
        assert 0.4 <= fit.seconds < 2
    assert result.verdict[-1].startswith("2 of 2 fits were stopped by the budget")
    page = write_page(tmp_path).read_text()
    assert page.count("stopped by the budget</td>") == 2 and "stopped: by the budget" in page
    assert "Quality against training time" not in page
    assert json.loads((tmp_path / "map.json").read_text())["row"]["fits"][0]["ended"] == "budget"


def test_how_a_fit_of_several_runs_ended():
    assert ended([]) == "" and ended(["limit", "patience"]) == "patience"
    assert ended(["budget", "limit"]) == "budget"
    assert steps_of([]) == {"steps": 0, "best_step": None} and steps_of([{"step": 7}]) == {
        "steps": 7,
        "best_step": None,
    }
    assert steps_of([{"step": 9, "best_step": 2}, {"step": 4, "best_step": 3}]) == {"steps": 9, "best_step": 3}
