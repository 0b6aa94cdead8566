"""Outputs of several rows together, against dense Jacobians, gradients by finite differences, and draws."""

import pytest
import torch
from laplace_reference import cnn, dense_covariance, labels, mlp, normal
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from dubito import EFB, INF, KFAC, Categorical, DataError, Diagonal, Gaussian, Laplace
from dubito.inference.laplace import covariance, linearised

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")

STRUCTURES = [Diagonal(), KFAC(), EFB(), INF(rank=5), INF(rank=5, guard="clamp")]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=str)


class Sequences(nn.Module):
    """A recurrent layer, attention, norms, a shared layer, for rows of three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.attention = (nn.LSTM(3, 4, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True))
        self.norm, self.shared, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.lstm(inputs)[0]
        hidden = self.norm(hidden + self.attention(hidden, hidden, hidden)[0])
        return self.head(torch.tanh(self.shared(torch.tanh(self.shared(hidden)))).mean(1))


NETWORKS = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 6, 5)), "sequences": (lambda: Sequences().double(), (3, 3))}


def fitted(structure, name: str, subset=None):
    make, shape = NETWORKS[name]
    network, inputs = make(), normal(20, *shape)
    targets = labels(20, 2 if name == "sequences" else 3)
    return Laplace(structure=structure, subset=subset).fit(network, (inputs, targets), Categorical()), shape


@pytest.mark.parametrize("name", NETWORKS)
@every_structure
def test_mean_and_covariance_are_those_of_dense_jacobians(structure, name: str) -> None:
    posterior, shape = fitted(structure, name)
    inputs = normal(5, *shape, seed=3)
    joint = posterior.joint(inputs)
    dense = dense_covariance(posterior, inputs).flatten(2).flatten(0, 1)
    torch.testing.assert_close(joint.mean, posterior.network(inputs))
    torch.testing.assert_close(joint.covariance, dense, rtol=1e-10, atol=1e-13)
    assert not joint.covariance.requires_grad
    _, (rows,) = posterior.linearised(inputs)(inputs, [posterior.normals], 100, pairs=False)
    torch.testing.assert_close(joint.variance.flatten(1), rows)


@pytest.mark.parametrize("name", ["TOGETHER", "CHUNK"])
@every_structure
def test_pieces_change_nothing(structure, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, shape = fitted(structure, "cnn")
    inputs = normal(5, *shape, seed=3)
    expected = posterior.joint(inputs)
    for module in (linearised, covariance):
        monkeypatch.setattr(module, name, 1, raising=False)
    joint = posterior.joint(inputs)
    torch.testing.assert_close(joint.covariance, expected.covariance)
    torch.testing.assert_close(joint.mean, expected.mean)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("structure", STRUCTURES[:4], ids=str)
def test_gradients_in_the_inputs(structure, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, shape = fitted(structure, name)
    inputs = normal(2, *shape, seed=3).requires_grad_()

    def function(inputs: Tensor) -> tuple[Tensor, Tensor]:
        joint = posterior.joint(inputs)
        return joint.mean, joint.covariance

    torch.autograd.gradcheck(function, inputs, fast_mode=name != "mlp")
    monkeypatch.setattr(covariance, "CHUNK", 8)  # parts that a backward pass forms again
    torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert not any(p.requires_grad or p.grad is not None for p in posterior.parameters())
    with torch.no_grad():
        assert not posterior.joint(inputs).covariance.requires_grad


def test_a_last_layer() -> None:
    for structure in STRUCTURES[:4]:
        posterior, shape = fitted(structure, "mlp", subset=["2"])
        inputs = normal(4, *shape, seed=3).requires_grad_()
        dense = dense_covariance(posterior, inputs.detach()).flatten(2).flatten(0, 1)
        torch.testing.assert_close(posterior.joint(inputs).covariance, dense, rtol=1e-10, atol=1e-13)
        torch.autograd.gradcheck(lambda x, kept=posterior: kept.joint(x).covariance, inputs)


def test_draws_and_densities() -> None:
    network, inputs = mlp(2), normal(20, 4)
    posterior = Laplace(structure=KFAC()).fit(network, (inputs, normal(20, 2, seed=2)), Gaussian(std=0.5))
    joint = posterior.joint(inputs[:3])
    truth = MultivariateNormal(joint.mean.flatten(), joint.covariance)
    values = normal(7, 3, 2, seed=5)
    torch.testing.assert_close(joint.log_prob(values), truth.log_prob(values.flatten(1)))
    torch.testing.assert_close(joint.log_prob(values[0]), truth.log_prob(values[0].flatten()))
    count = 20_000
    draws = joint.rsample((count,), seed=1)
    assert draws.shape == (count, 3, 2)
    assert torch.equal(draws, joint.rsample((count,), seed=1))
    assert not torch.equal(draws[0], joint.rsample(seed=2))
    generator = torch.Generator().manual_seed(4)
    state = torch.get_rng_state()
    assert joint.rsample(generator=generator).shape == (3, 2)
    assert torch.equal(torch.get_rng_state(), state)
    std = joint.covariance.diagonal().sqrt()
    error = (draws.flatten(1).T.cov() - joint.covariance) / (std[:, None] * std)
    assert error.abs().max() < 5 * (2 / count) ** 0.5  # five standard errors of a correlation, at most √(2/count)
    assert ((draws.flatten(1).mean(0) - joint.mean.flatten()) / std).abs().max() < 5 * count**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("structure", [*STRUCTURES[:3], INF(rank=0.5)], ids=str)
def test_more_outputs_than_weights_can_be_drawn(structure, dtype: torch.dtype) -> None:
    network, inputs = nn.Linear(3, 1).to(dtype), normal(50, 3).to(dtype)
    posterior = Laplace(structure=structure).fit(network, (inputs, inputs.sum(1, keepdim=True)), Gaussian(std=1.0))
    inputs = torch.cat([inputs, inputs]).requires_grad_()
    joint = posterior.joint(inputs)
    draws = joint.rsample((2,))
    assert draws.dtype == dtype and draws.isfinite().all()
    # The same row twice has the same value, but for the roundings of the trace that make the covariance definite.
    scale = float((10 * torch.finfo(dtype).eps * joint.covariance.trace()).detach()) ** 0.5
    assert (draws[:, :50] - draws[:, 50:]).abs().max() < 6 * 2**0.5 * scale
    (gradient,) = torch.autograd.grad(draws.sum(), inputs)
    assert gradient.isfinite().all()


def test_float32_agrees_with_float64() -> None:
    for structure in STRUCTURES[:4]:
        posterior, shape = fitted(structure, "cnn")
        inputs = normal(5, *shape, seed=3)
        expected = posterior.joint(inputs).covariance
        single = posterior.float().joint(inputs.float()).covariance
        assert single.dtype == torch.float32
        assert (single.double() - expected).norm() / expected.norm() < 1e-4


def test_inputs_are_checked() -> None:
    posterior, _ = fitted(KFAC(), "mlp")
    with pytest.raises(DataError, match="cannot read inputs"):
        posterior.joint(normal(3, 5))
    with pytest.raises(DataError, match="must be finite"):
        posterior.joint(normal(3, 4) / 0)
