"""Recorded passes: the inputs of every use of a parameter, and the gradients that come back to its outputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .context import Context, name_of, part_of
from .form import Form, Product
from .layout import Layout, rows_first
from .passes import asking

#: A parameter, or one of the equal parts it is cut in, by name and number.
Part = tuple[str, int]


class _Anchor(torch.autograd.Function):
    """Hands an output on and catches the gradient that comes back to it.

    The anchor tensor makes the output part of the graph even where no parameter requires a gradient, so that
    no gradient with respect to weights is ever computed. Marking the output dirty keeps later in-place
    operations (ReLU(inplace=True)) legal, and what is caught is the gradient before them.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, output: Tensor, caught: Callable[[Tensor], None]) -> Tensor:
        ctx.mark_dirty(output)
        ctx.caught = caught
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:  # pyright: ignore
        ctx.caught(gradient)
        return None, gradient if ctx.needs_input_grad[1] else None, None


@dataclass(eq=False)
class Call:
    """What one use of a weight and a bias saw.

    Attributes:
        form: how the outputs depend on them.
        weight: the user's name of the weight; None where it is no parameter of interest.
        bias: likewise of the bias.
        part: which of the weight's equal parts.
        parts: how many there are.
        bias_part: likewise of the bias.
        bias_parts: likewise.
        number: of the torch function's call; the steps of a recurrent layer share it.
        function: its name.
        inputs: what it read, cases first.
        active: which positions count, in the inputs' shape without features; None for all.
        layout: where inputs and outputs hold the rows.
        gradient: what the last backward pass brought to the outputs; None where nobody asked for them.
    """

    form: Form
    weight: str | None
    bias: str | None
    part: int
    parts: int
    bias_part: int
    bias_parts: int
    number: int
    function: str
    inputs: Tensor
    active: Tensor | None = None
    layout: Layout = Layout.ROWS
    gradient: Tensor | None = None

    @property
    def places(self) -> list[Part]:
        """The parameters that it uses."""
        places = ((self.weight, self.part), (self.bias, self.bias_part))
        return [(name, part) for name, part in places if name is not None]

    def rows(self, rows: int, part: slice) -> tuple[Tensor, Tensor]:
        """Inputs and gradients of some of the rows, each row's cases one after the other, [b · cases, ...]."""
        assert self.gradient is not None
        tensors = (rows_first(tensor, self.layout, rows, part) for tensor in (self.inputs, self.gradient))
        return next(tensors), next(tensors)

    def gradients(self, parameter: str, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of each case for one of its parameters."""
        return self.form.gradients(x, g) if parameter == self.weight else self.form.bias_gradients(g)


class Record(Context):
    """Keeps what every use of a parameter sees; without gradients for weights.

    Args:
        layout_of: tells where a call's inputs hold the rows; None takes rows first.
        ready: called during the backward pass when a gradient has come to a call.
        inner: makes the answers, where the pass itself is not a plain one.
        keep_graph: whether inputs and gradients are differentiated again.
    """

    def __init__(
        self,
        layout_of: Callable[["Record", Call], Layout] | None = None,
        *,
        ready: Callable[[Call], None] | None = None,
        inner: Context | None = None,
        keep_graph: bool = False,
    ) -> None:
        self.layout_of, self.ready, self.inner, self.keep_graph = layout_of, ready, inner, keep_graph
        self.calls: list[Call] = []
        self.uses: dict[Part, list[Call]] = {}
        #: A leaf of every recorded pass's graph, to which gradients go without reaching it.
        self.anchor = torch.zeros((), requires_grad=True)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        output = (self.inner or super()).use(form, x, weight, bias, active=active)
        call = self._call(form, x, weight, bias, active)
        if call is None:
            return output
        self.seen(call, output)

        def caught(gradient: Tensor) -> None:
            call.gradient = gradient
            if self.ready is not None:
                self.ready(call)

        if self.keep_graph:  # a leaf that many functions share is not always ready for `autograd.grad`
            return _Anchor.apply(self.anchor.clone(), output, caught)  # pyright: ignore
        return _Anchor.apply(self.anchor, output, caught)  # pyright: ignore

    def _call(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None, active: Tensor | None
    ) -> Call | None:
        """The use as a call, put under the parameters it uses."""
        names = name_of(weight), name_of(bias)
        if names == (None, None):
            return None
        parts = *part_of(weight), *part_of(bias)
        inputs = x if self.keep_graph else x.detach()
        call = Call(form, *names, *parts, self.number, self.function, inputs, active)
        for place in call.places:
            self.uses.setdefault(place, []).append(call)
        if self.layout_of is not None:
            call.layout = self.layout_of(self, call)
        self.calls.append(call)
        return call

    def seen(self, call: Call, output: Tensor) -> None:
        """Told of every call with its outputs."""

    def of(self, part: Part) -> list[Call]:
        """The calls that use a parameter, or its part, and that the last backward pass reached."""
        return [call for call in self.uses.get(part, ()) if call.gradient is not None]

    def forget_gradients(self) -> None:
        """Before another backward pass through the same graph."""
        for call in self.calls:
            call.gradient = None

    def clear(self) -> None:
        """Before another forward pass."""
        self.calls.clear()
        self.uses.clear()
        self.number = 0


@contextmanager
def recorded(
    network: nn.Module, names: Iterable[str], record: Record, tensors: Mapping[str, Tensor] | None = None
) -> Iterator[nn.Module]:
    """A private shell whose forward passes are recorded; parameters are detached, so no gradient is computed for them.

    Args:
        network: whose shell.
        names: of the parameters whose uses are recorded.
        record: what keeps them.
        tensors: in place of the network's own.
    """
    with asking(network, record, names, tensors, detached=True) as shell:
        yield shell


@dataclass(frozen=True)
class BlockPart:
    """A weight, or one of the equal parts it is cut in, with a bias as its last column.

    Attributes:
        parameter: the user's name of it.
        bias: the user's name of the bias that is its last column, or None.
        product: how all its uses multiply their inputs by it, if they do so alike; else None.
        part: which of the parts along its first axis.
        parts: how many parts.
    """

    parameter: str
    bias: str | None
    product: Product | None
    part: int = 0
    parts: int = 1

    @property
    def key(self) -> Part:
        """Under which a record keeps its calls."""
        return self.parameter, self.part

    def gradients(self, calls: list[Call], rows: int, part: slice, dtype: torch.dtype | None = None) -> Tensor:
        """The parameter's gradient of each of some rows, summed over calls and positions, [b, ...]."""
        total: Any = 0
        for call in calls:
            x, g = (_cast(tensor, dtype) for tensor in call.rows(rows, part))
            cases = call.gradients(self.parameter, x, g)
            total = total + cases.reshape(count(part, rows), -1, prod(cases.shape[1:])).sum(1)
        return total

    def inputs(self, calls: list[Call], rows: int, part: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Inputs [b, G, T, n] of some rows, at the positions of all calls.

        The bias is a last column of ones, or of zeros at positions where a layer does not add it.
        """
        inputs, size = [], count(part, rows)
        for call in calls:
            assert isinstance(call.form, Product)
            x = _cast(rows_first(call.inputs, call.layout, rows, part), dtype)
            a = by_row(call.form.inputs(x), size, 2)
            ones = a.new_ones(())
            if call.active is not None:
                ones = rows_first(call.active, call.layout, rows, part).reshape(size, 1, -1, 1).to(a)
                a = a * ones
            if self.bias is not None:
                column = (ones * (call.bias == self.bias)).expand(*a.shape[:-1], 1)
                a = torch.cat([a, column], -1)
            inputs.append(a)
        return inputs[0] if len(inputs) == 1 else torch.cat(inputs, 2)

    def outputs(self, calls: list[Call], rows: int, part: slice, dtype: torch.dtype | None = None) -> Tensor:
        """Gradients [b, G, m, T] of some rows, at the positions of all calls."""
        gradients = []
        for call in calls:
            assert isinstance(call.form, Product) and call.gradient is not None
            g = _cast(rows_first(call.gradient, call.layout, rows, part), dtype)
            gradients.append(by_row(call.form.outputs(g), count(part, rows), 3))
        return gradients[0] if len(gradients) == 1 else torch.cat(gradients, 3)

    def matrices(
        self, calls: list[Call], rows: int, part: slice, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.inputs(calls, rows, part, dtype), self.outputs(calls, rows, part, dtype)


def count(part: slice, rows: int) -> int:
    """How many of the rows a slice takes."""
    return len(range(*part.indices(rows)))


def by_row(matrices: Tensor, rows: int, axis: int) -> Tensor:
    """[b · cases, G, ..] as [b, G, ..] with the cases' positions together on `axis`."""
    cases = len(matrices) // rows
    if cases == 1:
        return matrices
    return matrices.unflatten(0, (rows, cases)).movedim(1, axis).flatten(axis, axis + 1)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
