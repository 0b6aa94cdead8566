"""A regression whose posterior is known: one linear layer, Normal noise of known size, a Normal prior.

Parameters are one vector: the weight row by row, then the bias.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

ROWS, FEATURES, OUTPUTS = 60, 3, 2


@dataclass(frozen=True)
class Moments:
    """Mean and covariance of all parameters as one vector."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Problem:
    """y = W x + b + ε with ε_o ~ N(0, σ_o²) and all weights a priori N(0, τ²)."""

    prior_std: float = 0.2
    noise: tuple[float, ...] = (0.5, 0.8)

    @cached_property
    def inputs(self) -> Tensor:
        mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.8, -0.5], [0.0, 0.0, 0.7]], dtype=torch.float64)
        return normal(ROWS, FEATURES, seed=1) @ mixing + torch.tensor([0.4, -0.3, 0.0], dtype=torch.float64)

    @cached_property
    def targets(self) -> Tensor:
        weight = torch.tensor([[1.2, -0.7, 0.5], [0.6, 0.9, -1.1]], dtype=torch.float64)
        bias = torch.tensor([0.3, -0.5], dtype=torch.float64)
        return self.inputs @ weight.T + bias + self.stds * normal(ROWS, OUTPUTS, seed=2)

    @cached_property
    def stds(self) -> Tensor:
        return torch.tensor(self.noise, dtype=torch.float64)

    @cached_property
    def design(self) -> Tensor:
        """Inputs with the bias's column of ones, [N, d + 1]."""
        return torch.cat([self.inputs, torch.ones(ROWS, 1, dtype=torch.float64)], 1)

    @cached_property
    def gram(self) -> Tensor:
        return self.design.T @ self.design

    @cached_property
    def data_precision(self) -> Tensor:
        """The likelihood's precision [P, P]: rows of W are independent, each with XᵀX / σ_o²."""
        return flat_square(torch.block_diag(*[self.gram / std**2 for std in self.stds]))

    @cached_property
    def precision(self) -> Tensor:
        size = len(self.data_precision)
        return self.data_precision + torch.eye(size, dtype=torch.float64) / self.prior_std**2

    @cached_property
    def projected(self) -> Tensor:
        """Xᵀy / σ², the likelihood's linear term, [P]."""
        return flat((self.targets / self.stds**2).T @ self.design)

    @cached_property
    def posterior(self) -> Moments:
        covariance = torch.linalg.inv(self.precision)
        return Moments(covariance @ self.projected, covariance)

    @cached_property
    def least_squares(self) -> Tensor:
        return torch.linalg.solve(self.data_precision, self.projected)

    def network(self, start: Tensor | None = None) -> nn.Module:
        """The layer, with PyTorch's own start or with given parameters."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layer = nn.Linear(FEATURES, OUTPUTS).double()
        if start is not None:
            weight, bias = start.split([OUTPUTS * FEATURES, OUTPUTS])
            with torch.no_grad():
                layer.weight.copy_(weight.view(OUTPUTS, FEATURES))
                layer.bias.copy_(bias)
        return layer


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat(matrix: Tensor) -> Tensor:
    """[m, d + 1] with the bias last as one vector: the weight row by row, then the bias."""
    return torch.cat([matrix[:, :-1].flatten(), matrix[:, -1]])


#: Where the entries of a flattened [m, d + 1] matrix stand in the vector of parameters.
ORDER = flat(torch.arange(OUTPUTS * (FEATURES + 1)).view(OUTPUTS, FEATURES + 1))


def flat_square(matrix: Tensor) -> Tensor:
    """A square matrix over the entries of [m, d + 1], in the order of the parameters."""
    return matrix[ORDER][:, ORDER]


def matrix_of(vector: Tensor) -> Tensor:
    """[m, d + 1] of a vector of parameters."""
    weight, bias = vector.split([OUTPUTS * FEATURES, OUTPUTS])
    return torch.cat([weight.view(OUTPUTS, FEATURES), bias[:, None]], 1)


PROBLEM = Problem()
