"""The matrix normal: a Gaussian over matrices whose covariance is a Kronecker product."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.kl import register_kl

from dubito.errors import ConfigError, DataError
from dubito.hints import checked

from .base import MatrixDistribution


class MatrixNormal(MatrixDistribution):
    """W ~ MN(M, R, Σ): Cov(vec W) = Σ ⊗ R, for matrices [n, p] with R over the rows and Σ over the columns.

    All tensors may have leading batch axes.

    Args:
        mean: M, [..., n, p].
        row_scale_tril: lower L with L Lᵀ = R, [..., n, n]; this or `row_precision_tril`.
        row_precision_tril: lower L with L Lᵀ = R⁻¹.
        column_scale_tril: lower C with C Cᵀ = Σ, [..., p, p].
        validate_args: check shapes' contents: finite, lower, with a positive diagonal.
    """

    def __init__(
        self,
        mean: Tensor,
        *,
        row_scale_tril: Tensor | None = None,
        row_precision_tril: Tensor | None = None,
        column_scale_tril: Tensor,
        validate_args: bool | None = None,
    ) -> None:
        if (row_scale_tril is None) == (row_precision_tril is None):
            raise ConfigError("MatrixNormal takes one of row_scale_tril and row_precision_tril")
        rows = row_scale_tril if row_scale_tril is not None else row_precision_tril
        assert rows is not None
        require_matrix("mean", mean)
        n, p = mean.shape[-2:]
        require_square_tril("row_scale_tril or row_precision_tril", rows, n, mean)
        require_square_tril("column_scale_tril", column_scale_tril, p, mean)
        batch = torch.broadcast_shapes(mean.shape[:-2], rows.shape[:-2], column_scale_tril.shape[:-2])
        self._mean = mean.expand(*batch, n, p)
        self.row_scale_tril, self.row_precision_tril = row_scale_tril, row_precision_tril
        self.column_scale_tril = column_scale_tril
        super().__init__(batch, torch.Size((n, p)), validate_args=validate_args)
        if self._validate_args:
            require_lower("row_scale_tril or row_precision_tril", rows)
            require_lower("column_scale_tril", column_scale_tril)

    @property
    def variance(self) -> Tensor:
        """Var W_ij = R_ii Σ_jj, [..., n, p]."""
        columns = self.column_scale_tril.square().sum(-1)
        return (self._row_root().square().sum(-1).unsqueeze(-1) * columns.unsqueeze(-2)).expand_as(self._mean)

    @property
    def row_logdet(self) -> Tensor:
        """The logarithm of |R|."""
        if self.row_scale_tril is not None:
            return 2 * log_diagonal(self.row_scale_tril)
        assert self.row_precision_tril is not None
        return -2 * log_diagonal(self.row_precision_tril)

    def row_whitened(self, values: Tensor) -> Tensor:
        """X with XᵀX = Vᵀ R⁻¹ V for V [..., n, k]."""
        if self.row_scale_tril is not None:
            return torch.linalg.solve_triangular(self.row_scale_tril, values, upper=False)
        assert self.row_precision_tril is not None
        return self.row_precision_tril.mT @ values

    @checked
    def rsample(
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape `sample_shape` + [..., n, p], differentiable in the parameters."""
        return self.placed(self._unit_noise(sample_shape, self._mean.shape, generator))

    def placed(self, noise: Tensor) -> Tensor:
        """M + R^½ A Σ^½ᵀ for given unit noise A [..., n, p]; Eq. 22 of BALI with the + M it omits."""
        right = noise @ self.column_scale_tril.mT
        if self.row_scale_tril is not None:
            return self._mean + self.row_scale_tril @ right
        assert self.row_precision_tril is not None  # L Lᵀ = R⁻¹, so L⁻ᵀ is a root of R
        return self._mean + torch.linalg.solve_triangular(self.row_precision_tril.mT, right, upper=True)

    @checked
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of each matrix of [..., n, p]."""
        if self._validate_args:
            self._validate_sample(value)
        n, p = self.event_shape
        # log MN = −½ (np log 2π + p log|R| + n log|Σ| + tr[Σ⁻¹ (W − M)ᵀ R⁻¹ (W − M)])   [BALI, Eq. 58]
        white = self.row_whitened(value - self._mean).mT
        white = torch.linalg.solve_triangular(self.column_scale_tril, white, upper=False)
        logs = p * self.row_logdet + 2 * n * log_diagonal(self.column_scale_tril)
        return -0.5 * (n * p * math.log(2 * math.pi) + logs + white.square().sum((-2, -1)))

    def entropy(self) -> Tensor:
        """In nats."""
        n, p = self.event_shape
        logs = p * self.row_logdet + 2 * n * log_diagonal(self.column_scale_tril)
        return (0.5 * (n * p * (1 + math.log(2 * math.pi)) + logs)).expand(self.batch_shape)

    def expand(self, batch_shape: Sequence[int], _instance: "MatrixNormal | None" = None) -> "MatrixNormal":
        """The same distribution over more batch axes."""
        return MatrixNormal(
            self._mean.expand(*batch_shape, *self.event_shape),
            row_scale_tril=self.row_scale_tril,
            row_precision_tril=self.row_precision_tril,
            column_scale_tril=self.column_scale_tril,
            validate_args=False,
        )

    def _row_root(self) -> Tensor:
        """A root F of R, F Fᵀ = R."""
        if self.row_scale_tril is not None:
            return self.row_scale_tril
        assert self.row_precision_tril is not None
        eye = torch.eye(self.event_shape[0], dtype=self._mean.dtype, device=self._mean.device)
        return torch.linalg.solve_triangular(self.row_precision_tril.mT, eye, upper=True)

    def __repr__(self) -> str:
        return f"MatrixNormal({' x '.join(map(str, self.event_shape))}, batch {tuple(self.batch_shape)})"


@register_kl(MatrixNormal, MatrixNormal)
def _kl_matrix_normal(p: MatrixNormal, q: MatrixNormal) -> Tensor:
    # KL = ½ (tr(R_q⁻¹ R_p) tr(Σ_q⁻¹ Σ_p) + ‖ΔM‖² − np + p log|R_q|/|R_p| + n log|Σ_q|/|Σ_p|),
    # the norm of ΔM being that of q's precision.
    if p.event_shape != q.event_shape:
        raise NotImplementedError
    n, k = p.event_shape
    rows = q.row_whitened(p._row_root()).square().sum((-2, -1))
    columns = torch.linalg.solve_triangular(q.column_scale_tril, p.column_scale_tril, upper=False)
    white = q.row_whitened(p.mean - q.mean).mT
    white = torch.linalg.solve_triangular(q.column_scale_tril, white, upper=False).square().sum((-2, -1))
    logs = k * (q.row_logdet - p.row_logdet)
    logs = logs + 2 * n * (log_diagonal(q.column_scale_tril) - log_diagonal(p.column_scale_tril))
    return 0.5 * (rows * columns.square().sum((-2, -1)) + white - n * k + logs)


def log_diagonal(tril: Tensor) -> Tensor:
    """Σ log L_ii, half the logarithm of the determinant of L Lᵀ."""
    return tril.diagonal(0, -2, -1).log().sum(-1)


def require_matrix(name: str, matrix: Tensor) -> None:
    """Refuse what is not a stack of matrices in single or double precision."""
    if matrix.ndim < 2 or 0 in matrix.shape[-2:] or matrix.dtype not in (torch.float32, torch.float64):
        raise DataError(
            f"{name} must be matrices [..., n, p] of float32 or float64, got {matrix.dtype} of shape "
            f"{tuple(matrix.shape)}"
        )


def require_square_tril(name: str, tril: Tensor, size: int, like: Tensor) -> None:
    """Refuse what is not a stack of size × size matrices like another tensor."""
    if tril.ndim < 2 or tril.shape[-2:] != (size, size):
        raise DataError(f"{name} must have shape [..., {size}, {size}], got {tuple(tril.shape)}")
    if tril.dtype != like.dtype or tril.device != like.device:
        raise DataError(
            f"{name} must be {like.dtype} on {like.device} like the mean, got {tril.dtype} on {tril.device}"
        )


def require_lower(name: str, tril: Tensor) -> None:
    """Refuse what is not a Cholesky factor, such as the covariance itself."""
    if not constraints.lower_cholesky.check(tril).all():
        raise DataError(
            f"{name} must hold lower triangular matrices with a positive diagonal; take "
            "torch.linalg.cholesky of a covariance"
        )
