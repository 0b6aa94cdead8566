"""Matrix normal and inverse Wishart against SciPy, and the conjugate update against brute force."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from dubito.distributions import InverseWishart, MatrixNormal, MatrixNormalInverseWishart
from dubito.errors import ConfigError, DataError

N, P = 4, 3


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def covariance(size: int, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    root = torch.randn(*batch, size, size + 2, generator=stream(seed), dtype=torch.float64)
    return root @ root.mT / size


def tril(size: int, seed: int, batch: tuple[int, ...] = ()) -> Tensor:
    return torch.linalg.cholesky(covariance(size, seed, batch))


def values(*shape: int, seed: int = 9) -> Tensor:
    return torch.randn(*shape, generator=stream(seed), dtype=torch.float64)


def normal(seed: int = 0, *, precision: bool = False, batch: tuple[int, ...] = ()) -> MatrixNormal:
    rows = covariance(N, seed, batch)
    own = (
        {"row_precision_tril": torch.linalg.cholesky(torch.linalg.inv(rows))}
        if precision
        else {"row_scale_tril": torch.linalg.cholesky(rows)}
    )
    return MatrixNormal(values(*batch, N, P, seed=seed), column_scale_tril=tril(P, seed + 50, batch), **own)


def joint(seed: int = 0, dof: float = 7.5) -> MatrixNormalInverseWishart:
    return MatrixNormalInverseWishart(
        values(N, P, seed=seed), row_precision_tril=tril(N, seed + 1), scale_tril=tril(P, seed + 2), dof=dof
    )


@pytest.mark.parametrize("precision", [False, True])
def test_the_matrix_normal_is_scipys(precision: bool) -> None:
    own = normal(precision=precision)
    columns = own.column_scale_tril @ own.column_scale_tril.mT
    truth = stats.matrix_normal(own.mean.numpy(), covariance(N, 0).numpy(), columns.numpy())
    points = values(5, N, P)
    torch.testing.assert_close(own.log_prob(points), torch.from_numpy(truth.logpdf(points.numpy())))
    assert float(own.entropy()) == pytest.approx(float(truth.entropy()))
    assert torch.equal(own.mode, own.mean)
    dense = torch.kron(columns, covariance(N, 0))  # Cov(vec W) = Σ ⊗ R, columns of W one after the other
    torch.testing.assert_close(own.variance.mT.flatten(), dense.diagonal())


@pytest.mark.parametrize("precision", [False, True])
def test_draws_have_the_covariance(precision: bool) -> None:
    own = normal(precision=precision)
    draws = own.sample((40_000,), generator=stream(3))
    dense = torch.kron(own.column_scale_tril @ own.column_scale_tril.mT, covariance(N, 0))
    flat = (draws - own.mean).mT.flatten(1)
    # The standard error of a covariance of S draws is √((C_ij² + C_ii C_jj) / S); five of them.
    spread = (dense.square() + dense.diagonal().outer(dense.diagonal())).div(40_000).sqrt()
    assert ((flat.mT @ flat / 40_000 - dense).abs() < 5 * spread).all()
    assert torch.equal(draws[:2], own.sample((40_000,), generator=stream(3))[:2])


def test_batches_are_each_their_own() -> None:
    stacked = normal(precision=True, batch=(2, 5))
    assert stacked.batch_shape == (2, 5) and stacked.event_shape == (N, P)
    points = values(2, 5, N, P)
    for i, j in ((0, 0), (1, 3)):
        one = MatrixNormal(
            stacked.mean[i, j],
            row_precision_tril=stacked.row_precision_tril[i, j],  # pyright: ignore
            column_scale_tril=stacked.column_scale_tril[i, j],
        )
        torch.testing.assert_close(stacked.log_prob(points)[i, j], one.log_prob(points[i, j]))
        torch.testing.assert_close(stacked.entropy()[i, j], one.entropy())
    assert stacked.rsample((3,), generator=stream()).shape == (3, 2, 5, N, P)
    assert normal().expand((6,)).rsample(generator=stream()).shape == (6, N, P)


@pytest.mark.parametrize("pair", [(False, False), (False, True), (True, False), (True, True)])
def test_divergence_of_matrix_normals_is_the_dense_one(pair: tuple[bool, bool]) -> None:
    p, q = normal(0, precision=pair[0]), normal(7, precision=pair[1])

    def dense(one: MatrixNormal, seed: int) -> MultivariateNormal:
        columns = one.column_scale_tril @ one.column_scale_tril.mT
        return MultivariateNormal(one.mean.mT.flatten(), torch.kron(columns, covariance(N, seed)))

    torch.testing.assert_close(kl_divergence(p, q), kl_divergence(dense(p, 0), dense(q, 7)))
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros((), dtype=torch.float64))


def test_gradients_reach_the_parameters() -> None:
    mean, rows, columns = values(N, P), tril(N, 1), tril(P, 2)
    for tensor in (mean, rows, columns):
        tensor.requires_grad_()
    drawn = MatrixNormal(mean, row_precision_tril=rows, column_scale_tril=columns).rsample(generator=stream())
    found = torch.autograd.grad(drawn.square().sum(), (mean, rows, columns))
    assert all(each.abs().sum() > 0 for each in found)


# -- inverse Wishart ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, dof", [(1, 0.5), (1, 4.0), (3, 3.5), (3, 9.0), (5, 20.0)])
def test_the_inverse_wishart_is_scipys(size: int, dof: float) -> None:
    factor = tril(size, 4)
    own = InverseWishart(dof, factor)
    truth = stats.invwishart(max(dof, size), (factor @ factor.mT).numpy())
    if dof >= size:  # SciPy refuses fewer degrees of freedom, where the density exists above p − 1
        point = covariance(size, 8)
        assert float(own.log_prob(point)) == pytest.approx(float(truth.logpdf(point.numpy())))
        if size == 1:  # for more SciPy's is not −E log p; `test_draws_of_the_inverse_wishart` takes the mean
            assert float(own.entropy()) == pytest.approx(float(truth.entropy()))
        torch.testing.assert_close(own.mode, torch.as_tensor(truth.mode()).reshape(size, size))
    if dof > size + 1:
        torch.testing.assert_close(own.mean, torch.as_tensor(truth.mean()).reshape(size, size))
    else:
        assert own.mean.isnan().all()


def test_a_variance_is_inverse_gamma() -> None:
    own = InverseWishart(0.5, torch.full((1, 1), 1.3, dtype=torch.float64))
    truth = stats.invgamma(0.25, scale=1.3**2 / 2)
    for x in (0.2, 1.0, 30.0):
        point = torch.full((1, 1), x, dtype=torch.float64)
        assert float(own.log_prob(point)) == pytest.approx(float(truth.logpdf(x)))
    assert float(own.entropy()) == pytest.approx(float(truth.entropy()))


def test_draws_of_the_inverse_wishart() -> None:
    own = InverseWishart(12.0, tril(P, 4))
    draws = own.sample((40_000,), generator=stream(1))
    error = draws.std(0) / 200
    assert ((draws.mean(0) - own.mean).abs() < 5 * error).all()
    logs = torch.logdet(draws)
    assert abs(float(logs.mean() - own.mean_logdet)) < 5 * float(logs.std()) / 200
    inverses = torch.linalg.inv(draws)
    assert ((inverses.mean(0) - own.mean_precision).abs() < 5 * inverses.std(0) / 200).all()
    entropy = -own.log_prob(draws)
    assert abs(float(entropy.mean() - own.entropy())) < 5 * float(entropy.std()) / 200


def test_divergence_of_inverse_wisharts() -> None:
    p, q = InverseWishart(9.0, tril(P, 4)), InverseWishart(6.5, tril(P, 5))
    draws = p.sample((40_000,), generator=stream(2))
    ratios = p.log_prob(draws) - q.log_prob(draws)
    assert abs(float(ratios.mean() - kl_divergence(p, q))) < 5 * float(ratios.std()) / 200
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros((), dtype=torch.float64))
    assert kl_divergence(p, q) > 0


# -- both together ------------------------------------------------------------------------------------------------


def test_the_joint_density_is_a_product() -> None:
    own, sigma, weights = joint(), covariance(P, 30), values(N, P)
    rows = torch.linalg.inv(own.row_precision_tril @ own.row_precision_tril.mT)
    scale = own.noise.scale_tril @ own.noise.scale_tril.mT
    truth = stats.invwishart(7.5, scale.numpy()).logpdf(sigma.numpy())
    truth += stats.matrix_normal(own.mean.numpy(), rows.numpy(), sigma.numpy()).logpdf(weights.numpy())
    assert float(own.log_prob((weights, sigma))) == pytest.approx(float(truth))
    best = own.mode
    for step in (1e-3, -1e-3):  # no neighbour is more probable
        assert own.log_prob(best) > own.log_prob((best.weights + step, best.covariance))
        assert own.log_prob(best) > own.log_prob((best.weights, best.covariance * (1 + step)))


def test_joint_draws_entropy_and_divergence() -> None:
    p, q = joint(0), joint(11, dof=9.0)
    draws = p.sample((30_000,), generator=stream(5))
    logs = p.log_prob(draws)
    error = 1 / math.sqrt(30_000)
    assert abs(float(-logs.mean() - p.entropy())) < 5 * float(logs.std()) * error
    ratios = logs - q.log_prob(draws)
    assert abs(float(ratios.mean() - kl_divergence(p, q))) < 5 * float(ratios.std()) * error
    assert ((draws.weights.mean(0) - p.mean).abs() < 5 * draws.weights.std(0) * error).all()
    torch.testing.assert_close(kl_divergence(p, p), torch.zeros((), dtype=torch.float64))


def data(rows: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = values(rows, N, seed=21)
    y = x @ values(N, P, seed=22) + 0.3 * values(rows, P, seed=23)
    return x.to(dtype), y.to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 11, 300])
def test_the_update_is_bayesian_linear_regression(rows: int) -> None:
    """For one Σ, the dense Gaussian over vec W; and the joint density, up to a constant, at many points."""
    prior, (x, y) = joint(), data(rows)
    after = prior.updated(x.mT @ x, x.mT @ y, y.mT @ y, rows)
    sigma = covariance(P, 40)
    # vec of columns: y = (I ⊗ X) vec W, noise Σ ⊗ I, prior N(vec M_0, Σ ⊗ R_0)
    rows0 = torch.linalg.inv(prior.row_precision_tril @ prior.row_precision_tril.mT).contiguous()
    noise = torch.kron(torch.linalg.inv(sigma).contiguous(), torch.eye(rows, dtype=torch.float64))
    design = torch.kron(torch.eye(P, dtype=torch.float64), x)
    precision0 = torch.linalg.inv(torch.kron(sigma, rows0))
    precision = precision0 + design.mT @ noise @ design
    eta = precision0 @ prior.mean.mT.flatten() + design.mT @ noise @ y.mT.flatten()
    given = after.given(sigma)
    torch.testing.assert_close(given.mean.mT.flatten(), torch.linalg.solve(precision, eta))
    assert given.row_precision_tril is not None
    rows1 = torch.linalg.inv(given.row_precision_tril @ given.row_precision_tril.mT).contiguous()
    torch.testing.assert_close(torch.kron(sigma, rows1), torch.linalg.inv(precision))
    assert float(after.noise.dof) == 7.5 + rows

    evidences = []
    for seed in range(6):  # log prior + log likelihood − log posterior is log p(Y | X) wherever it is taken
        weights, sigma = values(N, P, seed=seed), covariance(P, 60 + seed)
        likelihood = MultivariateNormal(x @ weights, sigma).log_prob(y).sum()
        evidences.append(prior.log_prob((weights, sigma)) + likelihood - after.log_prob((weights, sigma)))
    # log p(Y|X) = −Np/2 log π + p/2 log|R|/|R_0| + u_0/2 log|U_0| − u/2 log|U| + log Γ_p(u/2)/Γ_p(u_0/2)
    scales = [torch.logdet(joint.noise.scale_tril @ joint.noise.scale_tril.mT) for joint in (prior, after)]
    old, new = prior.noise.dof, after.noise.dof
    evidence = (
        -rows * P / 2 * math.log(math.pi)
        + P / 2 * (torch.logdet(rows1) - torch.logdet(rows0))
        + (old * scales[0] - new * scales[1]) / 2
        + torch.mvlgamma(new / 2, P)
        - torch.mvlgamma(old / 2, P)
    )
    torch.testing.assert_close(torch.stack(evidences), evidence.expand(6))


def test_the_update_in_printed_form_and_in_steps() -> None:
    prior, (x, y) = joint(), data(20)
    after = prior.updated(x.mT @ x, x.mT @ y, y.mT @ y, 20)
    r0 = prior.row_precision_tril @ prior.row_precision_tril.mT
    r = torch.linalg.inv(r0 + x.mT @ x)  # Eq. 16 as printed
    m = r @ (r0 @ prior.mean + x.mT @ y)
    u = prior.noise.scale_tril @ prior.noise.scale_tril.mT + prior.mean.mT @ r0 @ prior.mean
    u = u - m.mT @ torch.linalg.inv(r) @ m + y.mT @ y
    torch.testing.assert_close(after.mean, m)
    torch.testing.assert_close(after.noise.mode, u / (7.5 + 20 + P + 1))
    step = prior
    for i in range(20):
        a, b = x[i : i + 1], y[i : i + 1]
        step = step.updated(a.mT @ a, a.mT @ b, b.mT @ b, 1)
    torch.testing.assert_close(step.mean, after.mean)
    torch.testing.assert_close(step.noise.mode, after.noise.mode)


def test_single_precision_keeps_its_digits() -> None:
    """A design whose products have a condition number beyond float32 still gives a posterior."""
    x, y = data(200)
    x = torch.cat([x, x[:, :1] + 1e-4 * values(200, 1, seed=77)], 1)
    prior = {
        dtype: MatrixNormalInverseWishart(
            torch.zeros(N + 1, P, dtype=dtype),
            row_precision_tril=torch.eye(N + 1, dtype=dtype) * 0.1,
            scale_tril=torch.eye(P, dtype=dtype),
            dof=4.0,
        )
        for dtype in (torch.float32, torch.float64)
    }
    found = {}
    for dtype, each in prior.items():
        a, b = x.to(dtype), y.to(dtype)
        found[dtype] = each.updated(a.mT @ a, a.mT @ b, b.mT @ b, 200)
        assert found[dtype].mean.dtype == dtype
    torch.testing.assert_close(
        found[torch.float32].noise.mode.double(), found[torch.float64].noise.mode, rtol=1e-4, atol=1e-5
    )
    fits = [x @ each.mean.double() for each in found.values()]
    torch.testing.assert_close(fits[0], fits[1], rtol=1e-3, atol=1e-3)  # rows of W trade off, fits do not


def test_bad_arguments_are_named() -> None:
    mean, rows, columns = values(N, P), tril(N, 1), tril(P, 2)
    with pytest.raises(ConfigError, match="one of row_scale_tril"):
        MatrixNormal(mean, column_scale_tril=columns)
    with pytest.raises(DataError, match=r"column_scale_tril must have shape \[..., 3, 3\]"):
        MatrixNormal(mean, row_scale_tril=rows, column_scale_tril=rows)
    with pytest.raises(DataError, match="float32 on cpu"):
        MatrixNormal(mean, row_scale_tril=rows.float(), column_scale_tril=columns)
    with pytest.raises(DataError, match=r"torch\.linalg\.cholesky"):
        MatrixNormal(mean, row_scale_tril=covariance(N, 1), column_scale_tril=columns)
    with pytest.raises(DataError, match="mean must be matrices"):
        MatrixNormal(mean[0], row_scale_tril=rows, column_scale_tril=columns)
    with pytest.raises(ConfigError, match=r"dof must be above p - 1 = 2, got 2\.0"):
        InverseWishart(2.0, columns)
    x, y = data(5)
    with pytest.raises(DataError, match="of the same rows"):
        joint().updated(x.mT @ x, 50 * x.mT @ y, y.mT @ y, 5)
