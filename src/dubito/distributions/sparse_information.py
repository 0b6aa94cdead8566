"""The sparse information form (INF): a few Kronecker eigenvectors and the exact diagonal.

Lee, Humt, Feng and Triebel (2020), "Estimating Model Uncertainty of Neural Networks in Sparse
Information Form".
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property

from dubito.errors import DataError, unknown_name

from . import pair_products
from .linalg import cholesky, kronecker_diagonal, sandwich
from .structured import StructuredNormal, require_square

Guard = Literal["congruence", "clamp"]


class SparseInformationNormal(StructuredNormal):
    """N(mean, P⁻¹) with P = N_s (S V Λ Vᵀ S + diag(D₊)) + diag(τ) and V = U_g ⊗ U_a.

    The correction D = Φ − diag(V Λ Vᵀ) that would make the diagonal of the information exactly Φ is negative
    in places, and V Λ Vᵀ + D then need not be positive. Both guards keep D₊ = max(D, 0):

    - `congruence` shrinks the rows and columns where D is negative by S = diag(s), s² = Φ / diag(V Λ Vᵀ):
      positive definite, and the diagonal is exactly Φ.
    - `clamp` leaves S = I, as the authors' code does: positive definite, the diagonal too large where D is
      negative.

    With L = a·g, work and memory are those of L × L matrices and of a few m × n ones.

    Args:
        mean: [m, n].
        output_vectors: U_g, the kept eigenvectors of G, [m, g].
        input_vectors: U_a, the kept eigenvectors of A, [n, a].
        eigenvalues: Λ, the mean squared gradients along them, [g, a].
        diagonal: Φ, the exact diagonal of the Fisher information, [m, n].
        num_data: N_s, the number of data or a tempered one.
        prior_precision: τ, one number or one per weight [m, n].
        guard: what is done where the correction is negative.
        validate_args: check values, not only shapes; as torch's own distributions unless given.
    """

    def __init__(
        self,
        mean: Tensor,
        output_vectors: Tensor,
        input_vectors: Tensor,
        eigenvalues: Tensor,
        diagonal: Tensor,
        *,
        num_data: float,
        prior_precision: float | Tensor,
        guard: Guard = "congruence",
        validate_args: bool | None = None,
    ) -> None:
        if guard not in get_args(Guard):
            raise unknown_name("guard", guard, get_args(Guard))
        super().__init__(
            mean, num_data=num_data, prior_precision=prior_precision, validate_args=validate_args
        )
        (m, n), shape = mean.shape, eigenvalues.shape
        if len(shape) != 2 or not (1 <= shape[0] <= m and 1 <= shape[1] <= n):
            raise DataError(
                f"eigenvalues must be g x a with g from 1 to {m} and a to {n}, got {tuple(shape)}"
            )
        require_square(eigenvalues.numel(), mean, "lower `rank` or set `max_size` in select")
        self._require_vectors("output_vectors", output_vectors, (m, shape[0]))
        self._require_vectors("input_vectors", input_vectors, (n, shape[1]))
        self._require("eigenvalues", eigenvalues, shape, nonnegative=True)
        self._require("diagonal", diagonal, (m, n), nonnegative=True)
        self.output_vectors, self.input_vectors = output_vectors, input_vectors
        self.eigenvalues, self.diagonal = eigenvalues, diagonal
        self.guard = guard

    # What the precision is made of.

    @lazy_property
    def eigen_diagonal(self) -> Tensor:
        """What the low-rank part has on its diagonal, ℓ = diag(V Λ Vᵀ), [m, n]."""
        return kronecker_diagonal(self.output_vectors, self.input_vectors, self.eigenvalues)

    @lazy_property
    def correction(self) -> Tensor:
        """What the diagonal lacks, D = Φ − ℓ with its sign, [m, n]."""
        # Eq. 3 of the paper
        return self.diagonal - self.eigen_diagonal

    @lazy_property
    def congruence(self) -> Tensor:
        """The scale s of each weight in the low-rank part, [m, n]; all ones under `clamp`."""
        if self.guard == "clamp":
            return torch.ones_like(self.diagonal)
        # s = √(Φ/ℓ) where ℓ > Φ, else 1
        too_large = self.eigen_diagonal > self.diagonal
        ratio = self.diagonal / torch.where(too_large, self.eigen_diagonal, 1.0)
        return torch.where(too_large, ratio, 1.0).sqrt()

    @lazy_property
    def diagonal_precision(self) -> Tensor:
        """The diagonal part of the precision, d = N_s max(D, 0) + τ, [m, n]."""
        return self.num_data * self.correction.clamp(min=0) + self.prior_precision

    @lazy_property
    def root_eigenvalues(self) -> Tensor:
        """Roots of the scaled eigenvalues, l = √(N_s Λ), [g, a]."""
        return (self.num_data * self.eigenvalues).sqrt()

    @lazy_property
    def cholesky(self) -> Tensor:
        """The lower R of R Rᵀ = I + V_sᵀ V_s, where V_s = diag(s d^-½) V diag(l), [L, L]."""
        weight = self._whitening.square()
        parts = (self.output_vectors, self.input_vectors, weight, self.root_eigenvalues)

        def build(dtype: torch.dtype, device: torch.device) -> Tensor:
            left, right, weight, scale = (part.to(device, dtype) for part in parts)
            matrix = pair_products.unfold(pair_products.gram(left, right, weight), scale)
            matrix.diagonal().add_(1.0)
            return matrix

        return cholesky(build, self._mean, remedy="raise prior_precision or lower num_data")

    # What to report of a layer.

    @property
    def negative_share(self) -> float:
        """The share of weights whose correction D is negative by more than rounding."""
        rounding = torch.finfo(self._mean.dtype).eps * self.diagonal.max()
        return float((self.correction < -rounding).double().mean())

    @property
    def captured_trace(self) -> float:
        """The share of the information's trace that the kept eigenvalues hold."""
        # tr Λ over all eigenvectors is tr Φ when both come from the same gradients.
        total = float(self.diagonal.sum())
        return float(self.eigenvalues.sum()) / total if total > 0 else 1.0

    # The distribution.

    def _compute_variance(self) -> Tensor:
        # diag P⁻¹ = (1 − (s²/d) diag(V l (I + M)⁻¹ l Vᵀ)) / d
        pairs = pair_products.fold(torch.cholesky_inverse(self.cholesky), self.root_eigenvalues)
        taken = pair_products.diagonal(self.output_vectors, self.input_vectors, pairs)
        variance = (1 - self._whitening.square() * taken) / self.diagonal_precision
        # Where the data say nearly everything the difference is rounding; (P⁻¹)_ii is at least 1/P_ii.
        own = self.num_data * self.congruence.square() * self.eigen_diagonal + self.diagonal_precision
        return torch.maximum(variance, 1 / own)

    def _compute_logdet(self) -> Tensor:
        # log|P| = Σ log d + 2 Σ log R_ii
        return self.diagonal_precision.log().sum() + 2 * self.cholesky.diagonal().log().sum()

    def precision_matmul(self, vectors: Tensor) -> Tensor:
        """P x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        # P x = N_s S V Λ Vᵀ S x + d ∘ x
        inner = self.num_data * self.eigenvalues * self._project(self.congruence * vectors)
        low_rank = sandwich(self.output_vectors, inner, self.input_vectors.mT)
        return self.congruence * low_rank + self.diagonal_precision * vectors

    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        # P⁻¹ B = d^-½ ∘ (X − V_s (I + M)⁻¹ V_sᵀ X), X = d^-½ ∘ B
        whitened = self.diagonal_precision.rsqrt() * vectors
        return self._downdate(whitened, self._gather(whitened))

    def quadratic_form(self, vectors: Tensor) -> Tensor:
        """xᵀ P x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        low_rank = (self.root_eigenvalues * self._project(self.congruence * vectors)).square()
        return low_rank.sum((-2, -1)) + (self.diagonal_precision * vectors.square()).sum((-2, -1))

    @property
    def _noise_shapes(self) -> tuple[torch.Size, ...]:
        return (self.event_shape, self.eigenvalues.shape)

    def _apply_root(self, *noise: Tensor) -> Tensor:
        # x = d^-½ ∘ (e₁ − V_s R⁻ᵀ R⁻¹ (V_sᵀ e₁ − e₂))
        unit, low_rank_unit = noise
        return self._downdate(unit, self._gather(unit) - low_rank_unit)

    def _gather(self, vectors: Tensor) -> Tensor:
        """V_sᵀ x, [..., g, a]."""
        return self.root_eigenvalues * self._project(self._whitening * vectors)

    def _downdate(self, vectors: Tensor, low_rank: Tensor) -> Tensor:
        """d^-½ ∘ (x − V_s (I + M)⁻¹ y) for x of [..., m, n] and y of [..., g, a]."""
        columns = low_rank.reshape(-1, self.eigenvalues.numel()).mT
        solved = torch.cholesky_solve(columns, self.cholesky).mT.reshape(low_rank.shape)
        spread = sandwich(self.output_vectors, self.root_eigenvalues * solved, self.input_vectors.mT)
        return self.diagonal_precision.rsqrt() * (vectors - self._whitening * spread)

    @lazy_property
    def _whitening(self) -> Tensor:
        """The row scale of V_s, s d^-½, [m, n]."""
        return self.congruence * self.diagonal_precision.rsqrt()

    def _project(self, vectors: Tensor) -> Tensor:
        """Vᵀ x, [..., g, a]."""
        return sandwich(self.output_vectors.mT, vectors, self.input_vectors)

    def _require_prior(self, prior_precision: float | Tensor) -> None:
        if isinstance(prior_precision, Tensor) and prior_precision.ndim > 0:
            self._require("prior_precision", prior_precision, self.event_shape)
            self._require_positive_prior(prior_precision)
        else:
            super()._require_prior(prior_precision)
