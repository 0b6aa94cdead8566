"""The sparse information form against its dense precision: every rank, guard, selection and layer shape."""

import math

import pytest
import torch

from dubito.distributions import SparseInformationNormal, select
from dubito.errors import ConfigError, DataError, DubitoWarning, UnknownNameError
from dubito.seeds import generator

GUARDS = ("congruence", "clamp")
METHODS = ("algorithm1", "rectangle")


def root(normal):
    """F, column by column, as the sampler's linear map on unit noise."""
    size, (m, n), (g, a) = normal.mean.numel(), normal.event_shape, normal.eigenvalues.shape
    unit, low_rank_unit = torch.eye(size).to(normal.mean), torch.eye(g * a).to(normal.mean)
    first = normal._apply_root(unit.view(-1, m, n), torch.zeros(size, g, a).to(normal.mean))
    second = normal._apply_root(torch.zeros(g * a, m, n).to(normal.mean), low_rank_unit.view(-1, g, a))
    return torch.cat([first, second]).flatten(1).mT


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("rank", [1, 4, 0.05, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(3, 5), (6, 4), (1, 5), (5, 1)])
def test_root_solve_and_variance_match_the_dense_inverse(fisher_layer, dense_precision, shape, rank, guard, method):
    normal = fisher_layer(*shape, positions=2).sparse(rank, guard=guard, method=method)
    precision = dense_precision(normal)
    covariance = precision.inverse()
    factor = root(normal)
    close = {"atol": 1e-10, "rtol": 0.0}
    torch.testing.assert_close(factor @ factor.mT, covariance, **close)
    torch.testing.assert_close(normal.precision_matrix, precision, atol=1e-10, rtol=1e-12)
    torch.testing.assert_close(normal.covariance_matrix, covariance, **close)
    torch.testing.assert_close(normal.variance.flatten(), covariance.diagonal(), **close)
    torch.testing.assert_close(normal.precision_logdet, torch.logdet(precision), **close)


@pytest.mark.parametrize("guard", GUARDS)
def test_the_prior_may_differ_by_weight(fisher_layer, dense_precision, guard):
    prior = torch.linspace(0.1, 3.0, 15, dtype=torch.float64).view(3, 5)
    normal = fisher_layer(3, 5).sparse(4, guard=guard, prior_precision=prior)
    covariance = dense_precision(normal).inverse()
    factor = root(normal)
    torch.testing.assert_close(factor @ factor.mT, covariance, atol=1e-10, rtol=0)
    torch.testing.assert_close(normal.variance.flatten(), covariance.diagonal(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("rank", [1, 3, 0.5, 1.0])
def test_the_congruence_guard_is_the_default_and_keeps_the_diagonal(fisher_layer, rank):
    layer = fisher_layer(4, 6, positions=3)
    normal = layer.sparse(rank, num_data=50.0, prior_precision=0.7)
    assert SparseInformationNormal.__init__.__kwdefaults__["guard"] == normal.guard == "congruence"
    truth = 50.0 * layer.diagonal + 0.7
    torch.testing.assert_close(normal.precision_matrix.diagonal(), truth.flatten(), atol=1e-11, rtol=0)
    assert torch.linalg.eigvalsh(normal.precision_matrix).min() >= 0.7 - 1e-10


@pytest.mark.parametrize("rank", [3, 1.0])
def test_clamping_leaves_the_diagonal_too_large_where_the_correction_is_negative(fisher_layer, rank):
    layer = fisher_layer(4, 6)
    normal = layer.sparse(rank, guard="clamp", num_data=1.0, prior_precision=0.7)
    truth = torch.maximum(layer.diagonal, normal.eigen_diagonal)
    torch.testing.assert_close(normal.precision_matrix.diagonal(), (truth + 0.7).flatten())
    assert (truth - layer.diagonal).max() > 1e-3
    assert torch.equal(normal.congruence, torch.ones_like(layer.diagonal))


def test_without_a_guard_it_would_be_indefinite(fisher_layer):
    """Why there are guards: at full rank the corrections sum to zero, so about half are negative."""
    layer = fisher_layer(4, 6)
    normal = layer.sparse(1.0)
    assert abs(float(normal.correction.sum())) < 1e-12
    basis = torch.kron(layer.output_vectors, layer.input_vectors)
    unguarded = basis @ torch.diag(layer.eigenvalues.flatten()) @ basis.mT
    unguarded += torch.diag(normal.correction.flatten())
    assert torch.linalg.eigvalsh(unguarded).min() < -1e-3


def test_what_is_reported_of_a_layer(fisher_layer):
    layer = fisher_layer(4, 6, positions=2)
    for rank in (1, 5, 0.5, 1.0):
        kept = select(layer.eigenvalues, rank)
        normal = layer.sparse(rank)
        negative = (layer.diagonal < normal.eigen_diagonal).double().mean()
        assert normal.negative_share == pytest.approx(float(negative))
        # the same gradients in both passes: ΣΛ = ΣΦ
        assert normal.captured_trace == pytest.approx(kept.captured_trace, abs=1e-12)
        assert normal.eigenvalues.numel() == kept.size
    assert 0.3 < layer.sparse(1.0).negative_share < 0.9
    zero = torch.zeros(2, 2)
    silent = SparseInformationNormal(zero, torch.eye(2), torch.eye(2), zero, zero, num_data=1.0, prior_precision=1.0)
    assert silent.negative_share == 0.0 and silent.captured_trace == 1.0


def test_rounding_is_not_a_negative_correction():
    """With one example the basis is exact: every correction is zero but for rounding."""
    for dtype in (torch.float32, torch.float64):
        a, g = (torch.rand(7, generator=generator(1), dtype=dtype), torch.rand(5, generator=generator(2), dtype=dtype))
        normal = SparseInformationNormal(
            torch.zeros(5, 7, dtype=dtype),
            (g / g.norm())[:, None],
            (a / a.norm())[:, None],
            (g.square().sum() * a.square().sum()).view(1, 1),
            torch.outer(g, a).square(),
            num_data=1.0,
            prior_precision=1.0,
        )
        assert normal.negative_share == 0.0


def test_weights_without_any_gradient_keep_their_prior(fisher_layer):
    """An input that is always zero: no division by zero, no information."""
    layer = fisher_layer(3, 5)
    layer.inputs[..., 1] = 0.0
    for guard in GUARDS:
        normal = layer.sparse(1.0, guard=guard, prior_precision=0.7)
        torch.testing.assert_close(normal.variance[:, 1], torch.full((3,), 1 / 0.7, dtype=torch.float64))
        assert normal.sample((3,), generator=generator(0)).isfinite().all()


def test_the_pieces_for_a_linearised_predictive(fisher_layer, dense_precision):
    """J P⁻¹ Jᵀ = X Xᵀ − Yᵀ Y with X = d^-½ ∘ J and Y = R⁻¹ V_sᵀ Xᵀ, from the public parts alone."""
    normal = fisher_layer(3, 5).sparse(4)
    jacobian = torch.randn(2, 15, generator=generator(3), dtype=torch.float64)
    basis = torch.kron(normal.output_vectors, normal.input_vectors)
    root_d = normal.diagonal_precision.rsqrt().flatten()
    scaled_basis = (normal.congruence.flatten() * root_d)[:, None] * basis * normal.root_eigenvalues.flatten()
    x = jacobian * root_d
    y = torch.linalg.solve_triangular(normal.cholesky, scaled_basis.mT @ x.mT, upper=False)
    truth = jacobian @ dense_precision(normal).inverse() @ jacobian.mT
    torch.testing.assert_close(x @ x.mT - y.mT @ y, truth, atol=1e-10, rtol=0)


@pytest.mark.parametrize("guard", GUARDS)
def test_float32_beyond_its_precision_goes_through_float64_and_says_so(fisher_layer, guard):
    """Full rank and data that say 1e9 times more than the prior: float32 alone would be off by factors."""
    layer = fisher_layer(6, 8, examples=40)
    options = {"guard": guard, "num_data": 1e7, "prior_precision": 1e-2}
    normal = layer.sparse(1.0, dtype=torch.float32, **options)
    with pytest.warns(DubitoWarning, match=r"48 x 48 .* raise prior_precision or lower num_data"):
        factor = root(normal)
    assert factor.dtype == normal.variance.dtype == normal.solve(normal.mean).dtype == torch.float32
    # The truth has the very s, d and l of the float32 layer: their rounding is not the sampler's.
    left, right = normal.output_vectors.double(), normal.input_vectors.double()
    basis = torch.kron(left, right) * normal.root_eigenvalues.double().flatten()
    basis = normal.congruence.double().flatten()[:, None] * basis
    precision = basis @ basis.mT + torch.diag(normal.diagonal_precision.double().flatten())
    covariance = precision.inverse()
    marginal = (factor.double().square().sum(1) / covariance.diagonal()).log()
    # float64 leaves eps · cond(P) ≈ 2e-16 · 1e11 of error, rounding the results to float32 1e-7
    assert marginal.abs().max() < 1e-4
    torch.testing.assert_close(normal.variance.double().flatten(), covariance.diagonal(), rtol=1e-4, atol=0)
    torch.testing.assert_close(normal.precision_logdet.double(), torch.logdet(precision), rtol=1e-6, atol=0)


@pytest.mark.parametrize("guard", GUARDS)
def test_float32_marginal_variances_are_right_to_float32(fisher_layer, guard):
    """They are small differences of large numbers; a low-rank layer gives no warning and loses nothing."""
    layer = fisher_layer(6, 8, examples=40)
    normal = layer.sparse(6, dtype=torch.float32, guard=guard, num_data=1e5, prior_precision=1.0)
    basis = torch.kron(normal.output_vectors.double(), normal.input_vectors.double())
    basis = normal.congruence.double().flatten()[:, None] * basis * normal.root_eigenvalues.double().flatten()
    precision = basis @ basis.mT + torch.diag(normal.diagonal_precision.double().flatten())
    torch.testing.assert_close(normal.variance.double().flatten(), precision.inverse().diagonal(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_weight_that_the_data_determine_keeps_its_variance(dtype):
    """N_s Λ / τ = 1e18: the difference 1 − M/(1 + M) is zero in float64."""
    one = torch.ones(1, 1, dtype=dtype)
    normal = SparseInformationNormal(one, one, one, one, one, num_data=1e10, prior_precision=1e-8)
    torch.testing.assert_close(normal.variance, one / 1e10)
    torch.testing.assert_close(root(normal).square().sum(), torch.tensor(1e-10, dtype=dtype))


def test_beyond_float64_is_an_error_and_not_a_number(fisher_layer):
    normal = fisher_layer(6, 8, examples=40).sparse(1.0, num_data=1e12, prior_precision=1e-12)
    with pytest.raises(DataError, match="fails even in float64; raise prior_precision or lower num_data"):
        normal.sample()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"guard": "clam"}, "unknown guard 'clam', did you mean 'clamp'"),
        ({"guard": None}, "unknown guard None"),
        ({"eigenvalues": torch.ones(3, 1)}, r"g x a with g from 1 to 2 and a to 3, got \(3, 1\)"),
        ({"eigenvalues": torch.ones(2)}, "eigenvalues must be g x a"),
        ({"output_vectors": torch.eye(2)}, r"output_vectors must have shape \(2, 1\)"),
        ({"input_vectors": torch.ones(3, 2)}, "input_vectors must hold eigenvectors"),
        ({"diagonal": torch.ones(3, 2)}, r"diagonal must have shape \(2, 3\)"),
        ({"diagonal": torch.full((2, 3), -1.0)}, "diagonal must not be negative"),
        ({"prior_precision": torch.ones(3, 2)}, r"prior_precision must have shape \(2, 3\)"),
        ({"prior_precision": torch.zeros(2, 3)}, "prior_precision must be finite and above 0"),
        ({"prior_precision": math.nan}, "prior_precision must be a finite number above 0"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {
        "mean": torch.zeros(2, 3),
        "output_vectors": torch.eye(2)[:, :1],
        "input_vectors": torch.eye(3)[:, :2],
        "eigenvalues": torch.ones(1, 2),
        "diagonal": torch.ones(2, 3),
        "num_data": 1.0,
        "prior_precision": 1.0,
    }
    SparseInformationNormal(**good)
    with pytest.raises((ConfigError, DataError, UnknownNameError), match=message):
        SparseInformationNormal(**(good | change))


def test_a_rectangle_too_large_to_factorise_is_refused_at_once():
    side = 110
    with pytest.raises(ConfigError, match=r"12100 x 12100 .*lower `rank` or set `max_size`"):
        SparseInformationNormal(
            torch.zeros(side, side),
            torch.eye(side),
            torch.eye(side),
            torch.ones(side, side),
            torch.ones(side, side),
            num_data=1.0,
            prior_precision=1.0,
        )
