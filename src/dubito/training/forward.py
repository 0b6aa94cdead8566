"""One forward pass for the networks of several runs: as stacked weights, by `vmap`, or not at all."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from .. import seeds
from ..errors import DubitoError
from ..inputs import Inputs, TensorOptions, call, joined, map_tensors, rows_of, take
from ..layers import Dense, Form, Survey, survey
from ..layers.passes import asked
from ..layers.shell import take as take_shell
from ..layers.stack import Stack
from ..layers.tree import plain_values
from ..networks import duplicate


#: What a pass raises that cannot be made for several networks at once.
REFUSALS = (DubitoError, RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError)


class Forward(ABC):
    """A training pass of K networks of one form, rows network by network, [K·B, ...].

    Args:
        network: the first of them.
        modes: modules by name that stay in evaluation mode.
    """

    #: Whether buffers stand in stacks beside the parameters.
    buffers: bool

    def __init__(self, network: nn.Module, modes: Mapping[str, bool]) -> None:
        self.network, self.modes = network, modes

    @abstractmethod
    def __call__(self, stacks: Mapping[str, Tensor], count: int, inputs: Inputs) -> Tensor:
        """The outputs of all, with their tensors [K, ...] by name."""


class StackedForward(Forward):
    """Layers multiply stacks of weights.

    Args:
        network: see `Forward`.
        modes: see `Forward`.
        surveyed: how the network uses its parameters.
    """

    buffers = False

    def __init__(self, network: nn.Module, modes: Mapping[str, bool], surveyed: Survey) -> None:
        super().__init__(network, modes)
        self.surveyed = surveyed

    def __call__(self, stacks: Mapping[str, Tensor], count: int, inputs: Inputs) -> Tensor:
        context = TrainedStack(stacks, self.surveyed, draws=count, rows=rows_of(inputs) // count, repeated=True)
        return asked(self.network, context, stacks, training=self.modes).outputs(inputs)


class MappedForward(Forward):
    """Any network that `torch.func.vmap` can run; its buffers, such as batch norm's, are written in their stacks."""

    buffers = True

    def __call__(self, stacks: Mapping[str, Tensor], count: int, inputs: Inputs) -> Tensor:
        def single(tensors: dict[str, Tensor], rows: Inputs) -> Tensor:
            lease = take_shell(self.network, tensors, training=self.modes)
            try:  # nothing is written back to the first network
                return call(lease.module, rows)
            finally:
                lease.release()

        rows = map_tensors(lambda tensor: tensor.unflatten(0, (count, -1)), inputs)
        return vmap(single)(dict(stacks), rows).flatten(0, 1)


class TrainedStack(Stack):
    """Stacked products whose gradients come in the memory order of the weights, so that nothing copies them."""

    def answer(self, form: Form, x: Tensor, weights: Tensor | None, biases: Tensor | None) -> Tensor:
        if type(form) is not Dense or form.turned or weights is None or biases is None:
            return super().answer(form, x, weights, biases)
        cases = x.reshape(self.draws, -1, form.columns)
        return _Product.apply(cases, weights, biases).reshape(*x.shape[:-1], form.rows)  # pyright: ignore


class _Product(torch.autograd.Function):
    """y = x Wᵀ + b with x [K, B, n], W [K, m, n] and b [K, m]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return torch.baddbmm(biases.unsqueeze(1), x, weights.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:  # pyright: ignore
        (g,), (x, weights) = gradients, ctx.saved_tensors
        return torch.bmm(g, weights) if ctx.needs_input_grad[0] else None, torch.bmm(g.mT, x), g.sum(1)


def tensors_of(network: nn.Module, *, buffers: bool) -> dict[str, Tensor]:
    """Parameters, and buffers where asked, by their first names."""
    return {**dict(network.named_parameters()), **(dict(network.named_buffers()) if buffers else {})}


def side_by_side(networks: Sequence[nn.Module], *, buffers: bool) -> dict[str, Tensor]:
    """Copies of the tensors of several networks along a new first axis, which require gradients as they do."""
    named = [tensors_of(network, buffers=buffers) for network in networks]
    return {
        name: torch.stack([tensors[name].detach() for tensors in named]).requires_grad_(tensor.requires_grad)
        for name, tensor in named[0].items()
    }


def forward_of(networks: Sequence[nn.Module], modes: Mapping[str, bool], example: Inputs) -> Forward | None:
    """The cheapest pass that answers as the networks do one by one; None where they must run so.

    Args:
        networks: of one form, in evaluation mode.
        modes: modules by name that stay in evaluation mode.
        example: some rows to try it on.
    """
    network = networks[0]
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in network.modules()):
        return None  # kernels of their own run all steps of a sequence at once
    try:
        trial = _Trial(networks[:2], modes, example)
        if trial.peculiar:
            return None
        if trial.still and all(_alike(networks, name) for name, _ in network.named_buffers()):
            stacked = StackedForward(network, modes, survey(network, example))
            if trial.agrees(stacked):
                return stacked
    except REFUSALS:
        pass
    try:
        mapped = MappedForward(network, modes)
        return mapped if trial.agrees(mapped) else None
    except REFUSALS:
        return None


class _Trial:
    """Training passes of two networks over some rows, on copies.

    Attributes:
        answers: their outputs.
        states: their buffers afterwards.
        still: whether no buffer was changed.
        peculiar: whether a pass draws noise, which is each network's own, or assigns values that no stack holds.
    """

    def __init__(self, pair: Sequence[nn.Module], modes: Mapping[str, bool], example: Inputs) -> None:
        numbers = torch.arange(rows_of(example))
        self.pair, self.rows = pair, [take(example, numbers.roll(shift)) for shift in (0, 1)]
        copies, device = [duplicate(network) for network in pair], TensorOptions.of(pair[0]).device
        with seeds.forked(0, "trial", device=device), torch.no_grad():
            state = seeds.state(device)
            passes = zip(copies, self.rows, strict=True)
            self.answers = torch.cat([take_shell(n, training=modes).outputs(rows) for n, rows in passes])
            drawn = state != seeds.state(device)
        before, self.states = (side_by_side(networks, buffers=True) for networks in (pair, copies))
        self.still = all(torch.equal(before[name], self.states[name]) for name in before)
        values = [[plain_values(module) for n in networks for module in n.modules()] for networks in (pair, copies)]
        self.peculiar = drawn or values[0] != values[1]

    def agrees(self, forward: Forward) -> bool:
        """Whether one pass gives the same outputs and buffers, to rounding, and has gradients."""
        stacks = side_by_side(self.pair, buffers=forward.buffers)
        with torch.enable_grad():
            outputs = forward(stacks, 2, joined(self.rows))
        leaves = [tensor for tensor in stacks.values() if tensor.requires_grad]
        torch.autograd.grad(outputs.sum(), leaves, allow_unused=True)
        pairs = [(outputs, self.answers), *((stacks[name], self.states[name]) for name in stacks)]
        return all(_close(*pair) for pair in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal to rounding: half of the digits, where rows that meet wrongly share none."""
    if a.shape != b.shape or not b.is_floating_point():
        return torch.equal(a, b)
    scale = b.abs().max() if b.numel() else b.new_ones(())
    return bool(((a - b).abs() <= torch.finfo(b.dtype).eps ** 0.5 * scale).all())


def _alike(networks: Sequence[nn.Module], name: str) -> bool:
    first, *others = (network.get_buffer(name) for network in networks)
    return all(torch.equal(first, other) for other in others)
