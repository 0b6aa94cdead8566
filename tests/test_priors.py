"""Priors against torch.distributions."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

from dubito.errors import ConfigError
from dubito.priors import He, check_prior_std, normal_kl, normal_penalty, prior_std_of

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@BOTH
@pytest.mark.parametrize("prior_std", [0.1, 1.0, 7.5])
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 3, 2, 2)])
def test_normal_kl_is_that_of_torch_with_its_gradient(dtype: torch.dtype, prior_std: float, shape):
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
    std = (0.05 + torch.rand(shape, generator=generator, dtype=dtype)).requires_grad_()
    prior = Normal(torch.zeros((), dtype=dtype), torch.tensor(prior_std, dtype=dtype))
    expected = kl_divergence(Normal(mean, std), prior).sum()
    ours = normal_kl(mean, std, prior_std)
    torch.testing.assert_close(ours, expected)
    gradients = torch.autograd.grad(ours, (mean, std))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (mean, std)))


def test_normal_kl_is_zero_at_the_prior_and_smooth_at_zero_means():
    mean = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    kl = normal_kl(mean, torch.full((5,), 0.3, dtype=torch.float64), 0.3)
    torch.testing.assert_close(kl.detach(), torch.zeros((), dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(kl, mean)[0], torch.zeros(5, dtype=torch.float64))


@BOTH
def test_the_penalty_is_minus_the_log_density_up_to_its_constant(dtype: torch.dtype):
    weights = [torch.tensor([0.5, -2.0], dtype=dtype), torch.tensor([[3.0]], dtype=dtype)]
    prior = Normal(torch.zeros((), dtype=dtype), torch.tensor(0.4, dtype=dtype))
    constant = 3 * (math.log(0.4) + 0.5 * math.log(2 * math.pi))
    expected = -torch.stack([prior.log_prob(weight).sum() for weight in weights]).sum() - constant
    torch.testing.assert_close(normal_penalty(weights, 0.4), expected)


@pytest.mark.parametrize(
    ("weight", "fan_in"),
    [
        (nn.Linear(7, 3).weight, 7),
        (nn.Conv2d(6, 4, (3, 2), groups=2).weight, 3 * 3 * 2),
        (nn.Conv1d(5, 4, 3).weight, 5 * 3),
    ],
)
def test_he_scales_with_the_fan_in(weight, fan_in: int):
    assert He().std(weight) == pytest.approx(math.sqrt(2 / fan_in), rel=1e-12)
    assert prior_std_of(He(gain=0.5), weight) == pytest.approx(0.5 * math.sqrt(2 / fan_in), rel=1e-12)


def test_vectors_keep_a_standard_normal():
    assert He(gain=3.0).std(nn.Linear(7, 3).bias) == 1.0
    assert He(gain=3.0).std(torch.zeros(())) == 1.0


def test_one_number_serves_all():
    assert prior_std_of(0.25, torch.zeros(3, 3)) == 0.25


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "He", He, None, True])
def test_other_priors_are_refused(value):
    with pytest.raises(ConfigError, match="prior_std must be"):
        check_prior_std(value)


def test_priors_that_pass():
    check_prior_std(He(gain=2.0))
    check_prior_std(1)
    with pytest.raises(ConfigError, match="gain"):
        He(gain=0)
