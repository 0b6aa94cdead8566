"""Gradients taken pass by pass, handed to autograd as those of one value."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def collected_mean(
    value: Callable[[int, dict[Any, Tensor]], Tensor], passes: int, module: nn.Module, stds: dict[Any, Tensor]
) -> Tensor:
    """The mean of `value(p, stds)` over passes p, each one's gradient taken before the next begins.

    Args:
        value: of a pass, a function of the module's parameters and of the standard deviations it is given.
        passes: their number.
        module: what is trained.
        stds: standard deviations, computed once for all passes.
    """
    leaves = {key: std.detach().requires_grad_() for key, std in stds.items()}
    learned: list[Tensor] = []
    parts: list[Tensor] = []
    sums: list[Tensor | None] = []
    for index in range(passes):
        part = value(index, leaves) / passes
        if not parts:  # not before: a likelihood may take its shape from the first outputs
            learned = [p for p in module.parameters() if p.requires_grad]
            sums = [None] * (len(learned) + len(leaves))
        sums = gradients(part, [*learned, *leaves.values()], sums)
        parts.append(part.detach())
    mean = Collected.apply(torch.stack(parts).sum(), sums, *learned, *stds.values())
    assert isinstance(mean, Tensor)
    return mean


def gradients(
    value: Tensor, tensors: Sequence[Tensor], so_far: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a value, added to those so far; its graph is freed."""
    with torch.autocast(value.device.type, enabled=False):
        new = torch.autograd.grad(value, tensors, allow_unused=True)
    return [_added(old, gradient) for old, gradient in zip(so_far, new, strict=True)]


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old + new  # not in place: autograd may hand the same tensor to several places


class Collected(Function):
    """A value whose gradients with respect to some tensors are known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, known: Sequence[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.known = known
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        unit = bool(g == 1)  # as in `loss.backward()`: nothing to multiply
        return None, None, *(known if known is None or unit else known * g for known in ctx.known)
