"""Taps: what a layer sees, its inputs `a` and the gradients `g` at its outputs, as matrices per example."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .trace import Layout, unnested

TAPPED = (nn.Linear, nn.Conv2d)


class _Anchor(torch.autograd.Function):
    """Hands a layer's output on and catches the gradient that comes back to it.

    The anchor tensor makes the output part of the graph even where no parameter requires a gradient, so that
    no gradient with respect to weights is ever computed. Marking the output dirty keeps later in-place
    operations (ReLU(inplace=True)) legal, and what is caught is the gradient before them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, caught: list[Tensor | None], slot: int) -> Tensor:
        ctx.mark_dirty(output)
        ctx.caught, ctx.slot = caught, slot
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:  # pyright: ignore
        ctx.caught[ctx.slot] = gradient
        return None, gradient if ctx.needs_input_grad[1] else None, None, None


@dataclass
class Tap:
    """One weight (and bias) with everything its layers saw in one pass.

    Attributes:
        weight: the user's name of the weight.
        bias: the user's name of the bias, or None.
        names: the modules that use them, several where they are shared; each has this bias or none.
    """

    weight: str
    bias: str | None
    names: list[str]
    _inputs: list[tuple[nn.Module, Layout, Tensor]] = field(default_factory=list)
    _gradients: list[Tensor | None] = field(default_factory=list)

    @property
    def reached(self) -> bool:
        """Whether the last backward pass brought a gradient to one of its calls."""
        return any(gradient is not None for gradient in self._gradients)

    def pairs(self, rows: int) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """(a, g, biased) of every call: a [B, T, G, n], g [B, T, G, m]: T positions of an example, G groups.

        A row's gradient with respect to the weight is Σ_calls Σ_t g_t a_tᵀ; with respect to the bias it is
        Σ_t g_t over the calls of layers that have it.
        """
        for (layer, layout, inputs), gradient in zip(self._inputs, self._gradients, strict=True):
            if gradient is not None:
                a = rows_first(_patches(layer, inputs), layout, rows)
                g = rows_first(_outputs(layer, gradient), layout, rows)
                yield by_position(a), by_position(g), layer.bias is not None


@contextmanager
def tapped(network: nn.Module, taps: list[Tap], layouts: Mapping[str, Layout]) -> Iterator[None]:
    """While open, a forward pass records inputs, and each backward pass gradients, of all taps."""
    modules = dict(network.named_modules(remove_duplicate=False))
    anchor = torch.zeros((), requires_grad=True)
    handles = []

    def hook(tap: Tap, layout: Layout):
        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            tap._inputs.append((layer, layout, (args[0] if args else kwargs["input"]).detach()))
            tap._gradients.append(None)
            return _Anchor.apply(anchor.to(output), output, tap._gradients, len(tap._gradients) - 1)  # pyright: ignore

        return record

    wanted = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    seen: set[int] = set()
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        for tap in taps:
            tap._inputs.clear()
            tap._gradients.clear()
            for name in tap.names:
                if id(modules[name]) not in seen:
                    seen.add(id(modules[name]))
                    record = hook(tap, layouts[name])
                    # Before hooks of the user's own, which may change what the layer answers.
                    handle = modules[name].register_forward_hook(record, with_kwargs=True, prepend=True)
                    handles.append(handle)
        with unnested(network):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter, required in wanted:
            parameter.requires_grad_(required)
        for tap in taps:
            tap._inputs.clear()
            tap._gradients.clear()


def rows_first(tensor: Tensor, layout: Layout, rows: int) -> Tensor:
    """The tensor with rows on the first axis, whatever its layout."""
    if layout is Layout.SECOND:
        return tensor.transpose(0, 1)
    if layout is Layout.FLAT:
        return tensor.unflatten(0, (rows, -1))
    if layout is Layout.FLAT_SECOND:
        return tensor.unflatten(0, (-1, rows)).transpose(0, 1)
    return tensor


def _patches(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs as [..., G, n]: positions of a linear layer, unfolded patches [N, T, G, n] of a convolution."""
    if isinstance(layer, nn.Conv2d):
        inputs = padded(layer, inputs)
        columns = F.unfold(inputs, layer.kernel_size, dilation=layer.dilation, stride=layer.stride)
        return columns.unflatten(1, (layer.groups, -1)).permute(0, 3, 1, 2)  # [B, G, n, T] -> [B, T, G, n]
    return inputs.unsqueeze(-2)


def _outputs(layer: nn.Module, gradient: Tensor) -> Tensor:
    """Gradients as [..., G, m]."""
    if isinstance(layer, nn.Conv2d):
        return gradient.flatten(2).unflatten(1, (layer.groups, -1)).permute(0, 3, 1, 2)
    return gradient.unsqueeze(-2)


def by_position(tensor: Tensor) -> Tensor:
    """[B, ..., G, n] -> [B, T, G, n]: all axes between rows and groups are positions."""
    return tensor.reshape(len(tensor), -1, *tensor.shape[-2:])


def padded(layer: nn.Conv2d, inputs: Tensor) -> Tensor:
    """The inputs with the layer's own padding, of any kind, already in them."""
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        vertical, horizontal = layer.padding
        return F.pad(inputs, (horizontal, horizontal, vertical, vertical))
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(inputs, layer._reversed_padding_repeated_twice, mode=mode)
