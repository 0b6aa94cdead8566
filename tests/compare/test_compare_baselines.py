"""A linear model and gradient boosting beside the methods, against scikit-learn called directly."""

import importlib.util
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from dubito import ConfigError, DataError, Training
from dubito.compare import Settings, baselines, compare
from dubito.compare.baselines import ConformalPrediction
from dubito.compare.folder import Folder
from dubito.compare.task import make_task
from dubito.data import Part
from dubito.prediction import RealPrediction
from dubito.report import write_page

sklearn = pytest.importorskip("sklearn")
QUICK = Training(iterations=20, batch_size=64, lr=5e-3)


def quick(data, **options):
    return Settings(data=str(data), training=QUICK, num_samples=4, **options)


def arrays(part):
    return part.inputs.flatten(1).double().numpy(), part.targets.numpy()


@pytest.fixture(scope="module")
def cancer():
    return make_task(quick("breast-cancer"))


def regression(validation, test=4000, targets=1, stream=0):
    """A task whose noise is far from Gaussian: a quarter of the rows has twenty times the standard deviation."""
    draw = np.random.default_rng(stream)
    parts = []
    for rows in (400, validation, test):
        inputs = draw.normal(size=(rows, 3))
        wide = np.where(draw.random((rows, targets)) < 0.25, 4.0, 0.2)
        truth = inputs @ np.arange(3 * targets).reshape(3, targets) + wide * draw.normal(size=(rows, targets))
        parts.append(Part(torch.tensor(inputs).float(), torch.tensor(truth).float()))
    train, watched, judged = parts
    return replace(make_task(quick("diabetes")), train=train, validation=watched, test=judged)


def test_logistic_regression_is_that_of_scikit_learn_with_the_best_penalty_on_validation_rows():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    task = make_task(quick("digits"))
    model = baselines.fit("logistic-regression", task)
    losses = {}
    for penalty in baselines.PENALTIES:
        peer = LogisticRegression(C=1 / penalty, max_iter=500).fit(*arrays(task.train))
        inputs, labels = arrays(task.validation)
        losses[penalty] = log_loss(labels, peer.predict_proba(inputs), labels=range(8))
    best = min(losses, key=lambda penalty: losses[penalty])
    penalty = 1 / model.models[0].C
    assert penalty == pytest.approx(best)
    peer = LogisticRegression(C=1 / best, max_iter=500).fit(*arrays(task.train))
    inputs, labels = arrays(task.test)
    prediction = model.predict(task.test.inputs)
    np.testing.assert_allclose(prediction.probs, peer.predict_proba(inputs), atol=1e-9)
    nll = -float(prediction.log_prob(task.test.targets).mean())
    assert nll == pytest.approx(log_loss(labels, peer.predict_proba(inputs), labels=range(8)), rel=1e-9)
    assert prediction.epistemic.abs().max() < 1e-9


def test_boosting_has_as_many_trees_as_validation_rows_like_best(cancer):
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.metrics import log_loss

    model = baselines.fit("gradient-boosting", cancer)
    peer = HistGradientBoostingClassifier(max_iter=150, early_stopping=False).fit(*arrays(cancer.train))
    inputs, labels = arrays(cancer.validation)
    losses = [log_loss(labels, probs) for probs in peer.staged_predict_proba(inputs)]
    trees = model.models[0].n_iter_
    assert trees == 1 + int(np.argmin(losses))
    staged = list(peer.staged_predict_proba(arrays(cancer.test)[0]))[trees - 1]
    prediction = model.predict(cancer.test.inputs)
    np.testing.assert_allclose(prediction.probs[:, 0], staged[:, 1], atol=1e-9)
    nll = -float(prediction.log_prob(cancer.test.targets).mean())
    assert nll == pytest.approx(log_loss(cancer.test.targets, staged), rel=1e-9)


def test_ridge_regression_in_closed_form_with_the_noise_of_validation_rows():
    task = regression(200)
    model = baselines.fit("ridge-regression", task)
    (inputs, truth), (watched, seen), (rows, judged) = map(arrays, (task.train, task.validation, task.test))
    centre, level, losses = inputs.mean(0), truth.mean(0), {}
    for penalty in baselines.PENALTIES:
        gram = (inputs - centre).T @ (inputs - centre) + penalty * np.eye(3)
        weights = np.linalg.solve(gram, (inputs - centre).T @ (truth - level))
        std = np.sqrt((((watched - centre) @ weights + level - seen) ** 2).mean())
        losses[penalty] = std, weights
    best = min(losses, key=lambda penalty: losses[penalty][0])
    std, weights = losses[best]
    assert model.models[0].alpha == best
    prediction = model.predict(task.test.inputs)
    means = (rows - centre) @ weights + level
    np.testing.assert_allclose(prediction.mean, means, atol=1e-5)
    expected = 0.5 * ((judged - means) / std) ** 2 + math.log(std) + 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(-prediction.log_prob(task.test.targets), expected[:, 0], rtol=1e-4)


@pytest.mark.parametrize("name", ["ridge-regression", "gradient-boosting"])
def test_conformal_intervals_cover_what_they_promise_where_the_gaussian_does_not(name):
    task = regression(999)
    prediction = baselines.fit(name, task).predict(task.test.inputs)
    assert isinstance(prediction, ConformalPrediction)

    def covered(interval):
        lower, upper = interval
        return float(((lower <= task.test.targets) & (task.test.targets <= upper)).double().mean())

    # Over both sets of rows the share has mean 0.8 and standard deviation √(0.16/1000 + 0.16/4000) = 0.014; validation
    # rows also stop the boosting, which 0.05 has room for.
    assert covered(prediction.interval(0.8)) == pytest.approx(0.8, abs=0.05)
    assert covered(RealPrediction.interval(prediction, 0.8)) > 0.86
    # The share of validation rows within is exact: ⌈1000 · 0.8⌉ of 999.
    watched = baselines.fit(name, task).predict(task.validation.inputs)
    lower, upper = watched.interval(0.8)
    truth = task.validation.targets.double()
    assert int(((lower - 1e-9 <= truth) & (truth <= upper + 1e-9)).sum()) == 800


def test_conformal_intervals_move_with_units_and_rows_and_need_enough_rows():
    task = regression(30, test=5)
    prediction = baselines.fit("gradient-boosting", task).predict(task.test.inputs)
    lower, upper = prediction.interval(0.9)
    moved = prediction.rescaled(7.0, 3.0).interval(0.9)
    torch.testing.assert_close(moved, (7 + 3 * lower, 7 + 3 * upper))
    torch.testing.assert_close(prediction[1:3].interval(0.9)[0], lower[1:3])
    plain = RealPrediction(prediction.means, prediction.variances)
    torch.testing.assert_close(prediction.interval(0.99), plain.interval(0.99))  # 99 rows were needed
    assert not torch.allclose(upper, plain.interval(0.9)[1])


def test_several_targets_have_a_model_noise_and_intervals_each():
    task = regression(300, test=50, targets=2)
    model = baselines.fit("gradient-boosting", task)
    assert len(model.models) == 2
    prediction = model.predict(task.test.inputs)
    assert prediction.mean.shape == (50, 2) and prediction.log_prob(task.test.targets).shape == (50,)
    one = replace(
        task,
        **{
            part: Part(getattr(task, part).inputs, getattr(task, part).targets[:, 1:])
            for part in ("train", "validation", "test")
        },
    )
    alone = baselines.fit("gradient-boosting", one).predict(task.test.inputs)
    torch.testing.assert_close(prediction.interval(0.9)[0][:, 1:], alone.interval(0.9)[0])


def test_a_class_without_training_rows_has_a_small_chance_and_never_none():
    task = make_task(quick("digits"))
    rows = task.train.targets != 3
    task = replace(task, train=Part(task.train.inputs[rows][:300], task.train.targets[rows][:300]))
    for name in baselines.offered(task)[0]:
        prediction = baselines.fit(name, task).predict(task.test.inputs)
        torch.testing.assert_close(prediction.probs.sum(1), torch.ones(len(prediction)).double())
        torch.testing.assert_close(prediction.probs[:, 3], torch.full((len(prediction),), 1 / 302).double())


def test_two_classes_by_a_likelihood_of_several(cancer):
    several = make_task(quick("wine", held_out=1))
    assert len(several.class_names) == 2
    model = baselines.fit("logistic-regression", several)
    expected = model.models[0].predict_proba(arrays(several.test)[0])
    np.testing.assert_allclose(model.predict(several.test.inputs).probs, expected, atol=1e-9)


def test_rows_are_kept_judged_alike_and_nothing_is_unpickled(tmp_path, monkeypatch):
    names = ["map", "ridge-regression", "gradient-boosting"]
    result = compare(quick("diabetes"), names, out=tmp_path)
    rows = {row.method: row for row in result.rows}
    assert set(rows) == set(names) and not any(row.failure for row in result.rows)
    for name in names[1:]:
        assert rows[name].metrics.keys() == rows["map"].metrics.keys()
        assert rows[name].metrics["ood_auroc"] == 0.5  # the same noise everywhere
        assert rows[name].nbytes > 0 and rows[name].fits[0].steps == 0
    assert rows["ridge-regression"].settings.startswith("Ridge(alpha=")
    assert rows["gradient-boosting"].settings.startswith("HistGradientBoostingRegressor(")
    assert {path.suffix for path in tmp_path.glob("*-*")} == {".json"}
    task = make_task(quick("diabetes"))
    prediction = baselines.fit("ridge-regression", task).predict(task.test.inputs)
    prediction = prediction.rescaled(*task.data.target_scaling)
    truth = task.data.target_scaling.undo(task.test.targets)
    nll = -float(prediction.log_prob(truth).mean())
    assert rows["ridge-regression"].metrics["nll"] == pytest.approx(nll, rel=1e-6)
    assert "gradient-boosting" in write_page(tmp_path).read_text()
    monkeypatch.setattr(baselines, "fit", None)
    assert compare(quick("diabetes"), names, out=tmp_path).rows == result.rows
    assert Folder(tmp_path).result("ridge-regression") is not None


def test_what_cannot_be_fitted_says_so(monkeypatch, cancer):
    assert baselines.offered(cancer) == (("logistic-regression", "gradient-boosting"), None)
    with pytest.raises(ConfigError, match="ridge-regression is not for binary; choose logistic-regression or"):
        compare(quick("breast-cancer"), ["map", "ridge-regression"])
    wide = replace(cancer, train=Part(torch.zeros(4, 3, 32, 32), cancer.train.targets[:4]))
    assert baselines.offered(wide) == (
        (),
        "logistic-regression and gradient-boosting are left out: they take at most 1,000 values for a row, got 3,072",
    )
    words = replace(cancer, train=Part(torch.zeros(4, 9).long(), cancer.train.targets[:4]))
    assert "inputs are words" in str(baselines.offered(words)[1])
    empty = replace(cancer, validation=Part(*(tensor[:0] for tensor in cancer.validation)))
    with pytest.raises(DataError, match="gradient-boosting needs validation rows, got none"):
        baselines.fit("gradient-boosting", empty)
    find = importlib.util.find_spec
    monkeypatch.setattr(baselines, "find_spec", lambda name: None if name == "sklearn" else find(name))
    assert str(baselines.offered(cancer)[1]).endswith("they need scikit-learn: pip install 'dubito[cli]'")
    with pytest.raises(ConfigError, match=r"pip install 'dubito\[cli\]'"):
        compare(quick("breast-cancer"), ["gradient-boosting"])
