"""Linearised draws: f(x; w*) + J(x) (w − w*), against differences, the closed form, and each other."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from dubito import INF, KFAC, Categorical, Diagonal, Gaussian, Laplace, NetworkError, Training
from dubito.inputs import call, map_tensors

sys.path.insert(0, str(Path(__file__).parents[1]))
from contract.cases import fitted, make

pytestmark = pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Fused(nn.Module):
    """Attention that calls PyTorch's own function."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.head = nn.Linear(4, 24), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projection(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.head(F.scaled_dot_product_attention(*parts, scale=0.3).transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("network", ["mlp", "convolutional", "lstm", "attention", "shared", "dict", "fused"])
def test_draws_are_the_tangents_of_the_network(network: str) -> None:
    if network == "fused":
        x = rows(12, 5, 4).float()
        posterior, inputs = Laplace().fit(Fused(), (x, torch.arange(12) % 3), Categorical()), x
    else:
        posterior, case = fitted("laplace-kfac", network)
        inputs = case.inputs
    fixed = posterior.sampled(3, seed=5, linearised=True)
    outputs = fixed.sample_outputs(inputs, 3)
    assert fixed._ways["linearised"] == 0  # all draws in one pass
    centre, buffers = dict(posterior.network.named_parameters()), dict(posterior.network.named_buffers())
    double = {name: t.double() if t.is_floating_point() else t for name, t in {**centre, **buffers}.items()}
    wide = map_tensors(lambda t: t.double() if t.is_floating_point() else t, inputs)
    plain = (Fused() if network == "fused" else make(network).net).double().eval()
    weights = posterior.draw(2, posterior.generator(5, 2))

    def at(step: float) -> Tensor:
        moved = {name: double[name] + step * (weights[name].double() - double[name]) for name in centre}
        return call(lambda *a, **k: functional_call(plain, {**double, **moved}, a, k), wide).detach()

    truth = at(0) + (at(1e-5) - at(-1e-5)) / 2e-5
    torch.testing.assert_close(outputs[2].double(), truth, rtol=1e-5, atol=1e-5)
    assert (posterior.sample_outputs(inputs, 3, seed=5, linearised=False)[2] - truth).abs().max() > 1e-3
    one = posterior.sample_outputs(inputs, 3, seed=5, linearised=True)[2]
    torch.testing.assert_close(one.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("structure", [Diagonal(), KFAC(), INF(rank=0.5)])
def test_their_moments_are_those_of_the_closed_form(structure) -> None:
    x, y = rows(40, 3), rows(40, 2, seed=1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    method = Laplace(structure=structure, linearised=True)
    posterior = method.fit(net, (x, y), Gaussian(std=0.5), training=Training(epochs=5))
    closed, count = posterior.predict(x[:6]), 4000
    drawn = posterior.sampled(count, seed=1)
    assert drawn.linearised
    prediction = drawn.predict(x[:6])
    error = closed.epistemic_std / count**0.5
    assert ((prediction.mean - closed.mean).abs() < 4.5 * error).all()
    assert ((prediction.epistemic / closed.epistemic).log().abs() < 4.5 * (2 / count) ** 0.5).all()
    centred = drawn.sample_outputs(x[:6], count) - closed.means
    correlation = torch.einsum("sbi,sbj->bij", centred, centred) / count - closed.mean_covariances[0]
    scale = closed.mean_covariances[0].diagonal(dim1=1, dim2=2).sqrt()
    assert (correlation.abs() < 4.5 * (2 / count) ** 0.5 * scale[:, :, None] * scale[:, None]).all()


def test_every_way_to_ask_has_the_default_of_predict() -> None:
    x, y = rows(20, 3), torch.arange(20) % 2
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    for linearised in (True, False):
        posterior = Laplace(linearised=linearised).fit(net, (x, y), Categorical())
        asked = posterior.sample_outputs(x, 3, linearised=linearised)
        assert posterior.sampled(3).linearised is linearised
        torch.testing.assert_close(posterior.sample_outputs(x, 3), asked)
        torch.testing.assert_close(posterior.sampled(3).sample_outputs(x, 3), asked)
        torch.testing.assert_close(posterior.function(2)(x).detach(), asked[2])
        other = posterior.sample_outputs(x, 3, linearised=not linearised)
        assert (other - asked).abs().max() > 1e-3


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g


class Closed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Opaque.apply(torch.tanh(self.body(x))))


def test_a_network_without_forward_derivatives_is_refused_in_words() -> None:
    x, y = rows(20, 3), torch.arange(20) % 2
    posterior = Laplace().fit(Closed().double(), (x, y), Categorical())
    with pytest.raises(NetworkError, match=r"forward-mode derivatives .*"):
        posterior.sampled(3, linearised=True).predict(x)
    assert posterior.sampled(3, linearised=False).predict(x).probs.shape == (20, 2)
