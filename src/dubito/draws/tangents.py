"""Linearised draws as a graph of plain operators, for any number of rows: J(x) (w_s − w*) without forward mode.

Layers answer y(ε) = f(x; w*) + ε f'(x), f' being what the deviations of a draw add. For outputs o(ε) of all draws and
any direction u, ⟨u, ∂o/∂ε⟩ is a backward pass and linear in u; its gradient by u is ∂o/∂ε = J(x) (w_s − w*). All that
depends on u itself is dead code, so that what remains is a forward pass of values and of changes.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..errors import NetworkError
from ..inputs import Inputs, call, map_tensors, named_tensors, rows_of, take
from ..layers import Survey
from ..layers.context import Context, name_of
from ..layers.form import Form, Product
from ..layers.kinds import Standin, plain
from ..layers.norm import standardised
from ..layers.stack import Stack
from .base import FAILURES, agree
from .tile import Tile

#: Numbers of rows for a trace, of which one is no other size in the network: a tracer takes equal sizes for the same.
ROWS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47)


class LinearMap(Function):
    """A map that is linear in x but for a constant; PyTorch's own of convolutions knows one number of rows.

    Its gradient depends on the direction u alone, whose numbers are dead: any will do. The gradient of that by u is the
    map itself, of the change t.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: Any, linear: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.linear = linear
        return whole(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return LinearMapBack.apply(grads[0], *ctx.saved_tensors, ctx.linear), None, None


class LinearMapBack(Function):
    """The backward pass of `LinearMap`."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, linear: Any) -> Tensor:
        ctx.linear = linear
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.linear(grads[0]), None, None


class Tangents(Stack):
    """Layers answer at the centre, and ε times what the draws' deviations add there.

    Args:
        deviations: [S, ...] by name.
        surveyed: how the network uses them.
        draws: S.
        step: ε, which is 0.
    """

    keep_graph = True

    def __init__(self, deviations: Mapping[str, Tensor], surveyed: Survey, draws: int, step: Tensor) -> None:
        super().__init__(deviations, surveyed, draws=draws, rows=1, repeated=True)
        self.step = step

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        if isinstance(form, Product) and not isinstance(x, Standin):
            w, b = plain(weight), plain(bias)
            centre: Any = LinearMap.apply(x, lambda x: form.apply(x, w, b), lambda t: form.apply(t, w, None))
        else:
            centre = Context.use(self, form, x, weight, bias)
        if name_of(weight) is None and name_of(bias) is None:
            return centre
        # ∂/∂ε [W x(ε) + ε V x(ε)] at 0 is W x' + V x: what the deviations read need not know ε
        return centre + self.step * super().use(form, x.detach(), weight, bias)

    def _stacked(self, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or (isinstance(parameter, Standin) and parameter.parameter in self.tensors):
            return super()._stacked(parameter)
        return torch.zeros_like(plain(parameter)).expand(self.draws, *parameter.shape)


class ChangesGraph(nn.Module):
    """The outputs [S, B, ...] of linearised draws by a traced graph.

    Args:
        network: at the centre.
        deviations: [S, ...] by name.
        surveyed: how the network uses its parameters.
        inputs: rows like those that it will read.
        draws: S.

    Raises:
        NetworkError: where the network cannot be traced, or the graph is one of so many rows alone.
    """

    def __init__(
        self, network: nn.Module, deviations: Mapping[str, Tensor], surveyed: Survey, inputs: Inputs, draws: int
    ) -> None:
        super().__init__()
        tree = inputs if isinstance(inputs, Mapping | tuple | list) else (inputs,)
        sizes = {n for t in chain(network.parameters(), network.buffers()) for n in t.shape}
        sizes |= {n for _, tensor in named_tensors(tree) for n in tensor.shape[1:]}
        count = next((rows for rows in ROWS if rows not in sizes), ROWS[0])
        many = take(tree, torch.arange(count) % rows_of(tree))

        def outputs(*leaves: Tensor) -> Tensor:
            coming = iter(leaves)
            return changed(network, deviations, surveyed, map_tensors(lambda _: next(coming), tree), draws)

        try:
            with torch.inference_mode(False):
                leaves = [tensor for _, tensor in named_tensors(many)]
                graph = make_fx(outputs, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*leaves)
                graph.graph.eliminate_dead_code()
                graph.recompile()
                self.graph = graph
                for rows in (1, 3):
                    few = take(many, slice(rows))
                    truth = outputs(*(tensor for _, tensor in named_tensors(few)))
                    if not agree(call(self, few), truth):
                        raise NetworkError("its graph answers otherwise than it does")
        except FAILURES as error:
            reason = str(error).splitlines()[0]
            raise NetworkError(
                f"linearised draws of this network cannot be traced for any number of rows ({reason}); take draws of "
                "weights, linearised=False, or a posterior of the last layer, Laplace(subset=last_layer)"
            ) from error

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.graph(*(tensor for _, tensor in named_tensors(kwargs or args)))


class TwiceDifferentiable(TorchFunctionMode):
    """Batch norm in evaluation mode is written out."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.batch_norm or args[5] or args[3] is None:
            return function(*args, **(kwargs or {}))
        x, weight, bias, mean, variance, _, _, eps, _ = args
        shape, values = (-1, *[1] * (x.ndim - 2)), standardised(x, mean, variance, eps)
        values = values if weight is None else values * weight.view(shape)
        return values if bias is None else values + bias.view(shape)


def changed(
    network: nn.Module, deviations: Mapping[str, Tensor], surveyed: Survey, inputs: Inputs, draws: int
) -> Tensor:
    """f(x; w*) + J(x) (w_s − w*) of all draws, [S, B, ...]."""
    like = next(iter(deviations.values()))
    with (
        torch.enable_grad(),
        TwiceDifferentiable(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # fused attention has no second derivatives
        step = torch.zeros((), dtype=like.dtype, device=like.device, requires_grad=True)
        context = Tangents(deviations, surveyed, draws, step)
        outputs = call(Tile(network, context, draws), inputs)
        direction = torch.zeros_like(outputs, requires_grad=True)
        (slope,) = torch.autograd.grad(outputs, step, direction, create_graph=True)
        (change,) = torch.autograd.grad(slope, direction)
    return (outputs + change).detach()
