"""Two-sided products in either order, and factorisations that say when they had to try again."""

import pytest
import torch

from dubito.distributions.linalg import canonical, cholesky, eigh, float64_device, sandwich
from dubito.errors import DataError, DubitoWarning
from dubito.seeds import generator


@pytest.mark.parametrize("shape", [(2, 9, 8, 3), (9, 2, 3, 8), (9, 2, 8, 3), (2, 9, 3, 8), (1, 1, 1, 1)])
def test_sandwich_is_the_product(shape):
    p, q, r, t = shape
    draw = generator(0)
    left = torch.randn(p, q, generator=draw, dtype=torch.float64)
    middle = torch.randn(2, 3, q, r, generator=draw, dtype=torch.float64)
    right = torch.randn(r, t, generator=draw, dtype=torch.float64)
    torch.testing.assert_close(sandwich(left, middle, right), torch.einsum("pq,abqr,rt->abpt", left, middle, right))


def hilbert(size):
    """Positive definite, and beyond float32 from size 8 on (condition number 1e10)."""
    index = torch.arange(1, size + 1, dtype=torch.float64)
    return 1 / (index[:, None] + index - 1)


@pytest.mark.parametrize("size", [8, 10])
def test_a_cholesky_that_float32_cannot_do_is_done_in_float64_and_reported(size):
    with pytest.warns(DubitoWarning, match=r"cannot be trusted in torch.float32 .* try less"):
        factor = cholesky(lambda dtype, device: hilbert(size).to(device, dtype), torch.zeros(1), remedy="try less")
    assert factor.dtype == torch.float64
    torch.testing.assert_close(factor @ factor.mT, hilbert(size))


def test_a_cholesky_that_float32_can_do_stays_there():
    factor = cholesky(lambda dtype, device: hilbert(3).to(device, dtype), torch.zeros(1), remedy="try less")
    assert factor.dtype == torch.float32
    torch.testing.assert_close(factor.double(), torch.linalg.cholesky(hilbert(3)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("matrix", [-torch.eye(3), torch.full((3, 3), float("nan")), torch.ones(3, 3)])
def test_a_cholesky_that_cannot_be_done_is_an_error(dtype, matrix):
    with pytest.raises(DataError, match="a 3 x 3 one fails even in float64; try less"):
        cholesky(lambda dtype, device: matrix.to(device, dtype), torch.zeros(1, dtype=dtype), remedy="try less")


def test_float64_goes_to_the_cpu_where_the_device_has_none():
    assert float64_device(torch.device("mps")) == torch.device("cpu")
    for name in ("cpu", "cuda:1"):
        assert float64_device(torch.device(name)) == torch.device(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigh_of_a_singular_matrix_has_no_negative_eigenvalue(dtype):
    rows = torch.randn(2, 6, generator=generator(1), dtype=dtype)
    matrix = rows.mT @ rows
    assert torch.linalg.eigvalsh(matrix).min() < 0  # by rounding, or this would test nothing
    eigenvalues, vectors = eigh(matrix)
    assert eigenvalues.min() == 0 and eigenvalues.dtype == vectors.dtype == dtype
    # backward stable: a few times eps times the norm
    tolerance = 20 * torch.finfo(dtype).eps * float(eigenvalues.max())
    torch.testing.assert_close(vectors * eigenvalues @ vectors.mT, matrix, atol=tolerance, rtol=0)


def test_a_failing_eigensolver_is_tried_again_in_float64_and_reported(monkeypatch):
    """It neither ends the process nor passes in silence."""
    solver = torch.linalg.eigh

    def fails_in_float32(matrix):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return solver(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    matrix = torch.diag(torch.tensor([2.0, 1.0, 3.0]))
    with pytest.warns(DubitoWarning, match="eigendecomposition of the factor failed in torch.float32"):
        eigenvalues, vectors = eigh(matrix, name="the factor")
    assert eigenvalues.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(vectors * eigenvalues @ vectors.mT, matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_eigensolver_that_fails_twice_is_an_error(monkeypatch, dtype):
    def fails(matrix):
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(DataError, match="no eigendecomposition of G was found"):
        eigh(torch.eye(2, dtype=dtype), name="G")


def test_eigh_refuses_what_is_no_second_moment():
    with pytest.raises(DataError, match="positive semi-definite, got eigenvalues from -1 to 1"):
        eigh(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(DataError, match="finite"):
        eigh(torch.full((2, 2), float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigenvectors_do_not_depend_on_the_solver(dtype: torch.dtype) -> None:
    stream = torch.Generator().manual_seed(0)
    spaces = {0.0: 4, 1.0: 1, 2.0: 3, 5.0: 1, 9.0: 1}  # eigenvalues and the dimensions of their spaces
    values = torch.tensor([value for value, size in spaces.items() for _ in range(size)], dtype=dtype)
    axes = torch.linalg.qr(torch.randn(10, 10, generator=stream, dtype=torch.float64)).Q
    matrix = (axes * values) @ axes.mT
    found = eigh(matrix.to(dtype))
    for _ in range(5):  # what another solver might find: other signs, and other bases of every eigenspace
        turns = [torch.linalg.qr(torch.randn(n, n, generator=stream, dtype=torch.float64)).Q for n in spaces.values()]
        moved = values + 2 * torch.finfo(dtype).eps * torch.rand(10, generator=stream, dtype=dtype)
        again = canonical(moved, (axes @ torch.block_diag(*turns)).to(dtype))
        # Rounding of the rotations, and for float32 that of the matrix that `eigh` decomposed.
        tolerance = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(again[1], found[1], rtol=0, atol=tolerance)
        torch.testing.assert_close(again[0], values, rtol=0, atol=tolerance)
    eigenvalues, vectors = found
    torch.testing.assert_close((vectors * eigenvalues) @ vectors.mT, matrix.to(dtype))
    torch.testing.assert_close(vectors.mT @ vectors, torch.eye(10, dtype=dtype))


def test_eigenvalues_that_differ_stay_apart() -> None:
    matrix = torch.diag(torch.tensor([1.0, 1.0 + 1e-4, 2.0]))
    eigenvalues, vectors = eigh(matrix)
    torch.testing.assert_close(eigenvalues, matrix.diagonal(), rtol=1e-6, atol=0)
    torch.testing.assert_close(vectors.abs(), torch.eye(3))
    zero = eigh(torch.zeros(3, 3))
    torch.testing.assert_close(zero[0], torch.zeros(3))
    torch.testing.assert_close(zero[1].mT @ zero[1], torch.eye(3))
