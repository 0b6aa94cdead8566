"""One forward pass for the networks of several runs: as stacked weights, by `vmap`, or not at all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from .. import seeds
from ..errors import DubitoError
from ..inputs import Inputs, TensorOptions, call, joined, map_tensors, named_tensors, rows_of, take
from ..layers import Dense, Form, Layout, Survey, survey
from ..layers.kinds import Standin
from ..layers.passes import asked
from ..layers.shell import take as take_shell
from ..layers.stack import Stack
from ..layers.tree import is_shared, plain_values

#: What a pass raises that cannot be made for several networks at once.
REFUSALS = (DubitoError, RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError)


#: Numbers that a pass of one network may keep for its backward pass: beyond them arithmetic costs more than calls do,
#: and stacks leave the caches. Measured with four networks on one core, against a loop: 0.4 to 0.9 below, 1.0 to 1.4
#: above. Convolutions in groups lose earlier: LeNet takes 1.2 of a loop with 16 rows, 1.6 with 64.
MOST_NUMBERS, MOST_CONVOLVED = 1 << 20, 1 << 16


@dataclass(frozen=True, eq=False)
class Forward:
    """A training pass of K networks of one form over rows network by network, [K·B, ...].

    Attributes:
        network: the first of them.
        modes: modules by name that stay in evaluation mode.
        mapped: by `vmap`, with buffers, such as batch norm's, in stacks; else layers multiply stacked weights.
        surveyed: how the network uses its parameters; None where all layers hold rows first.
    """

    network: nn.Module
    modes: Mapping[str, bool]
    mapped: bool = False
    surveyed: Survey | None = None

    def over(self, stacks: Mapping[str, Tensor], count: int) -> Callable[[Inputs], Tensor]:
        """From inputs to the outputs of all, with their tensors [K, ...] by name, as they stand at each call."""
        return self._by_vmap(stacks, count) if self.mapped else self._by_products(stacks, count)

    def _by_products(self, stacks: Mapping[str, Tensor], count: int) -> Callable[[Inputs], Tensor]:
        context = TrainedStack(stacks, self.surveyed, count)
        lease = asked(self.network, context, stacks, training=self.modes)  # ends with the function

        def outputs(inputs: Inputs) -> Tensor:
            context.begin(rows_of(inputs))
            return call(lease.module, inputs)

        return outputs

    def _by_vmap(self, stacks: Mapping[str, Tensor], count: int) -> Callable[[Inputs], Tensor]:
        def single(tensors: dict[str, Tensor], rows: Inputs) -> Tensor:
            lease = take_shell(self.network, tensors, training=self.modes)
            try:  # nothing is written back to the first network
                return call(lease.module, rows)
            finally:
                lease.release()

        def outputs(inputs: Inputs) -> Tensor:
            rows = map_tensors(lambda tensor: tensor.unflatten(0, (count, -1)), inputs)
            return vmap(single)(dict(stacks), rows).flatten(0, 1)

        return outputs


class TrainedStack(Stack):
    """Stacked products whose gradients come in the memory order of the weights, so that nothing copies them.

    Args:
        tensors: parameters [K, ...] by name.
        surveyed: how the network uses them; None where all layers hold rows first.
        count: K.
    """

    def __init__(self, tensors: Mapping[str, Tensor], surveyed: Survey | None, count: int) -> None:
        self.rows_first = surveyed is None
        super().__init__(tensors, surveyed or Survey((), {}), draws=count, rows=0, repeated=True)

    def _layout(self, form: Form, weight: Tensor | None, bias: Tensor | None) -> Layout:
        return Layout.ROWS if self.rows_first else super()._layout(form, weight, bias)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        plain = self.rows_first and type(form) is Dense and not form.turned and type(x) is Tensor
        plain = plain and not torch.is_autocast_enabled(x.device.type)
        if plain and type(weight) is Standin and type(bias) is Standin and weight.parts == bias.parts == 1:
            return _StackedProduct.apply(x, self.tensors[weight.parameter], self.tensors[bias.parameter])  # pyright: ignore
        return super().use(form, x, weight, bias, active=active)


class _StackedProduct(torch.autograd.Function):
    """y = x Wᵀ + b with x [K·B, ..., n], W [K, m, n] and b [K, m]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
        count, rows, columns = weights.shape
        cases = x.reshape(count, -1, columns)
        ctx.save_for_backward(cases, weights)
        outputs = x.new_empty(*x.shape[:-1], rows)  # no view, so that later functions may write into it
        torch.baddbmm(biases.unsqueeze(1), cases, weights.mT, out=outputs.view(count, -1, rows))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        cases, weights = ctx.saved_tensors
        g = gradients[0].reshape(*cases.shape[:2], -1)
        before = slopes = shifts = None
        if ctx.needs_input_grad[0]:
            before = torch.bmm(g, weights).view(*gradients[0].shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            slopes = torch.bmm(g.mT, cases)
        if ctx.needs_input_grad[2]:
            shifts = g.sum(1)
        return before, slopes, shifts


def tensors_of(network: nn.Module, *, buffers: bool) -> dict[str, Tensor]:
    """Parameters but those of a shared base, and buffers where asked, by their first names."""
    parameters = {name: p for name, p in network.named_parameters() if not is_shared(p)}
    return {**parameters, **(dict(network.named_buffers()) if buffers else {})}


def side_by_side(networks: Sequence[nn.Module], *, buffers: bool) -> dict[str, Tensor]:
    """Copies of the tensors of several networks along a new first axis, which require gradients as they do."""
    named = [tensors_of(network, buffers=buffers) for network in networks]
    return {
        name: torch.stack([tensors[name].detach() for tensors in named]).requires_grad_(tensor.requires_grad)
        for name, tensor in named[0].items()
    }


def forward_of(networks: Sequence[nn.Module], modes: Mapping[str, bool], example: Inputs, rows: int) -> Forward | None:
    """The cheapest pass that answers as the networks do one by one; None where they must, or had better, run so.

    Args:
        networks: of one form, in evaluation mode.
        modes: modules by name that stay in evaluation mode.
        example: some rows to try it on.
        rows: of a pass of one network in training.
    """
    network = networks[0]
    if rows_of(example) < 2 or any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in network.modules()):
        return None  # nothing to tell rows apart by; kernels of their own run all steps of a sequence at once
    try:
        trial = _ForwardTrial(networks[:2], modes, example)
    except REFUSALS:  # as training itself will, in its own words
        return None
    convolves = any(parameter.ndim > 2 for parameter in network.parameters())
    if trial.peculiar or trial.numbers(rows) > (MOST_CONVOLVED if convolves else MOST_NUMBERS):
        return None
    candidates = [lambda: Forward(network, modes, mapped=True)]
    if trial.still and all(_alike(networks, name) for name, _ in network.named_buffers()):
        surveyed = lambda: Forward(network, modes, surveyed=survey(network, example))  # noqa: E731
        candidates = [lambda: Forward(network, modes), surveyed, *candidates]
    for candidate in candidates:
        try:
            forward = candidate()
            if trial.agrees(forward):
                return forward
        except REFUSALS:
            continue
    return None


class _ForwardTrial:
    """Training passes of two networks over some rows, in a private shell.

    Attributes:
        answers: their outputs.
        slopes: gradients of each network's parameters.
        states: their tensors afterwards.
        still: whether no buffer was changed.
        peculiar: whether a pass draws noise, which is each network's own, or assigns values that no stack holds.
    """

    def __init__(self, pair: Sequence[nn.Module], modes: Mapping[str, bool], example: Inputs) -> None:
        network, device = pair[0], TensorOptions.of(pair[0]).device
        numbers = torch.arange(rows_of(example))
        self.pair, self.rows = pair, [take(example, index) for index in (numbers, numbers // 2)]
        self.states, before = side_by_side(pair, buffers=True), side_by_side(pair, buffers=True)
        shell, answers, assigned = take_shell(network, training=modes).withdraw(), [], False
        graph = torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor)
        self._numbers: dict[int, tuple[int, bool]] = {}
        with seeds.forked(0, "trial", device=device), torch.enable_grad(), graph:
            state = seeds.state(device)
            for number, rows in enumerate(self.rows):
                given = {name: stack[number] for name, stack in self.states.items()}
                shell.fill(given, False)
                answers.append(call(shell.module, rows))
                assigned |= any(b is not given[name] for name, b in shell.module.named_buffers())
            drawn = state != seeds.state(device)
        self.slopes = [_slopes(answer, self.states, number) for number, answer in enumerate(answers)]
        self.answers = torch.cat([answer.detach() for answer in answers])
        self.still = all(torch.equal(before[name], self.states[name]) for name in before)
        there, here = ([plain_values(m) for m in root.modules()] for root in (network, shell.module))
        assigned |= any(not _same(*values) for values in zip(there, here, strict=True))
        self.peculiar = drawn or assigned

    def _saved(self, tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base
        self._numbers[tensor.data_ptr()] = (tensor.numel(), any(whole is stack for stack in self.states.values()))
        return tensor

    def numbers(self, rows: int) -> float:
        """How many numbers a pass of so many rows keeps for the backward pass of one network."""
        times = rows / rows_of(self.rows[0])
        return sum(count * (1 if weight else times) for count, weight in self._numbers.values()) / 2

    def agrees(self, forward: Forward) -> bool:
        """Whether one pass gives the same outputs and buffers, to rounding, and keeps the networks apart."""
        stacks = side_by_side(self.pair, buffers=forward.mapped)
        inputs = map_tensors(lambda t: t.requires_grad_(t.is_floating_point()), joined(self.rows))
        with torch.enable_grad():
            outputs = forward.over(stacks, 2)(inputs)
            first = outputs[: len(outputs) // 2].square().sum()
        tensors = [t for t in (*stacks.values(), *(t for _, t in named_tensors(inputs))) if t.requires_grad]
        gradients = torch.autograd.grad(first, tensors, materialize_grads=True, retain_graph=True)
        pairs = [(outputs, self.answers), *((stacks[name], self.states[name]) for name in stacks)]
        pairs += [(_slopes(half, stacks, number), self.slopes[number]) for number, half in enumerate(outputs.chunk(2))]
        return all(_close(*pair) for pair in pairs) and not any(g[len(g) // 2 :].any() for g in gradients)


def _slopes(answers: Tensor, stacks: Mapping[str, Tensor], number: int) -> Tensor:
    """The gradients of one network's parameters of the sum of its squared answers, in one vector."""
    learned = [stack for name, stack in sorted(stacks.items()) if stack.requires_grad]
    if not (learned and answers.requires_grad):
        return torch.zeros(0)
    gradients = torch.autograd.grad(answers.square().sum(), learned, materialize_grads=True, retain_graph=True)
    return torch.cat([gradient[number].flatten() for gradient in gradients])


def _same(there: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether a pass left a module's plain values as they were."""
    modes = ("training", "_compiled_call_impl")
    return there.keys() == here.keys() and all(here[k] is v for k, v in there.items() if k not in modes)


def _close(a: Tensor, b: Tensor) -> bool:
    """Equal to rounding: half of the digits, where rows that meet wrongly share none."""
    if a.shape != b.shape or not b.is_floating_point():
        return torch.equal(a, b)
    scale = b.abs().max() if b.numel() else b.new_ones(())
    return bool(((a - b).abs() <= torch.finfo(b.dtype).eps ** 0.5 * scale).all())


def _alike(networks: Sequence[nn.Module], name: str) -> bool:
    first, *others = (network.get_buffer(name) for network in networks)
    return all(torch.equal(first, other) for other in others)
