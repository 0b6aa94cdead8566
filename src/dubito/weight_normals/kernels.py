"""Noise on a layer's outputs that stands for noise in its weights, with backward passes to match."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..distributions.tied_functions import pairs

#: Added to variances before the root, whose slope at 0 is infinite.
SMALLEST = 1e-8


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
    """mean + sqrt(v) ε for v = X² (σ²)ᵀ + bias variance; mean and noise are overwritten.

    With h = ε / sqrt(v), which is what the way back needs, this is mean + v h.
    """

    @staticmethod
    def forward(ctx: Any, mean: Tensor, x: Tensor, std: Tensor, bias: Tensor | None, noise: Tensor) -> Tensor:
        x, (rows, ratio) = x.flatten(0, -2), _rows(mean, noise)
        squares, variances = x * x, std * std
        least = std.new_full((len(std),), SMALLEST) if bias is None else bias + SMALLEST
        variance = F.linear(squares, variances, least)
        rows.addcmul_(variance, ratio.mul_(variance.rsqrt()))
        ctx.mark_dirty(mean)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, std, squares, variances, ratio)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        x, std, squares, variances, ratio = ctx.saved_tensors
        slope = gradient.flatten(0, -2) * ratio  # twice that with respect to the variance
        d_x = None
        if ctx.needs_input_grad[1]:
            d_x = torch.mm(slope, variances).mul_(x).view(*gradient.shape[:-1], x.shape[1])
        d_std = torch.mm(slope.mT, squares).mul_(std)
        d_bias = slope.sum(0).mul_(0.5) if ctx.needs_input_grad[3] else None
        return gradient, d_x, d_std, d_bias, None


class TiedLinearNoise(torch.autograd.Function):
    """mean + sqrt(v) ε for v = (X² Qᵀ) P + bias variance and σ² = Pᵀ Q: no matrix of variances exists.

    P [q, m] holds the pairs of factors over the outputs, counted, Q [q, n] those over the inputs. A row of ones
    beside Q (X²)ᵀ takes in the bias's variance as one more row of P. Mean and noise are overwritten: with
    h = ε / sqrt(v), which is what the way back needs, the sum is mean + v h.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, x: Tensor, log_u: Tensor, log_v: Tensor, bias: Tensor | None, noise: Tensor
    ) -> Tensor:
        x, (rows, ratio) = x.flatten(0, -2), _rows(mean, noise)
        which, log_counts = pairs(len(log_u), log_u.dtype, log_u.device)
        q = torch.mm(which.mT, log_v).exp_()
        p = log_u.new_full((len(q) + 1, log_u.shape[1]), SMALLEST)
        torch.exp(torch.addmm(log_counts, which.mT, log_u), out=p[:-1])
        if bias is not None:
            p[-1] += bias
        sums = x.new_ones(len(p), len(x))  # [q + 1, B]
        torch.mm(q, (x * x).mT, out=sums[:-1])
        variance = torch.mm(sums.mT, p)
        rows.addcmul_(variance, ratio.mul_(variance.rsqrt()))
        ctx.mark_dirty(mean)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, p, q, sums, which, ratio)
        return mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        x, p, q, sums, which, ratio = ctx.saved_tensors
        slope = gradient.flatten(0, -2) * ratio  # twice that with respect to the variance
        d_p = torch.mm(sums, slope).mul_(0.5)
        # log P and log Q are sums of two log factors each: d/d log u = Σ over the pairs it is in of P dP
        d_u = torch.mm(which, d_p[:-1] * p[:-1])
        down = torch.mm(p[:-1], slope.mT)  # [q, B]
        d_x = None
        if ctx.needs_input_grad[1]:
            d_x = torch.mm(down.mT, q).mul_(x).view(*gradient.shape[:-1], x.shape[1])
        d_v = torch.mm(which, torch.mm(down, x * x).mul_(q).mul_(0.5))
        return gradient, d_x, d_u, d_v, d_p[-1] if ctx.needs_input_grad[4] else None, None


def _rows(mean: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Both as matrices that share their memory."""
    return mean.view(-1, mean.shape[-1]), noise.view(-1, noise.shape[-1])
