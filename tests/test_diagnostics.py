"""Gradient signal-to-noise ratios against moments taken directly."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dubito import MAP, Categorical, ConfigError, KTied, LocalReparameterised, MCDropout, MeanField
from dubito.diagnostics import GradientSNR, gradient_snr, trained
from dubito.objective import Objective


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def data(rows: int = 40) -> tuple[Tensor, Tensor]:
    return normal(rows, 4), torch.randint(3, (rows,), generator=torch.Generator().manual_seed(1))


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def ratios(gradients: list[np.ndarray]) -> tuple[float, float, float, float]:
    """E[g²]/Var[g] and E[g]²/Var[g], means over entries that vary, the lower median of the first, and the share
    of entries that do not vary."""
    each = np.stack(gradients)
    variance = ((each - each.mean(0)) ** 2).mean(0)
    varied = variance > 0
    if not varied.any():
        return math.nan, math.nan, math.nan, 1.0
    own = np.sort((each**2).mean(0)[varied] / variance[varied])
    signal = (each.mean(0)[varied] ** 2 / variance[varied]).mean()
    return own.mean(), signal, own[(len(own) - 1) // 2], 1 - varied.mean()


METHODS = [MAP(), MCDropout(), MeanField(), KTied(), KTied(estimator=LocalReparameterised())]


def run(built: Objective, watched: list[GradientSNR], steps: int) -> dict[str, list[np.ndarray]]:
    """Train a little; returns all gradients."""
    inputs, targets = data()
    optimizer = torch.optim.SGD(built.parameter_groups(lr=0.01))
    seen: dict[str, list[np.ndarray]] = {}
    for step in range(steps):
        optimizer.zero_grad()
        rows = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:16]
        loss = built.loss(inputs[rows], targets[rows], generator=torch.Generator().manual_seed(step))
        loss.total.backward()
        for each in watched:
            each.update()
        for name, tensor in trained(built).items():
            seen.setdefault(name, []).append(tensor.grad.numpy().copy())
        optimizer.step()
    return seen


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_along_a_run(method) -> None:
    built = method.build(network(), Categorical(), num_data=40)
    watched = [GradientSNR(built, window=5), GradientSNR(built, window=None)]
    seen = run(built, watched, 9)
    for each, last in zip(watched, (5, 9), strict=True):
        found = each.result()
        assert set(found) == set(seen)
        for name, gradients in seen.items():
            paper, signal, median, constant = ratios(gradients[-last:])
            assert found[name].signal == pytest.approx(signal, rel=1e-6, nan_ok=True), name
            assert found[name].paper == pytest.approx(paper, rel=1e-6, nan_ok=True), name
            assert found[name].median == pytest.approx(median, rel=1e-6, nan_ok=True), name
            assert found[name].constant == constant
            assert found[name].paper == pytest.approx(found[name].signal + 1, nan_ok=True)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_at_rest(method) -> None:
    built = method.build(network(), Categorical(), num_data=40)
    built.bind(data()[0])
    before = {name: tensor.clone() for name, tensor in built.state_dict().items()}
    found = gradient_snr(built, data(), num_batches=12, batch_size=16, seed=5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in built.state_dict().items())
    assert all(parameter.grad is None for parameter in built.parameters())
    assert set(found) == set(trained(built))
    again = gradient_snr(built, data(), num_batches=12, batch_size=16, seed=5)
    assert str(again) == str(found)  # as text, in which NaN equals NaN
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data()), batch_size=8)
    ours = gradient_snr(built, loader, num_batches=12, batch_size=16, seed=5)
    assert str(ours) == str(found)  # rows come in our order, not the loader's


def test_a_signal_that_is_known() -> None:
    # Rows of one input each: the gradient of the logits' bias over batches of one row is p − y exactly.
    inputs, targets = torch.zeros(30, 1, dtype=torch.float64), torch.arange(30) % 3
    built = MAP().build(nn.Linear(1, 3).double(), Categorical(), num_data=30)
    with torch.no_grad():
        built.draft.network.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    found = gradient_snr(built, (inputs, targets), num_batches=30, batch_size=1)
    probs = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    expected = np.mean((probs - 1 / 3) ** 2 / (1 / 3 * 2 / 3))  # each class in a third of the rows
    assert found["network.bias"].signal == pytest.approx(expected)
    assert math.isnan(found["network.weight"].signal) and found["network.weight"].constant == 1.0


def test_divergence_alone_has_no_noise() -> None:
    built = KTied().build(network(), Categorical(), num_data=40)
    built.loss(*data()).kl.backward()
    snr = GradientSNR(built, window=None)
    snr.update()
    snr.update()
    assert all(each.constant == 1.0 for each in snr.result().values())


def test_ties_raise_the_signal_of_standard_deviations() -> None:
    inputs, targets = normal(200, 30), torch.arange(200) % 3
    net = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    signals = []
    for method, key in ((MeanField(initial_std=0.1), "raw_std"), (KTied(initial_std=0.1), "log_v")):
        built = method.build(net, Categorical(), num_data=200)
        found = gradient_snr(built, (inputs, targets), num_batches=60, batch_size=32)
        signals.append(found[f"{key}.0.weight"].signal)
    assert signals[1] > 3 * signals[0]


def test_refusals() -> None:
    built = MAP().build(network(), Categorical(), num_data=40)
    with pytest.raises(ConfigError, match="window must be a whole number of at least 2"):
        GradientSNR(built, window=1)
    snr = GradientSNR(built)
    with pytest.raises(ConfigError, match="at least 2 batches, got 0"):
        snr.result()
    built.loss(*data()).total.backward()
    snr.update()
    with pytest.raises(ConfigError, match="at least 2 batches, got 1"):
        snr.result()
    for wrong in ({"num_batches": 1}, {"batch_size": 0}):
        with pytest.raises(ConfigError, match="must be a whole number"):
            gradient_snr(built, data(), **wrong)
