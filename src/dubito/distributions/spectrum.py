"""How much of a matrix its first singular values hold, and what is left when the others are cut off."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Shares of variance per singular value, γ_k² / Σ γ², largest first [k-tied Normal, Section 2.3].

    A nearly constant positive matrix, as trained standard deviations are, is nearly of rank 1 whatever its
    pattern: the centred shares, of the matrix less the mean of its entries, tell about the pattern.

    Attributes:
        mean: of the means.
        mean_centred: of the means, centred.
        std: of the standard deviations.
        std_centred: of the standard deviations, centred.
    """

    mean: Tensor
    mean_centred: Tensor
    std: Tensor
    std_centred: Tensor

    @classmethod
    def of(cls, mean: Tensor, std: Tensor) -> "Spectrum":
        """The spectrum of a matrix of Normals, [m, n] each."""
        return cls(explained(mean), explained(centred(mean)), explained(std), explained(centred(std)))


def centred(matrix: Tensor) -> Tensor:
    """The matrix less the mean of its entries; zeros where only rounding would be left."""
    rest = matrix - matrix.mean()
    rounding = 8 * torch.finfo(matrix.dtype).eps * matrix.abs().max()
    return torch.where(rest.abs().max() > rounding, rest, 0.0)


def explained(matrix: Tensor) -> Tensor:
    """γ_k² / Σ γ² for the singular values γ, [min(m, n)]; zeros where the matrix is all zeros."""
    values = torch.linalg.svdvals(matrix)
    squares = (values / values[0].clamp_min(torch.finfo(matrix.dtype).tiny)).square()  # no underflow
    return squares / squares.sum().clamp_min(1.0)


def truncate(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of rank k as factors [k, m] and [k, n]: matrix ≈ Σ_a left_a right_aᵀ.

    Both share each singular value evenly; entries of a positive matrix may become negative.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    roots = values[:rank].sqrt().unsqueeze(1)
    return (roots * left.mT[:rank]).contiguous(), (roots * right[:rank]).contiguous()
