"""Kernels of passes made one by one: factors of one pass in weights, and convolutions of a network's inputs.

Inputs need no gradient, but factors on them do. Both follow from each row's gradient of the kernel, which costs as much
as the kernel's gradient alone; and the passes over a batch share the patches it is made from.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .convolution import Convolution
from .form import Form

#: Patches of a batch by the parameter's name, with the inputs they were cut from.
Patches = dict[str, tuple[Tensor, Tensor]]
#: The most numbers that patches may have, 32 MB in single precision.
MOST = 2**23


class Folded(Function):
    """W ∘ s ∘ r for a weight in its form's view, with factors of input and output nodes that broadcast to it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
        ctx.save_for_backward(weight, inputs, outputs)
        return (weight * inputs).mul_(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        weight, inputs, outputs = ctx.saved_tensors
        gw = gi = go = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            # ∂/∂s_j = Σ_i g_ij w_ij r_i and ∂/∂r_i = Σ_j g_ij w_ij s_j
            both = g * weight
            gi = (both * outputs).sum_to_size(inputs.shape)
            go = both.mul_(inputs).sum_to_size(outputs.shape)
        if ctx.needs_input_grad[0]:
            gw = (g * inputs).mul_(outputs)
        return gw, gi, go


class FirstConvolution(Function):
    """W ∗ (x ∘ s) + b for inputs x [n, C, H, W] without gradients and factors s [n, C]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, factors: Tensor, weight: Tensor, bias: Tensor | None, patches: Tensor, form: Convolution
    ) -> Tensor:
        ctx.save_for_backward(factors, weight, patches)
        return form.apply(x * factors[:, :, None, None], weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (g,) = grads
        factors, weight, patches = ctx.saved_tensors
        # G_b = ∂/∂W of row b were its factors 1: ∂/∂W = Σ_b G_b ∘ s_b and ∂/∂s_bc = Σ_ok W_ock G_bock
        rows = torch.bmm(g.flatten(2), patches.mT).view(len(g), *weight.flatten(2).shape)
        scales = (rows * weight.flatten(2)).sum((1, 3)) if ctx.needs_input_grad[1] else None
        kernel = None
        if ctx.needs_input_grad[2]:
            kernel = rows.mul_(factors[:, None, :, None]).sum(0).view(weight.shape)
        bias = g.sum((0, 2, 3)) if ctx.needs_input_grad[3] else None
        return None, scales, kernel, bias, None, None


def is_first(form: Form, x: Tensor, weight: Tensor) -> bool:
    """Whether this is the cheaper way: on CPUs, for kernels over few channels of inputs without gradients."""
    if type(form) is not Convolution or form.groups > 1 or torch.is_autocast_enabled("cpu"):
        return False
    if x.requires_grad or not weight.requires_grad or not torch.is_grad_enabled() or x.device.type != "cpu":
        return False
    even = all(low == high for low, high in form.padding)
    return len(form.kernel) == 2 and even and weight[0].numel() * x[:, 0].numel() <= MOST


def first_convolution(
    form: Form, x: Tensor, factors: Tensor, weight: Tensor, bias: Tensor | None, patches: Patches, name: str
) -> Tensor:
    """The convolution of inputs with factors [n, C], with the patches of an earlier pass if there are any."""
    assert isinstance(form, Convolution)
    earlier = patches.get(name)
    if earlier is None or earlier[0] is not x:
        padding = tuple(low for low, _ in form.padding)
        earlier = patches[name] = x, F.unfold(x, form.kernel, form.dilation, padding, form.stride)
    out = FirstConvolution.apply(x, factors, weight, bias, earlier[1], form)
    assert isinstance(out, Tensor)
    return out
