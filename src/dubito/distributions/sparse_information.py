"""The sparse information form (INF): a few Kronecker eigenvectors and the exact diagonal.

Lee, Humt, Feng and Triebel (2020), "Estimating Model Uncertainty of Neural Networks in Sparse
Information Form".
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributions.utils import lazy_property

from dubito.errors import DataError, unknown_name

from ..hints import checked
from . import pair_products
from .linalg import cholesky, float64_device, kronecker_diagonal, sandwich
from .structured import StructuredNormal, require_square, total

Guard = Literal["congruence", "clamp"]


class SparseInformationNormal(StructuredNormal):
    """N(mean, P⁻¹) with P = N_s (S V Λ Vᵀ S + diag(D₊)) + diag(τ) and V = U_g ⊗ U_a   [INF, Eq. 4].

    The paper writes U_a ⊗ U_g, as its vec stacks columns where ours stacks rows, and leaves N_s and τ out.
    The correction D = Φ − diag(V Λ Vᵀ) that would make the diagonal of the information exactly Φ is negative
    in places, and V Λ Vᵀ + D then need not be positive. Both guards keep D₊ = max(D, 0):

    - `congruence` shrinks the rows and columns where D is negative by S = diag(s), s² = Φ / diag(V Λ Vᵀ):
      positive definite, and the diagonal is exactly Φ.
    - `clamp` leaves S = I, as the authors' code does: positive definite, the diagonal too large where D is
      negative.

    With L = a·g, work and memory are those of L × L matrices and of a few m × n ones; `variance` alone takes
    longer, about L·m·n·min(a, g) multiplications.

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

    _scaled = (*StructuredNormal._scaled, "root_eigenvalues", "cholesky", "precise_cholesky", "_parts")

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
        super().__init__(mean, num_data=num_data, prior_precision=prior_precision, validate_args=validate_args)
        (m, n), shape = mean.shape, eigenvalues.shape
        if len(shape) != 2 or not (1 <= shape[0] <= m and 1 <= shape[1] <= n):
            raise DataError(f"eigenvalues must be g x a with g from 1 to {m} and a to {n}, got {tuple(shape)}")
        # Eight bytes, as the factorisation may have to go through float64.
        require_square(eigenvalues.numel(), 8, "lower `rank` or set `max_size` in select")
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
        # D_ii = E[δθ_i²] − Σ_j (v_ij √Λ_j)²   [INF, Eq. 3]
        return self.diagonal - self.eigen_diagonal

    @lazy_property
    def congruence(self) -> Tensor:
        """The scale s of each weight in the low-rank part, [m, n]; all ones under `clamp`."""
        if self.guard == "clamp":
            return torch.ones_like(self.diagonal)
        # s = √(Φ/ℓ) where ℓ > Φ, else 1; not in the paper, whose Eq. 4 is indefinite there
        too_large = self.eigen_diagonal > self.diagonal
        ratio = self.diagonal / torch.where(too_large, self.eigen_diagonal, 1.0)
        return torch.where(too_large, ratio, 1.0).sqrt()

    @property
    def diagonal_precision(self) -> Tensor:
        """The diagonal part of the precision, d = N_s max(D, 0) + τ, [m, n]."""
        return self.num_data * self.correction.clamp(min=0) + self.prior_precision

    @lazy_property
    def root_eigenvalues(self) -> Tensor:
        """Roots of the scaled eigenvalues, l = √(N_s Λ), [g, a]."""
        return (self.num_data * self.eigenvalues).sqrt()

    @lazy_property
    def cholesky(self) -> Tensor:
        """The lower R of R Rᵀ = I + V_sᵀ V_s, where V_s = diag(s d^-½) V diag(l), [L, L].

        In float64, with a `DubitoWarning`, where the mean's type cannot resolve it; draws and `solve` then
        go through float64 too.
        """
        return cholesky(self._identity_plus_gram, self._mean, remedy="raise prior_precision or lower num_data")

    @lazy_property
    def precise_cholesky(self) -> Tensor:
        """`cholesky` in float64 in any case, for small differences of which float32 would leave nothing."""
        if self.cholesky.dtype == torch.float64:
            return self.cholesky
        device = float64_device(self.cholesky.device)
        return torch.linalg.cholesky(self._identity_plus_gram(torch.float64, device))

    # What to report of a layer.

    @property
    def negative_share(self) -> float:
        """The share of weights whose correction D is negative by more than rounding."""
        rounding = torch.finfo(self._mean.dtype).eps * self.diagonal.max()
        return int((self.correction < -rounding).sum()) / self.correction.numel()

    @property
    def captured_trace(self) -> float:
        """The share of the information's trace that the kept eigenvalues hold."""
        # tr Λ over all eigenvectors is tr Φ when both come from the same gradients.
        total = float(self.diagonal.sum())
        return float(self.eigenvalues.sum()) / total if total > 0 else 1.0

    # How much the data say beside the prior.

    @property
    def relative_logdet(self) -> Tensor:
        """Σ log(d/τ) + 2 Σ log R_ii."""
        diagonal = total((self.num_data * self.correction.clamp(min=0) / self.prior_precision).log1p())
        return diagonal + 2 * total(self.cholesky.diagonal().log()).to(diagonal)

    @property
    def num_determined(self) -> Tensor:
        """Σ N_s D₊/d + τ tr((I + M)⁻¹ V_sᵀ diag(1/d) V_s)."""
        # tr(P⁻¹ (P − τ)) = Σ (1 − τ/d) + τ tr(d^-½ V_s (I + M)⁻¹ V_sᵀ d^-½): no difference of large numbers.
        left, right, whitening, scale, root = self._parts
        weight = (whitening * root).square()
        gram = pair_products.unfold(pair_products.gram(left, right, weight), scale)
        low_rank = total(torch.cholesky_solve(gram, self.cholesky).diagonal())
        diagonal = total(self.num_data * self.correction.clamp(min=0) / self.diagonal_precision)
        return diagonal + self.prior_precision * low_rank.to(diagonal)

    # The distribution.

    def _compute_variance(self) -> Tensor:
        # diag P⁻¹ = (1 − ‖R⁻¹ V_sᵀ e_i‖²) / d, a small difference where the data say nearly everything, of
        # which float32 would leave nothing. A sum of squares, as (I + M)⁻¹ written out would lose far more.
        factor = self.precise_cholesky
        left, right, whitening, scale, root = self.parts_in(factor.dtype, factor.device)
        identity = torch.eye(len(factor)).to(factor)
        rows = torch.linalg.solve_triangular(factor, identity, upper=False).view(-1, *scale.shape) * scale
        taken = whitening.square() * pair_products.squared_norms(left, right, rows)
        variance = ((1 - taken) * root.square()).to(self._mean)
        # (P⁻¹)_ii is at least 1/P_ii
        precision_diagonal = self.num_data * self.congruence.square() * self.eigen_diagonal + self.diagonal_precision
        return torch.maximum(variance, 1 / precision_diagonal)

    def _compute_logdet(self) -> Tensor:
        # log|P| = Σ log d + 2 Σ log R_ii, by the lemma of determinants
        low_rank = 2 * self.cholesky.diagonal().log().sum()
        return self.diagonal_precision.log().sum() + low_rank.to(self._mean)

    @checked
    def precision_matmul(self, vectors: Tensor) -> Tensor:
        """P x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        # P x = N_s S V Λ Vᵀ S x + d ∘ x
        inner = self.num_data * self.eigenvalues * self._project(self.congruence * vectors)
        low_rank = sandwich(self.output_vectors, inner, self.input_vectors.mT)
        return self.congruence * low_rank + self.diagonal_precision * vectors

    @checked
    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        # P⁻¹ B = d^-½ ∘ (X − V_s (I + M)⁻¹ V_sᵀ X), X = d^-½ ∘ B
        *_, root = self._parts
        whitened = root * vectors.to(self.cholesky)
        return self._downdate(whitened, self._gather(whitened))

    @checked
    def quadratic_form(self, vectors: Tensor) -> Tensor:
        """xᵀ P x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        low_rank = (self.root_eigenvalues * self._project(self.congruence * vectors)).square()
        return low_rank.sum((-2, -1)) + (self.diagonal_precision * vectors.square()).sum((-2, -1))

    @property
    def _noise_shapes(self) -> tuple[torch.Size, ...]:
        return (self.event_shape, self.eigenvalues.shape)

    def _apply_root(self, *noise: Tensor) -> Tensor:
        # x = d^-½ ∘ (e₁ − V_s R⁻ᵀ R⁻¹ (V_sᵀ e₁ − e₂)), in place of F^c of [INF, Eq. 6]: as printed that is no factor of
        # the covariance; with B_c = chol(A_cᵀ A_c + I) and the factor transposed that is meant, it is.
        unit, low_rank_unit = (part.to(self.cholesky) for part in noise)
        return self._downdate(unit, self._gather(unit) - low_rank_unit)

    @lazy_property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.parts_in(self.cholesky.dtype, self.cholesky.device)

    def parts_in(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
        """U_g, U_a, s d^-½, l and d^-½."""
        # Cast first: what rounding does to s d^-½ must be the same in V_s and in M, or they do not cancel.
        left, right = self.output_vectors.to(device, dtype), self.input_vectors.to(device, dtype)
        root = self.diagonal_precision.to(device, dtype).rsqrt()
        return left, right, self.congruence.to(root) * root, self.root_eigenvalues.to(root), root

    def _gather(self, vectors: Tensor) -> Tensor:
        """V_sᵀ x = l ∘ (U_gᵀ (s d^-½ ∘ x) U_a), [..., g, a]   [INF, V_s of Eq. 6]."""
        left, right, whitening, scale, _ = self._parts
        return scale * sandwich(left.mT, whitening * vectors, right)

    def _downdate(self, vectors: Tensor, low_rank: Tensor) -> Tensor:
        """d^-½ ∘ (x − V_s (I + M)⁻¹ y) for x of [..., m, n] and y of [..., g, a]."""
        left, right, whitening, scale, root = self._parts
        columns = low_rank.reshape(-1, scale.numel()).mT
        solved = torch.cholesky_solve(columns, self.cholesky).mT.reshape(low_rank.shape)
        spread = sandwich(left, scale * solved, right.mT)  # V_s y = s d^-½ ∘ (U_g (l ∘ y) U_aᵀ)
        return (root * (vectors - whitening * spread)).to(self._mean)

    def _identity_plus_gram(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """I + M, M = l ∘ (Vᵀ diag(s²/d) V) ∘ l, [L, L]."""
        left, right, whitening, scale, _ = self.parts_in(dtype, device)
        matrix = pair_products.unfold(pair_products.gram(left, right, whitening.square()), scale)
        matrix.diagonal().add_(1.0)
        return matrix

    def _project(self, vectors: Tensor) -> Tensor:
        """Vᵀ x, [..., g, a]."""
        return sandwich(self.output_vectors.mT, vectors, self.input_vectors)

    def _require_prior(self, prior_precision: float | Tensor) -> None:
        if isinstance(prior_precision, Tensor) and prior_precision.ndim > 0:
            self._require("prior_precision", prior_precision, self.event_shape)
            self._require_positive_prior(prior_precision)
        else:
            super()._require_prior(prior_precision)
