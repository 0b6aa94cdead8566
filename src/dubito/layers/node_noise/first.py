"""Convolutions that read the network's inputs: gradients of weights and factors from one product per row.

Inputs need no gradient, but factors on them do. Both follow from each row's own gradient of the kernel, which costs
as much as the kernel's gradient alone; and the passes over a batch share the patches it is made from.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

#: Patches of a batch by module, with the inputs they were cut from.
Patches = dict[int, tuple[Tensor, Tensor]]
#: The most numbers that patches may have, 32 MB in single precision.
MOST = 2**23


class FirstConvolution(Function):
    """W ∗ (x ∘ s) + b for inputs x [n, C, H, W] without gradients and factors s [n, C]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        factors: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        patches: Tensor,
        module: nn.Conv2d,
    ) -> Tensor:
        ctx.save_for_backward(factors, weight, patches)
        return module._conv_forward(x * factors[:, :, None, None], weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        factors, weight, patches = ctx.saved_tensors
        # G_b = ∂/∂W of row b were its factors 1: ∂/∂W = Σ_b G_b ∘ s_b and ∂/∂s_bc = Σ_ok W_ock G_bock
        rows = torch.bmm(g.flatten(2), patches.mT).view(len(g), *weight.flatten(2).shape)
        own = (rows * weight.flatten(2)).sum((1, 3)) if ctx.needs_input_grad[1] else None
        kernel = None
        if ctx.needs_input_grad[2]:
            kernel = rows.mul_(factors[:, None, :, None]).sum(0).view(weight.shape)
        bias = g.sum((0, 2, 3)) if ctx.needs_input_grad[3] else None
        return None, own, kernel, bias, None, None


def is_first(module: nn.Module, x: Tensor, weight: Tensor) -> bool:
    """Whether this is the cheaper way: on CPUs, for kernels over few channels of inputs without gradients."""
    if x.requires_grad or not weight.requires_grad or not torch.is_grad_enabled() or x.device.type != "cpu":
        return False
    if not isinstance(module, nn.Conv2d) or module.groups > 1 or torch.is_autocast_enabled("cpu"):
        return False
    plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return plain and x.ndim == 4 and weight[0].numel() * x[:, 0].numel() <= MOST


def first_convolution(
    module: nn.Module, x: Tensor, factors: Tensor, weight: Tensor, bias: Tensor | None, patches: Patches
) -> Tensor:
    """The convolution of inputs with factors [n, C], with the patches of an earlier pass if there are any."""
    assert isinstance(module, nn.Conv2d)
    kept = patches.get(id(module))
    if kept is None or kept[0] is not x:
        cut = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)  # pyright: ignore
        kept = patches[id(module)] = x, cut
    out = FirstConvolution.apply(x, factors, weight, bias, kept[1], module)
    assert isinstance(out, Tensor)
    return out
