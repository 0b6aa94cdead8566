"""What holds for every structured Gaussian: the dense Gaussian of the same precision is the truth."""

import math

import pytest
import torch
from torch.distributions import Independent, MultivariateNormal, Normal, kl_divergence

from dubito.distributions import EigenKroneckerNormal, KroneckerNormal, SparseInformationNormal, structured
from dubito.errors import ConfigError, DataError
from dubito.seeds import generator

FAMILIES = ("kronecker", "eigen_kronecker", "congruence", "clamp")
SHAPES = ((3, 5), (5, 2), (1, 4), (4, 1), (4, 4))


@pytest.fixture
def build(fisher_layer, dense_precision):
    def of(family, shape, **options):
        """A distribution and its precision written out in float64."""
        layer = fisher_layer(*shape)
        if family in ("congruence", "clamp"):
            normal = layer.sparse(0.3, guard=family, **options)
            return normal, dense_precision(normal)
        normal = getattr(layer, family)(**options)
        if family == "kronecker":
            information = torch.kron(layer.output_factor, layer.input_factor)
        else:
            basis = torch.kron(layer.output_vectors, layer.input_vectors)
            information = basis @ torch.diag(layer.eigenvalues.flatten()) @ basis.mT
        return normal, normal.num_data * information + normal.prior_precision * torch.eye(
            len(information), dtype=torch.float64
        )

    return of


def root(normal):
    """F, column by column, as the sampler's linear map on unit noise."""
    shapes = normal._noise_shapes
    columns = []
    for place, shape in enumerate(shapes):
        noise = [torch.zeros(shape.numel(), *other).to(normal.mean) for other in shapes]
        noise[place] = torch.eye(shape.numel()).to(normal.mean).view(-1, *shape)
        columns.append(normal._apply_root(*noise).flatten(1))
    return torch.cat(columns).mT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_root_squared_is_the_dense_inverse(build, family, shape):
    normal, precision = build(family, shape)
    factor = root(normal)
    torch.testing.assert_close(factor @ factor.mT, precision.inverse(), atol=1e-10, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_dense_forms_solve_variance_and_logdet(build, family, shape):
    normal, precision = build(family, shape)
    covariance = precision.inverse()
    vectors = torch.randn(2, 3, *shape, generator=generator(1), dtype=torch.float64)
    flat = vectors.flatten(-2)
    close = {"atol": 1e-10, "rtol": 1e-10}
    torch.testing.assert_close(normal.precision_matrix, precision, **close)
    torch.testing.assert_close(normal.covariance_matrix, covariance, **close)
    torch.testing.assert_close(normal.variance.flatten(), covariance.diagonal(), **close)
    torch.testing.assert_close(normal.stddev.square(), normal.variance)
    torch.testing.assert_close(normal.precision_logdet, torch.logdet(precision), **close)
    torch.testing.assert_close(normal.solve(vectors).flatten(-2), flat @ covariance, **close)
    torch.testing.assert_close(normal.precision_matmul(vectors).flatten(-2), flat @ precision, **close)
    quadratic = torch.einsum("abi,ij,abj->ab", flat, precision, flat)
    torch.testing.assert_close(normal.quadratic_form(vectors), quadratic, **close)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_density_and_entropy_are_those_of_the_dense_gaussian(build, family, shape):
    normal, precision = build(family, shape)
    dense = MultivariateNormal(normal.mean.flatten(), precision_matrix=(precision + precision.mT) / 2)
    value = normal.mean + torch.randn(2, 3, *shape, generator=generator(2), dtype=torch.float64)
    torch.testing.assert_close(normal.log_prob(value), dense.log_prob(value.flatten(-2)), atol=1e-9, rtol=0)
    torch.testing.assert_close(normal.entropy(), dense.entropy(), atol=1e-9, rtol=0)
    assert normal.log_prob(value[0, 0]).shape == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_kl_to_a_prior_is_that_of_the_dense_gaussians(build, family):
    normal, precision = build(family, (3, 5))
    scale = torch.linspace(0.3, 2.0, 15, dtype=torch.float64).view(3, 5)
    for prior in (Normal(torch.zeros_like(scale), 0.5), Normal(scale.flip(0), scale)):
        dense = MultivariateNormal(normal.mean.flatten(), precision_matrix=(precision + precision.mT) / 2)
        truth = kl_divergence(dense, MultivariateNormal(prior.loc.flatten(), torch.diag(prior.variance.flatten())))
        torch.testing.assert_close(kl_divergence(normal, Independent(prior, 2)), truth, atol=1e-9, rtol=0)


def test_kl_to_anything_else_is_not_guessed(build):
    normal, _ = build("congruence", (3, 5))
    for other in (
        Independent(Normal(torch.zeros(5, 3), 1.0), 2),
        Independent(Normal(torch.zeros(3, 5), 1.0), 1),
        Independent(torch.distributions.Laplace(torch.zeros(3, 5), 1.0), 2),
    ):
        with pytest.raises(NotImplementedError):
            kl_divergence(normal, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_agrees_with_the_dense_float64_truth(build, family):
    normal, _ = build(family, (6, 4), dtype=torch.float32)
    _, precision = build(family, (6, 4))
    covariance = precision.inverse()
    # Statistics rounded to float32 (6e-8 relative) move P by as much and P⁻¹ by cond(P) times that; the root
    # of the low-rank part adds eps times the spread of its pivots, which cond(P) bounds too.
    tolerance = 10 * torch.finfo(torch.float32).eps * float(torch.linalg.cond(precision))
    assert tolerance < 2e-2  # else this would test nothing
    scale = float(covariance.abs().max())
    factor = root(normal)
    assert factor.dtype == normal.variance.dtype == normal.precision_logdet.dtype == torch.float32
    close = {"atol": tolerance * scale, "rtol": 0.0, "check_dtype": False}
    torch.testing.assert_close(factor @ factor.mT, covariance, **close)
    torch.testing.assert_close(normal.covariance_matrix, covariance, **close)
    torch.testing.assert_close(normal.variance.flatten(), covariance.diagonal(), **close)
    torch.testing.assert_close(
        normal.precision_logdet, torch.logdet(precision), atol=24 * tolerance, rtol=0, check_dtype=False
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_mean_and_covariance(build, family):
    normal, precision = build(family, (2, 3))
    count = 20_000
    samples = normal.sample((count,), generator=generator(3)).flatten(1)
    covariance = precision.inverse()
    deviation = samples - normal.mean.flatten()
    variances = covariance.diagonal()
    # Standard errors: √(Σ_ii / S) and √((Σ_ii Σ_jj + Σ_ij²) / S). The largest of 42 scores stays below 4.5
    # in all but 3 of 10,000 seeds.
    mean_score = deviation.mean(0) / (variances / count).sqrt()
    spread = ((variances[:, None] * variances + covariance.square()) / count).sqrt()
    covariance_score = (deviation.mT @ deviation / count - covariance) / spread
    assert mean_score.abs().max() < 4.5
    assert covariance_score.abs().max() < 4.5


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("family", FAMILIES)
def test_draws_follow_the_generator_alone(build, family, dtype):
    normal, _ = build(family, (3, 5), dtype=dtype)
    state = torch.get_rng_state()
    samples = normal.rsample((4, 2), generator=generator(4))
    assert samples.shape == (4, 2, 3, 5) and samples.dtype == dtype
    assert torch.equal(samples, normal.rsample((4, 2), generator=generator(4)))
    assert not torch.equal(samples, normal.rsample((4, 2), generator=generator(5)))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(samples.flatten(0, 1).unique(dim=0)) == 8  # as many different draws as were asked for
    assert normal.rsample(generator=generator(4)).shape == normal.sample().shape == (3, 5)
    normal.sample()
    assert not torch.equal(torch.get_rng_state(), state)  # without a generator it is torch's own state


def test_a_generator_on_another_device_is_refused():
    factor = torch.ones(1, 1, device="meta")
    normal = EigenKroneckerNormal(
        factor, factor, factor, factor, num_data=1.0, prior_precision=1.0, validate_args=False
    )
    with pytest.raises(ConfigError, match=r"generator must be on meta.*got one on cpu"):
        normal.rsample(generator=generator(0))


def test_without_information_it_is_the_prior():
    """The prior precision is a precision: neither a variance nor a standard deviation."""
    zero, left, right = torch.zeros(3, 2), torch.eye(3), torch.eye(2)
    options = {"num_data": 10.0, "prior_precision": 4.0}
    for normal in (
        KroneckerNormal(zero, left, torch.zeros(3), right, torch.zeros(2), **options),
        EigenKroneckerNormal(zero, left, right, zero, **options),
        SparseInformationNormal(zero, left, right, zero, zero, **options),
    ):
        torch.testing.assert_close(normal.variance, torch.full((3, 2), 0.25))
        torch.testing.assert_close(normal.precision_logdet, torch.tensor(6 * math.log(4.0)))
        assert kl_divergence(normal, Independent(Normal(zero, 0.5), 2)).abs() < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_the_prior_precision_and_the_mean(build, family):
    prior = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    normal, _ = build(family, (3, 5), prior_precision=prior)
    # d log|P| / dτ = tr P⁻¹
    (gradient,) = torch.autograd.grad(normal.precision_logdet, prior, retain_graph=True)
    torch.testing.assert_close(gradient, normal.variance.sum())

    def draw(tau):
        return build(family, (3, 5), prior_precision=tau)[0].rsample(generator=generator(6))

    assert torch.autograd.gradcheck(draw, prior)
    assert draw(prior).requires_grad
    assert not build(family, (3, 5), prior_precision=prior)[0].sample().requires_grad


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_a_torch_distribution(build, family):
    normal, _ = build(family, (3, 5))
    assert isinstance(normal, torch.distributions.Distribution)
    assert normal.has_rsample and normal.event_shape == (3, 5) and normal.batch_shape == ()
    assert torch.equal(normal.mode, normal.mean)
    assert "3 x 5" in repr(normal)
    with pytest.raises(ValueError, match="value must be finite"):
        normal.log_prob(torch.full((3, 5), math.nan, dtype=torch.float64))


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_another_shape_are_refused(build, family):
    normal, _ = build(family, (3, 5))
    wrong = torch.zeros(5, 3, dtype=torch.float64)
    for use in (normal.log_prob, normal.solve, normal.precision_matmul, normal.quadratic_form):
        with pytest.raises(DataError, match=r"\[\.\.\., 3, 5\], got \(5, 3\)"):
            use(wrong)


def test_dense_forms_are_refused_before_memory_runs_out(build, monkeypatch):
    large = EigenKroneckerNormal(
        torch.zeros(200, 90), torch.eye(200), torch.eye(90), torch.ones(200, 90), num_data=1.0, prior_precision=1.0
    )
    for name in ("precision_matrix", "covariance_matrix"):
        with pytest.raises(ConfigError, match=r"18000 x 18000 .* 2\.4 GiB, expected at most 2 GiB; use solve"):
            getattr(large, name)
    normal, precision = build("congruence", (3, 5))
    monkeypatch.setattr(structured, "CHUNK", 31)  # two rows at a time, and one alone
    torch.testing.assert_close(normal.precision_matrix, precision, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": torch.zeros(2, 3, 1)}, "m x n matrix"),
        ({"mean": torch.zeros(2, 3, dtype=torch.float16)}, "float32 or float64"),
        ({"mean": torch.full((2, 3), math.nan)}, "mean must be finite"),
        ({"output_vectors": torch.eye(3)}, r"output_vectors must have shape \(2, 2\)"),
        ({"input_vectors": 2 * torch.eye(3)}, "columns of length 1"),
        ({"input_vectors": torch.eye(3).double()}, r"must be torch.float32 on cpu.*\.to\(mean\)"),
        ({"eigenvalues": torch.zeros(3, 2)}, r"eigenvalues must have shape \(2, 3\)"),
        ({"eigenvalues": torch.full((2, 3), -0.5)}, "must not be negative, got -0.5"),
        ({"eigenvalues": torch.full((2, 3), math.inf)}, "eigenvalues must be finite"),
        ({"num_data": 0.0}, "num_data must be a finite number above 0"),
        ({"prior_precision": -1.0}, "prior_precision must be a finite number above 0"),
        ({"prior_precision": torch.tensor(math.inf)}, "prior_precision must be finite and above 0"),
        ({"prior_precision": torch.ones(2, 3)}, "one number for EigenKroneckerNormal"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {
        "mean": torch.zeros(2, 3),
        "output_vectors": torch.eye(2),
        "input_vectors": torch.eye(3),
        "eigenvalues": torch.ones(2, 3),
        "num_data": 1.0,
        "prior_precision": 1.0,
    }
    EigenKroneckerNormal(**good)
    with pytest.raises((ConfigError, DataError), match=message):
        EigenKroneckerNormal(**(good | change))
