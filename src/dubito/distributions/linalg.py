"""Small dense linear algebra: two-sided products, and factorisations that never fail in silence."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from dubito.errors import DataError, DubitoWarning

LinAlgError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


def sandwich(left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices around a stack of matrices, in the cheaper order."""
    (p, q), (r, t) = left.shape, right.shape
    if p * r * (q + t) <= q * t * (r + p):  # (p q r + p r t) against (q r t + p q t) products
        return (left @ middle) @ right
    return left @ (middle @ right)


def kronecker_diagonal(left: Tensor, right: Tensor, eigenvalues: Tensor) -> Tensor:
    """diag(V Λ Vᵀ) of V = left ⊗ right, as a matrix of the layer's shape."""
    # ℓ = (U_g ∘ U_g) Λ (U_a ∘ U_a)ᵀ
    return sandwich(left.square(), eigenvalues, right.square().mT)


def float64_device(device: torch.device) -> torch.device:
    """`device`, or the CPU where the device has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def cholesky(build: Callable[[torch.dtype, torch.device], Tensor], like: Tensor, *, remedy: str) -> Tensor:
    """The lower Cholesky factor of a matrix that is positive definite but for rounding.

    Where it fails in the type of `like`, the matrix is built anew in float64, because the rounding
    sits in its entries, and a `DubitoWarning` says so.

    Args:
        build: gives the matrix in a type and on a device.
        like: a tensor of the type and on the device of the result.
        remedy: what to do if the matrix cannot be factorised at all.

    Raises:
        DataError: if the factorisation fails in float64 too.
    """
    factor, info = torch.linalg.cholesky_ex(build(like.dtype, like.device))
    if _sound(factor, info):
        return factor
    if like.dtype != torch.float64:
        factor, info = torch.linalg.cholesky_ex(build(torch.float64, float64_device(like.device)))
        if _sound(factor, info):
            message = f"a Cholesky factorisation failed in {like.dtype} and was done in float64; {remedy}"
            warnings.warn(message, DubitoWarning, stacklevel=3)
            return factor.to(like)
    size = factor.shape[-1]
    raise DataError(
        f"expected a positive definite matrix, but the Cholesky factorisation of a {size} x {size} one "
        f"failed in float64 too; {remedy}"
    )


def _sound(factor: Tensor, info: Tensor) -> bool:
    # Not every backend reports a NaN in `info`.
    return bool(info == 0) and bool(factor.isfinite().all())


def eigh(matrix: Tensor, *, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and eigenvectors of a positive semi-definite matrix.

    Eigenvalues that are negative by rounding become zero. A solver that does not converge is tried
    again in float64, and a `DubitoWarning` says so.

    Raises:
        DataError: if the matrix is not square, not finite or not positive semi-definite.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise DataError(f"{name} must be a square matrix, got shape {tuple(matrix.shape)}")
    if not matrix.isfinite().all():
        raise DataError(f"{name} must be finite, got NaN or infinity; check the data it was summed from")
    # MPS has no eigensolver at all, so the matrix goes where there is float64.
    work = ((matrix + matrix.mT) / 2).to(float64_device(matrix.device))
    try:
        eigenvalues, vectors = torch.linalg.eigh(work)
    except LinAlgError as error:
        if matrix.dtype == torch.float64:
            raise DataError(f"no eigendecomposition of {name} was found: {error}") from error
        try:
            eigenvalues, vectors = torch.linalg.eigh(work.double())
        except LinAlgError as second:
            raise DataError(
                f"no eigendecomposition of {name} was found, nor in float64: {second}"
            ) from second
        message = f"the eigendecomposition of {name} failed in {matrix.dtype} and was done in float64"
        warnings.warn(message, DubitoWarning, stacklevel=2)
    lowest, highest = float(eigenvalues[0]), float(eigenvalues.abs().max())
    # The solver is backward stable: errors of a few n · eps · ‖matrix‖; a hundred times that is no rounding.
    if lowest < -100 * len(matrix) * torch.finfo(matrix.dtype).eps * highest:
        raise DataError(
            f"{name} must be positive semi-definite, got eigenvalues from {lowest:.3g} to {highest:.3g}; "
            "pass a mean of outer products"
        )
    return eigenvalues.clamp(min=0).to(matrix), vectors.to(matrix)
