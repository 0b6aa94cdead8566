"""Draws and divergences of many weights as one node of the graph, in few passes over memory."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..distributions.tied_functions import tied_kl_terms


class Term(ABC):
    """One weight's divergence from N(0, s²) and, where there is noise, its draw.

    Args:
        tensors: what it is computed of, the mean first.
        prior_std: s.
        noise: ε in the shape of the weight, or None for no draw.
        centred: draw σ ε instead of μ + σ ε.
    """

    def __init__(self, *tensors: Tensor, prior_std: float, noise: Tensor | None = None, centred: bool = False) -> None:
        self.tensors, self.prior_std, self.noise, self.centred = tensors, prior_std, noise, centred

    @abstractmethod
    def forward(self) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """The divergence, the draw, and what the way back needs."""

    @abstractmethod
    def backward(self, saved: Sequence[Tensor], d_kl: Tensor, d_draw: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients with respect to `tensors`."""

    def _drawn(self, mean: Tensor, std: Tensor) -> Tensor | None:
        if self.noise is None:
            return None
        return std * self.noise if self.centred else torch.addcmul(mean, std, self.noise)

    def _d_mean(self, mean: Tensor, scale: Tensor, d_draw: Tensor | None) -> Tensor:
        """μ/s² of the divergence, and what comes back through the draw."""
        if d_draw is None or self.centred:
            return mean * scale
        return torch.addcmul(d_draw, mean, scale)


class StdTerm(Term):
    """Of the mean and σ itself, without a draw."""

    def forward(self) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        mean, std = self.tensors
        return own_kl(mean, std, self.prior_std), None, (mean, std)

    def backward(self, saved: Sequence[Tensor], d_kl: Tensor, d_draw: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, std = saved
        scale = d_kl / self.prior_std**2
        return mean * scale, own_slope(std, self.prior_std**2, scale)


class OwnTerm(Term):
    """Of the mean and raw_std, with σ = softplus(raw_std)."""

    def forward(self) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        mean, raw_std = self.tensors
        std = F.softplus(raw_std)
        saved = (mean, raw_std, std) if self.noise is None else (mean, raw_std, std, self.noise)
        return own_kl(mean, std, self.prior_std), self._drawn(mean, std), saved

    def backward(self, saved: Sequence[Tensor], d_kl: Tensor, d_draw: Tensor | None) -> tuple[Tensor | None, ...]:
        mean, raw_std, std, *noise = saved
        scale = d_kl / self.prior_std**2
        d_std = own_slope(std, self.prior_std**2, scale)
        if noise and d_draw is not None:
            d_std.addcmul_(d_draw, noise[0])
        d_raw = torch.ops.aten.softplus_backward(d_std, raw_std, 1, 20)
        return self._d_mean(mean, scale, d_draw), d_raw


class TiedTerm(Term):
    """Of the mean, log_u and log_v, with σ = U Vᵀ: formed once for draw and divergence, in pieces for the latter."""

    def forward(self) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        mean, log_u, log_v = self.tensors
        u, v = log_u.exp(), log_v.exp()
        if self.noise is None:
            kl, d_u, d_v = tied_kl_terms(mean, u, v, self.prior_std)
            return kl, None, (mean, d_u, d_v)
        std = torch.mm(u.mT, v).view(mean.shape)
        return own_kl(mean, std, self.prior_std), self._drawn(mean, std), (mean, std, u, v, self.noise)

    def backward(self, saved: Sequence[Tensor], d_kl: Tensor, d_draw: Tensor | None) -> tuple[Tensor | None, ...]:
        scale = d_kl / self.prior_std**2
        if d_draw is None:
            mean, d_u, d_v = saved
            return mean * scale, d_u * d_kl, d_v * d_kl
        mean, std, u, v, noise = saved
        d_std = own_slope(std, self.prior_std**2, scale).addcmul_(d_draw, noise).view(u.shape[1], -1)
        # dU = dσ V and d/d log u = u d/du; likewise for V
        d_u, d_v = torch.mm(v, d_std.mT).mul_(u), torch.mm(u, d_std).mul_(v)
        return self._d_mean(mean, scale, d_draw), d_u, d_v


def own_kl(mean: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """KL( N(μ, σ²) ‖ N(0, s²) ) = Σ log(s/σ) + (σ² + μ²) / 2s² − ½   [k-tied Normal, Eq. 2 for Eq. 5]."""
    quadratic = torch.linalg.vector_norm(mean).square_().add_(torch.linalg.vector_norm(std).square_())
    constant = std.numel() * (math.log(prior_std) - 0.5)
    return quadratic.div_(2 * prior_std**2).sub_(std.log().sum()).add_(constant)


def own_slope(std: Tensor, prior_variance: float, scale: Tensor) -> Tensor:
    """Its gradient σ/s² − 1/σ, times s² `scale`."""
    return torch.sub(std, std.reciprocal(), alpha=prior_variance).mul_(scale)


def summed(terms: Sequence[Term]) -> tuple[Tensor, list[Tensor]]:
    """The sum of all divergences, and the draws of the terms with noise, differentiable once."""
    tensors = [tensor for term in terms for tensor in term.tensors]
    kl, *draws = _Summed.apply(terms, *tensors)  # pyright: ignore[reportGeneralTypeIssues]
    return kl, draws


class _Summed(torch.autograd.Function):
    """One node for all terms: nodes of their own would cost more than the work on small tensors."""

    @staticmethod
    def forward(ctx: Any, terms: Sequence[Term], *_: Tensor) -> tuple[Tensor, ...]:
        kls, draws, saved, ctx.counts = [], [], [], []
        for term in terms:
            kl, draw, tensors = term.forward()
            kls.append(kl)
            saved.extend(tensors)
            ctx.counts.append((len(tensors), draw is not None))
            if draw is not None:
                draws.append(draw)
            term.tensors, term.noise = (), None  # what the way back needs is kept by the node
        ctx.terms = terms
        ctx.save_for_backward(*saved)
        return (kls[0] if len(kls) == 1 else torch.stack(kls).sum(), *draws)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        d_kl, *d_draws = gradients
        input_gradients: list[Tensor | None] = [None]
        start, saved, draws = 0, ctx.saved_tensors, iter(d_draws)
        for term, (count, drawn) in zip(ctx.terms, ctx.counts, strict=True):
            input_gradients += term.backward(saved[start : start + count], d_kl, next(draws) if drawn else None)
            start += count
        return tuple(input_gradients)
