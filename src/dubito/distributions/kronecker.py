"""Gaussians whose precision is diagonal in a Kronecker-factored eigenbasis: KFAC and EFB.

KFAC is of Martens and Grosse (2015), as a posterior of Ritter et al. (2018); EFB of George et al. (2018).
"""

from abc import abstractmethod

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property

from ..hints import checked
from .linalg import kronecker_diagonal, sandwich
from .structured import StructuredNormal, total
from .two_sided import TwoSided


class EigenbasisNormal(StructuredNormal):
    """Precision (U_G ⊗ U_A) diag(p) (U_G ⊗ U_A)ᵀ with square orthogonal U_G and U_A."""

    _scaled = (*StructuredNormal._scaled, "precision_eigenvalues")

    def __init__(
        self,
        mean: Tensor,
        output_vectors: Tensor,
        input_vectors: Tensor,
        *,
        num_data: float,
        prior_precision: float | Tensor,
        validate_args: bool | None,
    ) -> None:
        super().__init__(mean, num_data=num_data, prior_precision=prior_precision, validate_args=validate_args)
        m, n = mean.shape
        self._require_vectors("output_vectors", output_vectors, (m, m))
        self._require_vectors("input_vectors", input_vectors, (n, n))
        self.output_vectors, self.input_vectors = output_vectors, input_vectors

    @abstractmethod
    def _information_eigenvalues(self) -> Tensor:
        """Eigenvalues of the Fisher information in the basis, [m, n]."""

    @lazy_property
    def precision_eigenvalues(self) -> Tensor:
        """Eigenvalues p of the precision: N_s times those of the information, plus τ; [m, n]."""
        # exactly this, also for KFAC, and not √τ added to each factor
        return self.num_data * self._information_eigenvalues() + self.prior_precision

    @property
    def relative_logdet(self) -> Tensor:
        """Σ log(1 + N_s λ / τ) over the eigenvalues λ of the information."""
        return total((self.num_data * self._information_eigenvalues() / self.prior_precision).log1p())

    @property
    def num_determined(self) -> Tensor:
        """Σ N_s λ / (N_s λ + τ)."""
        return total(self.num_data * self._information_eigenvalues() / self.precision_eigenvalues)

    def _compute_variance(self) -> Tensor:
        return kronecker_diagonal(self.output_vectors, self.input_vectors, 1 / self.precision_eigenvalues)

    def _compute_logdet(self) -> Tensor:
        return self.precision_eigenvalues.log().sum()

    @checked
    def precision_matmul(self, vectors: Tensor) -> Tensor:
        """P x for each matrix x of [..., m, n]."""
        return self._rotate_back(self._rotate(vectors) * self.precision_eigenvalues)

    @checked
    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ x for each matrix x of [..., m, n]."""
        return self._rotate_back(self._rotate(vectors) / self.precision_eigenvalues)

    @checked
    def quadratic_form(self, vectors: Tensor) -> Tensor:
        """xᵀ P x for each matrix x of [..., m, n]."""
        return (self._rotate(vectors).square() * self.precision_eigenvalues).sum((-2, -1))

    @property
    def _noise_shapes(self) -> tuple[torch.Size, ...]:
        return (self.event_shape,)

    def _apply_root(self, *noise: Tensor) -> Tensor:
        # x = U_G (ε / √p) U_Aᵀ
        (unit,) = noise
        return self._rotate_back(unit * self.precision_eigenvalues.rsqrt())

    def two_sided(self, scale: float = 1.0) -> TwoSided:
        """What turns the noise of `rsample` into a deviation, U_G (ε / √p) U_Aᵀ, times a scale."""
        std = self.precision_eigenvalues.rsqrt() * scale
        return TwoSided(self.output_vectors, self.input_vectors.mT, std)

    def _rotate(self, vectors: Tensor) -> Tensor:
        self._require_event("vectors", vectors)
        return sandwich(self.output_vectors.mT, vectors, self.input_vectors)

    def _rotate_back(self, vectors: Tensor) -> Tensor:
        return sandwich(self.output_vectors, vectors, self.input_vectors.mT)


class KroneckerNormal(EigenbasisNormal):
    """N(mean, (N_s G ⊗ A + τ I)⁻¹), the prior precision τ added to the whole and not to the factors.

    Args:
        mean: [m, n].
        output_vectors: U_G, the eigenvectors of G, [m, m].
        output_eigenvalues: s_g, [m].
        input_vectors: U_A, the eigenvectors of A, [n, n].
        input_eigenvalues: s_a, [n].
        num_data: N_s, the number of data or a tempered one.
        prior_precision: τ.
        validate_args: check values, not only shapes; as torch's own distributions unless given.
    """

    def __init__(
        self,
        mean: Tensor,
        output_vectors: Tensor,
        output_eigenvalues: Tensor,
        input_vectors: Tensor,
        input_eigenvalues: Tensor,
        *,
        num_data: float,
        prior_precision: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(
            mean,
            output_vectors,
            input_vectors,
            num_data=num_data,
            prior_precision=prior_precision,
            validate_args=validate_args,
        )
        m, n = mean.shape
        self._require("output_eigenvalues", output_eigenvalues, (m,), nonnegative=True)
        self._require("input_eigenvalues", input_eigenvalues, (n,), nonnegative=True)
        self.output_eigenvalues, self.input_eigenvalues = output_eigenvalues, input_eigenvalues

    def _information_eigenvalues(self) -> Tensor:
        return self.output_eigenvalues[:, None] * self.input_eigenvalues  # s_g s_aᵀ


class EigenKroneckerNormal(EigenbasisNormal):
    """N(mean, (N_s V Λ Vᵀ + τ I)⁻¹) with V = U_G ⊗ U_A: exact second moments along KFAC's basis   [INF, Eq. 2].

    Args:
        mean: [m, n].
        output_vectors: U_G, [m, m].
        input_vectors: U_A, [n, n].
        eigenvalues: Λ, the mean squared gradients in the basis, [m, n].
        num_data: N_s, the number of data or a tempered one.
        prior_precision: τ.
        validate_args: check values, not only shapes; as torch's own distributions unless given.
    """

    def __init__(
        self,
        mean: Tensor,
        output_vectors: Tensor,
        input_vectors: Tensor,
        eigenvalues: Tensor,
        *,
        num_data: float,
        prior_precision: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(
            mean,
            output_vectors,
            input_vectors,
            num_data=num_data,
            prior_precision=prior_precision,
            validate_args=validate_args,
        )
        self._require("eigenvalues", eigenvalues, mean.shape, nonnegative=True)
        self.eigenvalues = eigenvalues

    def _information_eigenvalues(self) -> Tensor:
        return self.eigenvalues
