"""One forward pass of some rows, and the backward passes that bring the gradients of their outputs to every layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...devices import moved
from ...layers.form import Form, Product
from ...layers.kinds import plain
from ...layers.layout import Layout
from ...layers.linear import Dense
from ...layers.record import BlockPart, Call, Record


class Last(NamedTuple):
    """The last use of a parameter.

    Attributes:
        call: of it.
        inputs: in the graph.
        weight: its numbers.
        answer: what it gave.
        version: of the answer, which operations in place change.
    """

    call: Call
    inputs: Tensor
    weight: Tensor | None
    answer: Tensor
    version: int


class Reading(Record):
    """A record that also keeps the last use, and for every call a gradient of zeros."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]
        self.zeros: dict[Call, Tensor] = {}
        self.last: Last | None = None

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        count = len(self.calls)
        answer = super().use(form, x, weight, bias, active=active)
        if len(self.calls) > count:
            call = self.calls[-1]
            self.zeros[call] = answer.new_zeros(()).expand(answer.shape)
            self.last = Last(call, x, plain(weight), answer, answer._version)
        return answer

    def tail(self, outputs: Tensor) -> Last | None:
        """The last use, where it is the only one of a matrix and its answers are the network's outputs, untouched."""
        last = self.last
        if last is None or not isinstance(last.call.form, Product) or last.call.layout is not Layout.ROWS:
            return None
        alone = last.call.parts == 1 and all(len(self.uses[place]) == 1 for place in last.call.places)
        return last if alone and last.call.weight is not None and _is_view(outputs, last) else None

    def clear(self) -> None:
        super().clear()
        self.zeros.clear()
        self.last = None


def _is_view(outputs: Tensor, last: Last) -> bool:
    """Whether outputs are an answer's numbers, all of them, in their order."""
    answer = last.answer
    return (
        outputs.data_ptr() == answer.data_ptr()
        and outputs.numel() == answer.numel()
        and outputs.is_contiguous()
        and answer.is_contiguous()
        and outputs._version == last.version
    )


class OutputGradients:
    """A forward pass of some rows, and backward passes for some of their outputs each.

    Every row stands in it several times, so that one backward pass serves several outputs of it.

    Args:
        record: of the pass.
        outputs: of the network, [b · copies, ...], the copies of a row together.
        tail: the layer that answers with them, if there is one.
        copies: of each row.
        unit_gradients: whether the gradients at that layer are wanted, which are unit vectors.
        create_graph: whether gradients stay in the graph.
    """

    def __init__(
        self,
        record: Reading,
        outputs: Tensor,
        tail: Last | None,
        copies: int = 1,
        *,
        unit_gradients: bool = True,
        create_graph: bool = False,
    ) -> None:
        self.record, self.copies = record, copies
        self.unit_gradients, self.create_graph = unit_gradients, create_graph
        self.rows = len(outputs) // copies
        self.flat = outputs.reshape(len(outputs), -1)
        self.outputs = outputs[::copies]
        self.tail = tail
        self.count = 0  # outputs whose gradients are there
        #: By backward pass, without the calls that it does not reach.
        self.caught: list[dict[Call, Tensor]] = []

    def backward(self, chosen: Tensor, *, last: bool = False) -> None:
        """Bring the gradients of some outputs to every call, in place of those that were there.

        Args:
            chosen: numbers of the outputs, [q].
            last: whether the graph is not needed any more.
        """
        self.caught, self.count = [], len(chosen)
        parts = chosen.split(self.copies)
        for number, some in enumerate(parts):
            self.record.forget_gradients()
            self._send(some, keep=not last or number + 1 < len(parts))
            reached = ((call, call.gradient) for call in self.record.calls)
            self.caught.append({call: gradient for call, gradient in reached if gradient is not None})

    def _send(self, some: Tensor, keep: bool) -> None:
        """One backward pass, in which copy i of every row stands for output i of `some`."""
        tail = self.tail
        if tail is not None and isinstance(tail.call.form, Dense) and tail.inputs.ndim == 2:
            # Rows of W are what the unit vectors become on their way through the last layer.
            assert tail.weight is not None
            weight = tail.weight.mT if tail.call.form.turned else tail.weight
            source, gradient = tail.inputs, self._repeated(weight[some])
            if self.unit_gradients:
                tail.call.gradient = self._units(some)
            if not source.requires_grad:  # no layer with a distribution stands before it
                return
        else:
            source, gradient = self.flat, self._units(some)
        if self.create_graph:
            torch.autograd.grad(source, self.record.anchor, gradient, create_graph=True, allow_unused=True)
        else:  # reentrant checkpointing refuses autograd.grad
            torch.autograd.backward([source], [gradient], retain_graph=keep)

    def _units(self, some: Tensor) -> Tensor:
        """Unit vectors of some outputs, for every row, [b · copies, E]."""
        units = self.flat.new_zeros(len(some), self.flat.shape[1])
        return self._repeated(units.scatter_(1, some.unsqueeze(1), 1))

    def _repeated(self, vectors: Tensor) -> Tensor:
        """Vectors of some outputs for every row, with zeros for copies that have none, [b · copies, k]."""
        vectors = pad(vectors, (0, 0, 0, self.copies - len(vectors)))
        return vectors.expand(self.rows, *vectors.shape).flatten(0, 1)

    # -- what the calls of a parameter saw ---------------------------------------------------------------------

    def calls(self, part: BlockPart, number: int) -> list[Call]:
        """The calls of a part with the gradients of one backward pass."""
        calls = self.record.uses[part.key]
        for call in calls:
            gradient = self.caught[number].get(call)
            call.gradient = self.record.zeros[call] if gradient is None else gradient
        return calls

    def inputs(self, part: BlockPart, dtype: torch.dtype) -> Tensor:
        """Inputs of a part as matrices [b, G, T, n], columns in the weight's order."""
        matrices = part.inputs(self.record.uses[part.key], self.total, slice(0, None, self.copies), dtype)
        assert part.product is not None
        if part.product.order is None:
            return matrices
        order = moved(part.product.order, matrices.device).argsort()
        bias = order.new_full((1 if part.bias is not None else 0,), len(order))
        return matrices[..., torch.cat([order, bias])]

    def gradients(self, part: BlockPart, dtype: torch.dtype) -> list[Tensor]:
        """Gradients at its outputs by each backward pass, [b, copies, G, m, T]; the last may have fewer copies."""
        passes = []
        for number in range(len(self.caught)):
            matrices = part.outputs(self.calls(part, number), self.total, slice(None), dtype)
            passes.append(matrices.unflatten(0, (self.rows, self.copies)))
        passes[-1] = passes[-1][:, : self.count - self.copies * (len(passes) - 1)]
        return passes

    def jacobians(self, parts: Sequence[BlockPart], rows: slice, dtype: torch.dtype) -> Tensor:
        """Gradients of a parameter for some rows, [b, q, size]."""
        some, passes = slice(rows.start * self.copies, rows.stop * self.copies), []
        for number in range(len(self.caught)):
            gradients = [part.gradients(self.calls(part, number), self.total, some, dtype) for part in parts]
            passes.append(torch.cat(gradients, 1).unflatten(0, (-1, self.copies)))
        return torch.cat(passes, 1)[:, : self.count]

    @property
    def numbers(self) -> Tensor:
        """Of all outputs, [E]."""
        return torch.arange(self.flat.shape[1], device=self.flat.device)

    @property
    def total(self) -> int:
        """Rows that went through the network, copies and all."""
        return self.rows * self.copies
