"""Noise per row: the same for a row whichever rows come with it, and distributed as it should be."""

import pytest
import torch

from dubito.weight_normals.streams import BLOCK_SIZE, RowStreams, block_rows


@pytest.mark.parametrize("shape", [(3,), (700,), (40, 9, 9), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_has_its_noise_in_every_batch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like, rows, size = torch.empty((), dtype=dtype), 300, torch.Size(shape).numel()
    whole = RowStreams(7, 0, rows)
    noise, signs = whole.normal(("a", 1), shape, like), whole.signs(("a",), size, like)
    assert noise.shape == (rows, *shape) and signs.shape == (rows, size) and noise.dtype == signs.dtype == dtype
    for first, end in ((0, 1), (0, 137), (137, 300), (299, 300), (5, 261)):
        part = RowStreams(7, first, end - first, rows)
        assert torch.equal(part.normal(("a", 1), shape, like), noise[first:end])
        assert torch.equal(part.signs(("a",), size, like), signs[first:end])


def test_streams_differ_by_seed_path_and_row() -> None:
    like = torch.empty(())
    draws = [
        RowStreams(seed, 0, 4).normal(path, (50,), like)
        for seed, path in ((0, ("a", 0)), (0, ("a", 1)), (0, ("b", 0)), (1, ("a", 0)))
    ]
    assert len(torch.cat(draws).unique(dim=0)) == 16


def test_noise_is_standard_normal_and_signs_are_fair() -> None:
    like = torch.empty((), dtype=torch.float64)
    noise = RowStreams(3, 0, 20_000).normal(("x",), (6,), like)
    signs = RowStreams(3, 0, 20_000).signs(("x",), 6, like)
    for values in (noise, signs):
        assert values.mean(0).abs().max() < 5 / 20_000**0.5
        assert (torch.corrcoef(values.T) - torch.eye(6)).abs().max() < 5 / 20_000**0.5
        follow = (values[1:] * values[:-1]).mean(0)  # of one row and the next
        assert follow.abs().max() < 5 / 20_000**0.5
    assert (noise.var(0) - 1).abs().max() < 5 * (2 / 20_000) ** 0.5
    assert torch.equal(signs.abs(), torch.ones_like(signs))


@pytest.mark.parametrize("size", [0, 1, 10, 400, 784, 32_768, 10**7])
@pytest.mark.parametrize("total", [1, 128, 1000, 60_000])
def test_blocks_are_even_and_of_bounded_size(total: int, size: int) -> None:
    block = block_rows(total, size)
    assert 1 <= block <= total and (block == 1 or (block - 1) * size <= BLOCK_SIZE)
    blocks = -(-total // block)
    assert blocks * block - total < blocks  # hardly any noise is drawn in vain
