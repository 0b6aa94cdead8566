"""Convolutions as products over patches, and the second moment of their patches without forming them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from .context import Context
from .form import PIECE, Form, Nodes, Product
from .grams import add_gram
from .kinds import Declared, NoRule, declares, kind

#: Numbers one block of patches may hold, so that it stays in the cache.
BLOCK = 1 << 20

#: From this many channels of a group on, shifted correlations are faster than patches.
CHANNELS = 8

#: Per axis the zeros before and behind.
Padding = tuple[tuple[int, int], ...]

_FORWARD = (F.conv1d, F.conv2d, F.conv3d)
_TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@dataclass(frozen=True)
class Convolution(Product):
    """The weight of a convolution in 1, 2 or 3 dimensions: a product with every patch.

    Patches hold the channels of a kernel's position together, in memory one after the other.

    Attributes:
        kernel: its sizes.
        stride: likewise per axis.
        padding: likewise, the zeros on both ends.
        dilation: likewise.
        groups: of channels that do not meet.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Padding
    dilation: tuple[int, ...]
    groups: int = 1  # pyright: ignore[reportIncompatibleMethodOverride]

    trailing: ClassVar[bool] = False

    @property
    def channels(self) -> int:
        """The input channels of a group."""
        return self.columns // prod(self.kernel)

    @cached_property
    def order(self) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Patches run (kernel, channel), weights (channel, kernel)."""
        if prod(self.kernel) == 1:
            return None
        return torch.arange(self.columns).reshape(self.channels, -1).mT.flatten()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups * self.rows, self.channels, *self.kernel)

    @property
    def view(self) -> tuple[int, ...]:
        return (self.groups, self.rows, self.channels, *self.kernel)

    @property
    def input_view(self) -> tuple[int, ...]:
        return (self.groups, 1, self.channels, *(1 for _ in self.kernel))

    @property
    def output_view(self) -> tuple[int, ...]:
        return (self.groups, self.rows, 1, *(1 for _ in self.kernel))

    @property
    def channel_axis(self) -> int:
        return -1 - len(self.kernel)

    @property
    def signature(self) -> tuple[object, ...]:
        return (type(self), self.groups, self.rows, self.columns, self.kernel)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        even = all(low == high for low, high in self.padding)
        if not even:
            x = F.pad(x, [pad for pair in reversed(self.padding) for pad in pair])
        padding = [low if even else 0 for low, _ in self.padding]
        function = _FORWARD[len(self.kernel) - 1]
        return function(x, weight, bias, self.stride, padding, self.dilation, self.groups)

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        return _side_by_side(replace(self, groups=draws * self.groups), x, weights, biases, draws)

    def inputs(self, x: Tensor) -> Tensor:
        windows = _windows(_channels_last(x, self.padding), self.kernel, self.stride, self.dilation)
        return _by_group(windows, self.groups, len(self.kernel))

    def pieces(self, x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
        windows = _windows(_channels_last(x, self.padding), self.kernel, self.stride, self.dilation)
        lines, line = windows.shape[1], prod(windows.shape[2 : 1 + len(self.kernel)])
        step = max(1, numbers // (len(x) * line * self.groups * self.columns))
        for start in range(0, lines, step):
            part = windows[:, start : start + step]
            yield (slice(start * line, (start + part.shape[1]) * line), _by_group(part, self.groups, len(self.kernel)))

    def outputs(self, g: Tensor) -> Tensor:
        return g.reshape(len(g), self.groups, self.rows, -1)

    def total(self, x: Tensor) -> Tensor:
        # Patches of a sum are sums of patches.
        return self.inputs(x.sum(0, keepdim=True)).sum(2)[0]

    def add_moment(self, sums: Tensor, x: Tensor) -> None:
        if self._shifts_pay(x):
            self._add_correlations(sums, x)
            return
        patches = self.columns * self.groups * prod(self._positions(x))
        for part in x.split(max(1, BLOCK // patches)):
            for _, matrices in self.pieces(part, PIECE):
                turned = matrices.transpose(0, 1)  # [G, N, t, n]
                add_gram(sums, turned.reshape(self.groups, -1, self.columns))

    def _positions(self, x: Tensor) -> list[int]:
        sizes = [size + sum(pad) for size, pad in zip(x.shape[2:], self.padding, strict=True)]
        return _positions(sizes, self.kernel, self.stride, self.dilation)

    # -- the second moment of the patches from correlations of the inputs with themselves ---------------------

    def _shifts_pay(self, x: Tensor) -> bool:
        """Whether one product per shift costs less than one per pair of kernel positions."""
        positions, area = prod(self._positions(x)), prod(x.shape[2:])
        padded = prod(size + reach for size, reach in zip(x.shape[2:], self._reach, strict=True))
        shifts = (prod(2 * size - 1 for size in self.kernel) + 1) // 2
        return (
            all(step == 1 for step in self.stride)
            and self.channels >= CHANNELS
            and area <= 4 * positions  # corrections at the edges would cost digits
            and 2 * shifts * padded < prod(self.kernel) ** 2 * positions
        )

    @property
    def _reach(self) -> list[int]:
        return [step * (size - 1) for step, size in zip(self.dilation, self.kernel, strict=True)]

    def _add_correlations(self, sums: Tensor, x: Tensor) -> None:
        """Σ_t a_t a_tᵀ for stride 1, block by block of two kernel positions k and k'.

        With p = t + k, a block is Σ_p x_p x_{p+d}ᵀ over a box of places p. It depends on k and k' by their
        distance d alone, but for which places near the edges the box leaves out: those are taken off.
        """
        padding = self.padding
        sizes = list(x.shape[2:])
        lengths = [size + sum(pad) - reach for size, pad, reach in zip(sizes, padding, self._reach, strict=True)]
        # Zeros behind every axis: a place shifted off its line meets zeros, so all lines are one long one.
        image = _channels_last(x, [(0, reach) for reach in self._reach])
        image = image.unflatten(-1, (self.groups, self.channels))
        known: dict[Any, Tensor] = {}
        offsets = list(product(*map(range, self.kernel)))
        for (i, first), (j, second) in product(enumerate(offsets), repeat=2):
            if j < i:
                continue
            shift = tuple(s * (b - a) for s, a, b in zip(self.dilation, first, second, strict=True))
            starts = [s * a - pad[0] for s, a, pad in zip(self.dilation, first, padding, strict=True)]
            rows = slice(i * self.channels, (i + 1) * self.channels)
            columns = slice(j * self.channels, (j + 1) * self.channels)
            for sign, region in _regions(sizes, shift, starts, lengths):
                if (shift, region) not in known:
                    known[shift, region] = _correlation(image, sizes, shift, region)
                sums[:, rows, columns].add_(known[shift, region], alpha=sign)


@dataclass(frozen=True)
class TransposedConvolution(Nodes):
    """The weight of a transposed convolution: inputs and gradients change their parts in a convolution's.

    Attributes:
        rows: output channels of a group.
        channels: input channels of a group.
        kernel: its sizes.
        stride: likewise per axis.
        padding: likewise, on both ends.
        output_padding: likewise, behind the outputs.
        dilation: likewise.
        groups: of channels that do not meet.
    """

    rows: int
    channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    trailing: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.groups * self.channels, self.rows, *self.kernel)

    @property
    def view(self) -> tuple[int, ...]:
        return (self.groups, self.channels, self.rows, *self.kernel)

    @property
    def input_view(self) -> tuple[int, ...]:
        return (self.groups, self.channels, 1, *(1 for _ in self.kernel))

    @property
    def output_view(self) -> tuple[int, ...]:
        return (self.groups, 1, self.rows, *(1 for _ in self.kernel))

    @property
    def channel_axis(self) -> int:
        return -1 - len(self.kernel)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        function = _TRANSPOSED[len(self.kernel) - 1]
        return function(x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation)

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        return _side_by_side(replace(self, groups=draws * self.groups), x, weights, biases, draws)

    def numbers(self, x: Tensor, g: Tensor) -> int:
        return len(x) * prod(x.shape[2:]) * prod(self.kernel) * g.shape[1]  # patches

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        around = tuple((pad, pad) for pad in self.padding)
        windows = _windows(_channels_last(g, around), self.kernel, self.stride, self.dilation, x.shape[2:])
        patches = _by_group(windows, self.groups, len(self.kernel))  # [N, G, T, kernel · channels]
        # δ[i, o, k] = Σ_t x[i, t] g[o, s t + k − p]
        products = x.reshape(len(x), self.groups, self.channels, -1) @ patches
        products = products.unflatten(-1, (prod(self.kernel), -1)).transpose(-1, -2)
        return products.reshape(len(x), *self.shape)


@lru_cache(maxsize=1024)
def convolution(*settings: Any) -> Convolution:
    """The form of a convolution, made once; a function, which compilers can look into."""
    return Convolution(*settings)


@lru_cache(maxsize=1024)
def transposed_convolution(*settings: Any) -> TransposedConvolution:
    """Likewise of a transposed one."""
    return TransposedConvolution(*settings)


@kind(F.conv1d, F.conv2d, F.conv3d)
def conv(
    at: Context,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Of nn.Conv1d, 2d and 3d; other modes of padding pad the inputs before."""
    _require_batch(input, weight.ndim - 2)
    return at.use(_form(weight, stride, padding, dilation, groups), input, weight, bias)


def _form(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> Convolution:
    rows, channels, *kernel = weight.shape
    axes = len(kernel)
    dilations = _sizes(dilation, axes)
    return convolution(
        rows // groups,
        channels * prod(kernel),
        tuple(kernel),
        _sizes(stride, axes),
        _paddings(padding, tuple(kernel), dilations),
        dilations,
        groups,
    )


@kind(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def conv_transpose(
    at: Context,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    """Of nn.ConvTranspose1d, 2d and 3d."""
    _require_batch(input, weight.ndim - 2)
    form = _transposed_form(weight, stride, padding, output_padding, dilation, groups)
    return at.use(form, input, weight, bias)


def _transposed_form(
    weight: Tensor, stride: Any, padding: Any, output_padding: Any, dilation: Any, groups: int
) -> TransposedConvolution:
    channels, rows, *kernel = weight.shape
    settings = (_sizes(setting, len(kernel)) for setting in (stride, padding, output_padding, dilation))
    return transposed_convolution(rows, channels // groups, tuple(kernel), *settings, groups)


@declares(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def conv_module(module: _ConvNd) -> Iterator[Declared]:
    """One convolution; paddings other than zeros are put around the inputs before."""
    axes = len(module.kernel_size)
    padding = module.padding if module.padding_mode == "zeros" else 0
    settings = module.dilation, module.groups
    if module.transposed:
        form = _transposed_form(module.weight, module.stride, padding, module.output_padding, *settings)
        yield Declared("weight", "bias", form, f"conv_transpose{axes}d")
    else:
        yield Declared("weight", "bias", _form(module.weight, module.stride, padding, *settings), f"conv{axes}d")


def _require_batch(input: Tensor, axes: int) -> None:
    if input.ndim != axes + 2:
        raise NoRule("its inputs have no axis of cases")


def _side_by_side(form: Form, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
    """Draws as groups of channels of one convolution: rows [S·N, C, ...] go through as [N, S·C, ...]."""
    assert weights is not None
    side = x.unflatten(0, (draws, -1)).transpose(0, 1).flatten(1, 2)
    y = form.apply(side, weights.flatten(0, 1), None if biases is None else biases.flatten())
    return y.unflatten(1, (draws, -1)).transpose(0, 1).flatten(0, 1)


def _sizes(setting: Any, axes: int) -> tuple[int, ...]:
    """One number per axis."""
    if isinstance(setting, Sequence):
        return tuple(setting) if len(setting) == axes else tuple(setting) * axes
    return (setting,) * axes


def _paddings(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> Padding:
    """Zeros on both ends of every axis."""
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding == "same":
        reach = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
        return tuple((total // 2, total - total // 2) for total in reach)
    return tuple((pad, pad) for pad in _sizes(padding, len(kernel)))


def _channels_last(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """[N, C, *sizes] as [N, *padded sizes, C] with zeros around."""
    if not any(map(any, padding)):
        return x.movedim(1, -1).contiguous()
    sizes = [size + sum(pad) for size, pad in zip(x.shape[2:], padding, strict=True)]
    padded = x.new_zeros(len(x), *sizes, x.shape[1])
    inside = tuple(slice(low, low + size) for size, (low, _) in zip(x.shape[2:], padding, strict=True))
    padded[(slice(None), *inside)] = x.movedim(1, -1)
    return padded


def _positions(
    sizes: list[int], kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> list[int]:
    axes = zip(sizes, kernel, stride, dilation, strict=True)
    return [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in axes]


def _windows(
    padded: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    positions: torch.Size | None = None,
) -> Tensor:
    """A view [N, *positions, *kernel, C] of [N, *sizes, C]."""
    first, *steps, last = padded.stride()
    count = positions or _positions(list(padded.shape[1:-1]), kernel, stride, dilation)
    strides = [a * b for a, b in zip(steps, stride, strict=True)]
    inner = [a * b for a, b in zip(steps, dilation, strict=True)]
    return padded.as_strided(
        (len(padded), *count, *kernel, padded.shape[-1]), (first, *strides, *inner, last), padded.storage_offset()
    )


def _by_group(windows: Tensor, groups: int, spatial: int) -> Tensor:
    """[N, *positions, *kernel, C] as matrices [N, G, T, kernel · C / G]."""
    count, kernel = prod(windows.shape[1 : 1 + spatial]), prod(windows.shape[1 + spatial : -1])
    if groups == 1:
        return windows.reshape(len(windows), 1, count, -1)
    split = windows.unflatten(-1, (groups, -1)).movedim(-2, 1)  # [N, G, *positions, *kernel, C / G]
    return split.reshape(len(windows), groups, count, kernel * split.shape[-1])


Region = tuple[tuple[int, int] | None, ...]  # per axis a range of places, or None for all


def _regions(
    sizes: list[int], shift: tuple[int, ...], starts: list[int], lengths: list[int]
) -> Iterator[tuple[int, Region]]:
    """Signs and regions whose sum is the box of `lengths` places from `starts` on.

    On each axis the box is all places less those before and those behind it.
    """
    choices: list[list[tuple[int, tuple[int, int] | None]]] = []
    for size, step, start, length in zip(sizes, shift, starts, lengths, strict=True):
        first, end = max(0, -step), size - max(0, step)  # where both p and p + d are inside
        axis: list[tuple[int, tuple[int, int] | None]] = [(1, None)]
        for low, high in ((first, min(start, end)), (max(start + length, first), end)):
            if low < high:
                axis.append((-1, (low, high)))
        choices.append(axis)
    for chosen in product(*choices):
        yield prod(sign for sign, _ in chosen), tuple(region for _, region in chosen)


def _correlation(image: Tensor, sizes: list[int], shift: tuple[int, ...], region: Region) -> Tensor:
    """Σ_p x_p x_{p+d}ᵀ over the places p of a region, [G, C, C], of an image [N, *sizes + zeros, G, C]."""
    if all(part is None for part in region):
        flat = image.flatten(0, -3)  # [places, G, C]
        offset = 0
        for step, size in zip(shift, image.shape[1:-2], strict=True):
            offset = offset * size + step
        left, right = flat[: len(flat) - offset], flat[offset:]
    else:
        here, there = [slice(None)], [slice(None)]
        for size, step, part in zip(sizes, shift, region, strict=True):
            low, high = part or (max(0, -step), size - max(0, step))
            here.append(slice(low, high))
            there.append(slice(low + step, high + step))
        left, right = image[tuple(here)].flatten(0, -3), image[tuple(there)].flatten(0, -3)
    if left.shape[1] == 1:
        return (left[:, 0].mT @ right[:, 0])[None]
    return torch.einsum("pgc,pgd->gcd", left, right)
