"""Optimisers as frozen settings."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import require_fraction, require_positive
from ..hints import Checked


class OptimizerSettings(Checked, ABC):
    """Settings that make an optimiser for given parameter groups."""

    @abstractmethod
    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimiser; learning rates and weight decays stand in the groups."""


@dataclass(frozen=True, kw_only=True)
class Adam(OptimizerSettings):
    """Adam; weight decay adds to the gradient (L2).

    Args:
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_fraction(beta1=self.betas[0], beta2=self.betas[1])
        require_positive(eps=self.eps)
        object.__setattr__(self, "betas", tuple(self.betas))

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Adam(groups, betas=self.betas, eps=self.eps, fused=fusible(groups))


@dataclass(frozen=True, kw_only=True)
class AdamW(Adam):
    """Adam with decoupled weight decay."""

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, betas=self.betas, eps=self.eps, fused=fusible(groups))


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSettings):
    """Stochastic gradient descent; without settings plain, as PyTorch's.

    Args:
        momentum: 0 for none.
        nesterov: Nesterov's form of momentum.
    """

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require_fraction(momentum=self.momentum)

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # PyTorch refuses Nesterov without momentum, where the two forms are the same.
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=nesterov, fused=fusible(groups))


def fusible(groups: list[dict[str, Any]]) -> bool:
    """Whether one kernel can update each tensor in one pass: about three times faster on CPUs."""
    tensors = [tensor for group in groups for tensor in group["params"]]
    devices = {tensor.device.type for tensor in tensors}
    return len(devices) == 1 and devices <= {"cpu", "cuda"} and all(t.is_floating_point() for t in tensors)
