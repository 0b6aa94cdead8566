"""What predictions share: rows that can be indexed, moved, joined and tabulated."""

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, require_extra
from ..hints import checked
from ..notebook import html
from .formulas import Weights, require_answers

#: What a notebook shows of a prediction.
SHOWN_ROWS, SHOWN_COLUMNS = 8, 12


def rows_on(axis: int) -> Any:
    """A tensor field whose rows lie along `axis`; optional fields may be None."""
    return field(metadata={"rows": axis})


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(ABC):
    """Base of predictions: rows can be indexed, moved, and turned into arrays or a table.

    Attributes:
        weights: those of K components where they differ: draws that are kept belong to component s mod K, and share its
            weight evenly.
    """

    weights: Weights = field(default=None, kw_only=True)

    #: Names of the per-row quantities that `to_numpy` and `to_pandas` show.
    columns: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def log_prob(self, targets: Tensor | np.ndarray) -> Tensor:
        """Log-density of each row's target under the exact mixture over draws, [B]."""

    def __getitem__(self, index: Any) -> Self:
        """The prediction for some rows; a single number keeps the row axis."""
        if isinstance(index, Integral) or (isinstance(index, Tensor) and index.ndim == 0):
            index = int(index)
            if not -len(self) <= index < len(self):  # also what ends a plain `for row in prediction`
                raise IndexError(f"row {index} of a prediction with {len(self)} rows")
            index = slice(index, index + 1 or None)
        elif isinstance(index, slice) and (index.step or 1) < 0:  # which tensors do not take
            index = list(range(len(self)))[index]
        return self._replaced(lambda tensor, axis: tensor[(slice(None),) * axis + (index,)])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The prediction on another device or with another dtype, as `Tensor.to` takes them."""
        return self._replaced(lambda tensor, _: tensor.to(*args, **kwargs))

    def to_numpy(self) -> dict[str, Any]:
        """Arrays by name, one entry per row quantity."""
        values = {name: getattr(self, name).detach().cpu() for name in self.columns}
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in values.items()
        }

    def to_pandas(self) -> Any:
        """One row per example; a quantity with several outputs becomes columns `name_0`, `name_1`, …"""
        pandas = require_extra("pandas", "tabular", "to_pandas")
        return pandas.DataFrame(dict(self._table_columns()))

    def _table_columns(self) -> Iterator[tuple[str, Any]]:
        """The columns of a table, one number per row each."""
        for name, array in self.to_numpy().items():
            if array.ndim > 2:
                raise DataError(
                    f"a table needs at most one axis of outputs, but {name} has shape {array.shape}; use to_numpy"
                )
            if array.ndim == 1 or array.shape[1] == 1:
                yield name, array.reshape(len(array))
            else:
                yield from ((f"{name}_{i}", array[:, i]) for i in range(array.shape[1]))

    def plot(self, targets: Tensor | None = None, *, axis: Any = None) -> Any:
        """Aleatoric against epistemic uncertainty, row by row: `dubito.plot.decomposition`; the axis it is drawn on.

        Args:
            targets: the true classes; wrong answers are then crosses.
            axis: of matplotlib, to draw on; None makes a figure, which a notebook shows as `plot().figure`.
        """
        return import_module("dubito.plot").decomposition(self, targets, axis=axis)

    def __repr__(self) -> str:
        title, columns, rows = self._first_rows()
        lengths = [max(map(len, column)) for column in columns]
        lines = [title]
        for line in zip(*columns, strict=True):
            lines.append("  ".join(text.rjust(length) for text, length in zip(line, lengths, strict=True)))
        if (left := rows - len(columns[0]) + 1) > 0:
            lines.append(f"… and {left:,} rows more")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        from rich.table import Table

        title, columns, rows = self._first_rows()
        table = Table(title=title)
        for name, *_ in columns:
            table.add_column(name, justify="right")
        for line in zip(*(values for _, *values in columns), strict=True):
            table.add_row(*line)
        return html(table, rows=rows)

    def _first_rows(self) -> tuple[str, list[list[str]], int]:
        """A title, columns of words under their names, and how many rows there are in all."""
        first, rows = self[:SHOWN_ROWS], len(self)
        try:
            columns = [("row", range(len(first))), *itertools.islice(first._table_columns(), SHOWN_COLUMNS)]
        except DataError:  # rows with several positions: what there is, in place of its numbers
            shapes = {name: array.shape[1:] for name, array in first.to_numpy().items()}
            columns = [("quantity", list(shapes)), ("of a row", ["×".join(map(str, s)) for s in shapes.values()])]
            rows = len(shapes)
        title = f"{type(self).__name__} of {len(self):,} row{'' if len(self) == 1 else 's'}"
        return title, [[name, *map(_word, values)] for name, values in columns], rows

    def finite(self, first: int = 0) -> Self:
        """The prediction, refused where it holds numbers that are none; `first` is the number of its first row."""
        for item in dataclasses.fields(self):
            tensor, axis = getattr(self, item.name), item.metadata.get("rows")
            if axis is not None and isinstance(tensor, Tensor):
                require_answers(tensor, axis, first, logarithms="log_" in item.name)
        return self

    @classmethod
    @checked
    def cat(cls, parts: list[Self]) -> Self:
        """The rows of several predictions of the same draws, one after the other."""
        if not parts or any(type(part) is not cls for part in parts):
            kinds = sorted({type(part).__name__ for part in parts})
            raise DataError(f"{cls.__name__}.cat joins predictions of its kind, at least one, got {kinds or 'none'}")
        values, alike = {}, cls.of_one_form(parts)
        for item in dataclasses.fields(cls):
            pieces = [getattr(part, item.name) for part in alike]
            axis = item.metadata.get("rows")
            if axis is not None and isinstance(pieces[0], Tensor):
                values[item.name] = torch.cat(pieces, dim=axis)
            else:
                values[item.name] = pieces[0]
        return cls(**values)

    @classmethod
    def of_one_form(cls, parts: list[Any]) -> list[Any]:
        """The parts in a form in which their rows can stand one after the other."""
        return parts

    def _replaced(self, change: Any) -> Self:
        values = {}
        for item in dataclasses.fields(self):
            value, axis = getattr(self, item.name), item.metadata.get("rows")
            values[item.name] = change(value, axis) if axis is not None and isinstance(value, Tensor) else value
        return type(self)(**values)


def _word(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, np.floating) else str(value)
