"""Where the noise of weights is put in training: into the weights, or onto the outputs of layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..hints import Checked


@dataclass(frozen=True, kw_only=True)
class Reparameterised(Checked):
    """One draw of all weights per batch, w = μ + σ ε: for any module."""


@dataclass(frozen=True, kw_only=True)
class LocalReparameterised(Checked):
    """Noise of the right variance on each output of a layer, drawn anew for every row [Kingma et al. 2015].

    For all weights that multiply inputs (dense layers, convolutions, projections of attention, products of one's own);
    others, and those of recurrent layers, are reparameterised. Each output has the right distribution by itself: those
    of one row that share weights (positions of a convolution, several calls of a layer) get independent noise.

    Args:
        layers: names of layers or parameters that must have it, the rest being reparameterised; None takes all that
            can.
    """

    layers: Sequence[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", checked_names(self.layers))


@dataclass(frozen=True, kw_only=True)
class Flipout(Checked):
    """One perturbation per batch whose signs are flipped for every row by input and output channel.

    [Wen et al. 2018] For all weights that multiply inputs (dense layers, convolutions, projections of attention,
    products of one's own); others, and those of recurrent layers, are reparameterised. A row sees one perturbation
    throughout, at all positions and in all calls.

    Args:
        layers: names of layers or parameters that must have it, the rest being reparameterised; None takes all that
            can.
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
