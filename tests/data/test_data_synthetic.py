import numpy as np
import pytest
import torch

from dubito.data import load


def sinc(x):
    return np.where(x == 0, 1.0, 2 * np.sin(20 * x) / np.where(x == 0, 1.0, 20 * x) - 1)


def sines(x):
    return 0.3 * np.sin(2 * np.pi * x) + 0.3 * np.sin(4 * np.pi * x) + x


CASES = [
    ("sinc", 128, sinc, 0.1, lambda x: np.abs(x) <= 1),
    ("sines-trend", 32, sines, 0.02, lambda x: (np.abs(x) >= 0.25) & (np.abs(x) <= 1)),
    ("cubic-inf", 100, lambda x: x**3, 3.0, lambda x: np.abs(x) <= 4),
    ("cubic-implicit", 30, lambda x: x**3, 3.0, lambda x: np.abs(x) <= 4),
]


@pytest.mark.parametrize(("name", "num_data", "function", "noise", "inside"), CASES)
def test_sets_follow_the_papers(name, num_data, function, noise, inside):
    data = load(name, dtype=torch.float64)
    assert data.train.inputs.shape == data.train.targets.shape == (num_data, 1)
    assert data.task == "regression"
    many = load(name, num_data=20_000, dtype=torch.float64)
    x, y = (part.numpy() for part in many.train)
    assert inside(x).all()
    errors = y - function(x)
    # The mean and std of 20,000 Normal errors lie within 5 of their standard errors
    assert abs(errors.mean()) < 5 * noise / np.sqrt(len(x))
    assert abs(errors.std() / noise - 1) < 5 / np.sqrt(2 * len(x))
    # Uniform inputs: their distribution function, on either side of 0, is a straight line
    side = np.sort(np.abs(x[:, 0]))
    low = 0.25 if name == "sines-trend" else 0.0
    line = (side - low) / (side[-1] - low)
    assert np.abs(line - np.arange(len(side)) / len(side)).max() < 2 / np.sqrt(len(side))
    assert abs((x > 0).mean() - 0.5) < 5 * 0.5 / np.sqrt(len(x))


def test_two_moons_are_two_half_circles_with_noise():
    data = load("two-moons", dtype=torch.float64)
    assert data.train.inputs.shape == (128, 2)
    assert data.train.targets.bincount().tolist() == [64, 64]
    assert (data.task, data.num_outputs, data.num_classes) == ("binary", 1, 2)
    x, y = load("two-moons", num_data=10_000, dtype=torch.float64).train
    centre = torch.stack([y.double(), y.double() / 2], 1)  # the lower moon's circle is centred at (1, 0.5)
    radius = (x - centre).norm(dim=1)
    # |r| with noise σ on both axes: E r² = 1 + 2σ²
    assert abs(radius.square().mean().item() - 1.08) < 0.03


def test_draws_are_reproducible_and_independent():
    first, again, other = load("sinc", 0), load("sinc", 0), load("sinc", 1)
    assert first.train.inputs.equal(again.train.inputs)
    assert first.train.targets.equal(again.train.targets)
    assert not first.train.inputs.equal(other.train.inputs)
    assert not torch.isin(first.train.inputs, first.test.inputs).any()
    assert not load("cubic-inf").train.inputs[:30].equal(load("cubic-implicit").train.inputs)


def test_synthetic_sets_are_as_drawn_unless_asked():
    plain, scaled = (load("cubic-inf", dtype=torch.float64), load("cubic-inf", standardise=True, dtype=torch.float64))
    assert plain.target_scaling is not None
    assert plain.target_scaling.shift.tolist() == [0.0]
    assert plain.target_scaling.scale.tolist() == [1.0]
    assert scaled.target_scaling is not None
    torch.testing.assert_close(scaled.target_scaling.undo(scaled.test.targets), plain.test.targets)
    torch.testing.assert_close(scaled.train.targets.std(correction=0), torch.tensor(1.0, dtype=torch.float64))
