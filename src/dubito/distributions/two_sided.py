"""Draws of a matrix from both sides, M + L (E ∘ s) R: written out, or as functions of few inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class TwoSided:
    """What turns unit noise E [m, n] into a draw's deviation L (E ∘ s) R from the mean.

    Attributes:
        left: L, [m, m].
        right: R, [n, n], or its inverse.
        scale: s, [m, n]; None for ones.
        inverted: whether `right` is the inverse of R, lower triangular.
    """

    left: Tensor
    right: Tensor
    scale: Tensor | None = None
    inverted: bool = False

    def noise(self, generator: torch.Generator | None) -> Tensor:
        """E ∘ s of a draw."""
        shape, like = (len(self.left), len(self.right)), self.left
        unit = torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)
        return unit if self.scale is None else unit.mul_(self.scale)

    def turned(self, x: Tensor) -> Tensor:
        """R x for each row x of [N, n], or of [N, n − 1] where the last input is always 1."""
        biased = x.shape[1] < len(self.right)
        if not self.inverted:
            inputs = self.right[:, : x.shape[1]]
            return F.linear(x, inputs, self.right[:, -1] if biased else None)
        columns = torch.cat([x, x.new_ones(len(x), 1)], 1).mT if biased else x.mT
        return torch.linalg.solve_triangular(self.right, columns, upper=False).mT


def products_saved(rows: int, columns: int, cases: float) -> float:
    """By how many products an m × n matrix, written out, exceeds its functions of so many inputs."""
    m, n = rows, columns
    return m * n * (m + n) - cases * (n * n + m * n + m * m)
