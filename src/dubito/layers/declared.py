"""What is known of a network before any row comes: what PyTorch's own modules do with their weights."""

from collections.abc import Iterator

from torch import nn

from .kinds import DECLARATIONS, Declared
from .layout import Layout
from .uses import Use


def declared(network: nn.Module) -> list[Use]:
    """The uses that the network's modules declare, in the order of the modules; layouts are not known.

    A weight that several modules hold has several uses. A weight computed from others (a parametrisation) is no
    parameter of its own and has none.
    """
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    uses = []
    for module in network.modules():
        for use in _declared(module):
            weight, bias = (
                None if key is None else names.get(id(module._parameters.get(key)))
                for key in (use.weight, use.bias)
            )
            if weight is not None:
                uses.append(Use(weight, bias, use.form, use.function, Layout.UNKNOWN, parts=use.parts))
    return uses


def _declared(module: nn.Module) -> Iterator[Declared]:
    for kind in type(module).__mro__:
        if kind in DECLARATIONS:
            yield from DECLARATIONS[kind](module)
            return
