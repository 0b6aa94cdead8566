"""Independent Normals for every weight: the diagonal of the Fisher information and a prior."""

import torch
from torch import Tensor

from ..hints import checked
from .structured import StructuredNormal, total


class DiagonalNormal(StructuredNormal):
    """N(mean, (N_s diag(Φ) + τ I)⁻¹).

    Args:
        mean: [m, n].
        diagonal: Φ, the diagonal of the Fisher information, [m, n].
        num_data: N_s, the number of data or a tempered one.
        prior_precision: τ.
        validate_args: check values, not only shapes; as torch's own distributions unless given.
    """

    def __init__(
        self,
        mean: Tensor,
        diagonal: Tensor,
        *,
        num_data: float,
        prior_precision: float | Tensor,
        validate_args: bool | None = None,
    ) -> None:
        super().__init__(mean, num_data=num_data, prior_precision=prior_precision, validate_args=validate_args)
        self._require("diagonal", diagonal, mean.shape, nonnegative=True)
        self.diagonal = diagonal

    @property
    def diagonal_precision(self) -> Tensor:
        """The precision of each weight, [m, n]."""
        return self.num_data * self.diagonal + self.prior_precision

    @property
    def relative_logdet(self) -> Tensor:
        """Σ log(1 + N_s Φ / τ)."""
        return total((self.num_data * self.diagonal / self.prior_precision).log1p())

    @property
    def num_determined(self) -> Tensor:
        """Σ N_s Φ / (N_s Φ + τ)."""
        return total(self.num_data * self.diagonal / self.diagonal_precision)

    def _compute_variance(self) -> Tensor:
        return 1 / self.diagonal_precision

    def _compute_logdet(self) -> Tensor:
        return self.diagonal_precision.log().sum()

    @checked
    def precision_matmul(self, vectors: Tensor) -> Tensor:
        """P x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        return self.diagonal_precision * vectors

    @checked
    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        return vectors / self.diagonal_precision

    @checked
    def quadratic_form(self, vectors: Tensor) -> Tensor:
        """xᵀ P x for each matrix x of [..., m, n]."""
        self._require_event("vectors", vectors)
        return (self.diagonal_precision * vectors.square()).sum((-2, -1))

    @property
    def _noise_shapes(self) -> tuple[torch.Size, ...]:
        return (self.event_shape,)

    def _apply_root(self, *noise: Tensor) -> Tensor:
        (unit,) = noise
        return unit * self.diagonal_precision.rsqrt()
