"""The estimators: scikit-learn's own checks, what they answer, its tools on top, frames with categories and gaps."""

import copy
import pickle
import warnings

import numpy as np
import pandas
import pytest
import torch
from scipy.stats import norm
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris, make_friedman1
from sklearn.exceptions import NotFittedError
from sklearn.metrics import mean_pinball_loss
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils import check_random_state
from sklearn.utils.estimator_checks import check_estimator

import dubito
from dubito import ConfigError, DataError, DubitoWarning, Training, UnknownNameError
from dubito.integrations.sklearn import BayesianClassifier, BayesianRegressor, training_for

BOTH = pytest.mark.parametrize("estimator", [BayesianRegressor, BayesianClassifier])
#: Laplace, the default's, with both; every other family with one: node factors, closed-form updates, weight normals,
#: networks apart.
ESTIMATORS = [
    (BayesianRegressor, None),
    (BayesianClassifier, None),
    (BayesianRegressor, "mc-dropout"),
    (BayesianRegressor, "bali"),
    (BayesianClassifier, "mean-field"),
    (BayesianClassifier, "deep-ensemble"),
]
QUICK = Training(iterations=20, lr=2e-2)


@pytest.mark.parametrize(("estimator", "method"), ESTIMATORS)
@pytest.mark.filterwarnings("default")
def test_the_checks_of_scikit_learn_pass(estimator, method):
    made = estimator() if method is None else estimator(method=method)
    results = check_estimator(made, on_skip=None)  # raises where one fails
    assert len(results) > 40 and {result["status"] for result in results} <= {"passed", "skipped"}
    assert [r["check_name"] for r in results if r["status"] == "skipped"] in ([], ["check_array_api_input"])


# -- what they answer --------------------------------------------------------------------------------------


def friedman(rows: int = 200):
    return make_friedman1(rows, noise=1.0, random_state=0)


@pytest.fixture(scope="module")
def regressor():
    return BayesianRegressor().fit(*friedman())


@pytest.fixture(scope="module")
def classifier():
    return BayesianClassifier("laplace-inf").fit(*load_iris(return_X_y=True))


def test_intervals_quantiles_and_draws_agree(regressor):
    X, y = make_friedman1(600, noise=1.0, random_state=1)
    mean, std = regressor.predict(X, return_std=True)
    assert mean.shape == std.shape == (600,) and regressor.score(X, y) > 0.75
    low, high = regressor.predict_interval(X, 0.9)
    assert 0.8 < ((low <= y) & (y <= high)).mean() < 0.98
    # Linearised predictions are Normal: quantiles follow from mean and deviation.
    quantiles = regressor.predict_quantiles(X, (0.05, 0.5, 0.95))
    expected = mean[:, None] + std[:, None] * norm.ppf([0.05, 0.5, 0.95])
    np.testing.assert_allclose(quantiles, expected, rtol=1e-6)
    np.testing.assert_allclose(np.stack([low, high], 1), quantiles[:, [0, 2]], rtol=1e-9)
    drawn = regressor.sample_y(X[:50], 40, random_state=3)
    assert drawn.shape == (50, 40)
    scaled = (drawn - mean[:50, None]) / std[:50, None]  # 2,000 numbers, of which 50 share a function
    assert abs(scaled.mean()) < 0.15 and scaled.std() == pytest.approx(1, abs=0.1)
    np.testing.assert_array_equal(drawn[:, :2], regressor.sample_y(X[:50], 2, random_state=3))
    assert not np.array_equal(drawn[:, :2], regressor.sample_y(X[:50], 2, random_state=4))


def test_draws_are_functions_with_noise_of_their_own(regressor):
    """Rows of the same inputs share the function of a draw, and not its noise."""
    X = np.repeat(friedman()[0][:1], 400, axis=0)
    parts = {kind: regressor.predict_uncertainty(X[:1], kind)[0] for kind in ("aleatoric", "epistemic")}
    drawn = regressor.sample_y(X, 60, random_state=0)
    assert drawn.std(0).mean() == pytest.approx(parts["aleatoric"], rel=0.05)
    assert drawn.mean(0).std() == pytest.approx(parts["epistemic"], rel=0.3)
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.2  # of their noise, over rows


def test_the_parts_of_the_uncertainty(regressor, classifier):
    X = friedman()[0][:20]
    parts = {kind: regressor.predict_uncertainty(X, kind) for kind in ("total", "aleatoric", "epistemic")}
    np.testing.assert_allclose(parts["total"] ** 2, parts["aleatoric"] ** 2 + parts["epistemic"] ** 2)
    np.testing.assert_array_equal(parts["total"], regressor.predict(X, return_std=True)[1])
    assert (regressor.predict_uncertainty(5 * X) > regressor.predict_uncertainty(X)).all()
    flowers = load_iris().data[::10]
    probs = classifier.predict_proba(flowers)
    np.testing.assert_allclose(classifier.predict_uncertainty(flowers, "total"), -(probs * np.log(probs)).sum(1))
    np.testing.assert_allclose(np.exp(classifier.predict_log_proba(flowers)), probs)
    assert isinstance(classifier.prediction(flowers), dubito.prediction.CategoricalPrediction)
    with pytest.raises(UnknownNameError, match="unknown kind 'all'"):
        classifier.predict_uncertainty(flowers, "all")


def test_several_targets():
    X, y = friedman(60)
    both = np.stack([y, -100 * y + X[:, 0]], 1)
    model = BayesianRegressor("mean-field", training=QUICK).fit(X, both)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == (60, 2) and (std[:, 1] > 20 * std[:, 0]).all()
    assert model.predict_quantiles(X, [0.1, 0.9]).shape == (60, 2, 2)
    assert model.sample_y(X, 3).shape == (60, 2, 3)
    low, high = model.predict_interval(X)
    assert (low < mean).all() and (mean < high).all()


def test_classes_may_be_words_and_rare():
    X, y = load_iris(return_X_y=True)
    words = np.array(["setosa", "versicolor", "virginica"])[y]
    words[7] = "unheard of"  # the only one of its class is never held out
    model = BayesianClassifier(random_state=check_random_state(3)).fit(X, words)
    assert model.classes_.tolist() == ["setosa", "unheard of", "versicolor", "virginica"]
    assert model.score(X, words) > 0.9
    numbers = np.unique(words, return_inverse=True)[1]
    for seed in range(30):
        train, held = model._parted(numbers, seed)
        assert 7 in train and len(held) == 30 and not set(train) & set(held) and len(train) == 120


@BOTH
@pytest.mark.parametrize("rows", [2, 3, 9])
def test_a_few_rows_are_enough(estimator, rows):
    X = np.random.default_rng(0).normal(size=(rows, 2))
    y = np.arange(rows) % 2 if estimator is BayesianClassifier else X[:, 0]
    model = estimator().fit(X, y)
    assert np.isfinite(model.predict(X)).all() and np.isfinite(model.predict_uncertainty(X)).all()


def test_seeds():
    X, y = friedman(30)
    state = np.random.get_state()[1].copy(), torch.random.get_rng_state()  # noqa: NPY002
    models = [BayesianRegressor(training=QUICK, random_state=s).fit(X, y) for s in (1, 1, 2)]
    first, again, other = (model.predict(X) for model in models)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(np.random.get_state()[1], state[0])  # noqa: NPY002
    assert torch.equal(torch.random.get_rng_state(), state[1])


def test_small_tables_have_short_runs():
    assert training_for(999).iterations == 999 and training_for(10).iterations == 60
    assert training_for(1000) == Training.auto()


# -- tools on top ------------------------------------------------------------------------------------------


def test_pipelines_searches_and_cross_validation():
    X, y = load_iris(return_X_y=True)
    scores = cross_val_score(make_pipeline(MinMaxScaler(), BayesianClassifier()), X, y, cv=3)
    assert scores.min() > 0.85
    grid = {"method": ["map", dubito.MCDropout(rate=0.2)], "hidden_layer_sizes": [(16,), (8,)]}
    search = GridSearchCV(BayesianClassifier(training=QUICK), grid, cv=2, scoring="neg_log_loss").fit(X, y)
    assert search.best_estimator_.posterior_ is not None and len(search.cv_results_["params"]) == 4
    probs = cross_val_predict(BayesianClassifier("map", training=QUICK), X, y, cv=2, method="predict_proba")
    assert probs.shape == (150, 3)


def test_copies_and_pickles_answer_the_same(regressor):
    X = friedman()[0][:10]
    for again in (pickle.loads(pickle.dumps(regressor)), copy.deepcopy(regressor)):
        np.testing.assert_array_equal(again.predict(X), regressor.predict(X))
    method = dubito.Laplace(structure=dubito.INF(rank=5))
    fresh = clone(BayesianRegressor(method, hidden_layer_sizes=(8,)))
    assert fresh.method == method and fresh.hidden_layer_sizes == (8,)
    with pytest.raises(NotFittedError):
        fresh.predict(X)
    assert not hasattr(fresh, "partial_fit") and "INF(rank=5" in repr(fresh)


def test_mapie_works_on_top():
    mapie = pytest.importorskip("mapie.regression")
    classification = pytest.importorskip("mapie.classification")
    X, y = friedman(160)
    conformal = mapie.SplitConformalRegressor(BayesianRegressor(training=QUICK), confidence_level=0.9, prefit=False)
    conformal.fit(X[:80], y[:80]).conformalize(X[80:], y[80:])
    points, intervals = conformal.predict_interval(X)
    assert points.shape == (160,) and (intervals[:, 0, 0] < intervals[:, 1, 0]).all()
    X, y = load_iris(return_X_y=True)
    fitted = BayesianClassifier(training=QUICK).fit(X[::2], y[::2])
    sets = classification.SplitConformalClassifier(fitted, confidence_level=0.9, prefit=True)
    sets.conformalize(X[1::2], y[1::2])
    assert sets.predict_set(X)[1].shape == (150, 3, 1)


def test_a_scorer_of_quantiles():
    def upper(model, X, y):
        return -mean_pinball_loss(y, model.predict_quantiles(X, [0.9])[:, 0], alpha=0.9)

    assert cross_val_score(BayesianRegressor(training=QUICK), *friedman(60), scoring=upper, cv=2).max() < 0


# -- frames ------------------------------------------------------------------------------------------------


def cars(rows: int = 120) -> tuple[pandas.DataFrame, np.ndarray]:
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": draw.uniform(0, 10, rows),
            "fuel": draw.choice(["petrol", "diesel", "electric"], rows),
            "doors": draw.integers(2, 6, rows),
            "sold": draw.random(rows) < 0.5,
        }
    )
    y = 20 - frame["age"] + frame["fuel"].map({"petrol": 0.0, "diesel": 3.0, "electric": 9.0})
    frame.loc[::7, "age"] = np.nan
    frame.loc[3, "fuel"] = None
    return frame, (y + 0.3 * draw.normal(size=rows)).to_numpy()


def test_frames_with_categories_and_gaps():
    frame, y = cars()
    model = BayesianRegressor().fit(frame, y)
    assert model.feature_names_in_.tolist() == ["age", "fuel", "doors", "sold"] and model.n_features_in_ == 4
    names = [name for column in model.columns_ for name in column.features]
    assert names[:4] == ["age", "age is missing", "fuel=diesel", "fuel=electric"]
    whole = frame.notna().all(axis=1).to_numpy()
    assert model.score(frame[whole], y[whole]) > 0.9
    # A gap costs certainty, and a row is read by itself.
    low, high = model.predict_interval(frame)
    assert np.isfinite(low).all() and (high > low).all()
    np.testing.assert_allclose(model.predict(frame.iloc[[7]]), model.predict(frame)[[7]])
    changed = frame.iloc[[1]].assign(fuel="electric")
    assert model.predict(changed)[0] > model.predict(frame.iloc[[1]].assign(fuel="petrol"))[0] + 5


def test_what_new_rows_have_otherwise_is_told_once():
    frame, y = cars(40)
    model = BayesianRegressor(training=QUICK).fit(frame, y)
    new = frame.assign(fuel="steam", doors=np.nan)
    with pytest.warns(DubitoWarning, match=r"doors: 40 values missing.*|fuel: 'steam' did not occur") as told:
        assert np.isfinite(model.predict(new)).all()
    assert len(told) == 1
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(frame.rename(columns={"age": "years"}))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        numbers = frame[["age", "doors"]]
        BayesianRegressor(training=QUICK).fit(numbers, y).predict(numbers.to_numpy())


def test_columns_that_are_names_are_left_out_with_a_word():
    frame, y = cars(60)
    frame["plate"] = [f"HH-{number}" for number in range(60)]
    with pytest.warns(DubitoWarning, match="left out: plate"):
        model = BayesianRegressor(training=QUICK).fit(frame, y)
    other = frame.assign(plate=frame["plate"][::-1].to_numpy())
    np.testing.assert_array_equal(model.predict(frame), model.predict(other))
    with pytest.raises(DataError, match="different names"):
        BayesianRegressor().fit(frame.set_axis(["a", "a", "b", "c", "d"], axis=1), y)


def test_frames_and_arrays_of_the_same_numbers_are_one():
    X, y = friedman(40)
    X[::5, 2] = np.nan
    by_array = BayesianRegressor(training=QUICK).fit(X, y)
    by_frame = BayesianRegressor(training=QUICK).fit(pandas.DataFrame(X), y)  # headings are numbers
    np.testing.assert_array_equal(by_array.predict(X), by_frame.predict(pandas.DataFrame(X)))
    assert not hasattr(by_frame, "feature_names_in_") and by_array.columns_[2].flagged


def test_a_column_transformer_in_front():
    frame, y = cars(60)
    model = make_pipeline(
        ColumnTransformer([("scale", MinMaxScaler(), ["age", "doors"])], remainder="passthrough").set_output(
            transform="pandas"
        ),
        BayesianRegressor(training=QUICK),
    ).fit(frame, y)
    assert model.predict(frame).shape == (60,)
    assert "remainder__fuel" in model[-1].feature_names_in_


def test_ordinary_use_warns_of_nothing(tmp_path):
    X, y = friedman()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = BayesianRegressor().fit(X, y)
        model.predict_interval(X)
        BayesianClassifier().fit(X, y > y.mean()).predict(X)
    model.posterior_.save(tmp_path / "model.safetensors")
    again = dubito.load(tmp_path / "model.safetensors", model.posterior_.network)
    assert again.num_parameters == model.posterior_.num_parameters


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"method": "laplace"}, UnknownNameError, "unknown method 'laplace'"),
        ({"method": dubito.MAP}, ConfigError, "method must be a name"),
        ({"num_samples": 0}, ConfigError, "num_samples"),
        ({"validation_fraction": 1.5}, ConfigError, "validation_fraction"),
        ({"activation": "relus"}, UnknownNameError, "did you mean 'relu'"),
        ({"hidden_layer_sizes": 8}, ConfigError, "hidden must be a list"),
        ({"training": "long"}, ConfigError, "training must be"),
    ],
)
def test_bad_settings_are_refused_by_fit(settings, error, words):
    with pytest.raises(error, match=words):
        BayesianRegressor(**settings).fit(*friedman(20))


def test_bad_rows_are_refused():
    X, y = friedman(20)
    with pytest.raises(DataError, match="two classes, got one class: 0"):
        BayesianClassifier().fit(X, np.zeros(20, int))
    with pytest.raises(ValueError, match="infinity"):
        BayesianRegressor().fit(np.where(X > 0.9, np.inf, X), y)
    frame = pandas.DataFrame({"a": [1.0, np.inf] * 10})
    with pytest.raises(DataError, match="finite numbers, got inf in row 2"):
        BayesianRegressor().fit(frame, y)
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        BayesianRegressor().fit(frame[:5].fillna(0).replace(np.inf, 0), y)
