"""Options of a prediction are one set of keywords for every method: such a form works, or is refused by name."""

import inspect
import re

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from dubito import Categorical, ConfigError, DataError, Diagonal, Laplace
from dubito.calibration import temperature_scaled
from dubito.posterior import Posterior
from dubito.prediction import FORMS, PredictionOptions
from dubito.weight_normals.normals import Normals

from .cases import METHODS, fitted, make

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
every_method = pytest.mark.parametrize("method", METHODS)
every_form = pytest.mark.parametrize("form", FORMS)

#: The registered methods whose posteriors have a form, as the methods' papers say.
HAVE = {
    "linearised": {"laplace-diag", "laplace-kfac", "laplace-efb", "laplace-inf"},
    "marginal": {"mean-field", "k-tied"},
    "per_example": {"batch-ensemble", "rank1", "rank1-beside", "implicit"},
}


@every_method
@every_form
def test_a_form_works_or_is_refused_by_name_before_any_work(method: str, form: str, monkeypatch):
    posterior, case = fitted(method)
    plain = posterior.predict(case.inputs, 4, seed=1).probs
    for off in ({}, {form: False}):
        assert torch.equal(posterior.predict(case.inputs, 4, seed=1, **off).probs, plain)
    data = (case.inputs, case.targets)
    if method in HAVE[form]:
        prediction = posterior.predict(case.inputs, 4, seed=1, **{form: True})
        metrics = posterior.evaluate(data, num_samples=4, seed=1, **{form: True})
        assert metrics["nll"] == pytest.approx(-float(prediction.log_prob(case.targets).mean()), rel=1e-5)
        differs = not torch.allclose(prediction.probs, plain, rtol=1e-4)
        assert differs == (method != "batch-ensemble")  # its factors are points: a row has no others
        return

    def worked(*_: object, **__: object) -> None:
        pytest.fail("work began")

    monkeypatch.setattr(type(posterior), "draw", worked)
    monkeypatch.setattr(posterior.network, "forward", worked)
    calls = (
        lambda: posterior.predict(case.inputs, 4, **{form: True}),
        lambda: posterior.predict("no inputs", 4, **{form: True}),
        lambda: posterior.evaluate(data, **{form: True}),
        lambda: temperature_scaled(posterior, data, **{form: True}),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=f"{form}=True is for posteriors of") as caught:
            call()
        named = set(re.findall(r"\w+", str(caught.value).partition(", got one of ")[0]))
        classes = {name: type(each).__name__ for name, each in METHODS.items()}
        assert {name for name in METHODS if classes[name] in named} == HAVE[form]
        assert f"got one of {classes[method]};" in str(caught.value)


@every_method
def test_one_signature_serves_all(method: str):
    kind = METHODS[method].posterior_type
    assert kind.predict is Posterior.predict and kind.evaluate is Posterior.evaluate
    given = inspect.signature(kind.predict).parameters
    shared = inspect.signature(kind.evaluate).parameters
    scaled = inspect.signature(temperature_scaled).parameters
    for name in ("num_samples", "seed", "max_rows", *FORMS):
        assert given[name].default == shared[name].default == scaled[name].default
    assert {"self", "inputs", *PredictionOptions.__dataclass_fields__} - {"moments"} == set(given)  # for mixtures
    assert [given[form].default for form in FORMS] == [None, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"linearised": "yes"}, "linearised must be True or False or None, got 'yes'"),
        ({"marginal": None}, "marginal must be True or False, got None"),
        ({"per_example": 1}, "per_example must be True or False, got 1"),
        ({"marginal": True, "per_example": True}, "one form, got marginal and per_example"),
        ({"num_samples": 0}, "num_samples"),
        ({"max_rows": 0}, "max_rows"),
    ],
)
def test_options_that_are_none(options: dict, message: str):
    posterior, case = fitted("mean-field")
    for call in (posterior.predict, posterior.evaluate):
        first = case.inputs if call == posterior.predict else (case.inputs, case.targets)
        with pytest.raises(ConfigError, match=message):
            call(first, **options)


def test_laplace_does_as_the_method_says_unless_told():
    case = make("mlp")
    data = (case.inputs, case.targets)
    by_draws = METHODS["laplace-diag"].fit(case.net, data, Categorical())
    closed = Laplace(structure=Diagonal()).fit(case.net, data, Categorical())
    exact = closed.predict(case.inputs).probs
    assert torch.equal(by_draws.predict(case.inputs, linearised=True).probs, exact)
    assert torch.equal(closed.predict(case.inputs, 4, linearised=False).probs, by_draws.predict(case.inputs, 4).probs)
    with pytest.raises(ConfigError, match="marginal=True is for posteriors of"):
        closed.predict(case.inputs, marginal=True)


class Draws(TensorDataset):
    """Items that draw from the global state, and one that cannot be read."""

    broken: int | None = None

    def __getitem__(self, index: int):
        if index == self.broken:
            raise DataError("unreadable")
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(()), target


@pytest.mark.parametrize("broken", [None, 9])
def test_evaluate_leaves_the_global_state_alone_also_where_it_fails(broken: int | None):
    posterior, case = fitted("map")
    data = Draws(case.inputs, case.targets)
    data.broken = broken
    loader = DataLoader(Subset(data, range(12)), batch_size=4)
    state = torch.get_rng_state()
    if broken is None:
        assert posterior.evaluate(loader, seed=3, max_rows=4) == posterior.evaluate(loader, seed=3, max_rows=4)
    else:
        with pytest.raises(DataError, match="unreadable") as caught:
            posterior.evaluate(loader, max_rows=4)
        assert caught.tb is not None  # whose frames are alive: nothing waits for them to end
    assert torch.equal(torch.get_rng_state(), state)


def test_scales_are_computed_once_for_each_caller_alone():
    posterior, _ = fitted("mean-field")
    ours, theirs = Normals(posterior), Normals(posterior)
    assert ours.scale("0.weight").std is ours.scale("0.weight").std
    assert ours.scale("0.weight") is not theirs.scale("0.weight")
    assert posterior.weight_scale("0.weight") is not posterior.weight_scale("0.weight")
