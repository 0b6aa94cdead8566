"""What BALI finds in a network: the layers it can treat, which of them is last, and what is left as points."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ... import seeds
from ...curvature import Block, Cover, cover
from ...errors import ConfigError, NetworkError, warn
from ...inputs import Inputs
from ...layers import Layout, reasons, survey
from ...networks import Subset, require_full, resolve, trainable
from ...training import Training


@dataclass(frozen=True, eq=False)
class Topology:
    """The layers of a network.

    Attributes:
        cover: their matrices, and how these are read from recorded passes.
        first: names of the blocks that read the network's own inputs, which Eq. 12 does not scale.
        last: name of the block whose outputs are the network's, or None.
        points: why trainable parameters are no part of a block, by name.
    """

    cover: Cover
    first: frozenset[str]
    last: str | None
    points: Mapping[str, str]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Their matrices."""
        return tuple(self.cover.blocks.values())

    def plain(self, block: Block) -> bool:
        """Whether a single use, which reads rows first, is all that the network makes of the block."""
        uses = self.cover.survey.of(block.weight)
        return len(uses) == 1 and not uses[0].steps and uses[0].layout is Layout.ROWS


def find_layers(network: nn.Module, inputs: Inputs, subset: Subset) -> Topology:
    """The layers whose weights multiply their inputs, and the points.

    Args:
        network: in evaluation mode.
        inputs: a few rows.
        subset: the parameters wanted.
    """
    require_full(network, "BALI's factorisation of sums of products")
    names = resolve(subset, network)
    surveyed = survey(network, inputs)
    covered = cover(network, surveyed, names)
    layers = covered.only([name for name, block in covered.blocks.items() if block.kronecker])
    if not layers.blocks:
        raise NetworkError(
            "BALI treats layers that multiply their inputs by a weight (Linear, Conv), and found none among "
            f"{', '.join(names)}; add such a layer, or take a method for any parameter such as MeanField()"
        )
    treated = set(layers.parameters)
    points = {
        name: covered.left_out.get(name, reasons.NO_MATRIX if name in names else reasons.SUBSET)
        for name in trainable(network)
        if name not in treated
    }
    if any(name in names for name in points):
        why = "; ".join(f"{name}: {reason}" for name, reason in points.items() if name in names)
        warn(
            f"BALI treats layers that multiply by a weight; these parameters are points, trained by the "
            f"optimiser at Training(lr=...): {why}; name what to treat with subset= to say so"
        )
    reading = frozenset(
        name for name, block in layers.blocks.items() if any(use.reads_input for use in surveyed.of(block.weight))
    )
    last = next((name for name, block in layers.blocks.items() if block.weight == surveyed.last), None)
    return Topology(layers, reading, last, points)


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
        raise ConfigError(f'BALI factorises sums of products, which needs precision="full", got {training.precision!r}')
