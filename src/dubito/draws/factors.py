"""Draws as factors on the nodes of shared weights."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..inputs import Inputs, TensorOptions, checked_inputs, rows_of
from ..layers.declared import stored_uses
from ..layers.factors import Factor, Factors, NodeFactors
from ..layers.kernels import fold_values
from .base import MOST_ROWS, Draws, JointPass
from .tile import tile


class FactorDraws(Draws):
    """W ∘ r sᵀ, or W + r sᵀ, with factors [S, nodes] by the weight's name, and biases [S, C] by their own.

    The groups are `input_factors`, `output_factors` and `biases`; `facts` also holds the `uses` of the weights and
    whether factors are `additive`. One pass sends the rows of all draws through the shared weights.
    """

    kind = "factors"

    def weights(self, index: int) -> dict[str, Tensor]:
        centre = dict(self.network.named_parameters())
        folded = {name: values[index] for name, values in self.tensors.get("biases", {}).items()}
        for name, use in stored_uses(self.facts).items():
            s, r = (None if side is None else side[index] for side in self._sides(name))
            folded[name] = fold_values(use.views, centre[name], s, r, additive=self.facts["additive"])
        return folded

    def makers(self, inputs: Inputs) -> Iterator[Callable[[], JointPass]]:
        yield self._tile

    def _tile(self) -> JointPass:
        factors = {
            name: NodeFactors(*(None if side is None else Factor(side) for side in self._sides(name)))
            for name in stored_uses(self.facts)
        }
        context = Factors(
            factors,
            self.tensors.get("biases"),
            passes=self.count,
            rows=1,
            additive=self.facts["additive"],
            repeated=True,
        )
        return tile(self.network, context, self.count, passing=self.passing)

    def _sides(self, name: str) -> tuple[Tensor | None, Tensor | None]:
        inputs, outputs = (self.tensors.get(f"{side}_factors", {}).get(name) for side in ("input", "output"))
        return inputs, outputs


def tiled(posterior: Any, inputs: Inputs, num_samples: int, seed: int, max_rows: int) -> Tensor | None:
    """Outputs [S, B, ...] of draws anew, in one tile; None where they must, or had better, run one by one.

    Args:
        posterior: whose `draws` are factors.
        inputs: what the network reads.
        num_samples: S.
        seed: of the draws.
        max_rows: rows that go through the network at once.
    """
    inputs = checked_inputs(inputs, TensorOptions.of(posterior.network))
    rows = rows_of(inputs)
    if rows > max_rows or rows * num_samples > MOST_ROWS:
        return None
    draws: FactorDraws = posterior.draws(range(num_samples), seed)
    draws.passing = True
    return draws.together(inputs)
