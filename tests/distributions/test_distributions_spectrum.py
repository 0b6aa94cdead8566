"""Explained variance and truncation against NumPy's singular value decomposition."""

import numpy as np
import pytest
import torch

from dubito.distributions.spectrum import Spectrum, explained, truncate


def shares(matrix: np.ndarray) -> np.ndarray:
    squares = np.linalg.svd(matrix, compute_uv=False) ** 2
    return squares / squares.sum()


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 4)])
def test_shares_are_those_of_numpy(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    mean, std = rng.normal(size=shape), rng.uniform(0.5, 2.0, size=shape)
    found = Spectrum.of(torch.from_numpy(mean), torch.from_numpy(std))
    np.testing.assert_allclose(found.mean, shares(mean), rtol=1e-12)
    np.testing.assert_allclose(found.std, shares(std), rtol=1e-12)
    np.testing.assert_allclose(found.mean_centred, shares(mean - mean.mean()), rtol=1e-12)
    np.testing.assert_allclose(found.std_centred, shares(std - std.mean()), rtol=1e-12)


def test_a_nearly_constant_matrix_shows_its_pattern_only_when_centred() -> None:
    rng = np.random.default_rng(1)
    std = torch.from_numpy(0.05 * (1 + 0.01 * rng.normal(size=(30, 40))))
    found = Spectrum.of(std, std)
    assert found.std[0] > 0.999 and found.std_centred[0] < 0.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_and_tiny_matrices(dtype: torch.dtype) -> None:
    constant = torch.full((3, 5), 0.01, dtype=dtype)
    found = Spectrum.of(torch.zeros(3, 5, dtype=dtype), constant)
    torch.testing.assert_close(found.std, torch.tensor([1.0, 0, 0], dtype=dtype))
    for nothing in (found.mean, found.mean_centred, found.std_centred):
        assert torch.equal(nothing, torch.zeros(3, dtype=dtype))
    small = 1e-30 * torch.eye(3, dtype=dtype)  # squares underflow in single precision
    torch.testing.assert_close(explained(small), torch.full((3,), 1 / 3, dtype=dtype))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_truncation_is_numpys_best_approximation(rank: int) -> None:
    matrix = np.random.default_rng(2).uniform(size=(4, 7))
    u, values, v = np.linalg.svd(matrix, full_matrices=False)
    left, right = truncate(torch.from_numpy(matrix), rank)
    assert left.shape == (rank, 4) and right.shape == (rank, 7)
    np.testing.assert_allclose(left.T @ right, u[:, :rank] * values[:rank] @ v[:rank], atol=1e-12)
