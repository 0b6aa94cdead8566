"""What is computed of σ = U Vᵀ, without an m × n matrix where none is needed, and with backward passes to match.

Factors are kept row by row: log_u [k, m] over the outputs, log_v [k, n] over the inputs.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Entries of σ that are formed at once where only a sum over them is wanted: they stay in a CPU's cache.
CPU_CHUNK, CHUNK = 2**16, 2**24


def tied_std(log_u: Tensor, log_v: Tensor) -> Tensor:
    """σ = U Vᵀ, [m, n]."""
    return log_u.exp().mT @ log_v.exp()


@torch.no_grad()
def scale_by_tied(matrix: Tensor, log_u: Tensor, log_v: Tensor) -> None:
    """Multiply a matrix [m, n] by σ = U Vᵀ, entry by entry and in place, σ being formed in pieces of rows."""
    u, v = log_u.exp(), log_v.exp()
    step = _rows_at_once(v)
    for rows, part in zip(u.split(step, 1), matrix.split(step), strict=True):
        part.mul_(torch.mm(rows.mT, v))


def sum_log_std(log_u: Tensor, log_v: Tensor) -> Tensor:
    """Σ_ij log(U Vᵀ)_ij, in pieces; rank 1 separates into n Σ log u + m Σ log v."""
    if len(log_u) == 1:
        return log_v.shape[1] * log_u.sum() + log_u.shape[1] * log_v.sum()
    return _SumLogStd.apply(log_u, log_v)  # pyright: ignore[reportReturnType]


def tied_kl(mean: Tensor, log_u: Tensor, log_v: Tensor, prior_std: float) -> Tensor:
    """KL( k-tied ‖ N(0, s²) ) = (‖μ‖² + ⟨UᵀU, VᵀV⟩) / 2s² − Σ log(U Vᵀ) + mn (log s − ½); no σ is kept."""
    return _TiedKL.apply(mean, log_u, log_v, prior_std)  # pyright: ignore[reportReturnType]


def pair_factors(log_factors: Tensor, *, counted: bool) -> Tensor:
    """Products of two factors for all pairs a ≤ b, [k, n] to [q, n] with q = k(k+1)/2.

    With P of the one side, counted, and Q of the other, σ²_ij = Σ_ab P_ab,i Q_ab,j: a layer's variance is
    (X² Qᵀ) P, and no m × n matrix of variances exists.

    Args:
        log_factors: log_u or log_v.
        counted: whether pairs of different factors count twice, which one of the two sides has to do.
    """
    which, log_counts = pairs(len(log_factors), log_factors.dtype, log_factors.device)
    if not counted:
        return (which.mT @ log_factors).exp()
    return torch.addmm(log_counts, which.mT, log_factors).exp()


@lru_cache(maxsize=64)
def pairs(rank: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the pairs a ≤ b of factors: how often each factor is in a pair [k, q], and log c [q, 1], c = 1 or 2."""
    both = [(a, b) for a in range(rank) for b in range(a, rank)]
    often = [[(a == factor) + (b == factor) for a, b in both] for factor in range(rank)]
    log_counts = [[math.log(2) if a != b else 0.0] for a, b in both]
    with torch.inference_mode(False):  # kept for later calls, which may want gradients
        return (
            torch.tensor(often, dtype=dtype, device=device),
            torch.tensor(log_counts, dtype=dtype, device=device),
        )


class _SumLogStd(torch.autograd.Function):
    """Gradients are formed along with the value, so that nothing of size m × n outlives the sum."""

    @staticmethod
    def forward(ctx: Any, log_u: Tensor, log_v: Tensor) -> Tensor:
        u, v = log_u.exp(), log_v.exp()
        total, du, dv = _log_terms(u, v, any(ctx.needs_input_grad))
        ctx.save_for_backward(du.mul_(u), dv.mul_(v))  # d/d log u = u d/du
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        du, dv = ctx.saved_tensors
        return gradients[0] * du, gradients[0] * dv


class _TiedKL(torch.autograd.Function):
    """All terms and all gradients but the mean's in one go."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, log_u: Tensor, log_v: Tensor, prior_std: float) -> Tensor:
        u, v = log_u.exp(), log_v.exp()
        if len(u) == 1:
            (m, n) = u.shape[1], v.shape[1]
            terms = n * log_u.sum() + m * log_v.sum(), u.reciprocal().mul_(n), v.reciprocal().mul_(m)
        else:
            terms = _log_terms(u, v, any(ctx.needs_input_grad[1:3]))
        kl, du, dv = _kl_terms(mean, u, v, *terms, prior_std)
        ctx.precision = prior_std**-2
        ctx.save_for_backward(mean, du, dv)
        return kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        mean, du, dv = ctx.saved_tensors
        d_mean = mean * (gradient * ctx.precision) if ctx.needs_input_grad[0] else None
        return d_mean, gradient * du, gradient * dv, None


class TiedDraw(torch.autograd.Function):
    """μ + σ ε (or σ ε alone) in the shape of μ, and the divergence of `tied_kl`: σ is formed once for both."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_u: Tensor, log_v: Tensor, noise: Tensor, prior_std: float, centred: bool
    ) -> tuple[Tensor, Tensor]:
        u, v = log_u.exp(), log_v.exp()
        std = torch.mm(u.mT, v)
        spread = std.view(mean.shape)
        weight = spread * noise if centred else torch.addcmul(mean, spread, noise)
        inverse = std.reciprocal()
        terms = std.log_().sum(), torch.mm(v, inverse.mT), torch.mm(u, inverse)
        kl, du, dv = _kl_terms(mean, u, v, *terms, prior_std)
        ctx.precision, ctx.centred = prior_std**-2, centred
        ctx.save_for_backward(mean, u, v, du, dv, noise)
        return weight, kl

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_weight, d_kl = gradients
        mean, u, v, du, dv, noise = ctx.saved_tensors
        scale = d_kl * ctx.precision
        d_mean = mean * scale if ctx.centred else torch.addcmul(d_weight, mean, scale)
        slope = (d_weight * noise).reshape(u.shape[1], v.shape[1])  # with respect to σ
        d_u = torch.mm(v, slope.mT).mul_(u).addcmul_(du, d_kl)
        d_v = torch.mm(u, slope).mul_(v).addcmul_(dv, d_kl)
        return d_mean, d_u, d_v, None, None, None


def _log_terms(u: Tensor, v: Tensor, slopes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log(U Vᵀ) and, if asked for, its gradients R V and Rᵀ U with R = 1/(U Vᵀ), in pieces of rows."""
    step = _rows_at_once(v)
    totals, du, dv = [], [], torch.zeros_like(v)
    for rows in u.split(step, 1):
        std = torch.mm(rows.mT, v)
        if slopes:
            inverse = std.reciprocal()
            du.append(torch.mm(v, inverse.mT))
            dv.addmm_(rows, inverse)
        totals.append(std.log_().sum())
    total = totals[0] if len(totals) == 1 else torch.stack(totals).sum()
    return total, torch.cat(du, 1) if slopes else torch.zeros_like(u), dv


def _rows_at_once(v: Tensor) -> int:
    return max(1, (CPU_CHUNK if v.device.type == "cpu" else CHUNK) // v.shape[1])


def _kl_terms(
    mean: Tensor, u: Tensor, v: Tensor, logs: Tensor, du: Tensor, dv: Tensor, prior_std: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence from N(0, s²), and its gradients with respect to log_u and log_v.

    Args:
        mean: of any shape.
        u: U.
        v: V.
        logs: Σ log(U Vᵀ).
        du: its gradient R V; overwritten.
        dv: its gradient Rᵀ U; overwritten.
        prior_std: s.
    """
    precision = prior_std**-2
    uu, vv = torch.mm(u, u.mT), torch.mm(v, v.mT)
    # d/dU = U VᵀV / s² − R V and d/d log u = u d/du; likewise for V
    du = du.addmm_(vv, u, beta=-1, alpha=precision).mul_(u)
    dv = dv.addmm_(uu, v, beta=-1, alpha=precision).mul_(v)
    quadratic = torch.linalg.vector_norm(mean).square_().add_((uu * vv).sum())  # Σ μ² + Σ σ²
    constant = mean.numel() * (math.log(prior_std) - 0.5)
    return quadratic.mul_(precision / 2).sub_(logs).add_(constant), du, dv
