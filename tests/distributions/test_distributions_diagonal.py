"""Diagonal and grouped Gaussians, and what all structures say about data and prior, against dense matrices."""

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from dubito.distributions import DiagonalNormal, GroupedNormal, StructuredNormal
from dubito.errors import ConfigError, DataError

KINDS = ("diagonal", "kronecker", "eigen", "congruence", "clamp", "full")


def made(layer, kind: str, dtype: torch.dtype = torch.float64) -> StructuredNormal:
    if kind == "diagonal":
        parts = (layer.mean.to(dtype), layer.diagonal.to(dtype))
        return DiagonalNormal(*parts, num_data=50.0, prior_precision=0.7)
    if kind == "kronecker":
        return layer.kronecker(dtype=dtype)
    if kind == "eigen":
        return layer.eigen_kronecker(dtype=dtype)
    return layer.sparse(1.0 if kind == "full" else 5, dtype=dtype, guard="clamp" if kind == "clamp" else "congruence")


def identity_like(matrix: Tensor) -> Tensor:
    return torch.eye(len(matrix)).to(matrix)


def test_a_diagonal_is_a_multivariate_normal(fisher_layer) -> None:
    layer = fisher_layer(4, 3)
    own = made(layer, "diagonal")
    precision = torch.diag(50 * layer.diagonal.flatten() + 0.7)
    truth = MultivariateNormal(own.mean.flatten(), precision_matrix=precision)
    values = torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(own.precision_matrix, precision)
    torch.testing.assert_close(own.covariance_matrix, truth.covariance_matrix)
    torch.testing.assert_close(own.variance.flatten(), truth.variance)
    torch.testing.assert_close(own.log_prob(values), truth.log_prob(values.flatten(1)))
    torch.testing.assert_close(own.entropy(), truth.entropy())
    torch.testing.assert_close(own.precision_logdet, torch.logdet(precision))
    draws = own.sample((20000,), generator=torch.Generator().manual_seed(1))
    white = (draws - own.mean) / own.variance.sqrt()
    assert white.mean(0).abs().max() < 4.5 / 20000**0.5
    assert (white.var(0) - 1).abs().max() < 4.5 * (2 / 20000) ** 0.5
    prior = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(4, 3).double(), 2.0), 2)
    dense = MultivariateNormal(torch.zeros(12).double(), 4 * torch.eye(12).double())
    torch.testing.assert_close(kl_divergence(own, prior), kl_divergence(truth, dense))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_determined_weights_and_relative_determinants(fisher_layer, kind: str, dtype: torch.dtype) -> None:
    own = made(fisher_layer(5, 4, positions=2), kind, dtype)
    precision = own.precision_matrix.double()
    gamma = torch.trace(torch.linalg.solve(precision, precision - 0.7 * identity_like(precision)))
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-10, "atol": 0.0}
    torch.testing.assert_close(own.num_determined, gamma, **tolerance)
    torch.testing.assert_close(own.relative_logdet, torch.logdet(precision / 0.7), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_other_scales_and_priors_share_the_information(fisher_layer, kind: str) -> None:
    own = made(fisher_layer(5, 4), kind)
    for use in (own.precision_logdet, own.variance, own.sample(), own.num_determined):
        assert use is not None  # everything is computed once before
    other = own.rescaled(num_data=3.0, prior_precision=2.0)
    eye = identity_like(own.precision_matrix)
    expected = (own.precision_matrix - 0.7 * eye) * 3 / 50 + 2 * eye
    torch.testing.assert_close(other.precision_matrix, expected)
    torch.testing.assert_close(other.covariance_matrix, torch.linalg.inv(expected))
    torch.testing.assert_close(other.variance.flatten(), torch.linalg.inv(expected).diagonal())
    torch.testing.assert_close(other.precision_logdet, torch.logdet(expected))
    torch.testing.assert_close(other.relative_logdet, torch.logdet(expected / 2))
    assert (own.num_data, own.prior_precision) == (50.0, 0.7)
    for settings in ({"num_data": 0.0, "prior_precision": 1.0}, {"num_data": 1.0, "prior_precision": -1.0}):
        with pytest.raises(ConfigError, match="must be a finite number above 0"):
            own.rescaled(**settings)


def test_groups_are_a_batch(fisher_layer) -> None:
    parts = [made(fisher_layer(3, 4, seed=seed), kind) for seed, kind in enumerate(("eigen", "congruence"))]
    grouped = GroupedNormal(parts)
    assert grouped.batch_shape == (2,) and grouped.event_shape == (3, 4)
    values = torch.randn(6, 2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for index, part in enumerate(parts):
        for name in ("mean", "mode", "variance", "precision_matrix", "covariance_matrix", "precision_logdet"):
            torch.testing.assert_close(getattr(grouped, name)[index], getattr(part, name))
        torch.testing.assert_close(grouped.log_prob(values)[:, index], part.log_prob(values[:, index]))
        torch.testing.assert_close(grouped.entropy()[index], part.entropy())
    draws = grouped.rsample((5,), generator=torch.Generator().manual_seed(2))
    assert draws.shape == (5, 2, 3, 4)
    generator = torch.Generator().manual_seed(2)
    for index, part in enumerate(parts):
        torch.testing.assert_close(draws[:, index], part.rsample((5,), generator=generator))
    assert grouped.sample().shape == (2, 3, 4)
    assert grouped.support.check(draws).all()


def test_unusable_diagonals_are_refused(fisher_layer) -> None:
    layer = fisher_layer(4, 3)
    for diagonal, message in (
        (layer.diagonal[:, :2], "must have shape"),
        (-layer.diagonal, "must not be negative"),
        (layer.diagonal * torch.nan, "must be finite"),
        (layer.diagonal.float(), "must be torch.float64"),
    ):
        with pytest.raises(DataError, match=f"diagonal {message}"):
            DiagonalNormal(layer.mean, diagonal, num_data=1.0, prior_precision=1.0)
    with pytest.raises(ConfigError, match="prior_precision must be"):
        DiagonalNormal(layer.mean, layer.diagonal, num_data=1.0, prior_precision=0.0)
