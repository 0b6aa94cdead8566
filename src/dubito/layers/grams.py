"""Sums of products XᵀX over many rows, of which only the upper triangle is computed."""

from torch import Tensor

#: From this width on, only the upper part of a symmetric product is computed, in blocks.
WIDE = 256
#: Numbers in a cache line: products of columns that start with one are a fifth faster.
LINE = 16


def add_gram(sums: Tensor, matrices: Tensor, scale: float = 1.0, keep: float = 1.0) -> None:
    """Add scale · XᵀX of [G, P, n] to keep times the upper triangle of [G, n, n]; below it anything may stand."""
    groups, _, width = matrices.shape
    if width < WIDE and groups > 1:
        sums.baddbmm_(matrices.mT, matrices, beta=keep, alpha=scale)
        return
    step = width if width < WIDE else -(-width // (8 * LINE)) * LINE  # eight blocks: 9/16 of the products
    for total, matrix in zip(sums, matrices, strict=True):
        for start in range(0, width, step):
            block = slice(start, start + step)
            total[block, start:].addmm_(matrix[:, block].mT, matrix[:, start:], beta=keep, alpha=scale)


def mirrored(sums: Tensor) -> Tensor:
    """The symmetric matrices whose upper triangles these are; what is given becomes them."""
    for start in range(0, sums.shape[-1], WIDE // 2):  # blocks that stay in the cache while they are turned
        block, rest = slice(start, start + WIDE // 2), slice(start + WIDE // 2, None)
        corner = sums[..., block, block].triu_()
        corner.add_(corner.triu(1).mT)
        sums[..., rest, block].copy_(sums[..., block, rest].mT)
    return sums
