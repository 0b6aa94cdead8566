"""The comparison on embedded data."""

import json

import pytest
import torch

import dubito
from dubito import ConfigError, Training
from dubito.compare import compare
from dubito.compare.task import make_task

QUICK = Training(iterations=60, batch_size=64, lr=5e-3)


def test_results_posteriors_and_ranking(tmp_path):
    seen = []
    result = compare("digits", ["map", "mean-field"], out=tmp_path, training=QUICK, report=seen.append)
    assert [row.method for row in seen] == ["map", "mean-field"]
    nll = [row.metrics["nll"] for row in result.rows]
    assert nll == sorted(nll) and result.held_out == ("8", "9")
    for row in result.rows:
        assert set(row.metrics) == {"nll", "accuracy", "brier", "ece", "ood_auroc"}
        assert row.metrics["accuracy"] > 0.8 and row.metrics["ood_auroc"] > 0.6
    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["method"] for row in saved["rows"]] == [row.method for row in result.rows]
    assert saved["settings"]["training"]["iterations"] == 60

    task = make_task("digits", None, 0)
    posterior = dubito.load(tmp_path / "map.safetensors", task.network(1))
    best = next(row for row in result.rows if row.method == "map")
    assert posterior.evaluate(task.test)["nll"] == pytest.approx(best.metrics["nll"])


def test_held_out_classes_are_never_trained_on():
    task = make_task("digits", 3, 0)
    assert task.held_out == ("7", "8", "9")
    assert task.train.targets.max() == 6 and task.test.targets.max() == 6
    assert len(task.train.targets) + len(task.test.targets) + len(task.unknown) == 1797
    with pytest.raises(ConfigError, match="at least 2 of the 10 classes must remain"):
        make_task("digits", 9, 0)
    with pytest.raises(ConfigError, match="diabetes"):
        make_task("diabetes", 1, 0)


def test_regression_is_reported_in_original_units():
    result = compare("diabetes", ["map"], training=QUICK)
    (row,) = result.rows
    task = make_task("diabetes", None, 0)
    posterior = dubito.MAP().fit(task.network(0), task.train, task.likelihood, training=QUICK)
    prediction = posterior.predict(task.test.inputs).rescaled(*task.data.target_scaling)
    truth = task.data.target_scaling.undo(task.test.targets)
    rmse = (prediction.mean - truth).square().mean().sqrt()
    assert row.metrics["rmse"] == pytest.approx(float(rmse), rel=1e-5)
    assert row.metrics["nll"] == pytest.approx(-float(prediction.log_prob(truth).mean()), rel=1e-5)


def test_one_failing_method_does_not_stop_the_others(monkeypatch):
    def broken(*_args, **_kwargs):
        raise dubito.NetworkError("no layer to treat")

    monkeypatch.setattr(dubito.MeanField, "_fit", broken)
    result = compare("wine", ["mean-field", "map"], training=QUICK)
    assert [row.method for row in result.rows] == ["map", "mean-field"]
    assert result.rows[1].failure == "no layer to treat"


def test_unknown_methods_are_named_before_work_starts():
    with pytest.raises(dubito.UnknownNameError, match="did you mean 'mean-field'"):
        compare("digits", ["map", "meanfield"])


def test_global_random_state_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    compare("wine", ["map"], training=QUICK)
    assert torch.equal(before, torch.get_rng_state())
