"""Priors against torch.distributions."""

import math

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from dubito.errors import ConfigError
from dubito.priors import He, check_prior_std, normal_penalty, prior_std_of

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


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
