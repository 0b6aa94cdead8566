"""Small dense linear algebra: two-sided products, and factorisations that never fail in silence."""

from collections.abc import Callable

import torch
from torch import Tensor

from dubito import seeds
from dubito.errors import DataError, warn

TRUSTED_ERROR = 1e-2
"""The largest relative error of a squared pivot, and so of a variance, that is let pass."""

SAME = 10.0
"""Eigenvalues are one where they differ by less, in units of eps times the largest: rounding moves them so far."""

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

    Where the factorisation fails or cannot be trusted in the type of `like`, the matrix is built anew in
    float64, because the rounding sits in its entries, the factor stays in float64 (on the CPU where the
    device has none), and a `DubitoWarning` says so.

    Args:
        build: gives the matrix in a type and on a device.
        like: a tensor of the type and on the device wanted.
        remedy: what to do if the matrix cannot be factorised.

    Raises:
        DataError: if the factorisation fails in float64 too.
    """
    factor, info = torch.linalg.cholesky_ex(build(like.dtype, like.device))
    error = _relative_error(factor, info)
    if error <= TRUSTED_ERROR:
        return factor
    if like.dtype != torch.float64:
        factor, info = torch.linalg.cholesky_ex(build(torch.float64, float64_device(like.device)))
        if _relative_error(factor, info) <= TRUSTED_ERROR:
            message = (
                f"a {len(factor)} x {len(factor)} Cholesky factorisation cannot be trusted in {like.dtype} "
                f"(relative error {error:.2g}) and is kept in float64, which is slower; {remedy}"
            )
            warn(message)
            return factor
    raise DataError(
        f"expected a positive definite matrix, but the Cholesky factorisation of a {len(factor)} x "
        f"{len(factor)} one fails even in float64; {remedy}"
    )


def _relative_error(factor: Tensor, info: Tensor) -> float:
    """An estimate of the largest relative error of the squared pivots; infinite if there is no factor."""
    # Not every backend reports a NaN in `info`.
    if int(info) != 0 or not bool(factor.isfinite().all()):
        return float("inf")
    # R_jj² = A_jj − Σ_k<j R_jk² is a difference of numbers of size A_jj = Σ_k≤j R_jk², each right to eps.
    ratio = factor.detach().square().sum(1) / factor.detach().diagonal().square()
    return torch.finfo(factor.dtype).eps * float(ratio.max())


def eigh(matrix: Tensor, *, name: str = "matrix") -> tuple[Tensor, Tensor]:
    """Eigenvalues in ascending order and eigenvectors of a positive semi-definite matrix.

    Eigenvalues that are negative by rounding become zero, and the eigenvectors are those of `canonical`. A solver
    that does not converge is tried again in float64, and a `DubitoWarning` says so.

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
            raise DataError(f"no eigendecomposition of {name} was found, nor in float64: {second}") from second
        message = f"the eigendecomposition of {name} failed in {matrix.dtype} and was done in float64"
        warn(message)
    lowest, highest = float(eigenvalues[0]), float(eigenvalues.abs().max())
    # The solver is backward stable: errors of a few n · eps · ‖matrix‖; a hundred times that is no rounding.
    if lowest < -100 * len(matrix) * torch.finfo(matrix.dtype).eps * highest:
        raise DataError(
            f"{name} must be positive semi-definite, got eigenvalues from {lowest:.3g} to {highest:.3g}; "
            "pass a mean of outer products"
        )
    eigenvalues, vectors = canonical(eigenvalues, vectors)
    return eigenvalues.to(matrix), vectors.to(matrix)


def canonical(eigenvalues: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """The same decomposition in the basis that fixed directions choose, and not the solver or its threads.

    Eigenvectors are determined up to their signs, and where eigenvalues are equal within rounding (0 in the null
    space of a factor of deficient rank) up to a rotation. Each such eigenspace, vectors V, gets the basis V Q with
    Vᵀ Ω = Q R, where R has a positive diagonal and Ω holds fixed directions: another V of the same space gives the
    same V Q. Its eigenvalues become their mean, or 0 where rounding left one below.

    Args:
        eigenvalues: ascending, of a positive semi-definite matrix but for rounding, [n].
        vectors: as columns, [n, n].
    """
    width = SAME * torch.finfo(vectors.dtype).eps * float(eigenvalues[-1])
    spans, values = [0], eigenvalues.tolist()
    for index, value in enumerate(values):
        if value - values[spans[-1]] > width:
            spans.append(index)
    sizes = [end - start for start, end in zip(spans, [*spans[1:], len(values)], strict=True)]
    shape, stream = (len(vectors), max(sizes)), seeds.generator(0, "directions")
    directions = torch.randn(shape, generator=stream, dtype=torch.float32).to(vectors)
    vectors = vectors * torch.where((vectors * directions[:, :1]).sum(0) < 0, -1.0, 1.0).to(vectors)
    eigenvalues = eigenvalues.clone()
    for start, size in zip(spans, sizes, strict=True):
        if size > 1:
            some = slice(start, start + size)
            orthogonal, triangle = torch.linalg.qr(vectors[:, some].mT @ directions[:, :size])
            signs = torch.where(triangle.diagonal() < 0, -1.0, 1.0).to(vectors)
            vectors[:, some] = vectors[:, some] @ (orthogonal * signs)
            eigenvalues[some] = eigenvalues[some].mean() if values[start] > 0 else 0.0
    return eigenvalues.clamp_(min=0), vectors
