"""Contexts: what a pass does wherever a torch function uses a parameter."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from .form import Form
from .kinds import NoRule, Standin, plain

#: A form with its weight and bias in place, for functions that apply it many times: `step(x, active=...)`.
Applied = Callable[..., Tensor]


class Context:
    """The plain pass: every function answers what it answers without a context.

    Attributes:
        number: of the function call that is being read; several uses inside of it, such as the steps of a recurrent
            layer, share it.
        function: its name.
        keep_graph: whether gradients of the pass are differentiated again.
    """

    number: int = 0
    function: str = ""
    keep_graph: bool = False

    def read(self, reader: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
        """Hand a function's arguments to its reader."""
        self.number += 1
        self.function = getattr(function, "__name__", str(function))
        return reader(self, *args, **kwargs)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        """The answer of a form at one place.

        Args:
            form: how the outputs depend on weight and bias.
            x: inputs, cases first.
            weight: a standin, or a plain tensor where it is no parameter of interest.
            bias: likewise; None where there is none.
            active: which positions count, in the inputs' shape without features; None for all.
        """
        if isinstance(x, Standin):
            raise NoRule("another parameter is its input")
        return form.apply(x, plain(weight), plain(bias))

    def bound(self, form: Form, weight: Tensor, bias: Tensor | None = None) -> Applied:
        """The form with its parameters in place, for functions that apply it step by step."""

        def step(x: Tensor, active: Tensor | None = None) -> Tensor:
            return self.use(form, x, weight, bias, active=active)

        return step

    def begin(self, rows: int) -> None:
        """Told how many rows the inputs of a pass have, where that may differ from pass to pass."""

    def parted(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """The inputs of a function that uses several parameters, with the rows that its answer will have."""
        return x

    def without_rule(self, function: Any, standins: Sequence[Standin], reason: str | None) -> None:
        """Told that a function ran as it is on some parameters, and why if a reader said so."""


def part_of(tensor: Tensor | None) -> tuple[int, int]:
    """Which of how many equal parts of a parameter a standin is."""
    return (tensor.part, tensor.parts) if isinstance(tensor, Standin) else (0, 1)


def name_of(tensor: Tensor | None) -> str | None:
    """The user's name of a parameter; None for a tensor that is no standin."""
    return tensor.parameter if isinstance(tensor, Standin) else None
