"""Draws as factors on the nodes of shared weights."""

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn

from ..inputs import Inputs
from ..layers import Dense, Layout, Use
from ..layers.declared import stored_uses
from ..layers.factors import Factor, Factors, NodeFactors
from ..layers.kernels import fold_values
from ..layers.stack import Stack
from .base import Draws, JointPass
from .tile import Tile, tile


class FactorDraws(Draws):
    """W ∘ r sᵀ, or W + r sᵀ, with factors [S, nodes] by the weight's name, and biases [S, C] by their own.

    The groups are `input_factors`, `output_factors` and `biases`, and `draws`, the stacks of parameters that are drawn
    themselves; `facts` also holds the `uses` of the weights and whether factors are `additive`. One pass sends the rows
    of all draws through the shared weights.
    """

    kind = "factors"

    @cached_property
    def uses(self) -> dict[str, Use]:
        """How each weight with factors stands between its nodes, by name."""
        return stored_uses(self.facts)

    def weights(self, index: int) -> dict[str, Tensor]:
        centre = dict(self.network.named_parameters())
        folded = {name: values[index] for name, values in self._stacks.items()}
        for name, use in self.uses.items():
            s, r = (None if side is None else side[index] for side in self._sides(name))
            folded[name] = fold_values(use.views, centre[name], s, r, additive=self.facts["additive"])
        return folded

    def makers(self, inputs: Inputs) -> Iterator[Callable[[], JointPass]]:
        additive = self.facts["additive"] and not all(isinstance(use.form, Dense) for use in self.uses.values())
        uses = (use for use in self.survey(inputs).uses if use.weight in self.uses)
        # What is added to other weights than dense layers' is not known row by row, nor are rows that stand second, for
        # which a trial may be passed by draws that are alike.
        if not additive and all(use.layout in (Layout.ROWS, Layout.FLAT) for use in uses):
            yield lambda: tile(self.network, self.context(inputs), self.count, passing=self.passing)

    @property
    def _stacks(self) -> dict[str, Tensor]:
        """Parameters of every draw's own, [S, ...] by name."""
        return {**self.tensors.get("biases", {}), **self.tensors.get("draws", {})}

    def context(self, inputs: Inputs = None) -> Factors:
        """What answers for all draws; rows serve where no survey is stored."""
        factors = {
            name: NodeFactors(*(None if side is None else Factor(side) for side in self._sides(name)))
            for name in self.uses
        }
        stacks, stack = self._stacks, None
        if "draws" in self.tensors:
            stack = Stack(stacks, self.survey(inputs), draws=self.count, rows=1, repeated=True)
        return Factors(
            factors, stacks, passes=self.count, rows=1, additive=self.facts["additive"], repeated=True, stack=stack
        )

    def traceable(self, inputs: Inputs = None) -> nn.Module | None:
        traced = super().traceable(inputs)
        context = traced.context if isinstance(traced, Tile) else None
        if isinstance(context, Factors) and context.stack is None:  # biases of components once
            context.biases = {name: _period(values) for name, values in context.biases.items()}
        return traced

    def _sides(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        inputs, outputs = (self.tensors.get(f"{side}_factors", {}).get(name) for side in ("input", "output"))
        return inputs, outputs


def _period(values: Tensor) -> Tensor:
    """The first rows, where all that follow repeat them."""
    for rows in range(1, len(values) // 2 + 1):
        if len(values) % rows == 0 and torch.equal(values, values[:rows].repeat(len(values) // rows, 1)):
            return values[:rows].clone()
    return values
