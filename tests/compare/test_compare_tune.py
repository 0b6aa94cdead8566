"""The search for settings: the same trials whatever was interrupted or ran at a time, and never a look at test rows."""

import importlib
import math
from dataclasses import fields, replace

import pytest

from dubito import ConfigError, Training
from dubito.compare import Settings, compare, tune
from dubito.compare.task import make_task
from dubito.jobs import Workers
from dubito.registry import methods

QUICK = Training(iterations=20, batch_size=64, lr=5e-3)
HERE = Workers(None, "local", None)


def quick(trials, **options):
    options = {"training": QUICK, **options}
    return Settings(data="wine", num_samples=4, tune=trials, **options)


def searched(path, names, settings, workers=HERE, say=lambda text: None):
    return tune.search([(name, settings, path) for name in names], workers, 1, say)


def trials_of(path, name, settings):
    optuna = pytest.importorskip("optuna")
    study = tune._study(optuna, name, settings, path)
    return [(trial.number, trial.params, trial.value, trial.state.name) for trial in study.trials]


def quadratic(name, settings, path, threads):
    """Least at a prior of 0.5 and a rate of 0.003; the method as it is lies far away."""
    values = {"prior_std": 5.0, "lr": 2e-4, **dict(settings.overrides)}
    return math.log(values["prior_std"] / 0.5) ** 2 + math.log(values["lr"] / 0.003) ** 2


def test_every_method_has_two_or_three_settings_that_exist():
    known = methods()
    assert tune.SPACES.keys() == known.keys()
    of_training = {item.name for item in fields(Training)} & {item.name for item in fields(type(Training.auto()))}
    for name, space in tune.SPACES.items():
        assert 2 <= len(space) <= 3
        assert space.keys() <= {item.name for item in fields(known[name])} | of_training
        for place in (0, 1):
            values = tuple((key, ends[place]) for key, ends in space.items())
            method, training = replace(quick(1), overrides=values).applied(known[name])
            assert method != known[name] and type(method) is type(known[name])
            assert (training != QUICK) == ("lr" in space)


def test_the_best_of_a_made_up_loss_is_found(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "validation_loss", quadratic)
    (chosen,) = searched(tmp_path, ["map"], quick(40))
    values = dict(chosen.overrides)
    assert values["prior_std"] == pytest.approx(0.5, rel=0.3) and values["lr"] == pytest.approx(0.003, rel=0.3)
    trials = trials_of(tmp_path, "map", quick(40))
    assert trials[0][1] == {} and len(trials) == 40
    assert quadratic("map", chosen, tmp_path, 1) == min(loss for _, _, loss, _ in trials)
    # later trials are nearer than those drawn from the whole space
    early, late = (sorted(loss for _, _, loss, _ in part)[4] for part in (trials[1:9], trials[-8:]))
    assert late < early


def test_an_interrupted_search_makes_the_same_trials(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "validation_loss", quadratic)
    whole = searched(tmp_path / "whole", ["map", "swa"], quick(14))
    calls = []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) in (3, 12, 20):
            raise KeyboardInterrupt
        return quadratic(*arguments)

    monkeypatch.setattr(tune, "validation_loss", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            searched(tmp_path / "parts", ["map", "swa"], quick(14))
    assert searched(tmp_path / "parts", ["map", "swa"], quick(14)) == whole
    for name in ("map", "swa"):
        trials = trials_of(tmp_path / "parts", name, quick(14))
        assert trials == trials_of(tmp_path / "whole", name, quick(14)) and len(trials) == 14
    assert len(calls) == 28 + 3  # no trial that had ended is run again
    searched(tmp_path / "parts", ["map", "swa"], quick(14))
    assert len(calls) == 31


def test_more_trials_go_on_from_those_that_are_there_and_other_settings_start_anew(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(tune, "validation_loss", quadratic)
    searched(tmp_path, ["map"], quick(8))
    before = trials_of(tmp_path, "map", quick(8))
    searched(tmp_path, ["map"], quick(16))
    after = trials_of(tmp_path, "map", quick(16))
    assert after[:8] == before and len(after) == 16
    searched(tmp_path, ["map"], quick(4))
    assert len(trials_of(tmp_path, "map", quick(4))) == 16  # none is thrown away
    searched(tmp_path, ["map"], quick(4, seed=1))
    others = trials_of(tmp_path, "map", quick(4, seed=1))
    assert len(others) == 4 and others[1:] != before[1:4]


def test_failures_count_are_told_and_end_nothing(tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    monkeypatch.setattr(
        tune, "validation_loss", lambda name, settings, *_: {}["no"] if name == "swa" else _mostly(settings)
    )

    def _mostly(settings):
        loss = quadratic("map", settings, None, 1)
        if loss > 4 and settings.overrides:
            raise RuntimeError("diverged\nhere")
        return loss

    lines, before = [], optuna.logging.get_verbosity()
    chosen = searched(tmp_path, ["map", "swa"], quick(12), say=lines.append)
    states = [state for *_, state in trials_of(tmp_path, "map", quick(12))]
    assert len(states) == 12 and {"FAIL", "COMPLETE"} == set(states)
    assert [state for *_, state in trials_of(tmp_path, "swa", quick(12))] == ["FAIL"] * 12
    assert chosen[0].overrides and chosen[1].overrides == ()
    assert sum("failed: RuntimeError: diverged here" in line for line in lines) == states.count("FAIL")
    assert optuna.logging.get_verbosity() == before


def test_side_by_side_makes_the_trials_of_one_after_the_other(tmp_path):
    pytest.importorskip("optuna")
    settings = quick(5, training=replace(QUICK, iterations=3))
    one = searched(tmp_path / "one", ["map", "vadam"], settings)
    two = searched(tmp_path / "two", ["map", "vadam"], settings, Workers(2, "local", None))
    assert one == two
    for name in ("map", "vadam"):
        assert trials_of(tmp_path / "one", name, settings) == trials_of(tmp_path / "two", name, settings)


def test_trials_are_judged_on_validation_rows_and_never_see_test_rows(tmp_path, monkeypatch):
    pytest.importorskip("optuna")

    class Forbidden:
        def __getattribute__(self, name):
            raise AssertionError("test rows were read")

        def __iter__(self):
            raise AssertionError("test rows were read")

    settings = quick(4)
    task = replace(make_task(settings), test=Forbidden(), ood=Forbidden())
    with pytest.raises(AssertionError):
        _ = task.test.targets
    monkeypatch.setattr(tune, "task_of", lambda settings: task)
    lines = []
    searched(tmp_path, ["mean-field"], settings, say=lines.append)
    assert lines == ["tuning: 4 trials of each method are done"]
    for number, params, loss, state in trials_of(tmp_path, "mean-field", settings):
        assert state == "COMPLETE" and bool(params) == bool(number)
        method, training = replace(settings, overrides=tuple(params.items())).applied(methods()["mean-field"])
        posterior = method.fit(
            task.network.build(0), task.train, task.likelihood, training=training, validation=task.validation
        )
        expected = posterior.evaluate(task.validation, num_samples=4)["nll"]
        assert loss == pytest.approx(expected, rel=1e-6)


def test_tuned_rows_stand_on_the_tuned_map_fit_and_are_kept(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    settings = quick(3, training=Training.auto(iterations=40, patience=20))
    lines, plans = [], []
    names = ["mean-field", "gradient-boosting"]
    result = compare(settings, names, out=tmp_path, say=lines.append, begin=lambda task, plan: plans.extend(plan))
    rows = {row.method: row for row in result.rows}
    assert rows.keys() == {"map", *names} and not any(row.failure for row in result.rows)
    assert "3 trials before each fit choose its settings; those in the folder count" in plans
    assert lines == ["tuning: 3 trials of each method are done"] * 2  # the fit that others stand on comes first
    assert result.settings["tune"] == 3
    split = settings.of_split(0, None)
    (point,) = searched(tmp_path, ["map"], split)
    (chosen,) = searched(tmp_path, ["mean-field"], replace(split, point=point.overrides))
    assert dict(chosen.overrides).items() <= rows["mean-field"].fits[0].chosen.items()
    assert rows["gradient-boosting"].fits[0].chosen == {}
    for name, best in (("map", point), ("mean-field", chosen)):
        losses = [loss for *_, loss, _ in trials_of(tmp_path, name, replace(best, overrides=()))]
        assert len(losses) == 3
        assert rows[name].fits[0].validation_nll == pytest.approx(min(losses), rel=1e-5)
    monkeypatch.setattr(tune, "validation_loss", None)
    monkeypatch.setattr("dubito.compare.work.fitted", None)
    assert compare(settings, names, out=tmp_path).rows == result.rows


def test_optuna_missing_says_how_to_get_it(monkeypatch):
    def missing(name):
        if name.startswith("optuna"):
            raise ImportError(name)
        return importlib.import_module(name)

    monkeypatch.setattr("dubito.errors.import_module", missing)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'dubito\[tune\]'"):
        compare(quick(2), ["map"])
    with pytest.raises(ConfigError, match="tune must be a whole number of at least 1, got 0"):
        quick(0)
