"""Bayesian linear regression with many outputs and unknown noise, in closed form.

The model is y_n = Wᵀ x_n + ε_n, ε_n ~ N(0, Σ), with W [n, p] and Σ [p, p] both unknown [BALI, Section 3.1].
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions.kl import register_kl

from dubito.errors import DataError

from ..hints import checked
from .base import GeneratedDistribution
from .inverse_wishart import InverseWishart, _kl_inverse_wishart
from .matrix_normal import MatrixNormal


class WeightsAndNoise(NamedTuple):
    """A value of the joint distribution.

    Attributes:
        weights: W, [..., n, p].
        covariance: Σ, [..., p, p].
    """

    weights: Tensor
    covariance: Tensor


class MatrixNormalInverseWishart(GeneratedDistribution):
    """Σ ~ W⁻¹(U, u) and W | Σ ~ MN(M, R, Σ).

    All tensors may have leading batch axes.

    Args:
        mean: M, [..., n, p].
        row_precision_tril: lower L with L Lᵀ = R⁻¹, [..., n, n].
        scale_tril: lower L with L Lᵀ = U, [..., p, p].
        dof: u, above p − 1; a number or [...].
        validate_args: check that factors are factors.
    """

    def __init__(
        self,
        mean: Tensor,
        *,
        row_precision_tril: Tensor,
        scale_tril: Tensor,
        dof: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        #: The marginal of Σ.
        self.noise = InverseWishart(dof, scale_tril, validate_args=validate_args)
        self._unit = MatrixNormal(
            mean,
            row_precision_tril=row_precision_tril,
            column_scale_tril=scale_tril,  # any: only the rows of it are read
            validate_args=validate_args,
        )
        self.row_precision_tril = row_precision_tril
        batch = torch.broadcast_shapes(self._unit.batch_shape, self.noise.batch_shape)
        super().__init__(batch, self._unit.event_shape, validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        """M, the mean of W."""
        return self._unit.mean

    @property
    def mode(self) -> WeightsAndNoise:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The most probable pair: M with U / (u + n + p + 1); that of Σ by itself is `noise.mode`."""
        n, p = self.event_shape
        scale = self.noise.scale_tril @ self.noise.scale_tril.mT
        return WeightsAndNoise(self.mean, scale / (self.noise.dof + n + p + 1)[..., None, None])

    @checked
    def given(self, covariance: Tensor) -> MatrixNormal:
        """The distribution of W for one Σ."""
        return MatrixNormal(
            self.mean,
            row_precision_tril=self.row_precision_tril,
            column_scale_tril=torch.linalg.cholesky(covariance),
            validate_args=self._validate_args,
        )

    @checked
    def rsample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> WeightsAndNoise:
        """Pairs, differentiable in the parameters."""
        mean = self.mean
        root = self.noise.root(sample_shape, generator=generator)
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        noise = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
        # W = M + L⁻ᵀ A Fᵀ with F Fᵀ = Σ: any root of Σ serves
        drawn = torch.linalg.solve_triangular(self.row_precision_tril.mT, noise @ root.mT, upper=True)
        return WeightsAndNoise(mean + drawn, root @ root.mT)

    @checked
    def sample(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> WeightsAndNoise:
        """`rsample` without gradients."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)

    @checked
    def log_prob(self, value: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore
        """The log-density of pairs (W, Σ)."""
        weights, covariance = value
        return self.noise.log_prob(covariance) + self.given(covariance).log_prob(weights)

    def entropy(self) -> Tensor:
        """In nats."""
        n, p = self.event_shape
        # H(Σ) + E H(W | Σ), the latter ½ (np (1 + log 2π) + p log|R| + n E log|Σ|)
        logs = p * self._unit.row_logdet + n * self.noise.mean_logdet
        conditional_entropy = 0.5 * (n * p * (1 + math.log(2 * math.pi)) + logs)
        return (self.noise.entropy() + conditional_entropy).expand(self.batch_shape)

    @checked
    def updated(self, xx: Tensor, xy: Tensor, yy: Tensor, num_data: float) -> "MatrixNormalInverseWishart":
        """The posterior after data whose sums of products are given; Eq. 16 of BALI by one factorisation.

        Args:
            xx: XᵀX, [..., n, n].
            xy: XᵀY, [..., n, p].
            yy: YᵀY, [..., p, p].
            num_data: N.
        """
        lower, mean = self.row_precision_tril, self.mean
        prior = lower @ lower.mT
        corner = prior @ mean
        scale = self.noise.scale_tril @ self.noise.scale_tril.mT
        joint = joint_matrix(prior + xx, corner + xy, scale + mean.mT @ corner + yy)
        factor, info = torch.linalg.cholesky_ex(joint)
        if bool(info.any()):
            raise DataError(
                "xx, xy and yy must be XᵀX, XᵀY and YᵀY of the same rows; with these the posterior's matrices "
                "are not positive definite"
            )
        mean, row_precision_tril, scale_tril = posterior_factors(factor, self.event_shape[0])
        return MatrixNormalInverseWishart(
            mean,
            row_precision_tril=row_precision_tril,
            scale_tril=scale_tril,
            dof=self.noise.dof + num_data,
            validate_args=False,
        )

    def __repr__(self) -> str:
        shape, batch = " x ".join(map(str, self.event_shape)), tuple(self.batch_shape)
        return f"MatrixNormalInverseWishart({shape}, batch {batch})"


def joint_matrix(xx: Tensor, xy: Tensor, yy: Tensor) -> Tensor:
    """[[xx, xy], [xyᵀ, yy]]."""
    return torch.cat([torch.cat([xx, xy], -1), torch.cat([xy.mT, yy], -1)], -2)


def posterior_factors(factor: Tensor, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """M [..., n, p], and roots of R⁻¹ and of U, from the Cholesky factor of the joint matrix.

    With J = [[R⁻¹, R⁻¹M], [·, U_0 + M_0ᵀR_0⁻¹M_0 + YᵀY]] = L Lᵀ: L₁₁L₁₁ᵀ = R⁻¹, M = L₁₁⁻ᵀ L₂₁ᵀ, and L₂₂L₂₂ᵀ is the
    Schur complement, which is U of Eq. 16c without its cancelling subtraction.
    """
    first, second, last = (factor[..., :inputs, :inputs], factor[..., inputs:, :inputs], factor[..., inputs:, inputs:])
    return torch.linalg.solve_triangular(first.mT, second.mT, upper=True), first, last


@register_kl(MatrixNormalInverseWishart, MatrixNormalInverseWishart)
def _kl_joint(p: MatrixNormalInverseWishart, q: MatrixNormalInverseWishart) -> Tensor:
    if p.event_shape != q.event_shape:
        raise NotImplementedError
    n, k = p.event_shape
    # KL(Σ) + E_p KL(W | Σ) = … + ½ (p (tr(R_q⁻¹R_p) − n + log|R_q|/|R_p|) + tr(ΔMᵀR_q⁻¹ΔM E Σ⁻¹))
    rows = q._unit.row_whitened(p._unit._row_root()).square().sum((-2, -1))
    logs = q._unit.row_logdet - p._unit.row_logdet
    white = q._unit.row_whitened(p.mean - q.mean)
    apart = ((white @ p.noise.mean_precision) * white).sum((-2, -1))
    return _kl_inverse_wishart(p.noise, q.noise) + 0.5 * (k * (rows - n + logs) + apart)
