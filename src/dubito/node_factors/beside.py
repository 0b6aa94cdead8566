"""Normal weights beside factors: where they start, how they are drawn, and at which rates they learn."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..fitting import Start
from ..inputs import Inputs
from ..networks import resolve
from ..objective import with_rate
from ..posterior import Streams
from ..weight_normals import NormalMethod, Normals, Reparameterised

if TYPE_CHECKING:
    from .objective import Drawn
    from .posterior import NodePosterior

    D = TypeVar("D", bound=Drawn)

#: Numbers of Normal weights that are drawn ahead of their passes.
MOST = 1 << 22


class NormalStart(NamedTuple):
    """The Normals that a method has beside its factors.

    Attributes:
        method: with its parameters by name; None where there are none.
        names: of these parameters.
        tensors: the scales that they start with.
    """

    method: NormalMethod | None = None
    names: frozenset[str] = frozenset()
    tensors: Mapping[str, dict[str, Tensor]] = MappingProxyType({})


NONE = NormalStart()


def check_beside(beside: NormalMethod) -> None:
    """Refuse Normals beside factors that take every weight, or whose noise is not in the weights."""
    kind = type(beside).__name__
    if beside.subset is None:
        raise ConfigError(
            f"beside must say which parameters are Normal, got {kind}(subset=None), which is all of them; give "
            f"{kind}(subset=[...])"
        )
    if not isinstance(beside.estimator, Reparameterised):
        raise ConfigError(
            f"beside factors weights are drawn once per batch, got {kind}(estimator={beside.estimator!r}); take "
            "Reparameterised()"
        )


def normal_start(method: Any, start: Start) -> NormalStart:
    """What a method of factors has beside them; a weight that both pick is refused."""
    beside, tensors = method.beside.started(start)
    names = frozenset(beside.subset)
    both = names.intersection(() if method.subset is None else resolve(method.subset, start.network))
    if both:
        raise ConfigError(
            f"a weight has factors or is Normal, not both, but subset and beside pick {sorted(both)}; take them out of "
            "one"
        )
    return NormalStart(beside, names, tensors)


def with_draw(drawn: "D", normals: Normals, generator: torch.Generator | None) -> "tuple[D, Tensor]":
    """Noise of factors with a draw of the Normal weights, and the divergence of these."""
    normals.limit()
    return replace(drawn, beside=normals.drawn(normals.random, generator)), normals.kl()


def with_rates(
    groups: list[dict[str, Any]], normals: Normals, network: nn.Module, factor_rate: float
) -> list[dict[str, Any]]:
    """Groups of parameters in which scales do not heed the factors' rate, nor Normal weights the decay.

    The prior of Normal weights is in the divergence.
    """
    groups = with_rate(groups, normals.trained(), 1 / factor_rate)
    groups = with_rate(groups, normals.trained("log_u", "log_v"), normals.factor_rate)
    weights = dict(network.named_parameters())
    return with_rate(groups, [weights[name] for name in normals.random], 1.0, weight_decay=0.0)


def draws(normals: Normals, streams: Streams) -> dict[str, Tensor]:
    """The Normal weights of draws from their streams, after the factors, [S, ...] by name."""
    drawn = [normals.draw(normals.random, stream) for stream in streams]
    return {name: torch.stack([weights[name] for weights in drawn]) for name in normals.random}


def outputs(
    posterior: "NodePosterior", inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool
) -> Iterable[Tensor]:
    """Outputs of one draw after the other, or of all, where few draws of the weights are in memory at a time."""
    size = sum(posterior.weights()[name].numel() for name in posterior.random)
    block = max(1, MOST // size)
    if block >= num_samples:
        return posterior.draws(range(num_samples), seed).once(inputs, max_rows, keep_graph)
    parts = (range(first, min(first + block, num_samples)) for first in range(0, num_samples, block))
    return chain.from_iterable(posterior.draws(part, seed).once(inputs, max_rows, keep_graph) for part in parts)
