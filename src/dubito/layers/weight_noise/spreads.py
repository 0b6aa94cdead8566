"""The forms in which the standard deviations of a weight tensor's independent Normals are kept."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from ...distributions.tied_functions import TiedDraw, scale_by_tied, tied_kl, tied_std
from .functions import OwnDraw, OwnKL


def standard_noise(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """ε in the shape, dtype and device of `like`."""
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


class Spread(ABC):
    """Standard deviations σ of one weight tensor; a kernel is read as outputs × (inputs · positions)."""

    @property
    @abstractmethod
    def std(self) -> Tensor:
        """σ in the shape of the weight."""

    def kl(self, mean: Tensor, prior_std: float) -> Tensor:
        """KL( N(μ, σ²) ‖ N(0, prior_std²) ), summed over the tensor."""
        return OwnKL.apply(mean, self.std, prior_std)  # pyright: ignore[reportReturnType]

    def draw(self, mean: Tensor, generator: torch.Generator | None) -> Tensor:
        """μ + σ ε."""
        noise, std = standard_noise(mean, generator), self.std
        if torch.is_grad_enabled() and (mean.requires_grad or std.requires_grad):
            return torch.addcmul(mean, std, noise)
        return noise.mul_(std).add_(mean)  # in place: no other tensor of this size is needed

    @abstractmethod
    def draw_and_kl(
        self, mean: Tensor, generator: torch.Generator | None, prior_std: float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        """μ + σ ε, or σ ε alone where `centred`, and the divergence, both differentiable."""


@dataclass(frozen=True, eq=False)
class OwnSpread(Spread):
    """One σ = softplus(raw_std) per weight, computed once however often it is asked for.

    Attributes:
        raw_std: in the shape of the weight.
    """

    raw_std: Tensor

    @cached_property
    def std(self) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """σ in the shape of the weight."""
        return F.softplus(self.raw_std)

    def draw_and_kl(
        self, mean: Tensor, generator: torch.Generator | None, prior_std: float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        noise = standard_noise(mean, generator)
        return OwnDraw.apply(mean, self.raw_std, noise, prior_std, centred)  # pyright: ignore


@dataclass(frozen=True, eq=False)
class TiedSpread(Spread):
    """σ = U Vᵀ of positive factors: the k-tied Normal's.

    Attributes:
        log_u: [k, m], over the outputs.
        log_v: [k, n], over the inputs and positions.
        shape: of the weight.
    """

    log_u: Tensor
    log_v: Tensor
    shape: torch.Size

    @property
    def std(self) -> Tensor:
        return tied_std(self.log_u, self.log_v).view(self.shape)

    def draw(self, mean: Tensor, generator: torch.Generator | None) -> Tensor:
        """μ + σ ε; without gradients σ is formed in pieces."""
        if torch.is_grad_enabled() and (mean.requires_grad or self.log_u.requires_grad):
            return super().draw(mean, generator)
        noise = standard_noise(mean, generator)
        scale_by_tied(noise.flatten(1), self.log_u, self.log_v)
        return noise.add_(mean)

    def kl(self, mean: Tensor, prior_std: float) -> Tensor:
        return tied_kl(mean, self.log_u, self.log_v, prior_std)

    def draw_and_kl(
        self, mean: Tensor, generator: torch.Generator | None, prior_std: float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        noise = standard_noise(mean, generator)
        return TiedDraw.apply(mean, self.log_u, self.log_v, noise, prior_std, centred)  # pyright: ignore


@dataclass(frozen=True, eq=False)
class TruncatedSpread(Spread):
    """σ = max(U Vᵀ, floor) of factors of any sign: what a truncated singular value decomposition leaves.

    Attributes:
        u: [k, m].
        v: [k, n].
        floor: the least σ.
        shape: of the weight.
    """

    u: Tensor
    v: Tensor
    floor: float
    shape: torch.Size

    @property
    def std(self) -> Tensor:
        return (self.u.mT @ self.v).clamp_min(self.floor).view(self.shape)

    def draw_and_kl(
        self, mean: Tensor, generator: torch.Generator | None, prior_std: float, *, centred: bool = False
    ) -> tuple[Tensor, Tensor]:
        change = self.std * standard_noise(mean, generator)
        return change if centred else mean + change, self.kl(mean, prior_std)
