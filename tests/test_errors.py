"""Errors: their classes, and messages that say what was expected and what came."""

import inspect

import numpy as np
import pytest

from dubito import errors
from dubito.errors import (
    ConfigError,
    DubitoError,
    UnknownNameError,
    require_count,
    require_fraction,
    require_positive,
    unknown_name,
)


def test_every_error_is_ours_and_an_ordinary_one():
    classes = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    raised = [cls for cls in classes if not issubclass(cls, Warning)]
    assert len(raised) > 5
    for cls in raised:
        assert issubclass(cls, DubitoError), cls
        if cls is not DubitoError:  # callers who know nothing of us can catch it by its usual class
            assert len(cls.__mro__) > len(DubitoError.__mro__) + 1, cls


@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), float("inf"), "1", None, True, [1.0], 1j])
def test_what_is_not_positive_is_refused(value):
    with pytest.raises(ConfigError, match="prior_std") as caught:
        require_positive(gain=1.0, prior_std=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [1e-300, 1, 2.5, np.float32(0.5), np.int64(3)])
def test_what_is_positive_passes(value):
    require_positive(value=value)


@pytest.mark.parametrize("value", [0, -1, 1.0, 2.5, float("nan"), "3", None, True, np.bool_(True)])
def test_what_is_no_count_is_refused(value):
    with pytest.raises(ConfigError, match=r"num_samples must be a whole number of at least 1, got"):
        require_count(num_samples=value)


def test_counts_have_their_minimum():
    require_count(num_samples=1, other=np.int32(7))
    require_count(0, index=0)
    require_count(5, epochs=5)
    with pytest.raises(ConfigError, match="at least 5, got 4"):
        require_count(5, epochs=4)


@pytest.mark.parametrize(
    ("ends", "span", "inside", "outside"),
    [
        ({}, r"\[0, 1\)", [0, 0.5, np.float32(0.25)], [1, -0.1, 1.5]),
        ({"zero": False}, r"\(0, 1\)", [0.5], [0, 1]),
        ({"one": True}, r"\[0, 1\]", [0, 1], [-1e-9, 1.0001]),
        ({"zero": False, "one": True}, r"\(0, 1\]", [1, 1e-9], [0]),
    ],
)
def test_fractions_and_their_ends(ends, span, inside, outside):
    for value in inside:
        require_fraction(rate=value, **ends)
    for value in [*outside, float("nan"), float("inf"), "0.5", None, True]:
        with pytest.raises(ConfigError, match=rf"rate must be a number in {span}"):
            require_fraction(rate=value, **ends)


def test_unknown_names_come_with_the_nearest_and_the_whole_list():
    error = unknown_name("method", "lapalce", ["mean-field", "laplace", "map"])
    assert str(error) == "unknown method 'lapalce', did you mean 'laplace'? Known: laplace, map, mean-field"
    assert "did you mean" not in str(unknown_name("method", 17, ["laplace"]))
    for usual in (KeyError, ValueError, ConfigError):
        with pytest.raises(usual):
            raise error
    assert isinstance(error, UnknownNameError)
