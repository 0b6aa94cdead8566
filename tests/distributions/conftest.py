"""Layers whose Fisher information is known in full, so that everything has a dense truth."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dubito.distributions import EigenKroneckerNormal, KroneckerNormal, SparseInformationNormal, select
from dubito.distributions.linalg import eigh


@dataclass(frozen=True)
class FisherLayer:
    """Statistics of an m × n layer from its inputs a [N, T, n] and output gradients g [N, T, m]."""

    inputs: Tensor
    gradients: Tensor

    @property
    def delta(self) -> Tensor:
        """Gradients of the weights per example, positions summed: [N, m, n]."""
        return torch.einsum("itm,itn->imn", self.gradients, self.inputs)

    @property
    def shape(self) -> tuple[int, int]:
        return self.gradients.shape[-1], self.inputs.shape[-1]

    @property
    def information(self) -> Tensor:
        """The exact Fisher information of the weights read row by row, [mn, mn]."""
        rows = self.delta.flatten(1)
        return rows.mT @ rows / len(rows)

    @property
    def input_factor(self) -> Tensor:
        return torch.einsum("itj,itk->jk", self.inputs, self.inputs) / len(self.inputs)

    @property
    def output_factor(self) -> Tensor:
        return torch.einsum("itj,itk->jk", self.gradients, self.gradients) / self.gradients[..., 0].numel()

    @property
    def output_vectors(self) -> Tensor:
        return torch.linalg.eigh(self.output_factor).eigenvectors

    @property
    def input_vectors(self) -> Tensor:
        return torch.linalg.eigh(self.input_factor).eigenvectors

    @property
    def eigenvalues(self) -> Tensor:
        return (self.output_vectors.mT @ self.delta @ self.input_vectors).square().mean(0)

    @property
    def diagonal(self) -> Tensor:
        return self.delta.square().mean(0)

    @property
    def mean(self) -> Tensor:
        m, n = self.shape
        return torch.linspace(-1, 1, m * n, dtype=self.inputs.dtype).view(m, n)

    def kronecker(self, *, dtype=torch.float64, num_data=50.0, prior_precision=0.7) -> KroneckerNormal:
        (s_g, u_g), (s_a, u_a) = (
            eigh(factor.to(dtype), name="a factor") for factor in (self.output_factor, self.input_factor)
        )
        return KroneckerNormal(
            self.mean.to(dtype), u_g, s_g, u_a, s_a, num_data=num_data, prior_precision=prior_precision
        )

    def eigen_kronecker(self, *, dtype=torch.float64, num_data=50.0, prior_precision=0.7) -> EigenKroneckerNormal:
        parts = (self.mean, self.output_vectors, self.input_vectors, self.eigenvalues)
        return EigenKroneckerNormal(
            *(part.to(dtype) for part in parts), num_data=num_data, prior_precision=prior_precision
        )

    def sparse(
        self,
        rank: int | float,
        *,
        guard="congruence",
        method="algorithm1",
        dtype=torch.float64,
        num_data=50.0,
        prior_precision: float | Tensor = 0.7,
    ) -> SparseInformationNormal:
        kept = select(self.eigenvalues, rank, method=method)
        parts = (
            self.mean,
            self.output_vectors[:, kept.output_index],
            self.input_vectors[:, kept.input_index],
            self.eigenvalues[kept.output_index][:, kept.input_index],
            self.diagonal,
        )
        return SparseInformationNormal(
            *(part.to(dtype) for part in parts), num_data=num_data, prior_precision=prior_precision, guard=guard
        )


def dense_sparse_information(normal: SparseInformationNormal) -> Tensor:
    """The precision of a sparse information form written out with V = U_g ⊗ U_a, in float64."""
    basis = torch.kron(normal.output_vectors.double(), normal.input_vectors.double())
    low_rank = basis @ torch.diag(normal.eigenvalues.double().flatten()) @ basis.mT
    exact, own = normal.diagonal.double().flatten(), low_rank.diagonal().clone()
    if normal.guard == "congruence":
        pairs = zip(exact.tolist(), own.tolist(), strict=True)
        shrink = torch.tensor([(f / o) ** 0.5 if o > f else 1.0 for f, o in pairs], dtype=torch.float64)
        low_rank = shrink[:, None] * low_rank * shrink
    prior = torch.as_tensor(normal.prior_precision, dtype=torch.float64).expand(normal.event_shape).flatten()
    return normal.num_data * (low_rank + torch.diag((exact - own).clamp(min=0))) + torch.diag(prior)


def random_layer(m: int, n: int, *, examples: int = 9, positions: int = 1, seed: int = 0) -> FisherLayer:
    """Rectified inputs with a bias column of ones, and gradients whose size depends on the input."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(examples, positions, m + n, generator=generator, dtype=torch.float64)
    inputs, gradients = noise.split([n, m], dim=-1)
    inputs = torch.cat([inputs[..., :-1].relu() + 0.1 * inputs[..., :-1], torch.ones_like(inputs[..., :1])], -1)
    return FisherLayer(inputs, gradients * (0.2 + inputs.mean(-1, keepdim=True).abs()))


@pytest.fixture(scope="session")
def fisher_layer() -> Callable[..., FisherLayer]:
    return random_layer


@pytest.fixture(scope="session")
def layer_of() -> Callable[[list[list[float]], list[list[float]]], FisherLayer]:
    """A layer of given inputs and gradients, one position per example."""

    def build(inputs, gradients):
        return FisherLayer(*(torch.tensor(rows, dtype=torch.float64)[:, None] for rows in (inputs, gradients)))

    return build


@pytest.fixture(scope="session")
def dense_precision() -> Callable[[SparseInformationNormal], Tensor]:
    return dense_sparse_information
