"""Blocks: the weight matrices that get distributions of their own, and what the data say about each."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..errors import StorageError
from ..storage.schema import conform


@dataclass(frozen=True, kw_only=True)
class Block:
    """One weight, with its bias as the last column, as a stack of matrices.

    Attributes:
        name: the module's path, or the weight's own name where a module has several or only a diagonal exists.
        weight: the user's name of the weight.
        bias: the user's name of the bias, or None.
        shape: of the weight.
        groups: G independent matrices: of a grouped convolution, or of query, key and value in one tensor.
        rows: m of each matrix.
        columns: n of each matrix, the bias column included.
        kronecker: whether it has Kronecker factors; else only the diagonal.
        turned: whether the weight is stored as inputs × outputs.
    """

    name: str
    weight: str
    bias: str | None
    shape: tuple[int, ...]
    groups: int
    rows: int
    columns: int
    kronecker: bool
    turned: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters it covers."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def matrix(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors by parameter name, in the parameters' own shapes, as matrices [G, m, n]."""
        weight = tensors[self.weight]
        weight = (weight.mT if self.turned else weight).reshape(self.groups, self.rows, -1)
        if self.bias is None:
            return weight
        return torch.cat([weight, tensors[self.bias].reshape(self.groups, self.rows, 1)], -1)

    def tensors(self, matrix: Tensor) -> dict[str, Tensor]:
        """Matrices [..., G, m, n] as tensors by parameter name; axes before G stay."""
        leading = matrix.shape[:-3]
        if self.bias is None:
            return {self.weight: self._weight(matrix)}
        weight, bias = matrix.split([self.columns - 1, 1], -1)
        return {self.weight: self._weight(weight), self.bias: bias.reshape(*leading, self.groups * self.rows)}

    def _weight(self, matrix: Tensor) -> Tensor:
        if self.turned:
            return matrix.squeeze(-3).mT
        return matrix.reshape(*matrix.shape[:-3], *self.shape)

    @property
    def size(self) -> int:
        """The number of weights, biases included."""
        return self.groups * self.rows * self.columns

    def to_json(self) -> dict[str, Any]:
        """Plain values, for storage."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Block":
        """The block behind `to_json`."""
        return cls(**{**values, "shape": tuple(values["shape"])})


def check_blocks(blocks: Iterable[Block], weights: Mapping[str, Tensor]) -> None:
    """Refuse blocks that a file says stand for parameters, where the network has these otherwise or not at all."""
    seen: set[str] = set()
    for block in blocks:
        conform(block, Block, f"the block {block.name!r}")
        unknown = [name for name in block.parameters if name not in weights or name in seen]
        if unknown:
            raise StorageError(f"the block {block.name!r} covers {unknown[0]!r}, which is not there or covered before")
        seen |= {*block.parameters}
        weight, inputs = weights[block.weight], block.columns - (block.bias is not None)
        fits = min(block.groups, block.rows, inputs) > 0 and block.shape == tuple(weight.shape)
        fits = fits and block.groups * block.rows * inputs == weight.numel()
        if not fits or (block.bias and weights[block.bias].numel() != block.groups * block.rows):
            raise StorageError(f"the block {block.name!r} does not fit the shape of {block.weight!r}")


def diagonal_block(name: str, shape: tuple[int, ...]) -> Block:
    """The block of a parameter that has only a diagonal."""
    rows = shape[0] if shape else 1
    return Block(
        name=name,
        weight=name,
        bias=None,
        shape=shape,
        groups=1,
        rows=rows,
        columns=prod(shape) // max(rows, 1),
        kronecker=False,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Statistics:
    """Means over the rows of what a block saw; None where it was not asked for or does not exist.

    With a_t the inputs of its layer at position t of a row (and 1 for the bias), g_t the gradients at its
    outputs and δ = Σ_t g_t a_tᵀ the row's own gradient, per group:

    Attributes:
        inputs: A = E[Σ_t a_t a_tᵀ], [G, n, n].
        gradients: G = E[1/T Σ_t g_t g_tᵀ], [G, m, m].
        input_vectors: U_A, the eigenvectors of A as columns, in ascending order, [G, n, n].
        gradient_vectors: U_G, those of G, [G, m, m].
        input_eigenvalues: s_a, the eigenvalues of A, [G, n].
        gradient_eigenvalues: s_g, those of G, [G, m].
        eigenvalues: Λ = E[(U_Gᵀ δ U_A)^∘2], [G, m, n]   [INF, Eq. 2].
        diagonal: Φ = E[δ^∘2], [G, m, n]   [INF, Eq. 3].
    """

    inputs: Tensor | None = None
    gradients: Tensor | None = None
    input_vectors: Tensor | None = None
    gradient_vectors: Tensor | None = None
    input_eigenvalues: Tensor | None = None
    gradient_eigenvalues: Tensor | None = None
    eigenvalues: Tensor | None = None
    diagonal: Tensor | None = None
