"""Products with node factors, of activations and of weights, whose gradients take few passes over memory."""

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .form import Nodes
from .linear import Dense
from .loop_kernels import Folded

#: Bounds of a draw: the least and the largest value, None where there is none.
Bounds = tuple[float | None, float | None]
#: Numbers that gradients are computed for at once on CPUs, about a megabyte.
PIECE = 2**18
#: The shapes in which a weight, its input factors and its output factors meet.
Views = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def as_blocks(x: Tensor, passes: int, rows: int, axis: int) -> Tensor:
    """Activations as [P or 1, n, positions, channels, positions]; 1 where passes have not parted yet."""
    axis %= x.ndim
    after = prod(x.shape[axis + 1 :])
    parted = 1 if x.shape[0] == rows else passes
    return x.reshape(parted, rows, -1, x.shape[axis], after)


def drawn(mean: Tensor, std: Tensor, noise: Tensor, bounds: Bounds) -> Tensor:
    """Mean + std · noise, held between the bounds: [K, 1, C] and [1, n, C] give [K, n, C]."""
    values = torch.addcmul(mean, std, noise)
    return values if bounds == (None, None) else values.clamp_(*bounds)


def inside(values: Tensor, bounds: Bounds) -> Tensor:
    """Where draws are not at their bounds; there alone they depend on mean and std."""
    low, high = bounds
    below = values < (float("inf") if high is None else high)
    return below if low is None else below & (values > low)


class Scaled(Function):
    """x ∘ f + b for blocks x [K or 1, n, A, C, Q], factors [K, n or 1, 1, C, 1], biases [K or 1, n or 1, 1, C, 1].

    A and Q are positions before and after the channels; K components may share one block x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
        factors = factors.to(x.dtype)  # autocast lowers activations alone
        ctx.save_for_backward(x, factors)
        ctx.bias = None if bias is None else bias.shape
        return product(x, factors, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        x, factors = ctx.saved_tensors
        inputs, scales, bias = ctx.needs_input_grad
        gx = torch.empty_like(x) if inputs else None
        per_row = factors.shape[1] == g.shape[1]
        gf = (torch.empty_like(factors) if per_row else g.new_zeros(factors.shape)) if scales else None
        gb = g.new_zeros(ctx.bias) if bias else None
        for rows in pieces(g, x):
            part = g[:, rows]
            if gx is not None:
                _put(gx, rows, part, _rows(factors, rows))
            if gf is not None and gf.shape == g.shape:
                torch.mul(part, x[:, rows], out=gf[:, rows])
            elif gf is not None and per_row:
                torch.sum(part * x[:, rows], (2, 4), keepdim=True, out=gf[:, rows])
            elif gf is not None:
                _add(gf, rows, part * x[:, rows])
            if gb is not None:
                _add(gb, rows, part)
        return gx, gf, gb


class ScaledDraw(Function):
    """x ∘ f + b like `Scaled`, with f = mean + std · noise held between bounds.

    Mean and std are [K, 1, 1, C, 1], the noise [1, n, 1, C, 1].
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, std: Tensor, noise: Tensor, bias: Tensor | None, bounds: Bounds
    ) -> Tensor:
        factors = drawn(mean, std, noise, bounds).to(x.dtype)
        ctx.bounds, ctx.shape = bounds, mean.shape
        ctx.bias = None if bias is None else bias.shape
        ctx.save_for_backward(x, factors, noise)
        return product(x, factors, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        x, factors, noise = ctx.saved_tensors
        inputs, first, second, _, bias, _ = ctx.needs_input_grad
        gx = torch.empty_like(x) if inputs else None
        mean, std = noise.new_zeros(ctx.shape), noise.new_zeros(ctx.shape)
        gb = g.new_zeros(ctx.bias) if bias else None
        for rows in pieces(g, x):
            part = g[:, rows]
            if gx is not None:
                _put(gx, rows, part, factors[:, rows])
            if first or second:
                slopes = part * x[:, rows]
                slopes = slopes.sum_to_size((*slopes.shape[:2], 1, slopes.shape[3], 1))
                if ctx.bounds != (None, None):
                    slopes = slopes.mul_(inside(factors[:, rows], ctx.bounds))
                mean += slopes.sum(1, keepdim=True)
                std += slopes.mul_(noise[:, rows]).sum(1, keepdim=True)
            if gb is not None:
                _add(gb, rows, part)
        return gx, mean, std, None, gb, None


def pieces(g: Tensor, x: Tensor) -> list[slice]:
    """Rows to take together: on CPUs what is made of them on the way should not leave the caches."""
    rows = g.shape[1]
    if g.device.type != "cpu" or g.numel() <= PIECE or g.shape != x.shape:
        return [slice(0, rows)]
    step = max(1, rows * PIECE // g.numel())
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _rows(values: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor, or the one that stands for all."""
    return values if values.shape[1] == 1 else values[:, rows]


def _put(out: Tensor, rows: slice, g: Tensor, factors: Tensor) -> None:
    """The product g ∘ f into some rows, summed where components share them."""
    if out.shape[0] == g.shape[0]:
        torch.mul(g, factors, out=out[:, rows])
    else:
        out[:, rows] = (g * factors).sum(0, keepdim=True)


def _add(out: Tensor, rows: slice, part: Tensor) -> None:
    """Add a part of some rows, summed over the axes that `out` lacks."""
    sums = _rows(out, rows)
    sums += part.sum_to_size(sums.shape)


def product(x: Tensor, factors: Tensor, bias: Tensor | None) -> Tensor:
    """X ∘ f + b in the precision of x."""
    if bias is None:
        return x * factors
    return torch.addcmul(bias if bias.dtype == x.dtype else bias.to(x.dtype), x, factors)


def fold_values(
    views: Views, weight: Tensor, inputs: Tensor | None, outputs: Tensor | None, *, additive: bool = False
) -> Tensor:
    """Likewise for factors of the nodes, with the shapes in which a weight, or a part of one, meets them."""
    view, input_view, output_view = views
    whole = weight if weight.shape == view else weight.reshape(view)
    s = None if inputs is None else inputs.reshape(input_view)
    r = None if outputs is None else outputs.reshape(output_view)
    if s is None or r is None:
        single = r if s is None else s
        folded = whole if single is None else whole * single
    elif additive:
        folded = whole + s * r
    elif torch.is_grad_enabled() and any(t.requires_grad for t in (whole, s, r)):
        folded = Folded.apply(whole, s, r)
    else:
        folded = (whole * s).mul_(r)
    assert isinstance(folded, Tensor)
    return folded if folded.shape == weight.shape else folded.reshape(weight.shape)


def folding_is_cheaper(form: Nodes, x: Tensor, weight: Tensor) -> bool:
    """Whether a weight has fewer numbers than the activations on both sides of it.

    Kernels always have; and the gradient for inputs that need none is saved.
    """
    if type(form) is not Dense:
        return True
    return x.numel() * (1 + form.rows / form.columns) > weight.numel()
