"""Forms: how the outputs of a torch function depend on a weight and a bias.

A form reads what a function saw: its inputs `x`, and the gradients `g` at its outputs, both with an axis of N cases
first (rows, or frames of rows). Everything that a pass can do with a layer is written over forms: per-row gradients,
Kronecker factors, node factors, noise on outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from .grams import add_gram

#: Numbers that patches of one case may take at a time.
PIECE = 1 << 23


@dataclass(frozen=True)
class Form(ABC):
    """How outputs depend on a weight and a bias: plain values, from which a posterior's file restores it."""

    #: Whether features stand on the last axes, so that all axes between them and the cases hold positions; else
    #: they stand on axis 1, that of channels.
    trailing: ClassVar[bool] = True
    #: The axes that features take.
    feature_axes: ClassVar[int] = 1
    #: All forms by the name of their class.
    known: ClassVar[dict[str, type["Form"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Form.known[cls.__name__] = cls

    @abstractmethod
    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the function answers."""

    @abstractmethod
    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        """The weight's gradient of each case, [N, ...], in the weight's order of axes."""

    def bias_gradients(self, g: Tensor) -> Tensor:
        """The bias's gradient of each case, [N, features]: it is added at every position."""
        if self.trailing:
            return g.reshape(len(g), -1, *g.shape[g.ndim - self.feature_axes :]).sum(1)
        return g.reshape(*g.shape[:2], -1).sum(2)

    def squares(self, x: Tensor, g: Tensor, rows: int) -> Tensor | None:
        """Σ over rows of squared gradients where that is cheaper than from `gradients`, else None."""
        return None

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        """What the function answers with the parameters [S, ...] of S draws, for rows draw by draw, [S·N, ...]."""
        cases = x.unflatten(0, (draws, -1))
        tensors = ([None] * draws if stack is None else stack for stack in (weights, biases))
        return torch.cat([self.apply(*draw) for draw in zip(cases, *tensors, strict=True)])  # pyright: ignore

    def numbers(self, x: Tensor, g: Tensor) -> int:
        """How many numbers `gradients` takes beside its answer."""
        return g.numel()

    @property
    def signature(self) -> tuple[object, ...]:
        """What two forms must share for their gradients to add up as those of one matrix."""
        return (type(self), *asdict(self).values())

    def to_json(self) -> dict[str, Any]:
        """Plain values, for storage."""
        return {"form": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Form":
        """The form behind `to_json`; KeyError for a class that is not there."""
        fields = {key: _tuples(value) for key, value in values.items() if key != "form"}
        return Form.known[values["form"]](**fields)


@dataclass(frozen=True)
class Nodes(Form):
    """A form whose weight stands between input and output nodes, which can carry factors: W ∘ r sᵀ.

    The weight, reshaped to `view`, meets input factors of shape `input_view` and output factors of `output_view`.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""

    @property
    def view(self) -> tuple[int, ...]:
        """The shape in which the weight meets factors."""
        return self.shape

    @property
    @abstractmethod
    def input_view(self) -> tuple[int, ...]:
        """The shape in which the factors of the input nodes meet the weight."""

    @property
    @abstractmethod
    def output_view(self) -> tuple[int, ...]:
        """The shape in which the factors of the output nodes meet the weight."""

    @property
    def channel_axis(self) -> int:
        """The axis of inputs and outputs that holds the nodes."""
        return -1

    @property
    def input_nodes(self) -> int:
        """The number of input nodes."""
        return prod(self.input_view)

    @property
    def output_nodes(self) -> int:
        """The number of output nodes."""
        return prod(self.output_view)


@dataclass(frozen=True)
class Product(Nodes):
    """A matrix that multiplies the features at every position: y = W x.

    As matrices, the inputs are [N, G, T, n] and the gradients [N, G, m, T]: T positions, G groups.

    Attributes:
        rows: m.
        columns: n.
    """

    rows: int
    columns: int

    @property
    def groups(self) -> int:
        """G: of features that do not meet."""
        return 1

    @property
    def order(self) -> Tensor | None:
        """Column j of the inputs as matrices belongs to column `order[j]` of the weight; None if the same."""
        return None

    @property
    def signature(self) -> tuple[object, ...]:
        return (type(self), self.groups, self.rows, self.columns)

    def inputs(self, x: Tensor) -> Tensor:
        """The inputs as matrices [N, G, T, n]."""
        return x.reshape(len(x), 1, prod(x.shape[1:-1]), self.columns)

    def outputs(self, g: Tensor) -> Tensor:
        """The gradients as matrices [N, G, m, T]."""
        return g.reshape(len(g), 1, prod(g.shape[1:-1]), self.rows).mT

    def pieces(self, x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
        """The inputs as matrices [N, G, t, n] of some positions each, of about `numbers` numbers if they are new."""
        yield slice(None), self.inputs(x)

    def add_moment(self, sums: Tensor, x: Tensor) -> None:
        """Add Σ a aᵀ over all positions to the upper triangle of [G, n, n]."""
        add_gram(sums, x.reshape(1, -1, self.columns))

    def total(self, x: Tensor) -> Tensor:
        """Σ a over all positions, [G, n]."""
        return x.reshape(1, -1, self.columns).sum(1)

    def products(self, x: Tensor, g: Tensor) -> Tensor:
        """δ = Σ_t g_t a_tᵀ of each case, [N, G, m, n], in the inputs' order of columns."""
        outputs = self.outputs(g)
        return reduce(Tensor.add_, (outputs[..., part] @ a for part, a in self.pieces(x, PIECE)))

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        products = self.products(x, g)
        return products[..., self.order.argsort()] if self.order is not None else products

    def matrix(self, weight: Tensor) -> Tensor:
        """Weights [..., *shape] as matrices [..., G, m, n]."""
        leading = weight.shape[: weight.ndim - len(self.shape)]
        return weight.reshape(*leading, self.groups, self.rows, self.columns)

    def tensor(self, matrix: Tensor) -> Tensor:
        """Matrices [..., G, m, n] as weights [..., *shape]."""
        return matrix.reshape(*matrix.shape[:-3], *self.shape)

    def variance(self, squares: Tensor, variance: Tensor, bias: Tensor | None) -> Tensor:
        """The variance of each output under independent weights: Σ_i x_i² σ_i², and that of the bias."""
        return self.apply(squares, variance, bias)


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
