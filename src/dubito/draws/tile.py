"""Passes in which the rows of all draws go through a network side by side, under a context."""

from typing import Any

from torch import Tensor, nn

from ..inputs import call, rows_of
from ..layers.factors import Factors
from ..layers.module import PassModule
from ..layers.passes import asking
from ..layers.stack import Stack
from .base import JointPass, repeated


class Tile(PassModule):
    """Inputs of B rows to the outputs [S, B, ...] of all draws; a module that can be exported.

    Args:
        network: whose shell is taken for good.
        context: of the draws, for inputs that are repeated draw by draw.
        draws: S.
    """

    def __init__(self, network: nn.Module, context: Stack | Factors, draws: int) -> None:
        super().__init__(network, context, context.names)
        self.draws = draws

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs = call(super().forward, repeated(kwargs or args, self.draws))
        return outputs.reshape(self.draws, -1, *outputs.shape[1:])


def tile(network: nn.Module, context: Stack | Factors, draws: int, *, passing: bool) -> JointPass:
    """A tile: a module of its own, or, for a single call, a pass through a leased shell."""
    if not passing:
        return Tile(network, context, draws)

    def leased(*args: Any, **kwargs: Any) -> Tensor:
        inputs = repeated(kwargs or args, draws)
        context.begin(rows_of(inputs))
        with asking(network, context, context.names) as shell:
            outputs = call(shell, inputs)
        return outputs.reshape(draws, -1, *outputs.shape[1:])

    return leased
