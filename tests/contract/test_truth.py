"""Every method has the moments that mathematics gives it, in a regression whose posterior is known."""

import pytest
import torch
from torch import Tensor

import dubito

from .problem import PROBLEM, flat, matrix_of, normal
from .truth import DECLARED, drawn, refusal

RANDOM = [name for name, declared in DECLARED.items() if declared.expected().covariance.any()]
POINTS = [name for name in DECLARED if name not in RANDOM]


def test_every_method_says_what_it_converges_to():
    registered = dubito.methods()
    lacking = sorted(set(registered) - set(DECLARED))
    assert not lacking, (
        f"{lacking} have no entry in DECLARED of tests/contract/truth.py: declare there the settings for the "
        "regression, the mean and the covariance that the method's draws then have (the posterior's, or the closed "
        "form it converges to instead), the tolerance that its training needs, and why"
    )
    # A reference, and a method with another beside it: neither has a name on the command line.
    assert sorted(set(DECLARED) - set(registered)) == ["hmc", "rank1-beside"]
    for name, method in registered.items():
        stated = DECLARED[name].method
        assert type(stated) is type(method), name
        structures = [type(getattr(settings, "structure", None)) for settings in (stated, method)]
        assert structures[0] is structures[1], name


def test_the_posterior_is_the_curvature_and_the_summit_of_the_joint_density():
    def log_joint(vector: Tensor) -> Tensor:
        outputs = PROBLEM.design @ matrix_of(vector).T
        likelihood = torch.distributions.Normal(outputs, PROBLEM.stds).log_prob(PROBLEM.targets).sum()
        return (
            likelihood + torch.distributions.Normal(torch.zeros_like(vector), PROBLEM.prior_std).log_prob(vector).sum()
        )

    mean = PROBLEM.posterior.mean
    precision = -torch.autograd.functional.hessian(log_joint, mean)
    torch.testing.assert_close(torch.linalg.inv(precision), PROBLEM.posterior.covariance)
    assert torch.autograd.functional.jacobian(log_joint, mean).abs().max() < 1e-9
    assert torch.equal(flat(matrix_of(mean)), mean)
    # A case in which the approximations are no longer one: weights are correlated.
    roots = PROBLEM.posterior.covariance.diagonal().sqrt()
    correlations = PROBLEM.posterior.covariance / (roots[:, None] * roots) - torch.eye(len(mean))
    assert correlations.abs().max() > 0.5


@pytest.mark.parametrize("name", DECLARED)
def test_draws_have_the_declared_mean_and_covariance(name: str):
    assert refusal(drawn(name), DECLARED[name]) is None


def rescaled(draws: Tensor, factor: float) -> Tensor:
    """Draws with deviations from their mean `factor` times as long: those of a `draw` that is so wrong."""
    return draws.mean(0) + factor * (draws - draws.mean(0))


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("factor", [0.5**0.5, 2**0.5])
def test_half_and_twice_the_variance_are_refused(name: str, factor: float):
    complaint = refusal(rescaled(drawn(name), factor), DECLARED[name])
    assert complaint is not None and complaint.startswith("covariances")


@pytest.mark.parametrize("name", RANDOM)
def test_half_the_variance_lies_ten_standard_errors_off(name: str):
    draws = drawn(name)
    squares = (draws - draws.mean(0)).square()
    error = squares.std(0) / len(draws) ** 0.5
    random = DECLARED[name].expected().covariance.diagonal() > 0
    assert (0.5 * squares.mean(0) >= 10 * error)[random].all()


@pytest.mark.parametrize("name", POINTS)
def test_points_with_any_variance_are_refused(name: str):
    draws = drawn(name).repeat(1000, 1)
    complaint = refusal(draws + 1e-4 * normal(*draws.shape, seed=3), DECLARED[name])
    assert complaint is not None and complaint.startswith("covariances")


def test_a_covariance_in_place_of_independence_is_refused():
    # Variances alone do not tell a full posterior from its diagonal.
    exact, independent = DECLARED["laplace-kfac"], DECLARED["laplace-diag"]
    assert refusal(drawn("laplace-kfac"), independent) is not None
    assert refusal(drawn("laplace-diag"), exact) is not None
