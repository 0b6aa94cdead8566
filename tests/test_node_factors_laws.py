"""Families of node factors: their divergences against Monte Carlo, their noise, their checks."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from dubito import ConfigError, factors
from dubito.factors import Cauchy, HalfCauchy, InverseGamma, LogNormal, NearOne, Normal, Point, Signs

FAMILIES = (
    Normal(prior_mean=0.8, prior_std=0.4),
    Cauchy(prior_mean=0.8, prior_std=0.4),
    LogNormal(prior_mean=0.2, prior_std=0.5),
    HalfCauchy(prior_scale=0.8),
    InverseGamma(concentration=2.0, rate=1.5),
)
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)


def prior_log_density(family: factors.Family, x: Tensor) -> Tensor:
    """By SciPy; InverseGamma is a law of squares: p(r) = 2 r p(r²)."""
    values = x.numpy()
    if isinstance(family, Normal):
        found = stats.norm.logpdf(values, family.prior_mean, family.prior_std)
    elif isinstance(family, Cauchy):
        found = stats.cauchy.logpdf(values, family.prior_mean, family.prior_std)
    elif isinstance(family, LogNormal):
        found = stats.lognorm.logpdf(values, family.prior_std, scale=math.exp(family.prior_mean))
    elif isinstance(family, HalfCauchy):
        found = stats.halfcauchy.logpdf(values, 0, family.prior_scale)
    else:
        found = (
            math.log(2) + x.log().numpy() + stats.invgamma.logpdf(values**2, family.concentration, scale=family.rate)
        )
    return torch.as_tensor(found)


@every_family
def test_divergence_and_draws_against_monte_carlo(family: factors.Family):
    mean, std = torch.tensor(0.3, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64)
    stream = torch.Generator().manual_seed(0)
    noise = family.noise((200_000,), mean, stream)
    drawn = mean + std * noise
    drawn = drawn.exp() if family.positive else drawn
    law = family.law(mean, std)
    ratios = law.log_prob(drawn) - prior_log_density(family, drawn)
    error = float(ratios.std()) / len(ratios) ** 0.5
    assert float(family.kl(mean, std)) == pytest.approx(float(ratios.mean()), abs=5 * error)
    # The noise has the law that the divergence is of: Kolmogorov-Smirnov at a level of 1e-4.
    sample = drawn[:5000]
    assert stats.kstest(sample.numpy(), lambda x: law.cdf(torch.as_tensor(x)).numpy()).pvalue > 1e-4


@every_family
def test_light_tails_are_light(family: factors.Family):
    largest = float(family.noise((500_000,), torch.zeros(()), torch.Generator().manual_seed(1)).abs().max())
    assert (largest < 9) == family.light


def test_squares_with_an_inverse_gamma_prior_make_weights_student_t():
    family = InverseGamma(concentration=3.0, rate=3.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        squares = torch.distributions.InverseGamma(3.0, 3.0).sample((20_000,))
        weights = torch.randn(20_000) * squares.sqrt()
    freedom = 2 * family.concentration  # scale √(rate / concentration) = 1
    assert stats.kstest(weights.numpy(), stats.t(freedom).cdf).pvalue > 1e-4


def test_points_have_no_divergence():
    assert not Point().random and Point().kl(torch.ones(3), torch.zeros(3)).tolist() == [0, 0, 0]


def test_starts():
    stream = torch.Generator().manual_seed(0)
    near = NearOne(std=0.5).draw((20_000,), Normal(), stream)
    assert float(near.mean()) == pytest.approx(1, abs=0.02) and float(near.std()) == pytest.approx(0.5, rel=0.03)
    assert float(NearOne(std=0.5).draw((20_000,), LogNormal(), stream).mean()) == pytest.approx(0, abs=0.02)
    signs = Signs(probability=0.75).draw((20_000,), Normal(), stream)
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert float((signs > 0).double().mean()) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Normal(prior_std=0),
        lambda: Normal(prior_mean=float("nan")),
        lambda: Cauchy(prior_std=-1),
        lambda: LogNormal(prior_std=0),
        lambda: HalfCauchy(prior_scale=0),
        lambda: InverseGamma(concentration=0),
        lambda: NearOne(std=-0.1),
        lambda: Signs(probability=1.5),
    ],
)
def test_refused(make):
    with pytest.raises(ConfigError):
        make()
