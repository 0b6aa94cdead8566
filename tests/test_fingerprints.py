"""Settings of modules, samplers and functions read the same in every run, and differ where behaviour does."""

import functools
import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from dubito.fingerprints import described, first_difference, modules_of, weights_of


class Act(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        for name, value in settings.items():
            setattr(self, name, value)


@dataclass
class Config:
    width: int
    inner: object = None


PAIRS = [
    (1, 5),
    (0.1, 0.2),
    ("a", "b"),
    (True, False),
    (None, 0),
    ((1, 2), (2, 1)),
    ({"a": 1}, {"a": 2}),
    ({1, 2}, {1, 3}),
    (float("nan"), float("inf")),
    (torch.zeros(3), torch.ones(3)),
    (np.zeros(3), np.ones(3)),
    (np.float32(1), np.float32(2)),
    (torch.float32, torch.float64),
    (torch.relu, torch.tanh),
    (functional.relu, functional.gelu),
    (nn.ReLU, nn.Tanh),
    (functools.partial(torch.add, alpha=1), functools.partial(torch.add, alpha=2)),
    (lambda x: 2 * x, lambda x: 3 * x),
    (lambda x: x.sin(), lambda x: x.cos()),
    (Config(1), Config(2)),
    (Config(1, SimpleNamespace(k=1)), Config(1, SimpleNamespace(k=2))),
    (list(range(500)), [*range(499), 0]),
    (torch.Generator(), 3),
]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda value: type(value).__name__)
def test_what_differs_is_told_apart_and_the_same_is_the_same(one, other):
    was, again, now = (modules_of(Act(k=value), {}) for value in (one, one, other))
    assert first_difference(json.loads(json.dumps(was)), again) is None
    name, _, _ = first_difference(was, now)
    assert name.startswith("(itself).k")


def test_functions_close_over_their_settings():
    def made(k):
        return lambda x: k * x

    assert described(made(1)) == described(made(1)) != described(made(2))


def test_modules_of_pytorch_are_told_apart_where_they_print_nothing():
    two, four = (modules_of(nn.MultiheadAttention(8, heads), {}) for heads in (2, 4))
    assert first_difference(two, four) == ("(itself).num_heads", 2, 4)


def test_what_holds_itself_and_what_is_long_stay_short():
    value: dict = {"k": 1}
    value["self"] = value
    assert len(str(described(value))) < 250
    assert len(str(described(["word"] * 10_000))) < 40


def test_every_weight_and_buffer_counts():
    net = nn.BatchNorm1d(3)
    net.register_buffer("hidden", torch.zeros(2), persistent=False)
    before = weights_of(net)
    assert set(before) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "hidden"}
    net.hidden += 1
    assert first_difference(before, weights_of(net))[0] == "hidden"
