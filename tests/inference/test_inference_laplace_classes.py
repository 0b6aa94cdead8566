"""The variance of centred logits in linearised predictions, against J P⁻¹ Jᵀ written out."""

import math

import pytest
import torch
from laplace_reference import cnn, dense_covariance, labels, mlp, normal
from torch import Tensor, nn

from dubito import EFB, INF, KFAC, Bernoulli, Categorical, Diagonal, Laplace
from dubito.calibration.tempered import TemperedBernoulli, TemperedCategorical
from dubito.inference.laplace import covariance, linearised, shares

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
every_structure = pytest.mark.parametrize("structure", [Diagonal(), KFAC(), EFB(), INF(rank=5)], ids=str)


def dense_centred(posterior, inputs: Tensor, class_axis: int = 1) -> Tensor:
    """Diagonals of H J P⁻¹ Jᵀ H, H = I − 1 1ᵀ / C, the mean over classes, laid out like a row's positions."""
    shape = posterior.network(inputs).shape
    truth = []
    for row, dense in enumerate(dense_covariance(posterior, inputs).unbind(0)):
        block = dense[:, row].reshape(*shape[1:], *shape[1:])
        axes = len(shape) - 1
        first, second = class_axis % len(shape) - 1, class_axis % len(shape) - 1 + axes
        for axis in (first, second):
            block = block - block.mean(axis, keepdim=True)
        size = math.prod(shape[1:])
        diagonal = block.reshape(size, size).diagonal().reshape(shape[1:])
        truth.append(diagonal.mean(first))
    return torch.stack(truth)


def assert_exact(posterior, inputs: Tensor, class_axis: int = 1) -> None:
    prediction = posterior.predict(inputs, linearised=True)
    truth = dense_centred(posterior, inputs, class_axis)
    assert prediction.function_variance.shape == prediction.aleatoric.shape
    torch.testing.assert_close(prediction.function_variance, truth, rtol=1e-10, atol=1e-14)


def cut(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    for name, size in sizes.items():
        for module in (linearised, covariance, shares):
            monkeypatch.setattr(module, name, size, raising=False)


class Turned(nn.Module):
    """The network's outputs come from its last layer by a function."""

    def __init__(self, after, outputs: int = 6) -> None:
        super().__init__()
        self.body, self.scale = nn.Linear(4, 5), nn.Parameter(1 + 0.1 * torch.randn(5))
        self.head, self.after = nn.Linear(5, outputs), after

    def forward(self, inputs: Tensor) -> Tensor:
        return self.after(self.head(self.scale * torch.tanh(self.body(inputs))))


#: Functions after the last layer, and where the classes are then.
LAST = {
    "as they are": (lambda y: y, 1),
    "reversed": (lambda y: y.flip(1), -1),
    "three classes twice": (lambda y: y.unflatten(1, (3, 2)), 1),
    "two classes three times": (lambda y: y.unflatten(1, (3, 2)), 2),
    "turned around": (lambda y: y.unflatten(1, (3, 2)).mT, -1),
}


@pytest.mark.parametrize("last", LAST)
@every_structure
def test_last_layers_of_every_kind(structure, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after, axis = LAST[last]
    network, inputs = Turned(after).double(), normal(12, 4)
    shape = list(network(inputs).shape)
    classes = shape.pop(axis)
    targets = labels(math.prod(shape), classes).reshape(shape)
    posterior = Laplace(structure=structure).fit(network, (inputs, targets), Categorical(class_axis=axis))
    assert_exact(posterior, inputs, axis)
    cut(monkeypatch, TOGETHER=1, BUDGET=1)  # one output at a time: sets of classes are merged
    assert_exact(posterior, inputs, axis)


HEADS = {"channels": (nn.Conv2d(4, 3, 2), 1), "grouped": (nn.Conv2d(4, 6, 1, groups=2), 1)}


@pytest.mark.parametrize("head", HEADS)
@every_structure
def test_classes_of_pixels(structure, head: str) -> None:
    last, axis = HEADS[head]
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), last).double()
    inputs = normal(3, 2, 4, 4)
    shape = network(inputs).shape
    targets = labels(3 * shape[2] * shape[3]).reshape(3, *shape[2:])
    for subset in (None, ["2"]):
        method = Laplace(structure=structure, subset=subset)
        assert_exact(method.fit(network, (inputs, targets), Categorical()), inputs, axis)


@pytest.mark.parametrize("sizes", [{"BUDGET": 1}, {"CHUNK": 1}, {"BUDGET": 2_500}, {"TOGETHER": 1}], ids=str)
@every_structure
def test_pieces_change_nothing(structure, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = normal(6, 2, 6, 5)
    network = nn.Sequential(nn.BatchNorm2d(2), *cnn(7)).double()
    posterior = Laplace(structure=structure).fit(network, (inputs, labels(6, 7)), Categorical())
    cut(monkeypatch, **sizes)
    assert_exact(posterior, inputs)


def test_a_common_shift_of_all_logits_leaves_its_digits() -> None:
    """Under a wide prior the mean logit, which no label speaks about, has millions of times their variance."""
    inputs = normal(4000, 3)
    posterior = Laplace(structure=KFAC(), prior_precision=1e-7).fit(
        nn.Linear(3, 3).double(), (inputs, labels(4000)), Categorical()
    )
    truth = dense_centred(posterior, inputs[:20])
    dense = dense_covariance(posterior, inputs[:20])
    variances = torch.stack([dense[row, :, row].diagonal() for row in range(20)]).mean(1)
    assert (variances > 1e6 * truth).all()
    found = posterior.float().predict(inputs[:20].float(), linearised=True).function_variance
    torch.testing.assert_close(found.double(), truth, rtol=1e-3, atol=0)


def test_temperatures_divide_logits() -> None:
    inputs = normal(9, 4)
    for settings, tempered, outputs, targets in (
        (Categorical(), TemperedCategorical(temperature=2.0), 3, labels(9)),
        (Bernoulli(), TemperedBernoulli(temperature=2.0), 1, labels(9, 2)[:, None]),
    ):
        posterior = Laplace(structure=KFAC()).fit(mlp(outputs), (inputs, targets), settings)
        plain = posterior.predict(inputs, linearised=True).function_variance
        posterior.likelihood = tempered.build(None)
        found = posterior.predict(inputs, linearised=True).function_variance
        torch.testing.assert_close(found, plain / 4)


def test_yes_and_no_have_the_variance_of_their_logit() -> None:
    inputs = normal(7, 4)
    posterior = Laplace(structure=KFAC()).fit(mlp(2), (inputs, torch.ones(7, 2)), Bernoulli())
    dense = dense_covariance(posterior, inputs)
    truth = torch.stack([dense[row, :, row].diagonal() for row in range(7)])
    found = posterior.predict(inputs, linearised=True).function_variance
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=0)


def test_linearised_draws_come_to_it() -> None:
    inputs = normal(5, 4)
    posterior = Laplace(structure=KFAC()).fit(mlp(), (normal(60, 4, seed=3), labels(60)), Categorical())
    exact = posterior.predict(inputs, linearised=True).function_variance
    drawn = posterior.sampled(4000, linearised=True).predict(inputs).function_variance
    torch.testing.assert_close(drawn, exact, rtol=0.1, atol=0)  # 4 standard errors: √(2/4000) or more
