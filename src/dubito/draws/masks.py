"""Draws as masks on the network's own dropout layers."""

from torch import Tensor, nn

from ..inputs import Inputs, call
from ..layers import Layout
from ..layers.dropout import fixed_dropout, with_fixed_dropout
from ..layers.shell import leased
from .base import Draws


class MaskDraws(Draws):
    """Masks by seeds, one for each draw, since their shapes follow from the inputs; draws run one by one.

    `facts` also holds the `seeds`, the layouts of the `dropouts` by name, and the `scale` s of masks 1 + s (mask − 1).
    """

    kind, traces = "masks", False

    @property
    def layouts(self) -> dict[str, Layout]:
        """The dropout layers, with how their inputs hold the rows."""
        return {name: Layout(value) for name, value in self.facts["dropouts"].items()}

    def weights(self, index: int) -> dict[str, Tensor]:
        return {}

    def answered(self, index: int, inputs: Inputs) -> Tensor:
        with (
            leased(self.network) as shell,
            fixed_dropout(shell, self.layouts, *self._mask(index)),
        ):
            return call(shell, inputs)

    def plain(self, index: int) -> nn.Module:
        return with_fixed_dropout(self.network, self.layouts, *self._mask(index))

    def _mask(self, index: int) -> tuple[int, float]:
        return self.facts["seeds"][index], self.facts.get("scale", 1.0)
