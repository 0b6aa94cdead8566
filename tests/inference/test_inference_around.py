"""A prior around pretrained weights against the closed form of a linear regression."""

from functools import cache
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import dubito
from dubito import INF, MAP, Around, Diagonal, Gaussian, He, KTied, Laplace, MeanField, Training
from dubito.errors import ConfigError, DubitoError
from dubito.training import Cosine
from dubito.weight_normals import LocalReparameterised

ROWS, NOISE = 40, 0.3
CENTRE = torch.tensor([1.0, 1.0, 1.0, 2.0], dtype=torch.float64)
GROUPS = {"weight": 0.1, "*": 0.5}
STDS = torch.tensor([0.1, 0.1, 0.1, 0.5], dtype=torch.float64)
DESCENT = Training(iterations=400, batch_size=ROWS, lr=0.1, schedule=Cosine())


@cache
def rows() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 3, generator=stream, dtype=torch.float64)
    noise = NOISE * torch.randn(ROWS, 1, generator=stream, dtype=torch.float64)
    return inputs, inputs @ torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64) + 1.5 + noise


def design() -> Tensor:
    return torch.cat([rows()[0], torch.ones(ROWS, 1, dtype=torch.float64)], 1)


def layer(vector: Tensor) -> nn.Linear:
    net = nn.Linear(3, 1).double()
    with torch.no_grad():
        net.weight.copy_(vector[:3])
        net.bias.copy_(vector[3:])
    return net


def centre_of(posterior: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in posterior.weights().values()])


def truth(stds: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and precision: P = AᵀA/σ² + S⁻², m = P⁻¹ (Aᵀy/σ² + S⁻² w₀)."""
    inputs, targets = design(), rows()[1][:, 0]
    precision = inputs.T @ inputs / NOISE**2 + torch.diag(stds**-2)
    return torch.linalg.solve(precision, inputs.T @ targets / NOISE**2 + CENTRE / stds**2), precision


@cache
def fitted(name: str) -> Any:
    groups, single = Around(layer(CENTRE), std=GROUPS), Around(layer(CENTRE), std=0.2)
    method = {
        "map": MAP(prior=groups),
        "mean-field": MeanField(prior=groups, initial_std=0.05, estimator=LocalReparameterised()),
        "k-tied": KTied(prior=groups, initial_std=0.05, estimator=LocalReparameterised()),
        "laplace": Laplace(prior=single),
        "laplace-diagonal": Laplace(prior=single, structure=Diagonal()),
    }[name]
    return method.fit(layer(torch.zeros(4)), rows(), Gaussian(std=NOISE), training=DESCENT, progress=False)


def test_map_ends_where_data_and_prior_agree():
    mean, _ = truth(STDS)
    torch.testing.assert_close(centre_of(fitted("map")), mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["mean-field", "k-tied"])
def test_normals_have_the_mean_and_the_conditional_variances(name: str):
    mean, precision = truth(STDS)
    posterior = fitted(name)
    torch.testing.assert_close(
        centre_of(posterior), mean, rtol=0, atol=0.02
    )  # noisy gradients; a prior around 0 ends 0.2 away
    stds = torch.cat([std.flatten() for std in posterior.standard_deviations()])
    torch.testing.assert_close(stds, precision.diagonal().rsqrt(), rtol=0.1, atol=0)


def test_the_divergence_is_that_of_two_normals():
    posterior = fitted("mean-field")
    stds = torch.cat([std.flatten() for std in posterior.standard_deviations()])
    normals = (torch.distributions.Normal(centre_of(posterior), stds), torch.distributions.Normal(CENTRE, STDS))
    expected = torch.distributions.kl_divergence(*normals).sum()
    torch.testing.assert_close(posterior.kl(), expected)


def test_laplace_has_the_posterior_and_its_evidence():
    stds = torch.full((4,), 0.2, dtype=torch.float64)
    mean, precision = truth(stds)
    posterior = fitted("laplace")
    torch.testing.assert_close(centre_of(posterior), mean, rtol=0, atol=1e-6)
    block = posterior.block("itself" if "itself" in posterior.blocks else next(iter(posterior.blocks)))
    torch.testing.assert_close(block.covariance_matrix, torch.linalg.inv(precision), rtol=1e-6, atol=1e-9)
    targets, inputs = rows()[1][:, 0], design()
    covariance = NOISE**2 * torch.eye(ROWS, dtype=torch.float64) + 0.04 * inputs @ inputs.T
    evidence = MultivariateNormal(inputs @ CENTRE, covariance).log_prob(targets)
    assert posterior.log_marginal_likelihood() == pytest.approx(float(evidence), abs=1e-6)


def test_tuning_moves_the_prior_around_its_centre():
    """The best τ is the root of γ = τ |w − w₀|², not of |w|²."""
    tuned = fitted("laplace-diagonal").tuned()
    evidences = [
        tuned.log_likelihood + tuned.evidence().log_occam(dict.fromkeys(tuned.blocks, factor * tuned.prior_precision))
        for factor in (0.9, 1.0, 1.1)
    ]
    assert evidences[1] > max(evidences[0], evidences[2])
    distance = float((centre_of(tuned) - CENTRE).square().sum())
    determined = tuned.evidence().num_determined(tuned.prior_precisions)
    assert tuned.prior_precision * distance == pytest.approx(determined, rel=1e-3)


@pytest.mark.parametrize("name", ["map", "mean-field", "laplace"])
def test_files_name_the_centre_and_the_network_brings_it(name: str, tmp_path):
    posterior, path = fitted(name), tmp_path / "p.safetensors"
    posterior.save(path)
    with safe_open(path, "pt") as file:
        numbers = sum(file.get_tensor(key).numel() for key in file.keys())  # noqa: SIM118
    assert numbers == posterior.num_parameters + 1  # and the noise, which is known
    loaded: Any = dubito.load(path, layer(CENTRE))
    again: Any = dubito.load(path, layer(CENTRE + 1))
    assert loaded.method == posterior.method
    if name == "mean-field":
        torch.testing.assert_close(loaded.kl(), posterior.kl())
        with pytest.raises(ConfigError, match="from a file"):
            again.kl()
    assert torch.equal(centre_of(again), centre_of(posterior))
    if name == "laplace":
        assert again.log_marginal_likelihood() == posterior.log_marginal_likelihood()


def test_the_centre_stays_when_its_network_is_trained_on():
    net = layer(CENTRE)
    prior = Around(net, std=0.1)
    with torch.no_grad():
        net.weight.zero_()
    assert torch.equal(prior.centre("weight", net.weight), torch.ones(1, 3, dtype=torch.float64))
    assert prior == Around(layer(CENTRE), std=0.1)
    assert prior != Around(net, std=0.1)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda net: MAP(prior=Around(net, std={"weight": 0.1})), "no group for 'bias'"),
        (lambda net: MeanField(prior=Around(net, std={"*": 0.1, "head*": 0.2})), "head"),
        (lambda net: KTied(prior=Around(nn.Linear(2, 1), std=0.1)), "must be like the one"),
        (lambda net: MAP(prior=Around(nn.Sequential(net), std=0.1)), "no trainable parameter"),
        (lambda net: Laplace(prior=Around(net, std={"weight": 0.1, "*": 1.0})), "one pattern"),
        (lambda net: Laplace(prior=Around(net, std=He())), "one pattern"),
        (lambda net: MAP(prior_std=1.0, prior=Around(net, std=0.1)), "not both"),
        (lambda net: Laplace(prior_precision=1.0, prior=Around(net, std=0.1)), "not both"),
        (lambda net: Around(net, std=0.0), "prior_std"),
    ],
)
def test_what_cannot_be_a_prior_is_refused_before_training(method, message: str):
    net = layer(CENTRE)
    with pytest.raises(DubitoError, match=message):
        method(net).fit(net, rows(), Gaussian(std=NOISE), progress=False)


def test_a_fit_tells_its_memory_before_it_starts(caplog):
    with caplog.at_level("INFO", logger="dubito"):
        Laplace(prior_precision=1.0).fit(layer(CENTRE), rows(), Gaussian(std=NOISE), progress=False)
    assert "1 layers: 136 bytes of statistics" in caplog.text  # (4² + 1²) numbers of 8 bytes


@pytest.mark.filterwarnings("ignore:the network is no better")  # it is not trained
def test_layers_measured_a_few_at_a_time_are_the_same(monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(layer(CENTRE), nn.Tanh(), nn.Linear(1, 4).double(), nn.Tanh(), nn.Linear(4, 1).double())
    method = Laplace(structure=INF(rank=0.5), prior_precision=1.0)

    def fit() -> Any:
        return method.fit(net, rows(), Gaussian(std=NOISE), progress=False)

    whole = fit()
    monkeypatch.setattr("dubito.inference.laplace.method.MOST_BYTES", 1)
    apart = fit()
    assert apart.log_likelihood == whole.log_likelihood
    for name, tensor in whole.stored().items():
        assert torch.equal(apart.stored()[name], tensor), name
