"""Scales: the forms in which the standard deviations of a weight tensor's independent Normals are kept."""

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ..distributions.tied_functions import draw_tied, tied_std
from ..precision import full_precision
from .terms import OwnTerm, StdTerm, Term, TiedTerm


def standard_noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """ε in the shape, dtype and device of `like`."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


class WeightScale(ABC):
    """Standard deviations σ of one weight tensor; a kernel is read as outputs × (inputs · positions)."""

    @property
    @abstractmethod
    def std(self) -> Tensor:
        """σ in the shape of the weight."""

    def draw(self, mean: Tensor, generator: torch.Generator | None) -> Tensor:
        """μ + σ ε   [k-tied Normal, Eq. 6]."""
        noise, std = standard_noise(mean, generator), self.std
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and (mean.requires_grad or std.requires_grad)):
            return torch.addcmul(mean, std, noise)
        return torch.addcmul(mean, std, noise, out=noise)  # in place: no other tensor of this size is needed

    def term(self, mean: Tensor, prior_std: float) -> Term:
        """The divergence from N(0, prior_std²)."""
        return StdTerm(mean, self.std, prior_std=prior_std)

    def formed(self) -> "WeightScale":
        """Itself, with all computed that is kept between uses."""
        return self

    def chunk(self, part: int, parts: int) -> "WeightScale":
        """Those of one of the weight's equal parts along its first axis."""
        return self if parts == 1 else FormedScale(self.std.chunk(parts)[part])


class FormedScale(WeightScale):
    """σ as it is.

    Args:
        std: in the shape of the weight.
    """

    def __init__(self, std: Tensor) -> None:
        self._std = std

    @property
    def std(self) -> Tensor:
        return self._std


class OwnScale(WeightScale):
    """One σ = softplus(raw_std) per weight, computed once however often it is asked for.

    Args:
        raw_std: in the shape of the weight.
    """

    def __init__(self, raw_std: Tensor) -> None:
        self.raw_std = raw_std

    @cached_property
    def std(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """σ in the shape of the weight."""
        return F.softplus(self.raw_std)

    def formed(self) -> WeightScale:
        with full_precision(self.raw_std.device):
            _ = self.std
        return self

    def draw_term(self, mean: Tensor, prior_std: float, generator: torch.Generator | None, centred: bool) -> Term:
        """A draw, or σ ε alone where `centred`, and the divergence."""
        noise = standard_noise(mean, generator)
        return OwnTerm(mean, self.raw_std, prior_std=prior_std, noise=noise, centred=centred)


class TiedScale(WeightScale):
    """σ = U Vᵀ of positive factors [k-tied Normal, Eq. 8].

    Args:
        log_u: [k, m], over the outputs.
        log_v: [k, n], over the inputs and positions.
        shape: of the weight.
    """

    def __init__(self, log_u: Tensor, log_v: Tensor, shape: torch.Size) -> None:
        self.log_u, self.log_v, self.shape = log_u, log_v, shape

    @property
    def std(self) -> Tensor:
        return tied_std(self.log_u, self.log_v).view(self.shape)

    def draw(self, mean: Tensor, generator: torch.Generator | None) -> Tensor:
        """μ + σ ε   [k-tied Normal, Eq. 6]; without gradients σ is formed in pieces."""
        if torch.compiler.is_compiling() or (
            torch.is_grad_enabled() and (mean.requires_grad or self.log_u.requires_grad)
        ):
            return super().draw(mean, generator)
        noise = standard_noise(mean, generator)
        draw_tied(mean.flatten(1), *self._factors, noise.flatten(1))
        return noise

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """U and V for draws without gradients."""
        with torch.no_grad():
            return self.log_u.exp(), self.log_v.exp()

    def chunk(self, part: int, parts: int) -> WeightScale:
        if parts == 1:
            return self
        log_u = self.log_u.chunk(parts, 1)[part]
        return TiedScale(log_u, self.log_v, torch.Size((log_u.shape[1], *self.shape[1:])))

    def term(self, mean: Tensor, prior_std: float) -> Term:
        return TiedTerm(mean, self.log_u, self.log_v, prior_std=prior_std)

    def draw_term(self, mean: Tensor, prior_std: float, generator: torch.Generator | None, centred: bool) -> Term:
        """A draw, or σ ε alone where `centred`, and the divergence."""
        noise = standard_noise(mean, generator)
        return TiedTerm(mean, self.log_u, self.log_v, prior_std=prior_std, noise=noise, centred=centred)


class TruncatedScale(WeightScale):
    """σ = max(U Vᵀ, floor) of factors of any sign: what a truncated singular value decomposition leaves.

    Args:
        u: [k, m].
        v: [k, n].
        floor: the least σ.
        shape: of the weight.
    """

    def __init__(self, u: Tensor, v: Tensor, floor: float, shape: torch.Size) -> None:
        self.u, self.v, self.floor, self.shape = u, v, floor, shape

    @cached_property
    def std(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """σ in the shape of the weight."""
        return (self.u.mT @ self.v).clamp_min(self.floor).view(self.shape)


#: The forms that can be trained.
TrainedScale = OwnScale | TiedScale
