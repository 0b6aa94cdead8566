"""What BALI leaves behind: a matrix normal for every layer."""

import math
from functools import cached_property
from typing import Any, NotRequired

import torch
from torch import Tensor

from ...curvature import Block, check_blocks
from ...distributions import InverseWishart, MatrixNormal
from ...distributions.two_sided import TwoSided
from ...matrices import BlockDrawer, BlockPosterior
from ...posterior import Details, ShapeRule
from ...storage.schema import Count, Positive
from .layer import placed


class BALIDetails(Details):
    """Facts of BALI: the layers as matrices, and by how many rows each counts."""

    blocks: list[dict[str, Any]]
    effective_data: dict[str, Positive]
    last: NotRequired[str | None]
    jitters: NotRequired[dict[str, Count]]


class BALIPosterior(BlockPosterior):
    """W ~ MN(M, R, Σ) for each layer, the means being the network's own weights.

    The tensors are L with L Lᵀ = R⁻¹ ("input_tril") and C with C Cᵀ = Σ ("output_tril") under the weight's
    name, for the layer's G groups of matrices, bias column included. Parameters of other kinds are points.
    """

    scalable = True
    details_type = BALIDetails

    def shapes(self) -> dict[str, ShapeRule]:
        check_blocks(self.blocks, self.weights())
        of = {block.weight: block for block in self.blocks}

        def square(side: str) -> ShapeRule:
            return lambda name, _: (of[name].groups, getattr(of[name], side), getattr(of[name], side))

        return {"input_tril": square("columns"), "output_tril": square("rows")}

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The layers, as matrices."""
        return tuple(Block.from_json(stored) for stored in self.details["blocks"])

    def drawn_blocks(self) -> tuple[Block, ...]:
        return self.blocks

    def block_drawer(self) -> BlockDrawer:
        weights = self.weights()
        means = {block.weight: block.matrix(weights) for block in self.blocks}
        return lambda block, generator: block.tensors(self.matrices(block, generator, means[block.weight]))

    def root(self, block: Block) -> TwoSided | None:
        if self.method.covariance == "sampled":
            return None
        left, right = (self.group(kind)[block.weight][0] for kind in ("output_tril", "input_tril"))
        return TwoSided(left * self.scale, right, inverted=True)

    def matrices(self, block: Block, generator: torch.Generator | None, mean: Tensor) -> Tensor:
        """A draw of a layer's matrices [G, m, n]."""
        noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
        root = self.group("output_tril")[block.weight] * self.scale
        if self.method.covariance == "sampled":
            root = sampled_root(root, self.details["effective_data"][block.weight], generator)
        return placed(mean, self.group("input_tril")[block.weight], root, noise)

    def distribution(self, weight: str) -> MatrixNormal:
        """The distribution of one layer's matrices by the weight's name, inputs × outputs as in the paper."""
        block = next(block for block in self.blocks if block.weight == weight)
        return MatrixNormal(
            block.matrix(self.weights()).mT,
            row_precision_tril=self.group("input_tril")[weight].detach(),
            column_scale_tril=self.group("output_tril")[weight].detach() * self.scale,
        )

    def holds(self, name: str) -> str:
        for block in self.blocks:
            if name in block.parameters:
                return f"matrix normal, {block.columns} x {block.rows}"
        return super().holds(name)


def sampled_root(output_tril: Tensor, data: float, generator: torch.Generator | None) -> Tensor:
    """F with F Fᵀ = Σ drawn from q(Σ) = W⁻¹(U, u), from the root of its mode U / (u + m + 1)."""
    scale_tril = output_tril * math.sqrt(data + output_tril.shape[-1] + 1)
    return InverseWishart(data, scale_tril, validate_args=False).root(generator=generator)
