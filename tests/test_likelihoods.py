"""Likelihoods against torch.distributions, SciPy, and derivatives taken by autograd."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributions import Bernoulli as BernoulliTruth
from torch.distributions import Categorical as CategoricalTruth
from torch.distributions import Independent, MultivariateNormal, Normal
from torch.func import jacrev, vmap
from torch.nn import functional as F

from dubito import Bernoulli, Categorical, ConfigError, DataError, Gaussian, NetworkError
from dubito.likelihoods import BuiltLikelihood, GaussianLikelihood, inverse_softplus, settings_of

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
COVARIANCE = ((2.0, 0.6, -0.3), (0.6, 1.0, 0.2), (-0.3, 0.2, 0.5))


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# -- log-densities -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("shape", "axis"), [((7, 4), 1), ((1, 2), 1), ((5, 3, 2, 4), 1), ((5, 6, 3), -1), ((5, 6, 3), 2), ((4, 2, 5, 3), 2)]
)
def test_categorical_log_prob(shape, axis: int, dtype: torch.dtype):
    logits = normal(*shape, dtype=dtype) * 3
    truth = CategoricalTruth(logits=logits.movedim(axis, -1))
    targets = truth.probs.argsort(-1)[..., 0]  # the least likely class of each position
    likelihood = Categorical(class_axis=axis).build(logits)
    likelihood.check_outputs(logits)
    ours = likelihood.log_prob(logits, likelihood.check_targets(logits, targets))
    assert ours.shape == (shape[0],) and ours.dtype == dtype
    torch.testing.assert_close(
        ours, truth.log_prob(targets).flatten(1).sum(1) if len(shape) > 2 else truth.log_prob(targets)
    )


@BOTH
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 4), (3, 2, 4, 5), (1, 1)])
def test_bernoulli_log_prob(shape, dtype: torch.dtype):
    logits = normal(*shape, dtype=dtype) * 3
    targets = (normal(*shape, seed=1) > 0).to(dtype)
    likelihood = Bernoulli().build(logits)
    expected = BernoulliTruth(logits=logits).log_prob(targets)
    ours = likelihood.log_prob(logits, likelihood.check_targets(logits, targets.bool()))
    assert ours.shape == (shape[0],) and ours.dtype == dtype
    torch.testing.assert_close(ours, expected.reshape(shape[0], -1).sum(1))


@BOTH
@pytest.mark.parametrize(
    ("shape", "std"),
    [
        ((6,), 0.3),
        ((6, 1), 0.3),
        ((6, 1), (0.3,)),
        ((6, 3), 2.0),
        ((6, 3), (0.1, 1.0, 5.0)),
        ((4, 2, 3, 5), 0.7),
        ((4, 2, 3, 5), (0.7, 2.0)),
    ],
)
def test_gaussian_log_prob_with_given_noise(shape, std, dtype: torch.dtype):
    outputs, targets = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    likelihood = Gaussian(std=std).build(outputs)
    likelihood.check_outputs(outputs)
    scales = torch.tensor(std, dtype=dtype)
    if scales.ndim:
        scales = scales.reshape(-1, *[1] * (len(shape) - 2))
    expected = Normal(outputs, scales).log_prob(targets)
    ours = likelihood.log_prob(outputs, likelihood.check_targets(outputs, targets))
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, expected.reshape(shape[0], -1).sum(1))


@BOTH
def test_gaussian_log_prob_with_a_full_covariance(dtype: torch.dtype):
    outputs, targets = normal(6, 3, dtype=dtype), normal(6, 3, dtype=dtype, seed=1)
    likelihood = Gaussian(covariance=COVARIANCE).build(outputs)
    likelihood.check_outputs(outputs)
    full = torch.tensor(COVARIANCE, dtype=dtype)
    torch.testing.assert_close(
        likelihood.log_prob(outputs, targets), MultivariateNormal(outputs, full).log_prob(targets)
    )
    torch.testing.assert_close(likelihood.std(), full.diagonal().sqrt())
    by_scipy = [
        scipy.stats.multivariate_normal(mean.double().numpy(), COVARIANCE).logpdf(target.double().numpy())
        for mean, target in zip(outputs, targets, strict=True)
    ]
    torch.testing.assert_close(
        likelihood.log_prob(outputs, targets).double(), torch.tensor(by_scipy), rtol=1e-5, atol=1e-5
    )


@BOTH
def test_noise_per_component(dtype: torch.dtype):
    """Draw s has the noise of component s mod K, as standard deviations or as full covariances."""
    outputs, targets = normal(6, 2, dtype=dtype), normal(6, 2, dtype=dtype, seed=1)
    stds = torch.tensor([[0.1, 1.0], [0.5, 0.2], [3.0, 0.7]], dtype=dtype)
    one = Gaussian().build(outputs).with_noise(std=stds)
    covariances = torch.stack([torch.eye(2), torch.tensor([[1.0, 0.5], [0.5, 2.0]])]).to(dtype)
    full = Gaussian().build(outputs).with_noise(covariance=covariances)
    assert (one.num_components, full.num_components) == (3, 2)
    for draw in range(7):
        expected = Normal(outputs, stds[draw % 3]).log_prob(targets).sum(1)
        torch.testing.assert_close(one.log_prob(outputs, targets, draw), expected)
        torch.testing.assert_close(one.std(draw), stds[draw % 3])
        expected = MultivariateNormal(outputs, covariances[draw % 2]).log_prob(targets)
        torch.testing.assert_close(full.log_prob(outputs, targets, draw), expected)
    one.check_outputs(outputs)
    full.check_outputs(outputs)
    single = Gaussian().build(outputs).with_noise(std=stds[0])
    assert single.num_components == 1
    torch.testing.assert_close(single.std(5), stds[0])


@BOTH
@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (4, 2, 3, 5)])
def test_learned_noise_has_one_number_per_output_and_the_right_gradient(shape, dtype: torch.dtype):
    outputs, targets = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype, seed=1)
    likelihood = Gaussian().build(outputs, targets)
    assert likelihood.raw_std.numel() == (shape[1] if len(shape) > 1 else 1)
    assert likelihood.raw_std.dtype == dtype and likelihood.raw_std.requires_grad
    raw_std = likelihood.raw_std.detach().clone().requires_grad_()
    expected = Normal(outputs, F.softplus(raw_std)).log_prob(targets).reshape(shape[0], -1).sum(1)
    ours = likelihood.log_prob(outputs, targets)
    torch.testing.assert_close(ours, expected)
    gradient = torch.autograd.grad(ours.sum(), likelihood.raw_std)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), raw_std)[0])


@BOTH
def test_extreme_logits_keep_exact_log_densities(dtype: torch.dtype):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, -1e4]], dtype=dtype)
    third = math.log(3)
    for targets, expected in (
        ([0, 0, 0], [0.0, -third, -math.log(2)]),
        ([1, 1, 2], [-2e4, -third, -2e4 - math.log(2)]),
    ):
        ours = Categorical().build(logits).log_prob(logits, torch.tensor(targets))
        torch.testing.assert_close(ours, torch.tensor(expected, dtype=dtype))
    pair = torch.tensor([1e4, -1e4], dtype=dtype)
    binary = Bernoulli().build(pair)
    assert torch.equal(binary.log_prob(pair, torch.tensor([1.0, 0.0], dtype=dtype)), torch.zeros(2, dtype=dtype))
    wrong = binary.log_prob(pair, torch.tensor([0.0, 1.0], dtype=dtype))
    assert torch.equal(wrong, torch.full((2,), -1e4, dtype=dtype))


def test_given_noise_keeps_all_its_digits():
    outputs = torch.zeros(2, 1, dtype=torch.float64)
    assert Gaussian(std=0.1).build(outputs).std().item() == 0.1
    assert Gaussian(std=(0.1,)).build(outputs).std().tolist() == [0.1]
    assert Gaussian(std=0.1).build(None).double().std().item() == 0.1
    assert Gaussian(std=0.1).build(outputs.float()).std().dtype == torch.float32


# -- draws -------------------------------------------------------------------------------------------------

COUNT = 20_000


def assert_frequencies(found: Tensor, probs: Tensor) -> None:
    """Within five standard errors √(p(1 − p)/n), and never where p is 0."""
    errors = (probs * (1 - probs) / COUNT).sqrt()
    assert ((found - probs).abs() <= 5 * errors + 1e-12).all(), (found, probs)


@BOTH
def test_categorical_draws_have_the_right_frequencies(dtype: torch.dtype):
    logits = torch.tensor([[0.0, 1.0, -2.0, 2.5], [0.0, 0.0, 0.0, -1e4]], dtype=dtype)
    dense = logits.T.expand(COUNT, 4, 2)  # classes on axis 1, two positions
    drawn = Categorical().build(dense).sample(dense, torch.Generator().manual_seed(0))
    assert drawn.shape == (COUNT, 2) and drawn.dtype == torch.int64
    found = F.one_hot(drawn, 4).double().mean(0)
    assert_frequencies(found, logits.double().softmax(-1))


@BOTH
def test_bernoulli_draws_have_the_right_frequencies(dtype: torch.dtype):
    logits = torch.tensor([0.0, -3.0, 2.0, 1e4, -1e4], dtype=dtype)
    drawn = Bernoulli().build(logits).sample(logits.expand(COUNT, 5), torch.Generator().manual_seed(0))
    assert drawn.dtype == dtype and set(drawn.unique().tolist()) == {0.0, 1.0}
    assert_frequencies(drawn.double().mean(0), logits.double().sigmoid())


@BOTH
@pytest.mark.parametrize(
    "settings_", [Gaussian(std=0.4), Gaussian(std=(0.1, 2.0, 1.0)), Gaussian(covariance=COVARIANCE), Gaussian()]
)
def test_gaussian_draws_have_the_right_moments(settings_: Gaussian, dtype: torch.dtype):
    outputs = torch.tensor([1.0, -2.0, 0.5], dtype=dtype).expand(COUNT, 3)
    likelihood = settings_.build(outputs)
    drawn = likelihood.sample(outputs, torch.Generator().manual_seed(0)).double()
    full = torch.diag(likelihood.std().detach().double().expand(3) ** 2)
    if settings_.covariance:
        full = torch.tensor(COVARIANCE, dtype=torch.float64)
    # Standard errors: σ_i/√n of a mean, √((σ_ii σ_jj + σ_ij²)/n) of a covariance; five of them.
    variances = full.diagonal()
    assert ((drawn.mean(0) - outputs[0].double()).abs() < 5 * (variances / COUNT).sqrt()).all()
    errors = ((variances[:, None] * variances + full**2) / COUNT).sqrt()
    assert ((drawn.T.cov() - full).abs() < 5 * errors).all()


@pytest.mark.parametrize(
    ("settings_", "shape"),
    [
        (Categorical(), (5, 3, 2)),
        (Bernoulli(), (5, 3)),
        (Gaussian(), (5, 3)),
        (Gaussian(covariance=COVARIANCE), (5, 3)),
    ],
)
def test_draws_follow_their_generator_and_are_targets(settings_, shape):
    outputs = normal(*shape).requires_grad_()
    likelihood = settings_.build(outputs)
    state = torch.get_rng_state()
    first, again, other = (likelihood.sample(outputs, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert not first.requires_grad
    assert torch.equal(likelihood.check_targets(outputs, first), first)
    # The same rows of noise give the same targets whatever the batch.
    noise = normal(*shape, seed=5)
    assert torch.equal(likelihood.sample_with(outputs[2:4], noise[2:4]), likelihood.sample_with(outputs, noise)[2:4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_outputs_have_draws(dtype: torch.dtype):
    outputs = torch.tensor([2.0, -1.0], dtype=dtype).expand(COUNT, 2)
    generator = torch.Generator().manual_seed(0)
    drawn = Categorical().build(outputs).sample(outputs, generator)
    assert_frequencies(F.one_hot(drawn, 2).double().mean(0), outputs[0].double().softmax(0))
    drawn = Bernoulli().build(outputs).sample(outputs, generator)
    assert drawn.dtype == dtype
    assert_frequencies(drawn.double().mean(0), outputs[0].double().sigmoid())


def test_draws_use_the_noise_of_their_component():
    outputs = torch.zeros(COUNT, 1, dtype=torch.float64)
    likelihood = Gaussian().build(outputs).with_noise(std=torch.tensor([[0.1], [10.0]], dtype=torch.float64))
    for draw, std in ((0, 0.1), (1, 10.0), (2, 0.1)):
        drawn = likelihood.sample(outputs, torch.Generator().manual_seed(0), draw)
        assert abs(drawn.std().item() / std - 1) < 5 / math.sqrt(2 * COUNT)  # standard error of σ̂/σ: 1/√(2n)


# -- curvature ---------------------------------------------------------------------------------------------


def dense_hessian(likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
    """∂²(−log p)/∂f∂fᵀ of every row by autograd, [B, n, n]."""

    def loss(row: Tensor, target: Tensor) -> Tensor:
        return -likelihood.log_prob(row[None], target[None], draw).sum()

    size = outputs[0].numel()
    return vmap(jacrev(jacrev(loss)))(outputs, targets).reshape(len(outputs), size, size)


@BOTH
@pytest.mark.parametrize(
    ("settings_", "shape"),
    [
        (Categorical(), (4, 3)),
        (Categorical(), (4, 2)),
        (Bernoulli(), (4,)),
        (Bernoulli(), (4, 1)),
        (Bernoulli(), (4, 3)),
        (Gaussian(std=0.3), (4,)),
        (Gaussian(std=(0.3, 2.0, 1.0)), (4, 3)),
        (Gaussian(), (4, 3)),
        (Gaussian(), (4, 3, 2, 2)),
        (Gaussian(covariance=COVARIANCE), (4, 3)),
    ],
)
def test_the_root_squares_to_the_hessian(settings_, shape, dtype: torch.dtype):
    outputs = normal(*shape, dtype=dtype) * 2
    likelihood = settings_.build(outputs, normal(*shape, dtype=dtype) * 3 if settings_ == Gaussian() else None)
    targets = likelihood.sample(outputs, torch.Generator().manual_seed(0))
    root = likelihood.hessian_root(outputs)
    assert root.dtype == dtype and not root.requires_grad
    torch.testing.assert_close(root @ root.mT, dense_hessian(likelihood, outputs, targets).detach())


@BOTH
@pytest.mark.parametrize(("shape", "axis"), [((3, 4, 2, 2), 1), ((3, 5, 4), -1)])
def test_the_root_of_dense_classes_is_one_block_per_position(shape, axis: int, dtype: torch.dtype):
    outputs = normal(*shape, dtype=dtype)
    likelihood = Categorical(class_axis=axis).build(outputs)
    targets = likelihood.sample(outputs, torch.Generator().manual_seed(0))
    root = likelihood.hessian_root(outputs)  # [B, positions..., C, C]
    assert root.shape == (*outputs.movedim(axis, -1).shape, shape[axis])
    blocks = (root @ root.mT).flatten(1, -3)
    places = (
        torch.arange(outputs[0].numel())
        .reshape(outputs.shape[1:])
        .movedim(axis - (axis > 0), -1)
        .reshape(-1, shape[axis])
    )
    expected = torch.zeros(3, outputs[0].numel(), outputs[0].numel(), dtype=dtype)
    for position, place in enumerate(places):
        expected[:, place[:, None], place] = blocks[:, position]
    torch.testing.assert_close(expected, dense_hessian(likelihood, outputs, targets))


def test_the_root_uses_the_noise_of_its_component():
    outputs = normal(4, 2)
    covariances = torch.stack([torch.eye(2), torch.tensor([[1.0, 0.5], [0.5, 2.0]])]).double()
    likelihood = Gaussian().build(outputs).with_noise(covariance=covariances)
    root = likelihood.hessian_root(outputs, 3)
    torch.testing.assert_close(root @ root.mT, covariances[1].inverse().expand(4, 2, 2))


def test_the_root_keeps_its_digits_where_probabilities_are_extreme():
    """Single precision against double, where 1 − p would have lost all of them."""
    logits = torch.tensor([0.0, 20.0, -20.0, 60.0, 1e4, -1e4])
    root = Bernoulli().build(logits).hessian_root(logits)
    probs, complements = logits.double().sigmoid(), (-logits.double()).sigmoid()
    torch.testing.assert_close(root[:, 0, 0].double(), (probs * complements).sqrt(), rtol=1e-5, atol=0)
    logits = torch.tensor([[20.0, 0.0, 0.0], [1e4, -1e4, 0.0]])
    root = Categorical().build(logits).hessian_root(logits)
    exact = logits.double().softmax(-1)
    exact = exact.diag_embed() - exact.unsqueeze(-1) * exact.unsqueeze(-2)
    assert root.isfinite().all()
    torch.testing.assert_close((root @ root.mT).double(), exact, rtol=1e-5, atol=1e-14)


# -- settings, building, checking --------------------------------------------------------------------------


def test_learned_noise_starts_at_the_targets_spread():
    targets = normal(200, 2) * torch.tensor([0.01, 50.0], dtype=torch.float64)
    outputs = normal(8, 2)
    torch.testing.assert_close(Gaussian().build(outputs, targets).std().detach(), targets.std(0))
    dense = normal(9, 2, 3, 4) * 3
    start = Gaussian().build(normal(8, 2, 3, 4), dense).std().detach()
    torch.testing.assert_close(start.flatten(), torch.stack([dense[:, c].std() for c in range(2)]))
    one = Gaussian().build(normal(8, 1), normal(30)).std().detach()  # targets without the output axis
    torch.testing.assert_close(one, normal(30).std().reshape(1))
    assert Gaussian().build(normal(8), torch.ones(8)).std().item() == pytest.approx(1)  # no spread to go by
    assert Gaussian().build(normal(8), torch.ones(1)).std().item() == pytest.approx(1)


def test_two_builds_never_share_state():
    outputs = normal(4, 2)
    settings_ = Gaussian()
    one, other = settings_.build(outputs), settings_.build(outputs)
    with torch.no_grad():
        one.raw_std.add_(1)
    assert not torch.equal(one.std(), other.std())
    assert settings_ == Gaussian()


def test_built_without_outputs_noise_takes_its_shape_from_the_first():
    likelihood = Gaussian().build(None)
    assert isinstance(likelihood.raw_std, nn.UninitializedParameter)
    outputs, targets = normal(4, 3), normal(4, 3, seed=1)
    likelihood.check_outputs(outputs)
    expected = Normal(outputs, torch.ones(3, dtype=torch.float64)).log_prob(targets).sum(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets).detach(), expected)
    assert likelihood.raw_std.shape == (3,) and likelihood.raw_std.requires_grad


@pytest.mark.parametrize(
    "arguments",
    [
        {"std": 0},
        {"std": -1.0},
        {"std": float("nan")},
        {"std": float("inf")},
        {"std": True},
        {"std": "1"},
        {"std": ()},
        {"std": (0.1, 0.0)},
        {"std": torch.tensor([0.1, 0.2])},
        {"covariance": 2.0},
        {"covariance": ()},
        {"covariance": (1.0, 2.0)},
        {"covariance": ((1.0, 0.0), (0.0,))},
        {"covariance": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))},
        {"covariance": ((1.0, 0.2), (0.0, 1.0))},
        {"covariance": ((1.0, 2.0), (2.0, 1.0))},
        {"covariance": ((float("nan"), 0.0), (0.0, 1.0))},
        {"covariance": ((float("inf"), 0.0), (0.0, 1.0))},
        {"covariance": (("a", "b"), ("c", "d"))},
        {"std": 1.0, "covariance": ((1.0,),)},
    ],
)
def test_gaussian_settings_that_are_refused(arguments):
    with pytest.raises(ConfigError, match=r"std|covariance"):
        Gaussian(**arguments)


def test_gaussian_settings_become_plain_and_comparable():
    assert Gaussian(std=np.float32(0.5)) == Gaussian(std=0.5) and type(Gaussian(std=np.float32(0.5)).std) is float
    assert Gaussian(std=[1, 2]) == Gaussian(std=(1.0, 2.0))  # pyright: ignore
    assert Gaussian(covariance=np.eye(2)) == Gaussian(covariance=((1.0, 0.0), (0.0, 1.0)))  # pyright: ignore
    rounded = np.linalg.inv(np.linalg.inv(np.array(COVARIANCE)))  # symmetric but for rounding
    assert np.allclose(Gaussian(covariance=rounded).covariance, COVARIANCE)  # pyright: ignore
    assert len({Gaussian(), Gaussian(std=(1.0,)), Gaussian(std=1.0)}) == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        Gaussian().std = 1.0  # pyright: ignore


@pytest.mark.parametrize("axis", [0, 1.0, "1", True])
def test_class_axes_that_are_refused(axis):
    with pytest.raises(ConfigError, match="class_axis must be a whole number"):
        Categorical(class_axis=axis)


@pytest.mark.parametrize(
    ("settings_", "outputs", "message"),
    [
        (Categorical(), torch.zeros(4), r"at least 2 classes on axis 1.*\(4,\).*Bernoulli"),
        (Categorical(), torch.zeros(4, 1), "for one logit use Bernoulli"),
        (Categorical(class_axis=2), torch.zeros(4, 3), "axis 2"),
        (Categorical(class_axis=3), torch.zeros(4, 3), "axis 3"),
        (Categorical(class_axis=-2), torch.zeros(4, 3), "axis -2"),
        (Categorical(), torch.zeros(4, 3, dtype=torch.int64), "real outputs.*int64"),
        (Categorical(), torch.zeros(()), "got torch.float32, "),
        (Bernoulli(), torch.zeros(()), "Bernoulli needs"),
        (Bernoulli(), torch.zeros(4, dtype=torch.int64), "real outputs.*int64"),
        (Gaussian(), torch.zeros(()), "Gaussian needs real outputs"),
        (Gaussian(), torch.zeros(4, dtype=torch.int64), "int64"),
        (Gaussian(std=(1.0, 2.0)), torch.zeros(4, 3), r"std is for 2 outputs.*\(4, 3\)"),
        (Gaussian(std=(1.0, 2.0)), torch.zeros(4), r"\(4,\)"),
        (Gaussian(covariance=COVARIANCE), torch.zeros(4, 2), r"covariance is for 3 outputs.*\(4, 2\)"),
        (Gaussian(covariance=COVARIANCE), torch.zeros(4, 3, 5, 5), r"covariance is for 3 outputs"),
    ],
)
def test_outputs_that_do_not_fit(settings_, outputs: Tensor, message: str):
    with pytest.raises(NetworkError, match=message):
        settings_.build(outputs).check_outputs(outputs)


@pytest.mark.parametrize(
    ("settings_", "outputs", "targets", "message"),
    [
        (Categorical(), (4, 3), torch.tensor([0, 1, 3, 2]), r"labels must lie in 0\.\.2 .*3 outputs.*got 3 at row 12"),
        (Categorical(), (4, 3), torch.tensor([0, -1, 1, 2]), "got -1 at row 11"),
        (Categorical(), (4, 3), torch.zeros(4), r"whole numbers, got torch.float32; use y\.long\(\)"),
        (Categorical(), (4, 3), torch.zeros(4, dtype=torch.bool), "whole numbers, got torch.bool"),
        (Categorical(), (4, 3), torch.zeros(4, 3, dtype=torch.int64), r"shape \[B\], got \(4, 3\); one-hot .*argmax"),
        (Categorical(), (4, 3), torch.zeros(4, 1, dtype=torch.int64), r"shape \[B\], got \(4, 1\); y\.squeeze\(-1\)"),
        (Categorical(), (4, 3, 5), torch.zeros(4, dtype=torch.int64), r"shape \[B, 5\], got \(4,\)"),
        (Categorical(class_axis=-1), (4, 3, 5), torch.zeros(4, 5, dtype=torch.int64), r"shape \[B, 3\]"),
        (Bernoulli(), (4,), torch.tensor([0, 1, 2, 0]), "must be 0 or 1, got 2 at row 12"),
        (Bernoulli(), (4, 2), torch.tensor([[0.0, 1], [0.5, 0], [1, 1], [0, 0]]), "got 0.5 at row 11"),
        (Bernoulli(), (4, 2), torch.zeros(4), r"outputs' shape \(4, 2\), got \(4,\)"),
        (Gaussian(), (4, 2), torch.zeros(4), r"outputs' shape \(4, 2\), got \(4,\)"),
        (Gaussian(), (4,), torch.zeros(4, 2), r"outputs' shape \(4,\), got \(4, 2\)"),
    ],
)
def test_targets_that_do_not_fit(settings_, outputs, targets: Tensor, message: str):
    outputs = torch.zeros(outputs)
    with pytest.raises(DataError, match=message):
        settings_.build(outputs).check_targets(outputs[:2], targets, 10)  # the rows count from 10


def test_targets_are_brought_into_form():
    outputs = torch.zeros(2, 3)
    taken = Categorical().build(outputs).check_targets(outputs, torch.tensor([0, 2, 1, 1], dtype=torch.uint8))
    assert taken.dtype == torch.int64 and taken.tolist() == [0, 2, 1, 1]
    column, flat = torch.zeros(2, 1), torch.zeros(2)
    for settings_ in (Bernoulli(), Gaussian()):
        taken = settings_.build(column).check_targets(column, torch.tensor([1, 0, 1]))
        assert taken.dtype == torch.float32 and taken.tolist() == [[1.0], [0.0], [1.0]]
        taken = settings_.build(flat).check_targets(flat, torch.tensor([[1], [0], [1]]))
        assert taken.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("value", ["classification", Categorical, None, nn.CrossEntropyLoss()])
def test_a_likelihood_is_an_object(value):
    with pytest.raises(ConfigError, match=r"must be an instance such as Categorical\(\) or Gaussian\(\), got"):
        settings_of(value)


def test_a_class_in_place_of_an_object_gets_the_remedy():
    with pytest.raises(ConfigError, match=r"give an instance: add \(\)"):
        settings_of(Gaussian)
    assert settings_of(Gaussian()) == Gaussian()


def test_tensors_move_with_their_module():
    likelihood = Gaussian(covariance=COVARIANCE).build(torch.zeros(2, 3)).double()
    assert isinstance(likelihood, GaussianLikelihood)
    assert likelihood.std().dtype == torch.float64
    assert set(Gaussian().build(torch.zeros(2, 3)).state_dict()) == {"raw_std"}


@settings(deadline=None)
@given(st.floats(1e-6, 1e6))
@example(20.0)  # where PyTorch's softplus becomes the identity
@example(20.000000001)
@example(21.0)
def test_inverse_softplus_is_the_inverse(value: float):
    # Rounding of the logarithm comes back as a relative error of eps · |log value|, at most 14 eps here.
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor(value, dtype=dtype)
        rtol = 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(F.softplus(inverse_softplus(tensor)), tensor, rtol=rtol, atol=0)


def test_independent_rows_make_the_joint():
    """The sum over event axes is the joint density of a row, as torch's Independent has it."""
    outputs, targets = normal(3, 2, 4), normal(3, 2, 4, seed=1)
    truth = Independent(Normal(outputs, 0.5), 2).log_prob(targets)
    torch.testing.assert_close(Gaussian(std=0.5).build(outputs).log_prob(outputs, targets), truth)
