"""A network's own dropout layers, run with masks that one draw shares among all rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .. import seeds
from .layout import Layout
from .passes import unnest, unnested
from .shell import leased
from .tree import deep_copy

#: How the inputs of dropout layers hold the rows, by their names.
Layouts: TypeAlias = Mapping[str, Layout]
#: The value SELU saturates at, which alpha dropout puts in place of dropped units.
SELU_FLOOR = -1.7580993408473766


class FixedDropout(nn.Module):
    """A dropout layer with its mask fixed by a seed: the same for every row and every call with it.

    Args:
        layer: the dropout layer it stands for.
        seed: decides the mask; each call within one forward pass has a mask of its own.
        row_axis: the axis of rows, which share the mask.
        scale: s, by which the mask deviates from 1: what the layer does is added s times.
    """

    def __init__(self, layer: nn.Module, seed: int, row_axis: int = 0, scale: float = 1.0) -> None:
        super().__init__()
        assert isinstance(layer, _DropoutNd)
        self.rate, self.seed, self.row_axis, self.scale = layer.p, seed, row_axis, scale
        self.channels = isinstance(layer, nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.FeatureAlphaDropout)
        self.alpha = isinstance(layer, nn.AlphaDropout | nn.FeatureAlphaDropout)
        self.calls = 0
        # Attention blocks skip their dropout layers in evaluation mode, unless one of them has a hook.
        self.register_forward_pre_hook(_heed)

    def forward(self, inputs: Tensor) -> Tensor:
        dropped = self._dropped(inputs)
        return dropped if self.scale == 1 else torch.lerp(inputs, dropped, self.scale)

    def _dropped(self, inputs: Tensor) -> Tensor:
        shape = list(inputs.shape)
        shape[self.row_axis] = 1
        if self.channels:
            shape[2:] = [1] * (len(shape) - 2)
        generator = seeds.generator(self.seed, self.calls, device=inputs.device)
        self.calls += 1
        keep = torch.full(shape, 1 - self.rate, dtype=inputs.dtype, device=inputs.device)
        mask = torch.bernoulli(keep, generator=generator)
        if not self.alpha:
            return inputs * mask / max(1 - self.rate, torch.finfo(inputs.dtype).tiny)
        if self.rate == 1:
            return inputs * 0
        # Alpha dropout keeps mean 0 and variance 1: a = (q + α'² q (1 − q))^-½, b = −a α' (1 − q)
        q = 1 - self.rate
        scale = (q + SELU_FLOOR**2 * q * (1 - q)) ** -0.5
        return scale * (inputs * mask + SELU_FLOOR * (1 - mask) - SELU_FLOOR * (1 - q))


def find_dropouts(network: nn.Module) -> list[str]:
    """The names of the network's dropout layers with a rate above 0."""
    return [name for name, m in network.named_modules() if isinstance(m, _DropoutNd) and m.p > 0]


def with_fixed_dropout(network: nn.Module, layouts: Layouts, seed: int, scale: float = 1.0) -> nn.Module:
    """A copy of the network whose dropout layers have the masks of one draw."""
    plain = deep_copy(network)
    fixed = {plain.get_submodule(name): mask for name, mask in _fixed(plain, layouts, seed, scale).items()}
    for name, module in list(plain.named_modules(remove_duplicate=False)):  # one layer may have two names
        if module in fixed:
            path, _, last = name.rpartition(".")
            setattr(plain.get_submodule(path), last, fixed[module])
    unnest(plain)  # nested tensors are for layers without hooks
    plain.register_forward_pre_hook(_restart)
    return plain


@contextmanager
def fixed_dropout(network: nn.Module, layouts: Layouts, seed: int, scale: float = 1.0) -> Iterator[None]:
    """While open, the dropout layers of a leased shell drop by the masks of one draw."""
    fixed = _fixed(network, layouts, seed, scale)
    handles = []

    def hook(mask: FixedDropout):
        return lambda _, __, output: mask(output)  # in evaluation mode a dropout layer hands its input on

    try:
        for name, mask in fixed.items():
            handles.append(network.get_submodule(name).register_forward_hook(hook(mask)))
        handles.append(network.register_forward_pre_hook(lambda *_: _rewind(fixed.values())))
        with unnested(network):
            yield
    finally:
        for handle in handles:
            handle.remove()


def row_axis(layout: Layout) -> int:
    """The axis of rows in what a dropout layer reads."""
    return 1 if layout is Layout.SECOND else 0


class StackedMasks(nn.Module):
    """What a dropout layer does in all draws: x ∘ factor + shift, of every call its own.

    Args:
        draws: factors and shifts of the calls of each draw.
        axis: of rows.
    """

    def __init__(self, draws: Sequence[Sequence[tuple[Tensor, Tensor]]], axis: int) -> None:
        super().__init__()
        self.axis, self.draws, self.calls = axis, len(draws), 0
        for call, pairs in enumerate(zip(*draws, strict=True)):
            factors, shifts = (torch.stack(values, axis) for values in zip(*pairs, strict=True))
            self.register_buffer(f"factors{call}", factors)
            self.register_buffer(f"shifts{call}", shifts if bool(shifts.any()) else None)

    def hook(self, _: object, __: object, outputs: Tensor) -> Tensor:
        """To stand after the layer, which hands its input on in evaluation mode."""
        factors, shifts = getattr(self, f"factors{self.calls}"), getattr(self, f"shifts{self.calls}")
        self.calls += 1
        scaled = outputs.unflatten(self.axis, (self.draws, -1)) * factors
        return (scaled if shifts is None else scaled + shifts).flatten(self.axis, self.axis + 1)


@torch.no_grad()
def recorded_masks(
    network: nn.Module, layouts: Layouts, seed: int, scale: float, run: Callable[[nn.Module], object]
) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Factors and shifts of every call of the dropout layers in a draw, while a shell is run."""
    record: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in layouts}

    def hook(name: str, mask: FixedDropout) -> Callable[..., None]:
        def keep(_: object, __: object, outputs: Tensor) -> None:
            row = outputs.narrow(mask.row_axis, 0, 1)
            shift, number = mask(torch.zeros_like(row)), mask.calls - 1
            mask.calls = number  # the same mask again
            record[name].append((mask(torch.ones_like(row)) - shift, shift))

        return keep

    with leased(network) as shell, unnested(shell), ExitStack() as handles:
        for name, mask in _fixed(shell, layouts, seed, scale).items():
            handle = shell.get_submodule(name).register_forward_hook(hook(name, mask))
            handles.callback(handle.remove)
        run(shell)
    return record


def _fixed(network: nn.Module, layouts: Layouts, seed: int, scale: float) -> dict[str, FixedDropout]:
    return {
        name: FixedDropout(network.get_submodule(name), seeds.derived(seed, name), row_axis(layout), scale)
        for name, layout in layouts.items()
    }


def _heed(layer: nn.Module, _: object) -> None:
    pass


def _restart(network: nn.Module, _: object) -> None:
    _rewind(module for module in network.modules() if isinstance(module, FixedDropout))


def _rewind(masks) -> None:
    for mask in masks:
        mask.calls = 0
