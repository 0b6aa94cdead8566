"""Draws, divergences and noise on outputs, with backward passes that go over memory few times."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ...distributions.tied_functions import pairs

#: Added to variances before the root, whose slope at 0 is infinite.
SMALLEST = 1e-8


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """While open, autocast is off: standard deviations, their squares and logarithms need all their digits."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


# -- a standard deviation per weight ----------------------------------------------------------------------------


class OwnKL(torch.autograd.Function):
    """KL( N(μ, σ²) ‖ N(0, s²) ), summed."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
        ctx.prior_variance = prior_std**2
        ctx.save_for_backward(mean, std)
        return _own_kl(mean, std, prior_std)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mean, std = ctx.saved_tensors
        scale = gradients[0] / ctx.prior_variance
        d_mean = mean * scale if ctx.needs_input_grad[0] else None
        d_std = _own_slope(std, ctx.prior_variance, scale) if ctx.needs_input_grad[1] else None
        return d_mean, d_std, None


class OwnDraw(torch.autograd.Function):
    """μ + σ ε (or σ ε alone) with σ = softplus(raw_std), and the divergence of `OwnKL`."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, raw_std: Tensor, noise: Tensor, prior_std: float, centred: bool
    ) -> tuple[Tensor, Tensor]:
        std = F.softplus(raw_std)
        ctx.prior_variance, ctx.centred = prior_std**2, centred
        ctx.save_for_backward(mean, raw_std, std, noise)
        weight = std * noise if centred else torch.addcmul(mean, std, noise)
        return weight, _own_kl(mean, std, prior_std)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_weight, d_kl = gradients
        mean, raw_std, std, noise = ctx.saved_tensors
        scale = d_kl / ctx.prior_variance
        d_mean = mean * scale if ctx.centred else torch.addcmul(d_weight, mean, scale)
        d_std = _own_slope(std, ctx.prior_variance, scale).addcmul_(d_weight, noise)
        return d_mean, torch.ops.aten.softplus_backward(d_std, raw_std, 1, 20), None, None, None


def _own_kl(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """Σ log(s/σ) + (σ² + μ²) / 2s² − ½."""
    quadratic = torch.linalg.vector_norm(mean).square_().add_(torch.linalg.vector_norm(std).square_())
    constant = std.numel() * (math.log(prior_std) - 0.5)
    return quadratic.div_(2 * prior_std**2).sub_(std.log().sum()).add_(constant)


def _own_slope(std: Tensor, prior_variance: float, scale: Tensor) -> Tensor:
    """The divergence's gradient σ/s² − 1/σ, times s² `scale`."""
    return torch.sub(std, std.reciprocal(), alpha=prior_variance).mul_(scale)


# -- noise on outputs -------------------------------------------------------------------------------------------


class AddNoise(torch.autograd.Function):
    """mean + sqrt(2 v) ε for half the variance v; mean and noise are overwritten.

    Only h = ε / sqrt(2 v) is kept: the gradient with respect to v is g h.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, half: Tensor, noise: Tensor) -> Tensor:
        root = half.mul(2).add_(SMALLEST).sqrt_()
        mean.addcmul_(root, noise)
        ctx.mark_dirty(mean)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(noise.div_(root))
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradients[0], gradients[0] * ctx.saved_tensors[0], None


class OwnLinearNoise(torch.autograd.Function):
    """mean + sqrt(X² (σ²)ᵀ + bias variance) ε; the noise is overwritten."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, x: Tensor, std: Tensor, bias: Tensor | None, noise: Tensor) -> Tensor:
        squares, variances = x * x, std * std
        root = F.linear(squares, variances, bias).add_(SMALLEST).sqrt_()
        out = torch.addcmul(mean, root, noise)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, std, squares, variances, noise.div_(root))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        x, std, squares, variances, ratio = ctx.saved_tensors
        slope = gradient * ratio  # twice that with respect to the variance
        d_x = torch.mm(slope, variances).mul_(x) if ctx.needs_input_grad[1] else None
        d_std = torch.mm(slope.mT, squares).mul_(std)
        d_bias = slope.sum(0).mul_(0.5) if ctx.needs_input_grad[3] else None
        return gradient, d_x, d_std, d_bias, None


class TiedLinearNoise(torch.autograd.Function):
    """mean + sqrt((X² Qᵀ) P + bias variance) ε for σ² = Pᵀ Q: no matrix of variances exists.

    P [q, m] holds the pairs of factors over the outputs, counted, Q [q, n] those over the inputs. A column of
    ones beside X² Qᵀ takes in the bias's variance as one more row of P. The noise is overwritten.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, x: Tensor, log_u: Tensor, log_v: Tensor, bias: Tensor | None, noise: Tensor
    ) -> Tensor:
        which, log_counts = pairs(len(log_u), log_u.dtype, log_u.device)
        q = torch.mm(which.mT, log_v).exp_()
        p = log_u.new_full((len(q) + 1, log_u.shape[1]), SMALLEST)
        torch.exp(torch.addmm(log_counts, which.mT, log_u), out=p[:-1])
        if bias is not None:
            p[-1] += bias
        sums = x.new_ones(len(x), len(p))  # [B, q + 1]
        sums[:, :-1] = torch.mm(x * x, q.mT)
        root = torch.mm(sums, p).sqrt_()
        out = torch.addcmul(mean, root, noise)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, p, q, sums, which, noise.div_(root))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        x, p, q, sums, which, ratio = ctx.saved_tensors
        slope = gradient * ratio  # twice that with respect to the variance
        d_p = torch.mm(sums.mT, slope).mul_(0.5)
        # log P and log Q are sums of two log factors each: d/d log u = Σ over the pairs it is in of P dP
        d_u = torch.mm(which, d_p[:-1] * p[:-1])
        down = torch.mm(slope, p[:-1].mT)  # [B, q]
        d_x = torch.mm(down, q).mul_(x) if ctx.needs_input_grad[1] else None
        d_v = torch.mm(which, torch.mm(down.mT, x * x).mul_(q).mul_(0.5))
        return gradient, d_x, d_u, d_v, d_p[-1] if ctx.needs_input_grad[4] else None, None
