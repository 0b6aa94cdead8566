"""The inverse Wishart: a distribution over covariance matrices, conjugate to Gaussian noise."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.kl import register_kl

from dubito.errors import ConfigError

from ..hints import checked
from .base import GeneratedDistribution
from .matrix_normal import log_diagonal, require_lower, require_matrix, require_square_tril


class InverseWishart(GeneratedDistribution):
    """Σ ~ W⁻¹(U, u): Σ⁻¹ is Wishart with scale U⁻¹ and u degrees of freedom.

    All tensors may have leading batch axes.

    Args:
        dof: u, above p − 1; a number or [...].
        scale_tril: lower L with L Lᵀ = U, [..., p, p].
        validate_args: check that the factor is one.
    """

    def __init__(self, dof: float | Tensor, scale_tril: Tensor, *, validate_args: bool | None = None) -> None:
        require_matrix("scale_tril", scale_tril)
        size = scale_tril.shape[-1]
        require_square_tril("scale_tril", scale_tril, size, scale_tril)
        told = isinstance(dof, Tensor)  # a number is judged without a look at the device
        most = torch.finfo(scale_tril.dtype).max
        if not ((dof > size - 1) & (dof < most)).all() if told else not size - 1 < dof < most:
            raise ConfigError(f"dof must be above p - 1 = {size - 1}, got {dof}")
        self.dof = dof.to(scale_tril) if told else scale_tril.new_full((), dof)
        batch = torch.broadcast_shapes(self.dof.shape, scale_tril.shape[:-2])
        self.scale_tril = scale_tril
        super().__init__(batch, torch.Size((size, size)), validate_args=validate_args)
        if self._validate_args:
            require_lower("scale_tril", scale_tril)

    @property
    def support(self) -> constraints.Constraint:
        """Symmetric positive definite matrices."""
        return constraints.positive_definite

    @property
    def mode(self) -> Tensor:
        """U / (u + p + 1); Eq. 21 of BALI."""
        return self._scale() / (self.dof + self.event_shape[0] + 1)[..., None, None]

    @property
    def mean(self) -> Tensor:
        """U / (u − p − 1), NaN where u is too small for one."""
        over = self.dof - self.event_shape[0] - 1
        return self._scale() / torch.where(over > 0, over, torch.nan)[..., None, None]

    @property
    def mean_precision(self) -> Tensor:
        """E Σ⁻¹ = u U⁻¹."""
        return self.dof[..., None, None] * torch.cholesky_inverse(self.scale_tril)

    @property
    def mean_logdet(self) -> Tensor:
        """E log|Σ| = log|U| − p log 2 − ψ_p(u/2)."""
        size = self.event_shape[0]
        logdet = 2 * log_diagonal(self.scale_tril)
        return logdet - size * math.log(2) - multivariate_digamma(self.dof / 2, size)

    def root(self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """F with F Fᵀ = Σ of a draw, not triangular, `sample_shape` + [..., p, p]."""
        tril, size = self.scale_tril, self.event_shape[0]
        shape = torch.Size(sample_shape) + self.batch_shape
        # Bartlett: Σ⁻¹ = L⁻ᵀ A Aᵀ L⁻¹ with A lower, A_ii² ~ χ²(u − i), A_ij ~ N(0, 1); so F = L A⁻ᵀ.
        places = torch.arange(size, dtype=tril.dtype, device=tril.device)
        half = ((self.dof.unsqueeze(-1) - places) / 2).expand(*shape, size)
        # PyTorch's Chi2 takes no generator; this is what it draws with.
        gammas = torch._standard_gamma(half, generator=generator)  # pyright: ignore[reportPrivateImportUsage]
        diagonal = (2 * gammas).sqrt()
        noise = torch.randn(*shape, size, size, generator=generator, dtype=tril.dtype, device=tril.device)
        bartlett = noise.tril(-1) + diagonal.diag_embed()
        return torch.linalg.solve_triangular(bartlett.mT, tril, upper=True, left=False)

    @checked
    def rsample(
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape `sample_shape` + [..., p, p], differentiable in the parameters."""
        root = self.root(sample_shape, generator=generator)
        return root @ root.mT

    @checked
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of each matrix of [..., p, p]."""
        if self._validate_args:
            self._validate_sample(value)
        size, half = self.event_shape[0], self.dof / 2
        # log W⁻¹ = u/2 log|U| − up/2 log 2 − log Γ_p(u/2) − (u + p + 1)/2 log|Σ| − ½ tr(U Σ⁻¹)   [BALI, Eq. 56]
        factor = torch.linalg.cholesky(value)
        white = torch.linalg.solve_triangular(factor, self.scale_tril, upper=False)
        return (
            2 * half * log_diagonal(self.scale_tril)
            - half * size * math.log(2)
            - torch.mvlgamma(half, size)
            - (self.dof + size + 1) * log_diagonal(factor)
            - 0.5 * white.square().sum((-2, -1))
        )

    def entropy(self) -> Tensor:
        """In nats."""
        size, half = self.event_shape[0], self.dof / 2
        # −E log W⁻¹, with E tr(U Σ⁻¹) = up
        constant = torch.mvlgamma(half, size) + half * size * (1 + math.log(2))
        logs = (self.dof + size + 1) / 2 * self.mean_logdet - 2 * half * log_diagonal(self.scale_tril)
        return (constant + logs).expand(self.batch_shape)

    def _scale(self) -> Tensor:
        return (self.scale_tril @ self.scale_tril.mT).expand(*self.batch_shape, *self.event_shape)

    def __repr__(self) -> str:
        return f"InverseWishart({' x '.join(map(str, self.event_shape))}, batch {tuple(self.batch_shape)})"


@register_kl(InverseWishart, InverseWishart)
def _kl_inverse_wishart(p: InverseWishart, q: InverseWishart) -> Tensor:
    if p.event_shape != q.event_shape:
        raise NotImplementedError
    size = p.event_shape[0]
    # KL = u_q/2 (log|U_p| − log|U_q|) + u_p/2 (tr(U_q U_p⁻¹) − p) + log Γ_p(u_q/2)/Γ_p(u_p/2)
    #      + (u_p − u_q)/2 ψ_p(u_p/2), that of the Wisharts of the inverses.
    white = torch.linalg.solve_triangular(p.scale_tril, q.scale_tril, upper=False).square().sum((-2, -1))
    logs = q.dof * (log_diagonal(p.scale_tril) - log_diagonal(q.scale_tril))
    gammas = torch.mvlgamma(q.dof / 2, size) - torch.mvlgamma(p.dof / 2, size)
    turned = (p.dof - q.dof) / 2 * multivariate_digamma(p.dof / 2, size)
    return logs + p.dof / 2 * (white - size) + gammas + turned


def multivariate_digamma(values: Tensor, size: int) -> Tensor:
    """ψ_p(a) = Σ_i ψ(a − i/2), the derivative of log Γ_p."""
    places = torch.arange(size, dtype=values.dtype, device=values.device) / 2
    return torch.digamma(values.unsqueeze(-1) - places).sum(-1)
