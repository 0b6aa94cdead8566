"""Networks whose parameters are spread over processes (FSDP2): passes run on private shells with whole tensors."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(tensor: Tensor | None) -> bool:
    """Whether a tensor is spread over processes."""
    return hasattr(tensor, "device_mesh")


def whole_tensors(network: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
    """The spread parameters by name, gathered; gradients of all processes are averaged on their way back.

    Args:
        network: every process asks for it in the same order.
        without: names that are not needed.
    """
    named = network.named_parameters()
    return {name: _Whole.apply(p) for name, p in named if is_sharded(p) and name not in without}  # pyright: ignore


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Any) -> Tensor:
        ctx.mesh, ctx.placements = part.device_mesh, part.placements
        return part.detach().full_tensor()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        from torch import distributed
        from torch.distributed.tensor import distribute_tensor

        gradient = gradients[0].contiguous().clone()
        distributed.all_reduce(gradient, group=ctx.mesh.get_group())
        gradient /= ctx.mesh.size()
        return distribute_tensor(gradient, ctx.mesh, ctx.placements, src_data_rank=None)
