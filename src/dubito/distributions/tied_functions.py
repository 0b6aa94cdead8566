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
    """σ = U Vᵀ, [m, n] [k-tied Normal, Eq. 7 and 8]."""
    return log_u.exp().mT @ log_v.exp()


@torch.no_grad()
def draw_tied(mean: Tensor, u: Tensor, v: Tensor, noise: Tensor) -> None:
    """Turn noise [m, n] into mean + σ ∘ noise in place [k-tied Normal, Eq. 6 and 8], σ in pieces of rows."""
    step = _rows_at_once(v)
    pieces = zip(u.split(step, 1), mean.split(step), noise.split(step), strict=True)
    for rows, centre, part in pieces:
        torch.addcmul(centre, torch.mm(rows.mT, v), part, out=part)


def sum_log_std(log_u: Tensor, log_v: Tensor) -> Tensor:
    """Σ_ij log(U Vᵀ)_ij, in pieces; rank 1 separates into n Σ log u + m Σ log v."""
    if len(log_u) == 1:
        return log_v.shape[1] * log_u.sum() + log_u.shape[1] * log_v.sum()
    return _SumLogStd.apply(log_u, log_v)  # pyright: ignore[reportReturnType]


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
        return (torch.tensor(often, dtype=dtype, device=device), torch.tensor(log_counts, dtype=dtype, device=device))


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


def _log_terms(u: Tensor, v: Tensor, slopes: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log(U Vᵀ) and, if asked for, its gradients R V and Rᵀ U with R = 1/(U Vᵀ), in pieces of rows."""
    step = _rows_at_once(v)
    if u.shape[1] <= step:
        std = torch.mm(u.mT, v)
        inverse = std.reciprocal()
        return std.log_().sum(), torch.mm(v, inverse.mT), torch.mm(u, inverse)
    totals, du, dv = [], [], torch.zeros_like(v)
    for rows in u.split(step, 1):
        std = torch.mm(rows.mT, v)
        if slopes:
            inverse = std.reciprocal()
            du.append(torch.mm(v, inverse.mT))
            dv.addmm_(rows, inverse)
        totals.append(std.log_().sum())
    return torch.stack(totals).sum(), torch.cat(du, 1) if slopes else torch.zeros_like(u), dv


def _rows_at_once(v: Tensor) -> int:
    return max(1, (CPU_CHUNK if v.device.type == "cpu" else CHUNK) // v.shape[1])


def tied_kl_terms(mean: Tensor, u: Tensor, v: Tensor, prior_std: float) -> tuple[Tensor, Tensor, Tensor]:
    """KL( k-tied ‖ N(0, s²) ) and its gradients with respect to log_u and log_v.

    [k-tied Normal, the divergence of Eq. 2 for Eq. 8]

    KL = (‖μ‖² + ⟨UᵀU, VᵀV⟩) / 2s² − Σ log(U Vᵀ) + mn (log s − ½): only the logarithms need σ, which is formed
    in pieces.

    Args:
        mean: of any shape.
        u: U, [k, m].
        v: V, [k, n].
        prior_std: s.
    """
    (rank, m), n, precision = u.shape, v.shape[1], prior_std**-2
    if rank == 1:  # separates: n Σ log u + m Σ log v
        logs = u.log().sum().mul_(n).add_(v.log().sum(), alpha=m)
        du, dv = u.reciprocal().mul_(n), v.reciprocal().mul_(m)
    else:
        logs, du, dv = _log_terms(u, v, slopes=True)
    uu, vv = torch.mm(u, u.mT), torch.mm(v, v.mT)
    # d/dU = U VᵀV / s² − R V with R = 1/σ, and d/d log u = u d/du; likewise for V
    du = du.addmm_(vv, u, beta=-1, alpha=precision).mul_(u)
    dv = dv.addmm_(uu, v, beta=-1, alpha=precision).mul_(v)
    quadratic = torch.linalg.vector_norm(mean).square_().add_(uu.mul_(vv).sum())  # Σ μ² + Σ σ²
    constant = m * n * (math.log(prior_std) - 0.5)
    return quadratic.mul_(precision / 2).sub_(logs).add_(constant), du, dv
