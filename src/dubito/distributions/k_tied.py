"""The k-tied Normal: independent weights whose standard deviations form a matrix of low rank.

σ = U Vᵀ with positive U (m × k) and V (n × k), kept as logarithms and row by row: log_u [k, m], log_v [k, n].
[Swiatkowski et al. 2020, Eq. 8]
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributions import Independent, Normal
from torch.distributions.kl import register_kl

from dubito.errors import DataError

from ..hints import checked
from .base import MatrixDistribution
from .tied_functions import pair_factors, sum_log_std, tied_std


class KTiedNormal(MatrixDistribution):
    """N(mean, diag(vec((U Vᵀ)²))) over an m × n weight matrix (outputs × inputs).

    Args:
        mean: [m, n].
        log_u: logarithm of U, one factor per row, [k, m].
        log_v: logarithm of V, [k, n].
        validate_args: also look for values that are not finite.
    """

    def __init__(self, mean: Tensor, log_u: Tensor, log_v: Tensor, *, validate_args: bool | None = None) -> None:
        if mean.ndim != 2 or not mean.is_floating_point():
            raise DataError(
                f"mean must be an m x n matrix of floats, got {mean.dtype} of shape {tuple(mean.shape)}; "
                "flatten a kernel to outputs x inputs first"
            )
        shapes = tuple(log_u.shape), tuple(log_v.shape)
        rank = shapes[0][0] if shapes[0] else 0
        if rank < 1 or shapes != ((rank, mean.shape[0]), (rank, mean.shape[1])):
            raise DataError(
                f"log_u and log_v must have shapes [k, {mean.shape[0]}] and [k, {mean.shape[1]}] with one k "
                f"of at least 1, got {shapes[0]} and {shapes[1]}"
            )
        self._mean, self.log_u, self.log_v = mean, log_u, log_v
        super().__init__(event_shape=mean.shape, validate_args=validate_args)
        for name, tensor in (("mean", mean), ("log_u", log_u), ("log_v", log_v)):
            if tensor.dtype != mean.dtype or tensor.device != mean.device:
                raise DataError(
                    f"{name} must be {mean.dtype} on {mean.device} like the mean, got {tensor.dtype} on "
                    f"{tensor.device}; move it with .to(mean)"
                )
            if self._validate_args and not tensor.isfinite().all():
                raise DataError(f"{name} must be finite, got NaN or infinity")

    @property
    def rank(self) -> int:
        """The number k of factors."""
        return len(self.log_u)

    @property
    def stddev(self) -> Tensor:
        """σ = U Vᵀ, [m, n]   [k-tied Normal, Eq. 7 and 8]."""
        return tied_std(self.log_u, self.log_v)

    @property
    def variance(self) -> Tensor:
        """(U Vᵀ)², entry by entry, [m, n]."""
        return self.stddev.square()

    @checked
    def rsample(
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape `sample_shape` + [m, n], differentiable in the parameters."""
        return torch.addcmul(self._mean, self.stddev, self._unit_noise(sample_shape, self._mean.shape, generator))

    @checked
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of each matrix of [..., m, n]."""
        if value.shape[-2:] != self.event_shape:
            m, n = self.event_shape
            raise DataError(f"value must have shape [..., {m}, {n}], got {tuple(value.shape)}")
        if self._validate_args:
            self._validate_sample(value)
        # log N = −½ Σ ((w − μ)/σ)² − Σ log σ − mn/2 log 2π   [k-tied Normal, Eq. 8]
        squares = ((value - self._mean) / self.stddev).square().sum((-2, -1))
        return -0.5 * (squares + self._mean.numel() * math.log(2 * math.pi)) - sum_log_std(self.log_u, self.log_v)

    def entropy(self) -> Tensor:
        """In nats: Σ log σ + mn/2 (1 + log 2π)."""
        return sum_log_std(self.log_u, self.log_v) + 0.5 * self._mean.numel() * (1 + math.log(2 * math.pi))

    def __repr__(self) -> str:
        return f"KTiedNormal({' x '.join(map(str, self.event_shape))}, rank={self.rank})"


@register_kl(KTiedNormal, Independent)
def _kl_tied_independent(p: KTiedNormal, q: Independent) -> Tensor:
    prior = q.base_dist
    if not isinstance(prior, Normal) or q.event_shape != p.event_shape:
        raise NotImplementedError
    # KL = ½ Σ ρ (σ² + (μ − ν)²) − Σ log σ − ½ Σ log ρ − mn/2 for the prior N(ν, 1/ρ), with σ² = Pᵀ Q
    precision = prior.scale**-2
    rows, columns = pair_factors(p.log_u, counted=True), pair_factors(p.log_v, counted=False)
    variances = ((rows @ precision) * columns).sum()
    errors = (precision * (p.mean - prior.loc).square()).sum()
    logs = precision.log().sum() + p.mean.numel()
    return (variances + errors - logs) / 2 - sum_log_std(p.log_u, p.log_v)
