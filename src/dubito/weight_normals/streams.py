"""Noise per row of a batch, the same for a row whichever rows come with it."""

from collections.abc import Iterator
from functools import lru_cache
from math import ceil, prod

import torch
from torch import Tensor

from .. import seeds

#: Numbers drawn from one generator: few enough that a piece of the rows does not cost the noise of all.
BLOCK_SIZE = 2**17


class RowStreams:
    """Streams of noise by name for the rows `first` to `first + rows` of a larger batch.

    Rows are drawn in blocks, each from a generator of its own: processes that share a batch, and predictions
    in pieces, see the same noise as one that has all rows.

    Args:
        seed: of all streams.
        first: the number of the first row.
        rows: how many.
        total: the rows of the larger batch; None where these are all.
        std: of Normal noise.
    """

    def __init__(self, seed: int, first: int, rows: int, total: int | None = None, std: float = 1.0) -> None:
        self.seed, self.first, self.rows, self.total, self.std = seed, first, rows, total or first + rows, std

    def normal(self, path: tuple[int | str, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Normal noise [rows, *shape] with the dtype and device of `like`."""
        size = prod(shape)
        block = block_rows(self.total, size)
        noise = torch.empty(self._count(block) * block, size, dtype=like.dtype, device=like.device)
        for part, generator in zip(noise.split(block), self._generators(path, block, like), strict=True):
            part.normal_(0.0, self.std, generator=generator)
        return self._own(noise, block).view(self.rows, *shape)

    def signs(self, path: tuple[int | str, ...], size: int, like: Tensor) -> Tensor:
        """−1 or 1 with even odds, [rows, size]."""
        block = block_rows(self.total, size)
        words = ceil(block * size / 32)  # whose bits give a sign each: generators make no less at a time
        drawn = [
            torch.randint(-(2**31), 2**31, (words,), generator=stream, device=like.device, dtype=torch.int32)
            for stream in self._generators(path, block, like)
        ]
        table = byte_signs(like.dtype, like.device)
        signs = table.index_select(0, torch.cat(drawn).view(torch.uint8).int()).view(len(drawn), -1)
        return self._own(signs[:, : block * size].reshape(-1, size), block)

    def _count(self, block: int) -> int:
        return (self.first + self.rows - 1) // block - self.first // block + 1

    def _generators(self, path: tuple[int | str, ...], block: int, like: Tensor) -> Iterator[torch.Generator]:
        number = self.first // block
        for index in range(number, number + self._count(block)):
            yield seeds.generator(self.seed, *path, index, device=like.device)

    def _own(self, blocks: Tensor, block: int) -> Tensor:
        start = self.first % block
        return blocks[start : start + self.rows]


def block_rows(total: int, size: int) -> int:
    """Rows drawn together where each takes `size` numbers: even shares of all rows."""
    most = max(1, BLOCK_SIZE // max(1, size))
    return ceil(total / ceil(total / most))


@lru_cache(maxsize=16)
def byte_signs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight bits of each byte as signs, [256, 8]."""
    bits = [[2.0 * (byte >> bit & 1) - 1.0 for bit in range(8)] for byte in range(256)]
    with torch.inference_mode(False):
        return torch.tensor(bits, dtype=dtype, device=device)
