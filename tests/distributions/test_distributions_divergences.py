"""Divergences that torch lacks, against numerical integration."""

import math

import pytest
import torch
from scipy import integrate, stats
from torch.distributions import Cauchy, HalfCauchy, InverseGamma, LogNormal, kl_divergence

import dubito.distributions.divergences as _registered  # noqa: F401


def tensors(*values: float, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=dtype) for value in values)


def on_the_line(p, q) -> float:
    """KL of two laws over all numbers, with the line mapped to a finite interval."""

    def integrand(angle: float) -> float:
        x = math.tan(angle)
        return p.pdf(x) * (p.logpdf(x) - q.logpdf(x)) / math.cos(angle) ** 2

    return integrate.quad(integrand, -math.pi / 2 + 1e-9, math.pi / 2 - 1e-9, limit=400)[0]


def over_logs(p: LogNormal, log_q) -> float:
    """KL of a log-Normal from a density of x, as an integral over log x."""
    mean, std = float(p.loc), float(p.scale)

    def integrand(z: float) -> float:
        return stats.norm.pdf(z, mean, std) * (stats.norm.logpdf(z, mean, std) - z - log_q(math.exp(z)))

    return integrate.quad(integrand, mean - 12 * std, mean + 12 * std, limit=400)[0]


@pytest.mark.parametrize(("a", "b", "c", "d"), [(0.0, 1.0, 0.0, 1.0), (1.0, 0.1, 0.7, 0.4), (-2.0, 3.0, 1.0, 0.5)])
def test_cauchy(a: float, b: float, c: float, d: float):
    kl = kl_divergence(Cauchy(*tensors(a, b)), Cauchy(*tensors(c, d)))
    assert float(kl) == pytest.approx(on_the_line(stats.cauchy(a, b), stats.cauchy(c, d)), abs=1e-7)


def test_cauchy_keeps_its_digits_near_zero():
    # log1p(e) with e = ((1e-4)² + (1e-4)²) / 4, to first order: 1e-8 / 2, where log(1 + e) would give 0
    kl = kl_divergence(
        Cauchy(*tensors(0.0, 1.0, dtype=torch.float32)), Cauchy(*tensors(1e-4, 1 + 1e-4, dtype=torch.float32))
    )
    assert float(kl) == pytest.approx(5e-9, rel=1e-3)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (0.3, 2.0)])
def test_half_cauchy(a: float, b: float):
    kl = kl_divergence(HalfCauchy(*tensors(a)), HalfCauchy(*tensors(b)))
    assert float(kl) == pytest.approx(on_the_line(stats.cauchy(0, a), stats.cauchy(0, b)), abs=1e-7)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.03), (0.4, 0.5), (-1.0, 1.0)])
def test_log_normal_from_half_cauchy_and_inverse_gamma(mean: float, std: float):
    p = LogNormal(*tensors(mean, std))
    half = kl_divergence(p, HalfCauchy(*tensors(0.7)))
    assert float(half) == pytest.approx(over_logs(p, stats.halfcauchy(0, 0.7).logpdf), rel=1e-7, abs=1e-8)
    inverse = kl_divergence(p, InverseGamma(*tensors(2.5, 1.5)))
    assert float(inverse) == pytest.approx(over_logs(p, stats.invgamma(2.5, scale=1.5).logpdf), rel=1e-7, abs=1e-8)


def test_shapes_and_gradients():
    loc, scale = torch.zeros(2, 3, dtype=torch.float64), torch.full((2, 3), 0.3, dtype=torch.float64)
    leaves = loc.requires_grad_(), scale.requires_grad_()
    prior = torch.ones(2, 3, dtype=torch.float64)
    for kl in (
        lambda a, b: kl_divergence(Cauchy(a, b), Cauchy(prior, prior)),
        lambda a, b: kl_divergence(LogNormal(a, b), HalfCauchy(prior)),
        lambda a, b: kl_divergence(LogNormal(a, b), InverseGamma(prior, prior)),
    ):
        assert kl(*leaves).shape == (2, 3)
        assert torch.autograd.gradcheck(kl, leaves)
