"""The k-tied Normal against dense Normals, Monte Carlo, and the matrix-variate Normal."""

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from dubito import ConfigError, DataError
from dubito.distributions import KTiedNormal, tied_functions
from dubito.distributions.tied_functions import pair_factors, sum_log_std, tied_kl_terms

ranks = pytest.mark.parametrize("rank", [1, 2, 3])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tied(rank: int, m: int = 5, n: int = 7, dtype: torch.dtype = torch.float64) -> KTiedNormal:
    parts = normal(m, n), normal(rank, m, seed=1) - 1, normal(rank, n, seed=2) - 0.5
    return KTiedNormal(*(part.to(dtype).requires_grad_() for part in parts))


def std_of(distribution: KTiedNormal) -> Tensor:
    """σ_ij = Σ_a u_ai v_aj, written out."""
    return torch.einsum("ai,aj->ij", distribution.log_u.exp(), distribution.log_v.exp())


def dense(distribution: KTiedNormal) -> Independent:
    return Independent(Normal(distribution.mean, std_of(distribution)), 2)


def gradients(value: Tensor, distribution: KTiedNormal) -> tuple[Tensor, ...]:
    inputs = (distribution.mean, distribution.log_u, distribution.log_v)
    return torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True, retain_graph=True)


def assert_same(value: Tensor, expected: Tensor, distribution: KTiedNormal) -> None:
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    pairs = zip(gradients(value, distribution), gradients(expected, distribution), strict=True)
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


# -- densities --------------------------------------------------------------------------------------------------


@ranks
def test_moments_density_and_entropy_are_those_of_the_dense_normal(rank: int) -> None:
    ours = tied(rank)
    truth = dense(ours)
    assert (ours.rank, ours.event_shape, ours.batch_shape) == (rank, (5, 7), ())
    torch.testing.assert_close(ours.stddev, std_of(ours))
    torch.testing.assert_close(ours.variance, truth.variance)
    values = normal(4, 3, 5, 7, seed=5)
    assert ours.log_prob(values).shape == (4, 3)
    assert_same(ours.log_prob(values).sum(), truth.log_prob(values).sum(), ours)
    assert_same(ours.entropy(), truth.entropy(), ours)


@ranks
def test_single_precision_keeps_its_digits(rank: int) -> None:
    ours, truth = tied(rank, 30, 40, torch.float32), tied(rank, 30, 40)
    torch.testing.assert_close(ours.entropy(), truth.entropy().float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.stddev.double(), truth.stddev, rtol=1e-6, atol=0)
    prior = Independent(Normal(torch.zeros(30, 40), torch.full((30, 40), 0.7)), 2)
    expected = kl_divergence(dense(truth), Independent(Normal(torch.zeros(30, 40).double(), 0.7), 2))
    torch.testing.assert_close(kl_divergence(ours, prior), expected.float(), rtol=1e-5, atol=0)


def test_draws_have_their_moments_and_carry_gradients() -> None:
    ours, count = tied(2), 20_000
    draws = ours.sample((count,), generator=torch.Generator().manual_seed(3))
    assert not draws.requires_grad
    standard = ((draws - ours.mean) / std_of(ours)).flatten(1).detach()
    assert standard.mean(0).abs().max() < 5 / count**0.5
    assert (standard.var(0) - 1).abs().max() < 5 * (2 / count) ** 0.5
    assert (torch.corrcoef(standard.T) - torch.eye(35)).abs().max() < 5 / count**0.5
    one = ours.rsample(generator=torch.Generator().manual_seed(4))
    noise = torch.randn(5, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    assert_same(one.square().sum(), (ours.mean + std_of(ours) * noise).square().sum(), ours)
    torch.testing.assert_close(one, ours.rsample(generator=torch.Generator().manual_seed(4)))


# -- divergence -------------------------------------------------------------------------------------------------


@ranks
def test_divergence_from_any_normal_against_the_dense_one(rank: int) -> None:
    ours = tied(rank)
    for loc, scale in (
        (torch.zeros(5, 7).double(), torch.full((5, 7), 0.3).double()),
        (normal(5, 7, seed=6), normal(5, 7, seed=7).exp()),
    ):
        prior = Independent(Normal(loc, scale), 2)
        assert_same(kl_divergence(ours, prior), kl_divergence(dense(ours), prior), ours)


@ranks
@pytest.mark.parametrize("chunk", [1, 20, 2**16])
def test_divergence_from_one_std_in_pieces(rank: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_functions, "CPU_CHUNK", chunk)
    ours = tied(rank)
    prior = Normal(torch.zeros((), dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64))
    expected = kl_divergence(Normal(ours.mean, std_of(ours)), prior).sum()
    with torch.no_grad():
        kl, *slopes = tied_kl_terms(ours.mean, ours.log_u.exp(), ours.log_v.exp(), 0.3)
    torch.testing.assert_close(kl, expected.detach(), rtol=1e-10, atol=1e-10)
    for found, wanted in zip(slopes, gradients(expected, ours)[1:], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert_same(sum_log_std(ours.log_u, ours.log_v), std_of(ours).log().sum(), ours)
    with torch.no_grad():
        torch.testing.assert_close(sum_log_std(ours.log_u, ours.log_v), std_of(ours).log().sum())


@ranks
def test_divergence_against_monte_carlo(rank: int) -> None:
    ours, count = tied(rank), 20_000
    prior = Independent(Normal(torch.zeros(5, 7).double(), 0.8), 2)
    draws = ours.sample((count,), generator=torch.Generator().manual_seed(8))
    terms = (ours.log_prob(draws) - prior.log_prob(draws)).detach()
    exact = kl_divergence(ours, prior).item()
    assert exact == pytest.approx(terms.mean().item(), abs=5 * terms.std().item() / count**0.5)


def test_the_sum_of_logarithms_keeps_nothing_of_the_matrixs_size() -> None:
    ours = tied(2, 60, 80)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        sum_log_std(ours.log_u, ours.log_v)
    assert kept and max(t.numel() for t in kept) == 2 * 80


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_squares_factor_into_pairs(rank: int) -> None:
    ours = tied(rank)
    rows, columns = pair_factors(ours.log_u, counted=True), pair_factors(ours.log_v, counted=False)
    assert len(rows) == rank * (rank + 1) // 2
    torch.testing.assert_close(rows.mT @ columns, std_of(ours).square())


# -- appendix A: k = 1 is a matrix-variate Normal with diagonal factors, k ≥ 2 is none ------------------------------


def covariance(distribution: KTiedNormal) -> Tensor:
    """Of the matrix with its columns stacked, [mn, mn]."""
    return std_of(distribution).detach().square().T.flatten().diag()


def kronecker_rank(matrix: Tensor, r: int, c: int) -> int:
    """Terms P ⊗ Q that a [cr, cr] matrix needs: the rank of its blocks, one per row [Van Loan & Pitsianis 1993]."""
    blocks = matrix.view(c, r, c, r).permute(0, 2, 1, 3).reshape(c * c, r * r)
    return int(torch.linalg.matrix_rank(blocks, rtol=1e-9))


def test_rank_1_is_the_matrix_variate_normal_with_diagonal_factors() -> None:
    ours = tied(1)
    q, p = (factor[0].exp().square().diag() for factor in (ours.log_u, ours.log_v))
    theirs = MultivariateNormal(ours.mean.T.flatten(), torch.kron(p, q))
    values = normal(6, 5, 7, seed=11)
    torch.testing.assert_close(ours.log_prob(values), theirs.log_prob(values.mT.flatten(1)))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    assert kronecker_rank(covariance(ours), 5, 7) == 1


@pytest.mark.parametrize("rank", [2, 3])
def test_higher_ranks_are_no_matrix_variate_normal(rank: int) -> None:
    # A matrix-variate Normal's covariance is one Kronecker product; this one needs one per pair of factors.
    terms = min(5, rank * (rank + 1) // 2)
    assert kronecker_rank(covariance(tied(rank)), 5, 7) == terms > 1


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mean", "log_u", "log_v", "message"),
    [
        ((5,), (2, 5), (2, 1), "mean must be an m x n matrix"),
        ((5, 7), (2, 7), (2, 5), r"must have shapes \[k, 5\] and \[k, 7\]"),
        ((5, 7), (2, 5), (3, 7), "with one k"),
        ((5, 7), (0, 5), (0, 7), "at least 1"),
        ((5, 7), (), (), "must have shapes"),
    ],
)
def test_shapes_that_do_not_fit(mean, log_u, log_v, message: str) -> None:
    with pytest.raises(DataError, match=message):
        KTiedNormal(torch.zeros(mean), torch.zeros(log_u), torch.zeros(log_v))


def test_values_that_do_not_fit() -> None:
    parts = torch.zeros(5, 7), torch.zeros(2, 5), torch.zeros(2, 7)
    with pytest.raises(DataError, match="log_v must be finite"):
        KTiedNormal(*parts[:2], torch.full((2, 7), math.nan))
    with pytest.raises(DataError, match=r"log_u must be torch.float32 .* got torch.float64"):
        KTiedNormal(parts[0], parts[1].double(), parts[2])
    with pytest.raises(DataError, match="mean must be an m x n matrix of floats"):
        KTiedNormal(parts[0].long(), *parts[1:])
    with pytest.raises(DataError, match=r"value must have shape \[..., 5, 7\]"):
        KTiedNormal(*parts).log_prob(torch.zeros(7, 5))
    with pytest.raises(ConfigError, match="generator must be on cpu"):
        KTiedNormal(*parts).rsample(generator=_Elsewhere())  # pyright: ignore
    with pytest.raises(NotImplementedError):
        kl_divergence(KTiedNormal(*parts), Independent(Normal(torch.zeros(5), 1.0), 1))


class _Elsewhere(torch.Generator):
    device = torch.device("meta")  # pyright: ignore


@pytest.mark.parametrize("chunk", [1, 20, 2**16])
def test_draws_in_place_and_in_pieces(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied_functions, "CPU_CHUNK", chunk)
    ours, noise = tied(2), normal(5, 7, seed=9)
    with torch.no_grad():
        expected = ours.mean + std_of(ours) * noise
        tied_functions.draw_tied(ours.mean, ours.log_u.exp(), ours.log_v.exp(), noise)
    torch.testing.assert_close(noise, expected, rtol=1e-12, atol=1e-12)
