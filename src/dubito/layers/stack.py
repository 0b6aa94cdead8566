"""Passes in which the draws of a posterior stand side by side, as stacked weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import NetworkError
from .context import Context, name_of, part_of
from .form import Form
from .kinds import NoRule, Standin, plain
from .layout import Layout
from .uses import CallKey, Survey


class Stack(Context):
    """Layers answer with the parameters of S draws at once, for rows draw by draw, [S·B, ...].

    Inputs of B rows are repeated by the first uses that have draws, so that everything before is computed once. Where
    that cannot be (`parts_late`), the network's own inputs must be repeated draw by draw.

    Args:
        tensors: parameters [S, ...] by name.
        surveyed: how the network uses them.
        draws: S.
        rows: B.
        repeated: whether the network's inputs were repeated before the pass, to S·B rows.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], surveyed: Survey, *, draws: int, rows: int, repeated: bool = False
    ) -> None:
        self.tensors, self.draws, self.rows, self.repeated = tensors, draws, rows, repeated
        self.surveyed = surveyed
        self._numbers: dict[CallKey, list[int]] = {}

    @property
    def names(self) -> list[str]:
        """The parameters that must ask this context."""
        return list(self.tensors)

    @property
    def parts_late(self) -> bool:
        """Whether every use tells whether its rows are those of one draw or of all: not so on a shared axis."""
        layouts = {use.layout for name in self.tensors for use in self.surveyed.of(name)}
        return layouts <= {Layout.ROWS, Layout.SECOND, Layout.NONE}

    def begin(self, rows: int) -> None:
        """Inputs are those of one draw, or of all."""
        self.rows = rows // self.draws if self.repeated else rows
        self._numbers = {}

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        if isinstance(x, Standin):
            raise NoRule("another parameter is its input")
        if name_of(weight) is None and name_of(bias) is None:
            return super().use(form, x, weight, bias)
        layout = self._layout(form, weight, bias)
        x = self._first(x, layout)
        y = form.stacked(x, self._stacked(weight), self._stacked(bias), self.draws)
        if layout is Layout.SECOND:
            return y.transpose(0, 1)
        if layout is Layout.FLAT_SECOND:
            return y.unflatten(0, (self.draws * self.rows, -1)).transpose(0, 1).flatten(0, 1)
        return y

    def parted(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        """Inputs of a function that uses several parameters, with rows for every draw."""
        asks = any(isinstance(parameter, Standin) for parameter in parameters)
        return self._tiled(x, 0) if asks and not self.repeated else x

    def without_rule(self, function: Any, standins: Sequence[Standin], reason: str | None) -> None:
        """A function that knows nothing of draws would answer for one of them.

        Raises:
            NetworkError: always.
        """
        names = sorted({standin.parameter for standin in standins})
        raise NetworkError(
            f"draws can be stacked where rules use the parameters alone, but {getattr(function, '__name__', function)} "
            f"uses {names} ({reason or 'there is no rule for it'}); leave them out or run draw by draw"
        )

    def _stacked(self, parameter: Tensor | None) -> Tensor | None:
        """The parameters of all draws, [S, ...]; one that does not ask is the same in all."""
        if parameter is None:
            return None
        if not isinstance(parameter, Standin) or parameter.parameter not in self.tensors:
            value = plain(parameter)
            return value.expand(self.draws, *value.shape)
        stack = self.tensors[parameter.parameter]
        return stack if parameter.parts == 1 else stack.chunk(parameter.parts, 1)[parameter.part]

    def _first(self, x: Tensor, layout: Layout) -> Tensor:
        """Inputs with the rows of all draws first: [S·B, ...], or [S·B·T, ...]."""
        if layout in (Layout.FLAT, Layout.FLAT_SECOND):
            if not self.repeated:
                raise NetworkError(
                    f"inputs must be repeated draw by draw where a layer holds {layout.value}, but are those of one"
                )
            if layout is Layout.FLAT:
                return x
            return x.unflatten(0, (-1, self.draws * self.rows)).transpose(0, 1).flatten(0, 1)
        if layout is Layout.NONE and x.shape[0] == 1:
            return x.expand(self.draws * self.rows, *x.shape[1:])
        if layout is Layout.SECOND:
            x = x.transpose(0, 1)
        elif layout is not Layout.ROWS:
            raise NetworkError(f"draws can be stacked where layers hold rows, not where they hold {layout.value}")
        return x if self.repeated else self._tiled(x, 0)

    def _tiled(self, x: Tensor, axis: int) -> Tensor:
        """Rows of one draw, repeated for all draws."""
        if self.draws == 1 or x.shape[axis] != self.rows:
            return x
        return x.repeat(self.draws, *(1 for _ in x.shape[1:]))

    def _layout(self, form: Form, weight: Tensor | None, bias: Tensor | None) -> Layout:
        """Where this call holds the rows, as the survey found."""
        key = name_of(weight), name_of(bias), part_of(weight)[0], part_of(bias)[0]
        numbers = self._numbers.setdefault(key, [])
        if self.number not in numbers:
            numbers.append(self.number)
        layout = self.surveyed.layout(form, key, lambda: numbers.index(self.number))
        if layout is None:
            raise NetworkError(
                f"the network must use {key[0] or key[1]!r} as it did on the rows it was surveyed with, but "
                f"{self.function} now uses it in another way; run draw by draw"
            )
        return layout
