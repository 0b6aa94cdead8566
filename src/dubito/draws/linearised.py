"""Draws of the network linearised in its weights: f(x; w*) + J(x) (w_s − w*), by forward-mode derivatives."""

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..errors import ConfigError, NetworkError
from ..inputs import Inputs, call, map_tensors
from ..layers.context import Context
from ..layers.passes import asking
from ..networks import run
from .base import FAILURES, Draws, Groups, JointPass
from .tangents import ChangesGraph

#: Held by a forward-mode pass: PyTorch knows one level of them for all threads.
_forward_mode = threading.Lock()


class LinearisedDraws(Draws):
    """Deviations w_s − w* from the network's weights, [S, ...], in the group `deviations`.

    Layers run as their rules say where PyTorch's own forms (fused recurrent layers and encoders) have no forward-mode
    derivatives.
    """

    kind = "linearised"

    def weights(self, index: int) -> dict[str, Tensor]:
        centre = dict(self.network.named_parameters())
        return {name: centre[name] + stack[index] for name, stack in self.tensors["deviations"].items()}

    def plain(self, index: int) -> nn.Module:
        raise ConfigError(
            "a linearised draw is no network with other weights; take function(index), or fold a draw of "
            "sampled(..., linearised=False)"
        )

    def answered(self, index: int, inputs: Inputs) -> Tensor:
        deviation = {name: stack[index] for name, stack in self.tensors["deviations"].items()}
        outputs, change = self._pushed(inputs, lambda push: push(deviation))
        return outputs + change

    def makers(self, inputs: Inputs) -> Iterator[Callable[[], JointPass]]:
        deviations = dict(self.tensors["deviations"])

        def mapped(*args: Any, **kwargs: Any) -> Tensor:
            axes: Any = (None, 0)
            outputs, changes = self._pushed(kwargs or args, lambda push: vmap(push, out_dims=axes)(deviations))
            return outputs + changes

        yield lambda: mapped

    def traceable(self, inputs: Inputs = None) -> nn.Module | None:
        if inputs is None:
            return None
        return ChangesGraph(self.network, self.tensors["deviations"], self.survey(inputs), inputs, self.count)

    def _pushed(self, inputs: Inputs, pushes: Callable[[Any], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """f(x; w*), and J(x) times deviations: by PyTorch's layers, or by the layers' rules where that fails."""
        key = f"{self.kind} layers"
        known, failure, keep = self.ways.get(key), None, torch.is_grad_enabled()
        inputs = map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, inputs)
        for way, function in enumerate((run, ruled)):
            if known not in (None, way):
                continue
            try:
                # Leaving inference mode turns gradients on.
                with torch.inference_mode(False), torch.set_grad_enabled(keep), _forward_mode, Explicit():
                    load_derivatives()
                    answer = pushes(self._push(function, inputs))
            except FAILURES as error:
                failure = error
            else:
                self.ways[key] = way
                return answer
        with torch.no_grad():
            run(self.network, {}, inputs)  # says what is wrong with inputs the network cannot read
        raise NetworkError(
            "linearised draws need forward-mode derivatives of every operator in the network, but one has none "
            f"({failure}); predict with linearised=True in closed form, or take draws with linearised=False"
        ) from failure

    def _push(self, function: Any, inputs: Inputs) -> Callable[[dict[str, Tensor]], Any]:
        named = dict(self.network.named_parameters())
        centre = {name: named[name].detach() for name in self.tensors["deviations"]}

        def outputs(weights: dict[str, Tensor]) -> Tensor:
            return function(self.network, weights, inputs)

        return lambda deviation: jvp(outputs, (centre,), (deviation,))


@cache
def load_derivatives() -> None:
    """What PyTorch loads for its first forward-mode pass, without what it says about itself on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._decomp.decompositions_for_jvp")


def ruled(network: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """The network's outputs with other weights, layers being computed by their rules."""
    with asking(network, Context(), weights, weights) as shell:
        return call(shell, inputs)


class Explicit(TorchFunctionMode):
    """Attention is written out: the fused forms have no forward-mode derivatives."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            return torch.ops.aten._scaled_dot_product_attention_math(*args, **(kwargs or {}))[0]
        return function(*args, **(kwargs or {}))


def deviations(network: nn.Module, tensors: Groups) -> Groups:
    """The tensors of linearised draws from those of draws of weights."""
    if tensors.get("statistics"):
        raise ConfigError("draws with batch norm statistics of their own cannot be linearised in weights")
    centre = dict(network.named_parameters())
    return {"deviations": {name: stack - centre[name] for name, stack in tensors.get("draws", {}).items()}}
