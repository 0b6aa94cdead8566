"""Batch norm's statistics under other weights than those they were gathered with, from data."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ... import seeds
from ...inputs import Batch, TensorOptions, call
from ...layers.shell import leased, seeded
from ...sources import OrderedSource, Source, reading, split


def normalising(network: nn.Module, frozen: Collection[str] = ()) -> dict[str, _BatchNorm]:
    """The batch norms that keep statistics and are trained, by name.

    Args:
        network: to look into.
        frozen: names of modules that stay as they are.
    """
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None and name not in frozen
    }


def statistics_of(network: nn.Module, layers: Collection[str]) -> dict[str, Tensor]:
    """The statistics that these layers keep, by the names the network gives them."""
    buffers, statistics = (dict(network.named_buffers()), ("running_mean", "running_var", "num_batches_tracked"))
    names = [f"{layer}.{name}" if layer else name for layer in layers for name in statistics]
    return {name: buffers[name] for name in names if name in buffers}


@torch.no_grad()
def refresh(
    network: nn.Module,
    weights: Mapping[str, Tensor],
    layers: Mapping[str, _BatchNorm],
    source: Source,
    batch_size: int,
    seed: int,
) -> None:
    """Give batch norms the statistics they have under `weights`: means over all batches of the data, in place.

    Args:
        network: whose buffers change; everything but the batch norms is in evaluation mode.
        weights: parameters by name.
        layers: the batch norms.
        source: the data.
        batch_size: rows at once, best as in training.
        seed: of the order of the rows.
    """
    if not layers:
        return
    device = TensorOptions.of(network).device
    with (
        leased(network, weights) as shell,
        _gathering({name: shell.get_submodule(name) for name in layers}),  # pyright: ignore[reportArgumentType]
        reading(source, seed, "statistics", device=device),
        seeded(network, seed, "statistics"),
    ):
        for batch in _batches(source, batch_size, seed):
            call(shell, batch.inputs)


def _batches(source: Source, batch_size: int, seed: int) -> Iterator[Batch]:
    """All rows once, in an order by seed where the source leaves it to us: a batch of one class is no sample."""
    if not isinstance(source, OrderedSource):
        yield from source.batches(batch_size)
        return
    order = torch.randperm(source.num_data, generator=seeds.generator(seed, "statistics"))
    for batch in source.read([order[rows] for rows in split(source.num_data, batch_size)]):
        assert batch is not None
        yield batch


@contextmanager
def _gathering(layers: Mapping[str, _BatchNorm]) -> Iterator[None]:
    """While open, these layers start anew and take plain means over batches."""
    before = {name: layer.momentum for name, layer in layers.items()}
    for layer in layers.values():
        layer.reset_running_stats()
        layer.momentum = None  # pyright: ignore[reportAttributeAccessIssue]
        layer.train()
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.momentum = before[name]  # pyright: ignore[reportAttributeAccessIssue]
            layer.eval()
