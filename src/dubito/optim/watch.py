"""Watching the passes of a user's own loop: what each row says, for an optimiser's parameters and nothing else."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..curvature.products import ProductSums
from ..curvature.sums import DiagonalSums, Wanted
from ..layers import Dense, Form, Layout, Product
from ..layers.context import Context, name_of
from ..layers.kinds import READERS, NoRule, Standin, plain
from ..layers.layout import per_row
from ..layers.record import BlockPart, Call


class _UseRecorder(Context):
    """Keeps what every use of a parameter sees, and the gradients that a backward pass brings to its outputs.

    Args:
        watch: that keeps it.
        layouts: where the inputs of each parameter's uses hold the rows, by the names of standins; rows stand first
            for those that are not there.
    """

    def __init__(self, watch: "Watch", layouts: Mapping[str, Layout]) -> None:
        self.watch, self.layouts = watch, layouts

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        if any(isinstance(tensor, Standin) and tensor.parts > 1 for tensor in (weight, bias)):
            raise NoRule("parts of a weight have no rule here")
        output = super().use(form, x, weight, bias, active=active)
        if output.requires_grad:
            if output._is_view():  # what is changed in place later would lose the hook
                output = output.clone()
            name = name_of(weight) or name_of(bias)
            self.watch.seen(form, x, weight, bias, output, self.layouts.get(name or "", Layout.ROWS))
        return output


class _Mode(TorchFunctionMode):
    """Sees every torch function that reads one of the parameters; all others run as they are."""

    def __init__(self, watch: "Watch") -> None:
        super().__init__()
        self.watch, self.context = watch, _UseRecorder(watch, {})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader = READERS.get(function)
        if reader is None or not any(id(a) in self.watch.parameters for a in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        try:
            answer = self.context.read(
                reader, function, tuple(map(self._asking, args)), {k: self._asking(v) for k, v in kwargs.items()}
            )
        except NoRule:
            answer = NotImplemented
        return function(*args, **kwargs) if answer is NotImplemented else answer

    def _asking(self, argument: Any) -> Any:
        name = self.watch.parameters.get(id(argument))
        return argument if name is None else Standin.of(argument, name, self.context)


class Watch:
    """Records what layers see, while open, and sums it over rows.

    In a loop of the user's, layers are noticed as torch functions read the parameters, and a row is what stands at one
    place of the first axis of a function's inputs; the library's own passes tell where rows stand. The loss is a mean
    over B rows, so that gradients are each row's own over B.

    Args:
        parameters: those of interest.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._tensors = list(parameters)  # kept alive, so that their identities stay theirs
        self.parameters = {id(parameter): str(number) for number, parameter in enumerate(self._tensors)}
        self.calls: dict[str, list[Call]] = {}
        #: The bias of a weight, where one function adds it and both are of interest.
        self.biases: dict[int, Tensor] = {}
        self.rows = 0
        self.roots: Tensor | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, the forward and backward passes of this thread are watched."""
        with _Mode(self):
            yield

    def context(self, layouts: Mapping[str, Layout], rows: int, weights: Tensor | None = None) -> Context:
        """What watches a pass of the library's own, whose parameters ask it.

        Args:
            layouts: where the inputs of their uses hold the rows, by their names.
            rows: of the batch.
            weights: of the rows, which the loss has as factors: squares of their gradients would have them twice.
        """
        self.rows = rows
        if weights is not None:
            self.roots = weights.clamp(min=torch.finfo(weights.dtype).tiny).sqrt()
        return _UseRecorder(self, layouts)

    def seen(self, form: Form, x: Tensor, weight: Any, bias: Any, output: Tensor, layout: Layout = Layout.ROWS) -> None:
        """Keep one use of a weight and a bias, whose outputs are part of a graph."""
        learned = (None if tensor is None else plain(tensor) for tensor in (weight, bias))
        names = [
            self.parameters.get(id(tensor)) if tensor is not None and tensor.requires_grad else None
            for tensor in learned
        ]
        call = Call(form, names[0], names[1], 0, 1, 0, 1, 0, "", x.detach(), layout=layout)

        def caught(gradient: Tensor) -> None:
            call.gradient = gradient if self.roots is None else gradient / per_row(self.roots, layout, gradient)

        output.register_hook(caught)
        if layout is Layout.ROWS:
            self.rows = len(x)
        for name in names:
            if name is not None:
                self.calls.setdefault(name, []).append(call)
        if names[0] is not None and names[1] is not None:
            self.biases[id(plain(weight))] = plain(bias)
        elif names[0] is not None and bias is not None:  # a frozen one
            self.biases.pop(id(plain(weight)), None)

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls.clear()
        self.rows, self.roots = 0, None

    def _of(self, parameter: Tensor) -> list[Call]:
        """The uses of a parameter that a backward pass reached; none where they disagree about the rows."""
        calls = [c for c in self.calls.get(self.parameters[id(parameter)], ()) if c.gradient is not None]
        first = [call for call in calls if call.layout is Layout.ROWS]
        return calls if all(len(call.inputs) == self.rows for call in first) else []

    @torch.no_grad()
    def squares(self, parameter: Tensor) -> Tensor | None:
        """Σ_i (g_i / B)^∘2 over the rows' gradients, in the parameter's shape; None where no layer tells them.

        Rows are taken a block at a time: never more than a layer's share of them is formed.
        """
        calls = self._of(parameter)
        if not calls:
            return None
        part = self._part(parameter, calls, None)
        if part.product is None:
            sums = DiagonalSums(part, tuple(parameter.shape), parameter)
        else:
            sums = ProductSums(part, Wanted(diagonal=True), parameter)
        self._fill(sums, calls)
        assert sums.diagonal is not None
        return sums.diagonal if part.product is None else part.product.tensor(sums.diagonal)

    @torch.no_grad()
    def factors(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Σ a aᵀ [G, n, n] with the bias column, and Σ 1/T Σ_t g gᵀ / B² [G, m, m]; None where not a product."""
        calls = self._of(weight)
        bias = self.biases.get(id(weight))
        if not calls:
            return None
        part = self._part(weight, calls, bias)
        if part.product is None:
            return None
        sums = ProductSums(part, Wanted(factors=True), weight)
        self._fill(sums, calls)
        assert sums.inputs is not None and sums.gradients is not None
        return sums.inputs, sums.gradients

    def turned(self, weight: Tensor) -> bool:
        """Whether a weight that multiplies the inputs of its layer is stored as inputs × outputs."""
        form = self._of(weight)[0].form
        return isinstance(form, Dense) and form.turned

    def _fill(self, sums: DiagonalSums | ProductSums, calls: list[Call]) -> None:
        if isinstance(sums, ProductSums):
            sums.roots = self.roots
        sums.add(calls, self.rows, 1.0, True, True)
        sums.flush()
        sums.finish()

    def _part(self, parameter: Tensor, calls: list[Call], bias: Tensor | None) -> BlockPart:
        name, form = self.parameters[id(parameter)], calls[0].form
        alike = all(call.weight == name and call.form.signature == form.signature for call in calls)
        product = form if alike and isinstance(form, Product) else None
        return BlockPart(name, None if bias is None else self.parameters.get(id(bias)), product)
