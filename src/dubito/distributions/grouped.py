"""Several independent matrices of the same shape, as a grouped convolution has them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributions import constraints

from ..errors import ConfigError
from ..hints import checked
from .base import GeneratedDistribution
from .structured import StructuredNormal


class GroupedNormal(GeneratedDistribution):
    """A batch of G structured Gaussians over m × n matrices, each with a structure of its own.

    Args:
        parts: one distribution per group.
    """

    def __init__(self, parts: Sequence[StructuredNormal]) -> None:
        if not len(parts):
            raise ConfigError("parts must hold at least one distribution, got none")
        self.parts = tuple(parts)
        super().__init__(
            batch_shape=torch.Size([len(self.parts)]), event_shape=self.parts[0].event_shape, validate_args=False
        )

    @property
    def support(self) -> constraints.Constraint:
        """All real m × n matrices."""
        return self.parts[0].support

    @property
    def mean(self) -> Tensor:
        """[G, m, n]."""
        return self._stack(lambda part: part.mean)

    @property
    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    @property
    def variance(self) -> Tensor:
        """The marginal variances, [G, m, n]."""
        return self._stack(lambda part: part.variance)

    @property
    def precision_logdet(self) -> Tensor:
        """The logarithms of the determinants of the precisions, [G]."""
        return self._stack(lambda part: part.precision_logdet)

    @property
    def precision_matrix(self) -> Tensor:
        """The dense precisions, [G, mn, mn], for small layers."""
        return self._stack(lambda part: part.precision_matrix)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense covariances, [G, mn, mn], for small layers."""
        return self._stack(lambda part: part.covariance_matrix)

    @checked
    def rsample(
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape `sample_shape` + [G, m, n], differentiable in the parameters."""
        return torch.stack([part.rsample(sample_shape, generator=generator) for part in self.parts], -3)

    @checked
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of each matrix of [..., G, m, n]: [..., G]."""
        pairs = zip(self.parts, value.unbind(-3), strict=True)
        return torch.stack([part.log_prob(matrix) for part, matrix in pairs], -1)

    def entropy(self) -> Tensor:
        """In nats, [G]."""
        return self._stack(lambda part: part.entropy())

    def _stack(self, of: Callable[[StructuredNormal], Tensor]) -> Tensor:
        return torch.stack([of(part) for part in self.parts])
