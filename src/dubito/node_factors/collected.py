"""Gradients taken piece by piece, handed to autograd as those of one value."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


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
        one = bool(g == 1)  # as in `loss.backward()`: nothing to multiply
        return None, None, *(own if own is None or one else own * g for own in ctx.known)


def collected(value: Tensor, tensors: Sequence[Tensor], known: Sequence[Tensor | None]) -> Tensor:
    """The value, with known gradients with respect to the tensors."""
    out = Collected.apply(value, known, *tensors)
    assert isinstance(out, Tensor)
    return out


def gradients(
    value: Tensor, tensors: Sequence[Tensor], so_far: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a value, added to those so far; its graph is freed."""
    with torch.autocast(value.device.type, enabled=False):
        new = torch.autograd.grad(value, tensors, allow_unused=True)
    return [_added(old, own) for old, own in zip(so_far, new, strict=True)]


def _added(old: Tensor | None, new: Tensor | None) -> Tensor | None:
    if old is None or new is None:
        return new if old is None else old
    return old + new  # not in place: autograd may hand the same tensor to several places
