"""What BALI finds in a network: the layers it can treat, which of them is last, and what is left as points."""

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ... import seeds
from ...curvature import Block, Taps, find_blocks
from ...errors import ConfigError, DubitoWarning, NetworkError
from ...inputs import Inputs, Place, call
from ...layers.shell import leased
from ...layers.taps import Port, Tap
from ...layers.trace import Layout, trace
from ...networks import Subset, resolve, trainable
from ...training import Training


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a network.

    Attributes:
        blocks: their matrices.
        taps: what reads them.
        first: names of the blocks that read the network's own inputs, which Eq. 12 does not scale.
        last: name of the block whose outputs are the network's, or None.
        points: names of trainable parameters that are no part of a block.
    """

    blocks: tuple[Block, ...]
    taps: Taps
    first: frozenset[str]
    last: str | None
    points: tuple[str, ...]

    def taps_of(self, block: Block) -> tuple[Tap, ...]:
        """The taps of a block, one for each part of its weight."""
        return self.taps.taps[block.name]

    @property
    def ports(self) -> list[Port]:
        """Where the network is tapped."""
        links = [link for block in self.blocks for tap in self.taps_of(block) for link in tap.links]
        return list({id(link.port): link.port for link in links}.values())

    def plain(self, block: Block) -> bool:
        """Whether a single layer, which reads rows first, is all that uses the block."""
        taps = self.taps_of(block)
        if len(taps) != 1 or len(taps[0].links) != 1:
            return False
        port = taps[0].links[0].port
        return port.key == "" and port.layout is Layout.ROWS


def find_layers(network: nn.Module, inputs: Inputs, subset: Subset) -> Layers:
    """The layers whose weights multiply their inputs, and the points.

    Args:
        network: in evaluation mode.
        inputs: a few rows.
        subset: the parameters wanted.
    """
    names = resolve(subset, network)
    found, taps, reasons = find_blocks(network, inputs, names)
    blocks = tuple(block for block in found if block.kronecker)
    if not blocks:
        raise NetworkError(
            "BALI treats layers that multiply their inputs by a weight (Linear, Conv), and found none among "
            f"{', '.join(names)}; add such a layer, or take a method for any parameter such as MeanField()"
        )
    kept = {name for block in blocks for name in block.parameters}
    points = tuple(name for name in trainable(network) if name not in kept)
    unwanted = [name for name in points if name in names]
    if unwanted:
        why = "; ".join(f"{name}: {reasons.get(name, 'its layer has no matrix')}" for name in unwanted)
        warnings.warn(
            f"BALI treats layers that multiply by a weight; these parameters are points, trained by the "
            f"optimiser at Training(lr=...): {why}; name what to treat with subset= to say so",
            DubitoWarning,
            stacklevel=4,
        )
    own = Taps({b.name: b for b in blocks}, {b.name: taps.taps[b.name] for b in blocks})
    layers = Layers(blocks, own, frozenset(), None, points)
    outputs, answers, reading = _looked(network, inputs, layers)
    last = next((name for name, answer in answers.items() if _same(answer, outputs)), None)
    return Layers(blocks, own, frozenset(reading), last, points)


def _looked(network: nn.Module, inputs: Inputs, layers: Layers) -> tuple[Tensor, dict[str, Tensor], set[str]]:
    """The network's outputs, those of plain layers by block, and the blocks that read the inputs."""
    paths = {block.name: {link.port.path for tap in layers.taps_of(block) for link in tap.links}
             for block in layers.blocks}  # fmt: skip
    visits = trace(network, inputs, sorted({path for own in paths.values() for path in own}))
    reading = {name for name, own in paths.items() if any(visits[path].reads_input for path in own)}
    answers: dict[str, Tensor] = {}

    def hook(name: str):
        def record(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            answers[name] = output.clone()  # later operations may change it in place

        return record

    with leased(network) as shell, ExitStack() as hooks:
        for block in layers.blocks:
            (path, *others) = paths[block.name]
            if not others and layers.plain(block) and block.groups == 1:
                hooks.enter_context(shell.get_submodule(path).register_forward_hook(hook(block.name)))
        with torch.no_grad(), seeds.forked(0, "outputs", device=Place.of(network).device):
            outputs = call(shell, inputs)
    return outputs, answers, reading


def _same(answer: Tensor, outputs: Tensor) -> bool:
    """Whether a layer's outputs [B, m] are the network's, but for an axis of size 1."""
    return (
        answer.ndim == 2
        and answer.numel() == outputs.numel()
        and torch.equal(answer.reshape_as(outputs), outputs)
    )


def initial_weights(
    blocks: tuple[Block, ...], scales: Mapping[str, float], std: float, like: Tensor, seed: int
) -> dict[str, Tensor]:
    """Weights drawn for the first forward pass, N(0, s² std²), by parameter name."""
    stream = seeds.generator(seed, "initial weights", device=like.device)
    weights: dict[str, Tensor] = {}
    for block in blocks:
        shape = block.groups, block.rows, block.columns
        noise = torch.randn(shape, generator=stream, dtype=like.dtype, device=like.device)
        weights |= block.tensors(noise * (std * scales[block.name]))
    return weights


def check_training(training: Training) -> None:
    """Refuse what sums of products and factorisations cannot bear."""
    if training.precision != "full":
        raise ConfigError(
            f'BALI factorises sums of products, which needs precision="full", got {training.precision!r}'
        )


def suffixed(path: str | os.PathLike[str] | None, suffix: str) -> Path | None:
    """A file beside another one."""
    return None if path is None else Path(path).with_name(f"{Path(path).name}.{suffix}")
