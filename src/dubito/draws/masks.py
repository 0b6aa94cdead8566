"""Draws as masks on the network's own dropout layers."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..inputs import Inputs, call, take
from ..layers import Layout
from ..layers.dropout import Layouts, StackedMasks, fixed_dropout, recorded_masks, row_axis, with_fixed_dropout
from ..layers.passes import unnest
from ..layers.shell import leased
from ..layers.shell import take as take_shell
from .base import Draws, repeated


class MaskDraws(Draws):
    """Masks by seeds, one for each draw, since their shapes follow from the inputs; draws run one by one.

    `facts` also holds the `seeds`, the layouts of the `dropouts` by name, and the `scale` s of masks 1 + s (mask − 1).
    """

    kind = "masks"

    @property
    def layouts(self) -> dict[str, Layout]:
        """The dropout layers, with how their inputs hold the rows."""
        return {name: Layout(value) for name, value in self.facts["dropouts"].items()}

    def weights(self, index: int) -> dict[str, Tensor]:
        return {}

    def answered(self, index: int, inputs: Inputs) -> Tensor:
        with leased(self.network) as shell, fixed_dropout(shell, self.layouts, *self._mask(index)):
            return call(shell, inputs)

    def plain(self, index: int) -> nn.Module:
        return with_fixed_dropout(self.network, self.layouts, *self._mask(index))

    def traceable(self, inputs: Inputs = None) -> nn.Module | None:
        if inputs is None:
            return None
        return MaskTile(self.network, self.layouts, [self._mask(index) for index in range(self.count)], inputs)

    def _mask(self, index: int) -> tuple[int, float]:
        return self.facts["seeds"][index], self.facts.get("scale", 1.0)


class MaskTile(nn.Module):
    """Inputs of B rows to the outputs [S, B, ...] of all draws of masks, which are constants of it.

    Args:
        network: whose shell is taken for good.
        layouts: of its dropout layers.
        masks: seed and scale of each draw.
        inputs: rows like those that it will read.
    """

    def __init__(
        self, network: nn.Module, layouts: Layouts, masks: Sequence[tuple[int, float]], inputs: Inputs
    ) -> None:
        super().__init__()
        row = take(inputs, slice(1))
        drawn = [recorded_masks(network, layouts, *mask, lambda shell: call(shell, row)) for mask in masks]
        self.shell, self.draws = take_shell(network).withdraw().module, len(masks)
        self.masks = nn.ModuleList()
        unnest(self.shell)
        for name, layout in layouts.items():
            stacked = StackedMasks([record[name] for record in drawn], row_axis(layout))
            self.masks.append(stacked)
            self.shell.get_submodule(name).register_forward_hook(stacked.hook)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        for mask in self.masks:
            mask.calls = 0  # pyright: ignore[reportArgumentType]
        outputs = call(self.shell, repeated(kwargs or args, self.draws))
        return outputs.reshape(self.draws, -1, *outputs.shape[1:])
