"""Where the noise of weights is put in training: into the weights, or onto the outputs of layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import ConfigError, NetworkError, unknown_name
from ...inputs import Inputs
from ..trace import Layout, trace

#: Layers whose outputs can carry the noise; subclasses may do other things with their weights.
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, kw_only=True)
class Reparameterised:
    """One draw of all weights per batch, w = μ + σ ε: for any module."""


@dataclass(frozen=True, kw_only=True)
class LocalReparameterised:
    """Noise of the right variance on each output of a layer, drawn anew for every row [Kingma et al. 2015].

    For Linear and Conv1d, 2d and 3d; other layers are reparameterised. Each output has the right distribution
    by itself: those of one row that share weights (positions of a convolution, several calls of a layer) get
    independent noise.

    Args:
        layers: names of layers that must have it, the rest being reparameterised; None takes all that can.
    """

    layers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", checked_names(self.layers))


@dataclass(frozen=True, kw_only=True)
class Flipout:
    """One perturbation per batch whose signs are flipped for every row by input and output channel.

    [Wen et al. 2018] For Linear and Conv1d, 2d and 3d; other layers are reparameterised. A row sees one
    perturbation throughout, at all positions and in all calls.

    Args:
        layers: names of layers that must have it, the rest being reparameterised; None takes all that can.
    """

    layers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", checked_names(self.layers))


Estimator = Reparameterised | LocalReparameterised | Flipout


def checked_names(layers: Sequence[str] | None) -> tuple[str, ...] | None:
    """Names as a tuple; anything else is refused."""
    if layers is None:
        return None
    if isinstance(layers, str) or not all(isinstance(name, str) for name in layers) or not layers:
        raise ConfigError(f"layers must be a list of layer names, or None for all that can, got {layers!r}")
    return tuple(layers)


def check_estimator(estimator: Any) -> None:
    """Refuse what is no estimator."""
    if not isinstance(estimator, Estimator):
        raise ConfigError(
            f"estimator must be Reparameterised(), LocalReparameterised() or Flipout(), got {estimator!r}"
        )


@dataclass(frozen=True)
class NoisyLayer:
    """A layer whose outputs carry the noise of its parameters.

    Attributes:
        name: the module's.
        module: itself.
        weight: the name of its weight, None where that is a point.
        bias: the name of its bias, None where that is a point or missing.
        layout: where its inputs and outputs hold the rows.
        reads_input: whether it reads what the network reads.
    """

    name: str
    module: nn.Module
    weight: str | None
    bias: str | None
    layout: Layout
    reads_input: bool


@dataclass(frozen=True)
class Placement:
    """Where each parameter's noise goes.

    Attributes:
        layers: those whose outputs carry noise.
        drawn: why the other parameters are drawn as they are, by name.
    """

    layers: tuple[NoisyLayer, ...]
    drawn: Mapping[str, str]


def place(
    network: nn.Module, parameters: Sequence[str], wanted: Sequence[str] | None, inputs: Inputs
) -> Placement:
    """Which layers can carry the noise of `parameters` on their outputs, learned from a dry run.

    Args:
        network: in evaluation mode.
        parameters: those with a distribution.
        wanted: the layers to take, which then must be able to; None takes all that can.
        inputs: some rows.
    """
    modules = dict(network.named_modules())
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    supported = [name for name, module in modules.items() if type(module) in LAYERS]
    visits = trace(network, inputs, supported)
    reasons: dict[str, str] = {}  # of modules
    for name, module in modules.items():
        if type(module) not in LAYERS:
            reasons[name] = type(module).__name__
        elif "forward" in vars(module):
            reasons[name] = "has a forward pass of its own"
        elif name not in visits:
            reasons[name] = "not called as a layer"
        elif not readable(module, visits[name].layout):
            reasons[name] = "rows cannot be told apart"
        elif wanted is not None and name not in wanted:
            reasons[name] = "not asked for"
    chosen = set(parameters)
    drawn: dict[str, str] = {}
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if name in reasons and names[id(parameter)] in chosen:
                drawn.setdefault(names[id(parameter)], reasons[name])
    _require(wanted, modules, reasons, drawn, names)

    def own(parameter: nn.Parameter | None) -> str | None:
        name = names.get(id(parameter))
        return name if name in chosen and name not in drawn else None

    layers = []
    for name, visit in visits.items():
        module = modules[name]
        weight, bias = own(module.weight), own(module.bias)  # pyright: ignore[reportArgumentType]
        if name not in reasons and (weight or bias):
            layers.append(NoisyLayer(name, module, weight, bias, visit.layout, visit.reads_input))
    return Placement(tuple(layers), drawn)


def readable(module: nn.Module, layout: Layout) -> bool:
    """Whether the rows in a layer's inputs can be told apart; the second axis of a convolution holds channels."""
    return layout is not Layout.UNKNOWN and (layout is not Layout.SECOND or isinstance(module, nn.Linear))


def _require(
    wanted: Sequence[str] | None,
    modules: Mapping[str, nn.Module],
    reasons: Mapping[str, str],
    drawn: Mapping[str, str],
    names: Mapping[int, str],
) -> None:
    """Refuse layers that were asked for by name and cannot carry noise on their outputs."""
    for name in wanted or ():
        if name not in modules:
            raise unknown_name("layer", name, [known for known in modules if known])
        shared = (drawn.get(names[id(p)]) for p in modules[name].parameters(recurse=False))
        reason = reasons.get(name) or next((f"shares a weight with {why}" for why in shared if why), None)
        if reason is not None:
            raise NetworkError(
                f"layer {name!r} cannot carry the noise of its weights on its outputs ({reason}); only Linear, "
                "Conv1d, Conv2d and Conv3d that the network calls as layers can: leave it out of `layers`"
            )
