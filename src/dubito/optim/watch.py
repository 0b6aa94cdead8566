"""Watching the passes of a user's own loop: what each row says, for an optimiser's parameters and nothing else."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..curvature.products import ProductSums
from ..curvature.sums import DiagonalSums, Wanted
from ..layers import Dense, Form, Product
from ..layers.context import Context
from ..layers.kinds import READERS, NoRule, Standin, plain
from ..layers.record import BlockPart, Call


class _Seen(Context):
    """Keeps what every use of a parameter sees, and the gradients that a backward pass brings to its outputs."""

    def __init__(self, watch: "Watch") -> None:
        self.watch = watch

    def use(
        self,
        form: Form,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        active: Tensor | None = None,
    ) -> Tensor:
        if any(isinstance(tensor, Standin) and tensor.parts > 1 for tensor in (weight, bias)):
            raise NoRule("parts of a weight have no rule here")
        output = super().use(form, x, weight, bias, active=active)
        if output.requires_grad:
            self.watch.seen(form, x, weight, bias, output)
        return output


class _Mode(TorchFunctionMode):
    """Sees every torch function that reads one of the parameters; all others run as they are."""

    def __init__(self, watch: "Watch") -> None:
        super().__init__()
        self.watch, self.context = watch, _Seen(watch)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reader = READERS.get(function)
        if reader is None or not any(id(a) in self.watch.parameters for a in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        try:
            answer = self.context.read(
                reader,
                function,
                tuple(map(self._asking, args)),
                {k: self._asking(v) for k, v in kwargs.items()},
            )
        except NoRule:
            answer = NotImplemented
        return function(*args, **kwargs) if answer is NotImplemented else answer

    def _asking(self, argument: Any) -> Any:
        name = self.watch.parameters.get(id(argument))
        return argument if name is None else Standin.of(argument, name, self.context)


class Watch:
    """Records what layers see, while open, and sums it over rows.

    Layers are noticed as torch functions read the parameters. A row is what stands at one place of the first axis of
    a function's inputs. The loss is a mean over B rows, so that gradients are each row's own over B.

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

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, the forward and backward passes of this thread are watched."""
        with _Mode(self):
            yield

    def seen(self, form: Form, x: Tensor, weight: Any, bias: Any, output: Tensor) -> None:
        """Keep one use of a weight and a bias, whose outputs are part of a graph."""
        names = [tensor.parameter if isinstance(tensor, Standin) else None for tensor in (weight, bias)]
        call = Call(form, names[0], names[1], 0, 1, 0, 1, 0, "", x.detach())

        def caught(gradient: Tensor) -> None:
            call.gradient = gradient

        output.register_hook(caught)
        self.rows = len(x)
        for name in names:
            if name is not None:
                self.calls.setdefault(name, []).append(call)
        if names[0] is not None and names[1] is not None:
            self.biases[id(plain(weight))] = plain(bias)

    def clear(self) -> None:
        """Forget what was seen."""
        self.calls.clear()

    def _of(self, parameter: Tensor) -> list[Call]:
        """The uses of a parameter that a backward pass reached; none where rows do not stand first in all."""
        calls = [c for c in self.calls.get(self.parameters[id(parameter)], ()) if c.gradient is not None]
        return calls if all(len(call.inputs) == len(calls[0].inputs) for call in calls) else []

    @torch.no_grad()
    def squares(self, parameter: Tensor) -> Tensor | None:
        """Σ_i (g_i / B)^∘2 over the rows' gradients, in the parameter's shape; None where no layer tells them.

        Rows are taken a block at a time: never more than a layer's share of them is formed.
        """
        calls = self._of(parameter)
        if not calls:
            return None
        part, like = self._part(parameter, calls, None), calls[0].gradient
        assert like is not None
        if part.product is None:
            sums = DiagonalSums(part, tuple(parameter.shape), like)
        else:
            sums = ProductSums(part, Wanted(diagonal=True), like)
        _fill(sums, calls)
        assert sums.diagonal is not None
        return sums.diagonal if part.product is None else part.product.tensor(sums.diagonal)

    @torch.no_grad()
    def factors(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Σ a aᵀ [G, n, n] with the bias column, and Σ 1/T Σ_t g gᵀ / B² [G, m, m]; None where not a product."""
        calls = self._of(weight)
        bias = self.biases.get(id(weight))
        if not calls:
            return None
        part, like = self._part(weight, calls, bias), calls[0].gradient
        if part.product is None or like is None:
            return None
        sums = ProductSums(part, Wanted(factors=True), like)
        _fill(sums, calls)
        assert sums.inputs is not None and sums.gradients is not None
        return sums.inputs, sums.gradients

    def turned(self, weight: Tensor) -> bool:
        """Whether a weight that multiplies the inputs of its layer is stored as inputs × outputs."""
        form = self._of(weight)[0].form
        return isinstance(form, Dense) and form.turned

    def _part(self, parameter: Tensor, calls: list[Call], bias: Tensor | None) -> BlockPart:
        name, form = self.parameters[id(parameter)], calls[0].form
        alike = all(call.weight == name and call.form.signature == form.signature for call in calls)
        product = form if alike and isinstance(form, Product) else None
        return BlockPart(name, None if bias is None else self.parameters.get(id(bias)), product)


def _fill(sums: DiagonalSums | ProductSums, calls: list[Call]) -> None:
    sums.add(calls, len(calls[0].inputs), 1.0, True, True)
    sums.flush()
    sums.finish()
