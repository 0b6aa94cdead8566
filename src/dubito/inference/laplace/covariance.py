"""J P⁻¹ Jᵀ of one weight matrix: the covariance that its distribution gives to the network's outputs, for each row.

The Jacobian of a row's output c is J_c = Σ_t g_ct a_tᵀ over the positions t that its layer sees. With one position
it stays factored; with several it is formed for as many rows, or rows of the weight, as fit into `CHUNK` numbers.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ...distributions import EigenKroneckerNormal, KroneckerNormal, SparseInformationNormal, StructuredNormal
from ...distributions.linalg import sandwich

#: Numbers of the largest temporary array: beyond, it leaves the cache.
CHUNK = 1 << 20
#: A difference that leaves less than this many roundings of its first term is taken again in float64.
CANCELLED = 1e4

#: Rows of the weight, and their part [b, C, i, n] of some examples' Jacobians.
JacobianRows = tuple[slice, Tensor]


def output_covariances(
    normals: Sequence[StructuredNormal], inputs: Tensor, gradients: Tensor
) -> list[Tensor]:
    """J P⁻¹ Jᵀ of every row, [B, C, C], under each of some distributions.

    Args:
        normals: of one m × n matrix: the same information at several scales or under several priors.
        inputs: a, [B, T, n].
        gradients: g, [B, C, m, T].
    """
    first = normals[0]
    if isinstance(first, KroneckerNormal | EigenKroneckerNormal):
        # P⁻¹ = (U_G ⊗ U_A) diag(1/p) (U_G ⊗ U_A)ᵀ: diagonal for rotated factors
        inputs = torch.einsum("btn,nk->btk", inputs, first.input_vectors)
        gradients = torch.einsum("bcmt,mk->bckt", gradients, first.output_vectors)
    kernels = [
        _LowRankKernel(normal, normal.cholesky)
        if isinstance(normal, SparseInformationNormal)
        else _DiagonalKernel(normal)
        for normal in normals
    ]
    if inputs.shape[1] == 1:
        return [kernel.factored(inputs[:, 0], gradients[..., 0]) for kernel in kernels]
    size = gradients.shape[1] * gradients.shape[2] * inputs.shape[2]
    step = max(1, CHUNK // size)
    by_kernel: list[list[Tensor]] = [[] for _ in kernels]
    for start in range(0, len(inputs), step):
        rows = slice(start, start + step)
        parts = _parts(inputs[rows], gradients[rows], size)
        for kernel, pieces in zip(kernels, by_kernel, strict=True):
            pieces.append(kernel.formed(parts))
    return [torch.cat(pieces) for pieces in by_kernel]


def dense_covariance(normal: StructuredNormal, jacobians: Tensor) -> Tensor:
    """The same for a diagonal precision, from the Jacobians [B, C, m, n] themselves."""
    return (normal.variance * jacobians).flatten(2) @ jacobians.flatten(2).mT


def _parts(inputs: Tensor, gradients: Tensor, size: int) -> Callable[[], Iterable[JacobianRows]]:
    """The Jacobians of some rows: formed once where they fit into `CHUNK`, else in parts, each time anew."""
    m = gradients.shape[2]
    height = m if size <= CHUNK else max(1, CHUNK * m // size)

    def formed() -> Iterable[JacobianRows]:
        for first in range(0, m, height):
            part = slice(first, first + height)
            yield part, torch.einsum("bcit,btn->bcin", gradients[:, :, part], inputs)

    if height < m:
        return formed
    once = list(formed())
    return lambda: once


class _DiagonalKernel:
    """P⁻¹ in a basis where it is diagonal."""

    def __init__(self, normal: StructuredNormal) -> None:
        self.normal = normal

    def variance(self) -> Tensor:
        """Its diagonal, [m, n]."""
        if isinstance(self.normal, KroneckerNormal | EigenKroneckerNormal):
            return 1 / self.normal.precision_eigenvalues
        return self.normal.variance

    def factored(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        """J P⁻¹ Jᵀ for J_c = g_c aᵀ with a [b, n] and g [b, C, m]."""
        # Σ_ij v_ij (g_ci a_j) (g_c'i a_j) = Σ_i g_ci g_c'i Σ_j v_ij a_j²
        weight = inputs.square() @ self.variance().mT  # [b, m]
        return (gradients * weight.unsqueeze(1)) @ gradients.mT

    def formed(self, parts: Callable[[], Iterable[JacobianRows]]) -> Tensor:
        """J P⁻¹ Jᵀ for Jacobians that are written out."""
        variance = self.variance()
        return sum((variance[i] * j).flatten(2) @ j.flatten(2).mT for i, j in parts())  # pyright: ignore


class _LowRankKernel(_DiagonalKernel):
    """P⁻¹ = diag(1/d) − d^-½ V_s (R Rᵀ)⁻¹ V_sᵀ d^-½, so J P⁻¹ Jᵀ = J diag(1/d) Jᵀ − Yᵀ Y, Y = R⁻¹ V_sᵀ d^-½ Jᵀ.

    Args:
        normal: the distribution.
        factor: R, in whose type all is computed.
    """

    normal: SparseInformationNormal

    def __init__(self, normal: SparseInformationNormal, factor: Tensor) -> None:
        super().__init__(normal)
        self.factor = factor
        self.left, self.right = normal.output_vectors.to(factor), normal.input_vectors.to(factor)
        self.scale = normal.root_eigenvalues.to(factor)

    def variance(self) -> Tensor:
        # 1/d, written out: the distribution would keep it, and a grid has many distributions.
        correction = self.normal.correction.to(self.factor).clamp(min=0)
        return 1 / (self.normal.num_data * correction + self.normal.prior_precision)

    def weight(self) -> Tensor:
        """s/d, [m, n]: V_sᵀ d^-½ J = l ∘ (U_gᵀ (s/d ∘ J) U_a)."""
        return self.normal.congruence.to(self.factor) * self.variance()

    def factored(self, inputs: Tensor, gradients: Tensor) -> Tensor:
        a, g = inputs.to(self.factor), gradients.to(self.factor)
        covariance, weight = super().factored(a, g), self.weight()
        first_term = covariance.diagonal(dim1=1, dim2=2).clone()
        (m, height), (n, width), outputs = self.left.shape, self.right.shape, g.shape[1]
        left, right = self.left.mT.contiguous(), self.right.mT.contiguous()  # products of them stay in order
        step = max(1, CHUNK // max(width * n, outputs * height * m))
        for start in range(0, len(a), step):
            rows = slice(start, start + step)
            # U_gᵀ (w ∘ g_c aᵀ) U_a = (U_g ∘ g_c)ᵀ Q, where Q = (w ∘ a) U_a is shared by all outputs
            shared = (a[rows].unsqueeze(1) * right).flatten(0, 1) @ weight.mT  # [b·a, m]
            scaled = (g[rows].unsqueeze(2) * left).flatten(1, 2)  # [b, C·g, m]
            projected = scaled @ shared.view(-1, width, m).mT
            covariance[rows] -= self._taken(projected.view(-1, outputs, height, width))
        if self._is_lost(covariance, first_term):
            return _LowRankKernel(self.normal, self.normal.precise_cholesky).factored(inputs, gradients)
        return covariance.to(inputs)

    def formed(self, parts: Callable[[], Iterable[JacobianRows]]) -> Tensor:
        variance, weight = self.variance(), self.weight()
        covariance = projected = torch.zeros(()).to(self.factor)
        like = self.normal.mean
        for i, jacobian in parts():
            j = jacobian.to(self.factor)
            covariance = covariance + (variance[i] * j).flatten(2) @ j.flatten(2).mT
            projected = projected + sandwich(self.left[i].mT, weight[i] * j, self.right)
        first_term = covariance.diagonal(dim1=1, dim2=2)
        covariance = covariance - self._taken(projected)
        if self._is_lost(covariance, first_term):
            return _LowRankKernel(self.normal, self.normal.precise_cholesky).formed(parts)
        return covariance.to(like)

    def _taken(self, projected: Tensor) -> Tensor:
        """Yᵀ Y from U_gᵀ (s/d ∘ J) U_a of some rows, [b, C, g, a]."""
        columns = (self.scale * projected).flatten(2)
        # (R⁻¹ X)ᵀ = Xᵀ R⁻ᵀ: from the right, rows need not be turned into columns
        solved = torch.linalg.solve_triangular(
            self.factor.mT, columns.flatten(0, 1), upper=True, left=False
        ).view(columns.shape)
        return solved @ solved.mT

    def _is_lost(self, covariance: Tensor, first_term: Tensor) -> bool:
        """Whether so little is left of the first term that rounding matters, and float64 can do better."""
        least = CANCELLED * torch.finfo(self.factor.dtype).eps * first_term
        lost = (covariance.diagonal(dim1=1, dim2=2) < least).any()
        return self.factor.dtype != torch.float64 and bool(lost)
