"""Dense layers: `F.linear`, and the products that networks write themselves."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .context import Context
from .form import Form, Product
from .kinds import Declared, NoRule, Standin, declares, kind

#: Cases per draw that are few, and numbers of a matrix from which it is large, where draws are stacked on CPUs.
FEW, LARGE = 2, 1 << 16


@dataclass(frozen=True)
class Dense(Product):
    """y = W x + b over the last axis, for W [m, n], or [n, m] where it is turned.

    Attributes:
        turned: whether the weight is stored as inputs × outputs.
    """

    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.columns, self.rows) if self.turned else (self.rows, self.columns)

    @property
    def input_view(self) -> tuple[int, ...]:
        return (self.columns, 1) if self.turned else (1, self.columns)

    @property
    def output_view(self) -> tuple[int, ...]:
        return (1, self.rows) if self.turned else (self.rows, 1)

    @property
    def signature(self) -> tuple[object, ...]:
        return (type(self), 1, self.rows, self.columns, self.turned)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.mT if self.turned else weight, bias)

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        assert weights is not None
        cases, matrices = x.reshape(draws, -1, self.columns), weights if self.turned else weights.mT
        shape = (*x.shape[:-1], self.rows)
        if self._weights_first(cases):
            # W xᵀ reads large weights once at the speed of memory; x Wᵀ takes twice as long for a row or two.
            added = None if biases is None else biases.unsqueeze(2)
            products = (
                torch.bmm(matrices.mT, cases.mT) if added is None else torch.baddbmm(added, matrices.mT, cases.mT)
            )
            return products.mT.reshape(shape)
        if biases is None:
            return torch.bmm(cases, matrices).reshape(shape)
        return torch.baddbmm(biases.unsqueeze(1), cases, matrices).reshape(shape)

    def _weights_first(self, cases: Tensor) -> bool:
        if torch.compiler.is_compiling() or cases.device.type != "cpu":
            return False
        return cases.shape[1] <= FEW and self.rows * self.columns > LARGE and not self.turned

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        return self.products(x, g).mT if self.turned else self.products(x, g)

    def matrix(self, weight: Tensor) -> Tensor:
        matrix = weight.unsqueeze(-3)
        return matrix.mT if self.turned else matrix

    def tensor(self, matrix: Tensor) -> Tensor:
        weight = matrix.squeeze(-3)
        return weight.mT if self.turned else weight


@lru_cache(maxsize=1024)
def dense(rows: int, columns: int, turned: bool = False) -> Dense:
    """The form of a matrix, made once; a function, which compilers can look into."""
    return Dense(rows, columns, turned)


def product(at: Context, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, turned: bool = False) -> Tensor:
    """A dense use of a weight [m, n], or [n, m] where it is turned; a transposed parameter counts as itself."""
    if isinstance(weight, Standin) and weight.turned:
        weight, turned = weight.transposed(), not turned
    rows, columns = reversed(weight.shape) if turned else weight.shape
    return at.use(dense(rows, columns, turned), x, weight, bias)


@kind(F.linear)
def linear(at: Context, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of nn.Linear, and of code that calls it on parameters."""
    return product(at, input, weight, bias)


@declares(nn.Linear)
def linear_module(module: nn.Linear) -> Iterator[Declared]:
    """One product."""
    yield Declared("weight", "bias", dense(module.out_features, module.in_features), "linear")


@kind(torch.addmm, Tensor.addmm)
def addmm(
    at: Context, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> Any:
    """Bias + x W, as the layers of GPT-2 write it."""
    if beta != 1 or alpha != 1 or out is not None or not isinstance(mat2, Standin):
        return NotImplemented
    if isinstance(input, Standin) and input.ndim > 1:
        return NotImplemented
    return product(at, mat1, mat2, input, turned=True)


@kind(torch.matmul, Tensor.matmul, Tensor.__matmul__, operator.matmul, torch.mm, Tensor.mm)
def matmul(at: Context, input: Tensor, other: Tensor) -> Any:
    """X W with a matrix W that is a parameter."""
    if not isinstance(other, Standin) or other.ndim != 2 or input.ndim < 2:
        return NotImplemented
    return product(at, input, other, turned=True)


@kind(Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__)  # pyright: ignore[reportAttributeAccessIssue]
def transposed(at: Context, input: Standin) -> Any:
    """A matrix turned stays a parameter: `x @ W.t()`."""
    return input.transposed() if input.ndim == 2 and input.parts == 1 else NotImplemented


@dataclass(frozen=True)
class Pairwise(Form):
    """y_k = Σ_ij x_i W_kij z_j + b_k: linear in the weight, but with two inputs, joined on the last axis.

    Attributes:
        first: the features of x.
    """

    first: int

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two inputs."""
        return x[..., : self.first], x[..., self.first :]

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        left, right = self.split(x)
        return F.bilinear(left.contiguous(), right.contiguous(), weight, bias)

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        left, right = (part.reshape(len(x), -1, part.shape[-1]) for part in self.split(x))
        return torch.einsum("btk,bti,btj->bkij", g.reshape(len(g), -1, g.shape[-1]), left, right)


@kind(F.bilinear)
def bilinear(at: Context, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Of nn.Bilinear."""
    if isinstance(input1, Standin) or isinstance(input2, Standin):
        raise NoRule("another parameter is its input")
    dtype = torch.promote_types(input1.dtype, input2.dtype)
    joined = torch.cat([input1.to(dtype), input2.to(dtype)], -1)
    return at.use(Pairwise(input1.shape[-1]), joined, weight, bias)
