"""Draws as stacked weights: every parameter and buffer that differs, [S, ...]."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import vmap

from ..inputs import Inputs, rows_of
from ..layers.stack import Stack
from ..networks import run
from .base import Draws, JointPass
from .tile import tile

#: Rows from which a loop over draws is faster than stacked weights.
LOOP_ROWS = 256


class WeightDraws(Draws):
    """Sets of weights: parameters in the group `draws`, buffers in `statistics`.

    One pass is a stacked one where rules cover all that differs, and else `vmap` over the whole network.
    """

    kind = "weights"

    def block(self, inputs: Inputs) -> int:
        return super().block(inputs) if rows_of(inputs) < LOOP_ROWS else 1

    @property
    def _stacks(self) -> dict[str, Tensor]:
        return {**self.tensors.get("draws", {}), **self.tensors.get("statistics", {})}

    def weights(self, index: int) -> dict[str, Tensor]:
        return {name: stack[index] for name, stack in self._stacks.items()}

    def context(self, inputs: Inputs = None) -> Stack:
        """What answers for all draws, where rules cover all that differs."""
        return Stack(self._stacks, self.survey(inputs), draws=self.count, rows=1, repeated=True)

    def makers(self, inputs: Inputs) -> Iterator[Callable[[], JointPass]]:
        network, tensors = self.network, self._stacks
        if not self.tensors.get("statistics"):
            self.survey(inputs)  # or fail
            yield lambda: tile(network, self.context(inputs), self.count, passing=self.passing)

        def mapped(*args: Any, **kwargs: Any) -> Tensor:
            return vmap(lambda weights: run(network, weights, kwargs or args))(tensors)

        yield lambda: mapped


def weight_stacks(
    network: nn.Module, drawn: Iterable[Mapping[str, Tensor]], count: int
) -> dict[str, dict[str, Tensor]]:
    """What differs between draws, [S, ...]: parameters and buffers by name; what is the network's own does not."""
    centre = {"draws": dict(network.named_parameters()), "statistics": dict(network.named_buffers())}
    groups: dict[str, dict[str, Tensor]] = {"draws": {}, "statistics": {}}
    for index, weights in enumerate(drawn):
        for key, tensors in centre.items():
            for name, tensor in tensors.items():
                value = weights.get(name, tensor)
                if name not in groups[key] and value is not tensor:
                    groups[key][name] = tensor.detach().expand(count, *tensor.shape).clone()
                if name in groups[key]:
                    groups[key][name][index].copy_(value)
    return {key: group for key, group in groups.items() if group}
