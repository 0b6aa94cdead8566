"""Which parameters' noise can be put on the outputs of layers, and why others are drawn as weights."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import nn

from ..errors import NetworkError, unknown_name
from ..layers import reasons
from ..layers.form import Product
from ..layers.uses import Survey, Use
from ..networks import parameters_of

#: As what a context meets the parameters of a use: names of weight and bias, and which part of each.
Key = tuple[str | None, str | None, int, int]


class Calls(NamedTuple):
    """The calls of a pass that use the same parameters.

    Attributes:
        uses: one where all calls are alike, else one for every call in order.
        stream: the name of the stream of their noise.
        several: whether there is more than one.
    """

    uses: tuple[Use, ...]
    stream: str
    several: bool


@dataclass(frozen=True)
class Placement:
    """Where each parameter's noise goes.

    Attributes:
        names: those whose noise is put on outputs.
        drawn: why the others are drawn as weights, by name.
        uses: the uses whose outputs carry noise.
    """

    names: tuple[str, ...]
    drawn: Mapping[str, str]
    uses: tuple[Use, ...]

    @cached_property
    def by_key(self) -> dict[Key, Calls]:
        """The calls that a context meets, by the names that are on outputs."""
        return {
            key: Calls(
                tuple(uses[:1] if _alike(uses) else uses),
                stream_name(key[0] or key[1] or ""),
                sum(use.calls for use in uses) > 1,
            )
            for key, uses in _by_key(self.uses, self.names).items()
        }


def stream_name(parameter: str) -> str:
    """The stream of a parameter's noise: its layer's name, or its whole name where a layer has others beside."""
    layer, _, last = parameter.rpartition(".")
    return layer if last in ("weight", "bias") else parameter


def assign_noise(
    survey: Survey, network: nn.Module, parameters: Sequence[str], wanted: Sequence[str] | None = None
) -> Placement:
    """Where the noise of `parameters` goes.

    Args:
        survey: of the network.
        network: whose modules `wanted` names.
        parameters: those with a distribution.
        wanted: the modules or parameters whose noise must be on outputs, which then must be able to; None takes all
            that can.
    """
    drawn = {name: survey.reasons[name] for name in parameters if name in survey.reasons}
    for use in survey.uses:
        reason = _reason(use)
        for name in (use.weight, use.bias):
            if name is not None and reason is not None:
                drawn.setdefault(name, reason)
    if wanted is not None:
        chosen = _required(wanted, network, set(parameters), drawn)
        drawn |= {name: reasons.NOT_ASKED for name in parameters if name not in chosen and name not in drawn}
    while True:
        names = tuple(name for name in parameters if name not in drawn)
        uses = tuple(use for use in survey.uses if not {use.weight, use.bias}.isdisjoint(names))
        mixed = _mixed(uses, names)
        if not mixed:
            ordered = {name: drawn[name] for name in parameters if name in drawn}
            return Placement(names, ordered, uses)
        drawn |= dict.fromkeys(mixed, reasons.UNKNOWN_ROWS)


def _mixed(uses: Sequence[Use], names: Collection[str]) -> list[str]:
    """The parameters whose calls differ in ways that their order does not tell.

    The order is known for one pair of weight and bias only.
    """
    mixed = []
    for (weight, bias, _, _), same in _by_key(uses, names).items():
        pairs = {(use.weight, use.bias, use.part, use.bias_part) for use in same}
        if not _alike(same) and len(pairs) > 1:
            mixed.append(weight or bias)
    return [name for name in mixed if name is not None]


def _by_key(uses: Sequence[Use], names: Collection[str]) -> dict[Key, list[Use]]:
    """Uses by the names that are on outputs: a partner that is drawn or a point has none there."""
    table: dict[Key, list[Use]] = {}
    for use in uses:
        weight, bias = (name if name in names else None for name in (use.weight, use.bias))
        key = (weight, bias, use.part if weight else 0, use.bias_part if bias else 0)
        table.setdefault(key, []).append(use)
    return table


def _alike(uses: Sequence[Use]) -> bool:
    return len({(use.form.signature, use.layout) for use in uses}) == 1


def _reason(use: Use) -> str | None:
    """Why the outputs of a use cannot carry noise, or None."""
    if use.steps or use.function in reasons.RECURRENT:
        return reasons.STEPS
    return None if isinstance(use.form, Product) else reasons.NO_PRODUCT


def _required(
    wanted: Sequence[str], network: nn.Module, parameters: Collection[str], drawn: Mapping[str, str]
) -> set[str]:
    """The parameters of the layers that were asked for by name; refused where one cannot be on outputs."""
    chosen: set[str] = set()
    for layer in wanted:
        names = parameters_of(layer, network)
        if not names:
            modules = [name for name, _ in network.named_modules() if name]
            if layer not in modules:
                raise unknown_name("layer", layer, [*modules, *dict(network.named_parameters())])
            raise NetworkError(f"layer {layer!r} cannot carry noise on its outputs: it has no parameters")
        for name in sorted(names & set(parameters)):
            if name in drawn:
                raise NetworkError(
                    f"layer {layer!r} cannot carry the noise of its weights on its outputs ({name}: {drawn[name]}); "
                    "leave it out of `layers`"
                )
        chosen |= names
    return chosen
