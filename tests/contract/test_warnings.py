"""What every method says before it fits: real targets far from standard, probabilities in place of logits."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dubito import MAP, Categorical, DubitoWarning, Gaussian, Laplace, Training
from dubito.data import load

from .cases import METHODS, labels, rows

QUICK = Training(iterations=2)
X = rows((40, 4))
Y = X[:, :1].sin() + 0.1 * rows((40, 1), 5)
Y = (Y - Y.mean()) / Y.std()
FAR = "have mean .* and standard deviation .*Gaussian\\(standardise=True\\)"


def net(outputs: int = 1, last: nn.Module | None = None) -> nn.Module:
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)]
    return nn.Sequential(*layers, *([last] if last else []))


def messages(method, network, data, likelihood, **options) -> list[str]:
    options = {"training": QUICK} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.fit(network, data, likelihood, progress=False, **options)
    here = [str(entry.message) for entry in caught if entry.filename == __file__]
    return [text for text in here if "no better than a constant" not in text]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_warns_of_targets_far_from_standard(name: str):
    method, run = METHODS[name], {}
    if name == "hmc":
        method, run = type(method)(num_samples=2, warmup=2, chains=1), {"training": None}
    std = 0.5 if name == "hmc" else None
    (text,) = [m for m in messages(method, net(), (X, 1e5 * Y + 1e6), Gaussian(std), **run) if "targets" in m]
    assert "output 0 have mean 1e+06 and standard deviation 1e+05" in text
    assert 'training="auto"' in text
    silent = messages(method, net(), (X, 1e5 * Y + 1e6), Gaussian(std and 5e4, standardise=True), **run)
    assert not [text for text in silent if "targets" in text]


@pytest.mark.parametrize(
    ("scale", "shift", "far"),
    [
        *[(1, 0, False), (1, 4, False), (1, -6, True), (0.1, 0.9, False), (0.1, 3, True), (5, 9, False)],
        *[(5, -11, True), (9, 0, False), (11, 0, True), (0.03, 0, False), (0.01, 0, True), (0, 3, False)],
    ],
)
def test_far_from_standard_is_what_training_does_not_reach(scale: float, shift: float, far: bool):
    for likelihood in (Gaussian(), Gaussian(std=0.3)):
        assert bool(messages(MAP(), net(), (X, scale * Y + shift), likelihood)) == far


def test_the_first_rows_of_a_loader_tell():
    for scale, shift, far in [(1, 0, False), (1, -20, True), (100, 0, True), (1e-3, 0, True)]:
        loader = DataLoader(TensorDataset(X, scale * Y + shift), batch_size=40, sampler=range(40))
        assert bool(messages(MAP(), net(), loader, Gaussian())) == far


def test_one_output_of_several_is_named():
    targets = torch.cat([Y, Y * 1e3], 1)
    (text,) = messages(MAP(), net(2), (X, targets), Gaussian())
    assert "output 1 have mean" in text


def test_networks_that_answer_in_the_targets_units_are_not_warned_about():
    targets = 1e5 * Y + 1e6
    linear = nn.Linear(4, 1)
    with torch.no_grad():
        solved = torch.linalg.lstsq(torch.cat([X, torch.ones(40, 1)], 1).double(), targets.double()).solution
        linear.weight.copy_(solved[:4].T)
        linear.bias.copy_(solved[4])
    assert not messages(Laplace(), linear, (X, targets), Gaussian(), training=None)
    assert messages(Laplace(), nn.Linear(4, 1), (X, targets), Gaussian(), training=None)


@pytest.mark.parametrize("name", ["diabetes", "sinc"])
def test_the_data_room_gives_targets_that_are_near(name: str):
    data = load(name)
    network = nn.Linear(data.train.inputs.shape[1], 1)
    assert not messages(MAP(), network, data.train, Gaussian())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_last_softmax_is_told_apart_from_logits(dtype: torch.dtype):
    data = X.to(dtype), labels(40)
    for last, expected in [(nn.Softmax(1), 1), (nn.LogSoftmax(1), 0), (nn.Sigmoid(), 0), (None, 0)]:
        found = messages(MAP(), net(3, last).to(dtype), data, Categorical())
        assert len([text for text in found if "are probabilities" in text]) == expected
    pixels = X.reshape(40, 4, 1, 1).expand(40, 4, 2, 2).to(dtype), labels(160).reshape(40, 2, 2)
    network = nn.Sequential(nn.Conv2d(4, 3, 1), nn.Softmax(1)).to(dtype)
    assert messages(MAP(), network, pixels, Categorical())
    with pytest.warns(DubitoWarning, match="leave the last layer out"):
        MAP().fit(net(3, nn.Softmax(1)).to(dtype), data, Categorical(), training=QUICK)


def test_more_data_for_a_fitted_posterior_warns_of_nothing():
    posterior = Laplace().fit(net(), (X, Y), Gaussian(), training=Training(iterations=30, lr=0.03))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior.update((X, Y + 100))
