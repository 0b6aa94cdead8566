"""Settings as JSON and back, for known classes alone."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from dubito import MAP, Categorical, ConfigError, Gaussian, He, Laplace, MeanField, StorageError
from dubito.loading import known_settings
from dubito.registry import methods
from dubito.storage import decode, encode

EXAMPLES = [
    *methods().values(),
    MAP(prior_std=0.1),
    MeanField(prior_std=He(gain=0.5), subset=("0.weight", "2.weight")),
    Laplace(prior_precision=7.0, subset=("2",), batch_size=3),
    Categorical(class_axis=-1),
    Gaussian(),
    Gaussian(std=(0.1, 0.2)),
    Gaussian(covariance=((1.0, 0.5), (0.5, 2.0))),
]


@pytest.mark.parametrize("example", EXAMPLES, ids=repr)
def test_settings_come_back_the_same(example):
    text = json.dumps(encode(example))
    assert decode(json.loads(text), known_settings()) == example


def test_every_method_can_be_stored():
    assert {type(method).__name__ for method in methods().values()} <= set(known_settings())
    assert all(name == cls.__name__ for name, cls in known_settings().items())


def test_what_fields_name_can_be_stored_and_bases_cannot():
    laws = {"Normal", "Cauchy", "LogNormal", "HalfCauchy", "InverseGamma", "Point", "NearOne", "Signs"}
    others = {"HMC", "INF", "GGN", "Empirical", "He", "Flipout", "Cosine", "Step", "TemperedBernoulli"}
    assert laws | others <= set(known_settings())
    assert not {"Method", "TrainedMethod", "Averaging", "NaturalGradient", "Family"} & set(known_settings())


def test_numbers_of_numpy_are_stored_as_plain_ones():
    stored = encode(Laplace(prior_precision=np.float32(2.0), batch_size=np.int64(5)))
    assert type(stored["prior_precision"]) is float and type(stored["batch_size"]) is int
    assert decode(json.loads(json.dumps(stored)), known_settings()) == Laplace(prior_precision=2.0, batch_size=5)


def test_plain_values_and_nests_of_them():
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert encode(value) == value
    assert decode(value, {}) == {"a": (1, 2.5, None, True, "x"), "b": {"c": ()}}


@pytest.mark.parametrize("value", [print, object(), {1, 2}, MAP, lambda name, tensor: True])
def test_other_things_are_refused(value):
    with pytest.raises(StorageError, match="cannot store a setting of type"):
        encode({"subset": [value]})


@pytest.mark.parametrize("name", ["os.system", "Popen", "__import__", "", None, ["MAP"], {"a": 1}, "Training"])
def test_only_known_classes_are_built(name):
    with pytest.raises(StorageError, match=r"names unknown settings .*; known: .*'MAP'"):
        decode({"type": name, "command": "true"}, known_settings())


@pytest.mark.parametrize(
    "value",
    [
        {"type": "MAP", "prior_std": -1.0},
        {"type": "MAP", "unheard_of": 1},
        {"type": "MAP", "prior_std": {"type": "He"}},
        {"type": "MeanField", "prior_std": {"type": "He", "gain": 0}},
        {"type": "Gaussian", "covariance": 3},
        {"type": "Laplace", "curvature": [[]]},
    ],
)
def test_settings_that_do_not_fit_are_refused(value):
    with pytest.raises(StorageError, match="do not fit"):
        decode(value, known_settings())


def test_whatever_a_class_raises_becomes_ours():
    @dataclass(frozen=True)
    class Odd:
        value: int

        def __post_init__(self) -> None:
            raise self.value  # pyright: ignore

    for error in (ConfigError("no"), AttributeError("no"), ZeroDivisionError("no")):
        with pytest.raises(StorageError, match="settings of Odd do not fit: no"):
            decode({"type": "Odd", "value": error}, {"Odd": Odd})
