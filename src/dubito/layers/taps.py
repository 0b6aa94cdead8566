"""Taps: what layers see, their inputs and the gradients at their outputs, read for one parameter at a time."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .opened import opened
from .trace import Layout, unnested
from .uses import Product, Use


class _Anchor(torch.autograd.Function):
    """Hands a layer's output on and catches the gradient that comes back to it.

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
    """What a layer saw in one call.

    Attributes:
        inputs: what it read.
        layout: where inputs and outputs hold the rows.
        active: which positions count, in the inputs' shape without features; None for all.
        gradient: what the last backward pass brought to its outputs; None where nobody asked for them.
    """

    inputs: Tensor
    layout: Layout
    active: Tensor | None = None
    gradient: Tensor | None = None

    def part(self, rows: int, part: slice) -> tuple[Tensor, Tensor]:
        """Inputs and gradients of some of the rows, each row's cases one after the other, [b · cases, ...]."""
        assert self.gradient is not None
        return rows_first(self.inputs, self.layout, rows, part), rows_first(
            self.gradient, self.layout, rows, part
        )


@dataclass(eq=False)
class Port:
    """A place where a layer makes outputs of inputs by its parameters.

    Attributes:
        path: of the layer.
        key: which of the layer's products, where it has several inside; else empty.
        layout: where inputs and outputs hold the rows.
        calls: what it saw since the last `clear`.
    """

    path: str
    key: str
    layout: Layout
    calls: list[Call] = field(default_factory=list)

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls.clear()


@dataclass(frozen=True, eq=False)
class Link:
    """A port that uses a tap's parameter.

    Attributes:
        port: where.
        use: how.
        biased: whether the tap's bias is added there.
    """

    port: Port
    use: Use
    biased: bool = False


@dataclass(frozen=True, eq=False)
class Tap:
    """One parameter, or one of the equal parts it is cut in, and every place that uses it.

    Attributes:
        parameter: the user's name of it.
        bias: the user's name of the bias that is its last column, or None.
        part: which of the parts along its first axis.
        parts: how many parts.
        links: the places.
    """

    parameter: str
    bias: str | None
    links: tuple[Link, ...]
    part: int = 0
    parts: int = 1

    @property
    def product(self) -> Product | None:
        """How all places use it, if all multiply their inputs by it alike; else None."""
        use = self.links[0].use
        if not isinstance(use, Product):
            return None
        alike = all(isinstance(link.use, Product) and link.use.form == use.form for link in self.links)
        return use if alike else None

    def seen(self) -> list[tuple[Call, Link]]:
        """All calls that the last backward pass reached."""
        return [(call, link) for link in self.links for call in link.port.calls if call.gradient is not None]

    def gradients(self, rows: int, part: slice, dtype: torch.dtype | None = None) -> Tensor:
        """The parameter's gradient of each of some rows, summed over calls and positions, [b, ...]."""
        total: Any = 0
        for call, link in self.seen():
            x, g = (_cast(tensor, dtype) for tensor in call.part(rows, part))
            own = link.use.gradients(x, g)
            total = total + own.reshape(len(range(*part.indices(rows))), -1, prod(own.shape[1:])).sum(1)
        return total

    def matrices(self, rows: int, part: slice, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Inputs [b, G, T, n] and gradients [b, G, m, T] of some rows, at the positions of all calls.

        The bias is a last column of ones, or of zeros at positions where a layer does not add it.
        """
        inputs, gradients = [], []
        for call, link in self.seen():
            assert isinstance(link.use, Product)
            x, g = (_cast(tensor, dtype) for tensor in call.part(rows, part))
            count = len(range(*part.indices(rows)))
            a = by_row(link.use.inputs(x), count, 2)
            counts = a.new_ones(())
            if call.active is not None:
                counts = rows_first(call.active, call.layout, rows, part).reshape(count, 1, -1, 1).to(a)
                a = a * counts
            if self.bias is not None:
                ones = (counts * link.biased).expand(*a.shape[:-1], 1)
                a = torch.cat([a, ones], -1)
            inputs.append(a)
            gradients.append(by_row(link.use.outputs(g), count, 3))
        if len(inputs) == 1:
            return inputs[0], gradients[0]
        return torch.cat(inputs, 2), torch.cat(gradients, 3)


@contextmanager
def tapped(
    network: nn.Module, ports: Iterable[Port], ready: Callable[[Port], None] | None = None
) -> Iterator[None]:
    """While open, a forward pass records the inputs, and each backward pass the gradients, of all ports.

    Args:
        network: whose layers these are; it is left as it was found.
        ports: cleared by the caller between batches.
        ready: called during the backward pass when a gradient has come to a port.
    """
    modules = dict(network.named_modules(remove_duplicate=False))
    anchor = torch.zeros((), requires_grad=True)
    by_path: dict[str, dict[str, Port]] = {}
    for port in ports:
        by_path.setdefault(port.path, {})[port.key] = port

    def recorded(port: Port, x: Tensor, output: Tensor, active: Tensor | None = None) -> Tensor:
        call = Call(x.detach(), port.layout, active)
        port.calls.append(call)

        def caught(gradient: Tensor) -> None:
            call.gradient = gradient
            if ready is not None:
                ready(port)

        return _Anchor.apply(anchor.to(output), output, caught)  # pyright: ignore

    def hook(port: Port):
        def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
            return recorded(port, args[0] if args else kwargs["input"], output)

        return record

    wanted = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    handles = []
    forwards: list[tuple[nn.Module, Any]] = []
    try:
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        for path, own in by_path.items():
            module = modules[path]
            if "" in own:
                # Before hooks of the user's own, which may change what the layer answers.
                handle = module.register_forward_hook(hook(own[""]), with_kwargs=True, prepend=True)
                handles.append(handle)
            else:
                handles.append(module.register_forward_hook(_heed))
                forwards.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = opened(module, own, recorded)
        with unnested(network):
            yield
    finally:
        for handle in handles:
            handle.remove()
        for module, before in forwards:
            module.__dict__.pop("forward")
            if before is not None:
                module.__dict__["forward"] = before
        for parameter, required in wanted:
            parameter.requires_grad_(required)
        for own in by_path.values():
            for port in own.values():
                port.clear()


def _heed(*_: Any) -> None:
    """A hook that does nothing: without one, a block around the module may leave it out in evaluation mode."""


def rows_first(tensor: Tensor, layout: Layout, rows: int, part: slice = slice(None)) -> Tensor:
    """Some of the rows, whatever the layout: [b · cases, ...], a row's cases (frames) one after the other."""
    if layout is Layout.SECOND:
        return tensor.transpose(0, 1)[part]
    if layout is Layout.FLAT:
        return tensor.unflatten(0, (rows, -1))[part].flatten(0, 1)
    if layout is Layout.FLAT_SECOND:
        return tensor.unflatten(0, (-1, rows)).transpose(0, 1)[part].flatten(0, 1)
    return tensor if part == slice(None) else tensor[part]


def by_row(matrices: Tensor, rows: int, axis: int) -> Tensor:
    """[b · cases, G, ..] as [b, G, ..] with the cases' positions together on `axis`."""
    cases = len(matrices) // rows
    if cases == 1:
        return matrices
    return matrices.unflatten(0, (rows, cases)).movedim(1, axis).flatten(axis, axis + 1)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
