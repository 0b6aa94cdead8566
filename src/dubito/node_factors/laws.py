"""Laws of node factors: a variational family with its prior, as frozen settings.

A factor is mean + std · noise, or its exponential where factors are positive. `mean` and `std` are the location
and scale of the family, on the scale of logarithms for positive ones.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor, distributions
from torch.distributions import Distribution

from ..errors import ConfigError, require_fraction, require_positive
from ..hints import Checked


class Family(Checked, ABC):
    """The law of the factors of one side of a layer."""

    #: Whether factors are random; a point mass is learned like a weight.
    random: ClassVar[bool] = True
    #: Whether tails are so light that no number of a generator lies more than nine standard deviations out.
    light: ClassVar[bool] = True
    #: Whether factors are exponentials, and above 0.
    positive: ClassVar[bool] = False
    #: The rate of dropout whose noise is as large as that of factors at the start.
    initial_rate: ClassVar[float] = 1e-3

    @abstractmethod
    def law(self, mean: Tensor, std: Tensor) -> Distribution:
        """The distribution of factors with these locations and scales, before any clamping."""

    @abstractmethod
    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        """Divergence from the prior in nats, one per factor."""

    def noise(self, shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
        """Standard noise of the family."""
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


@dataclass(frozen=True, kw_only=True)
class Normal(Family):
    """Normal factors.

    Args:
        prior_mean: of the Normal prior.
        prior_std: likewise.
    """

    prior_mean: float = 1.0
    prior_std: float = 0.1

    def __post_init__(self) -> None:
        require_real(prior_mean=self.prior_mean)
        require_positive(prior_std=self.prior_std)

    def law(self, mean: Tensor, std: Tensor) -> Distribution:
        return distributions.Normal(mean, std, validate_args=False)

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        # KL(N(m, s²) ‖ N(m₀, s₀²)) = log(s₀/s) + (s² + (m − m₀)²) / 2s₀² − ½
        ratio = std / self.prior_std
        distance = (mean - self.prior_mean) / self.prior_std
        return 0.5 * (ratio.square() + distance.square() - 1) - ratio.log()


@dataclass(frozen=True, kw_only=True)
class Point(Family):
    """Factors without spread, learned like weights."""

    random = False

    def law(self, mean: Tensor, std: Tensor) -> Distribution:
        raise NotImplementedError("a point mass has no density")

    def kl(self, mean: Tensor, std: Tensor) -> Tensor:
        return torch.zeros_like(mean)


@dataclass(frozen=True, kw_only=True)
class NearOne(Checked):
    """Means start at N(1, std²), logarithms of positive factors at N(0, std²).

    Args:
        std: of the start; 0 starts all components alike.
    """

    std: float = 0.1

    def __post_init__(self) -> None:
        require_positive(zero=True, std=self.std)

    def draw(self, shape: tuple[int, ...], family: Family, generator: torch.Generator) -> Tensor:
        """Where locations start."""
        centre = 0.0 if family.positive else 1.0
        return centre + self.std * torch.randn(shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Signs(Checked):
    """Means start at 1 or −1.

    Args:
        probability: of 1; the authors take 0.5 on CIFAR and 0.75 on ImageNet.
    """

    probability: float = 0.5

    def __post_init__(self) -> None:
        require_fraction(probability=self.probability, one=True)

    def draw(self, shape: tuple[int, ...], family: Family, generator: torch.Generator) -> Tensor:
        """Where locations start."""
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return torch.where(uniform < self.probability, 1.0, -1.0).double()


def require_real(**values: float) -> None:
    """Refuse settings that are not finite numbers."""
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and abs(value) < float("inf")):
            raise ConfigError(f"{name} must be a finite number, got {value!r}")
