"""What distributions share: arguments that they check themselves, and draws from a generator."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from dubito.errors import ConfigError
from dubito.hints import Checked, checked


class GeneratedDistribution(Checked, Distribution):
    """A distribution whose differentiable draws take a generator."""

    #: Empty: constructors check their arguments themselves, so that errors name the remedy.
    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}  # pyright: ignore
    has_rsample = True

    def rsample(
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        raise NotImplementedError

    @checked
    def sample(self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None) -> Tensor:
        """`rsample` without gradients."""
        with torch.no_grad():
            return self.rsample(sample_shape, generator=generator)


class MatrixDistribution(GeneratedDistribution):
    """A distribution over m × n matrices that is symmetric around its mean."""

    _mean: Tensor

    @property
    def support(self) -> constraints.Constraint:
        """All real m × n matrices."""
        return constraints.independent(constraints.real, 2)

    @property
    def mean(self) -> Tensor:
        """[..., m, n]."""
        return self._mean

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self._mean

    def _unit_noise(
        self, sample_shape: Sequence[int], shape: Sequence[int], generator: torch.Generator | None
    ) -> Tensor:
        mean = self._mean
        if generator is not None and generator.device.type != mean.device.type:
            raise ConfigError(
                f"generator must be on {mean.device}, where the parameters are, got one on "
                f"{generator.device}; make it with dubito.seeds.generator(seed, device={str(mean.device)!r})"
            )
        return torch.randn(*sample_shape, *shape, generator=generator, dtype=mean.dtype, device=mean.device)
