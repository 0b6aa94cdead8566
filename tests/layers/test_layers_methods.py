"""Every method takes every layer of the contract, and says what each parameter holds."""

import copy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from layers_contract import ROWS, names_of, network_of, normal
from torch import nn

import dubito
from dubito import Gaussian, Training

TRAINING = Training(epochs=1, batch_size=8, lr=1e-3)
#: Methods whose answer is one network: all their parameters are points, and no reason is needed.
POINTS = {"map", "swa", "deep-ensemble"}


def small(method: Any) -> Any:
    """With few components and members: what is checked here does not depend on how many."""
    counts = {field.name: 2 for field in fields(method) if field.name in ("components", "members")}
    return replace(method, **counts)


@pytest.mark.filterwarnings(
    "ignore::dubito.DubitoWarning", "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
)
@pytest.mark.parametrize("method", sorted(dubito.methods()))
def test_every_method_takes_every_layer(method: str) -> None:
    for name, row in ROWS.items():
        # Dense layers behind, so that every method has something to treat.
        layers = copy.deepcopy(network_of(name)), nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)
        network = nn.Sequential(*layers).float()
        inputs = row.inputs(8) if row.tokens is not None else row.inputs(8).float()
        data = inputs, normal(8, 2, seed=9).float()
        chosen = small(dubito.methods()[method])
        posterior = chosen.fit(network, data, Gaussian(std=1.0), training=TRAINING)
        prediction = posterior.predict(inputs[:3], 2)
        assert prediction.mean.shape == (3, 2) and torch.isfinite(prediction.mean).all(), name
        held = {line.name: line.holds for line in posterior.summary().rows}
        for key in names_of(network):
            assert held[key], (name, key)
            reasoned = not held[key].startswith("point") or "(" in held[key]
            assert reasoned or method in POINTS, (name, key, held[key])
