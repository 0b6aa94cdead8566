"""Draws that a graph makes itself, anew at every call."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from ..draws import Draws, FactorDraws, WeightDraws
from ..draws.module import answers
from ..draws.tile import Tile
from ..errors import ConfigError, NetworkError
from ..inputs import Inputs, call
from ..layers.stack import Stack
from ..posterior import Posterior
from ..prediction import Prediction


class GraphNoise(TorchFunctionMode):
    """Noise without a generator by operators that graphs have: Normal and uniform numbers."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("generator", self) is None:
            del kwargs["generator"]
        if function in (torch.bernoulli, Tensor.bernoulli) and len(args) == 1:
            return (torch.rand_like(args[0]) < args[0]).to(args[0].dtype)
        return function(*args, **kwargs)


class FreshModule(nn.Module):
    """As `PredictiveModule`, with draws of its own in every call.

    Args:
        posterior: that is drawn from.
        count: S.
        inputs: checked rows like those that it will read.
        linearised: whether draws are linearised.
    """

    def __init__(self, posterior: Posterior, count: int, inputs: Inputs, *, linearised: bool) -> None:
        super().__init__()
        if linearised:
            raise ConfigError(
                'sampling="fresh" draws weights, and these predictions are linearised: pass linearised=False, or leave '
                "sampling out"
            )
        self.posterior, self.count = posterior, count
        draws = posterior.draws(range(count), 0)
        tile = draws.traceable(inputs)
        if not isinstance(tile, Tile) or not isinstance(draws, FactorDraws | WeightDraws):
            raise NetworkError(
                'sampling="fresh" needs a pass for all draws at once, and this network runs draw by draw '
                f"({draws.kind}); leave sampling out"
            )
        #: Its context is given the draws of every call.
        self.tile = tile
        with torch.no_grad():
            posterior.draw(0, None)  # what is built once is built before a trace

    def forward(self, inputs: Any = None, **named: Any) -> dict[str, Tensor]:
        return answers(self.prediction(named if inputs is None else inputs))

    def prediction(self, inputs: Any) -> Prediction:
        """What the answers are read off."""
        with GraphNoise():
            draws = fresh_draws(self.posterior, self.count)
        context = draws.context()
        if isinstance(context, Stack):
            self.tile.context.tensors = context.tensors  # pyright: ignore[reportAttributeAccessIssue]
        else:
            self.tile.context.factors = context.factors  # pyright: ignore[reportAttributeAccessIssue]
            self.tile.context.biases = context.biases  # pyright: ignore[reportAttributeAccessIssue]
            self.tile.context.stack = context.stack  # pyright: ignore[reportAttributeAccessIssue]
        return self.posterior.likelihood.predictive(call(self.tile, inputs))


def fresh_draws(posterior: Posterior, count: int) -> FactorDraws | WeightDraws:
    """Draws with noise of no seed, all at once."""
    if type(posterior)._drawn is not Posterior._drawn:
        draws: Draws = posterior._drawn(range(count), [None] * count, 0)
        assert isinstance(draws, FactorDraws)
        return draws
    draw = posterior.drawer()
    stacks = vmap(lambda _: dict(draw(0, None)), randomness="different")(torch.arange(count))
    return WeightDraws(posterior.network, {"draws": stacks}, **posterior._facts(range(count), 0))
