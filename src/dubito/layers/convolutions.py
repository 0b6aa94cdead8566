"""Convolutions as products over patches, and the second moment of their patches without forming them."""

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .uses import PIECE, Product, Use, add_gram

#: Numbers one block of patches may hold, so that it stays in the cache.
BLOCK = 1 << 20

#: From this many channels of a group on, shifted correlations are faster than patches.
CHANNELS = 8


class Convolution(Product):
    """The weight of a convolution in 1, 2 or 3 dimensions: a product with every patch.

    Patches hold the channels of a kernel's position together, in memory one after the other.

    Args:
        layer: the convolution.
    """

    trailing = False

    def __init__(self, layer: _ConvNd) -> None:
        self.groups, self.channels = layer.groups, layer.in_channels // layer.groups
        self.kernel, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
        super().__init__(layer.out_channels // layer.groups, self.channels * prod(self.kernel))
        self.mode = layer.padding_mode
        pads = layer._reversed_padding_repeated_twice  # of the last axis first, as F.pad takes them
        self.padding = [(pads[i], pads[i + 1]) for i in range(len(pads) - 2, -1, -2)]
        if prod(self.kernel) > 1:
            place = torch.arange(self.columns).reshape(self.channels, -1)
            self.order = place.mT.flatten()  # patches run (kernel, channel), weights (channel, kernel)

    @property
    def form(self) -> tuple[object, ...]:
        return (*super().form, self.kernel)

    def inputs(self, x: Tensor) -> Tensor:
        windows = _windows(self._padded(x), self.kernel, self.stride, self.dilation)
        return _by_group(windows, self.groups, len(self.kernel))

    def pieces(self, x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
        windows = _windows(self._padded(x), self.kernel, self.stride, self.dilation)
        lines, line = windows.shape[1], prod(windows.shape[2 : 1 + len(self.kernel)])
        step = max(1, numbers // (len(x) * line * self.groups * self.columns))
        for start in range(0, lines, step):
            part = windows[:, start : start + step]
            yield (
                slice(start * line, (start + part.shape[1]) * line),
                _by_group(part, self.groups, len(self.kernel)),
            )

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

    def _padded(self, x: Tensor) -> Tensor:
        """The inputs with channels last and the layer's own padding around them, [N, *sizes, C]."""
        if self.mode != "zeros" and any(map(any, self.padding)):
            pads = [pad for pair in reversed(self.padding) for pad in pair]
            return F.pad(x, pads, mode=self.mode).movedim(1, -1).contiguous()
        return _channels_last(x, self.padding)

    # -- the second moment of the patches from correlations of the inputs with themselves ---------------------

    def _shifts_pay(self, x: Tensor) -> bool:
        """Whether one product per shift costs less than one per pair of kernel positions."""
        positions, area = prod(self._positions(x)), prod(x.shape[2:])
        spread = prod(size + reach for size, reach in zip(x.shape[2:], self._reach, strict=True))
        shifts = (prod(2 * size - 1 for size in self.kernel) + 1) // 2
        return (
            all(step == 1 for step in self.stride)
            and self.channels >= CHANNELS
            and area <= 4 * positions  # corrections at the edges would cost digits
            and 2 * shifts * spread < prod(self.kernel) ** 2 * positions
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
        if self.mode != "zeros" and any(map(any, padding)):
            x, padding = self._padded(x).movedim(-1, 1), [(0, 0)] * len(self.kernel)
        sizes = list(x.shape[2:])
        lengths = [
            size + sum(pad) - reach for size, pad, reach in zip(sizes, padding, self._reach, strict=True)
        ]
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


class TransposedConvolution(Use):
    """The weight of a transposed convolution: inputs and gradients change their parts in a convolution's.

    Args:
        layer: the transposed convolution.
    """

    trailing = False

    def __init__(self, layer: _ConvTransposeNd) -> None:
        self.layer = layer
        assert not isinstance(layer.padding, str)  # PyTorch refuses it
        self.padding = [(pad, pad) for pad in layer.padding]

    def numbers(self, x: Tensor, g: Tensor) -> int:
        return len(x) * prod(x.shape[2:]) * prod(self.layer.kernel_size) * g.shape[1]  # patches

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        layer, spatial = self.layer, len(self.layer.kernel_size)
        windows = _windows(
            _channels_last(g, self.padding), layer.kernel_size, layer.stride, layer.dilation, x.shape[2:]
        )
        patches = _by_group(windows, layer.groups, spatial)  # [N, G, T, kernel · channels]
        # δ[i, o, k] = Σ_t x[i, t] g[o, s t + k − p]
        own = x.reshape(len(x), layer.groups, layer.in_channels // layer.groups, -1) @ patches
        own = own.unflatten(-1, (prod(layer.kernel_size), -1)).transpose(-1, -2)
        return own.reshape(len(x), *layer.weight.shape)


def _channels_last(x: Tensor, padding: list[tuple[int, int]]) -> Tensor:
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
    each = zip(sizes, kernel, stride, dilation, strict=True)
    return [(size - d * (k - 1) - 1) // s + 1 for size, k, s, d in each]


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
        (len(padded), *count, *kernel, padded.shape[-1]),
        (first, *strides, *inner, last),
        padded.storage_offset(),
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
