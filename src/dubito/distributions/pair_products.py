"""The Gram matrix of a Kronecker basis V = U_g ⊗ U_a, without ever forming V.

Column (ζ, β) of V is the outer product of column ζ of U_g [m, g] and column β of U_a [n, a]. Products of
two columns of V are products of pairs of columns of U_g and of U_a, and a pair is the same both ways round:
g(g+1)/2 and a(a+1)/2 pairs hold all of Vᵀ diag(w) V, whose size is L² with L = g·a.
"""

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

CHUNK = 2**22
"""Entries of the largest temporary array (16 MiB in float32)."""


def gram(left: Tensor, right: Tensor, weight: Tensor) -> Tensor:
    """M₀ = Vᵀ diag(weight) V as an array of pairs [g(g+1)/2, a(a+1)/2].

    Args:
        left: U_g, [m, g].
        right: U_a, [n, a].
        weight: [m, n].
    """
    if _right_first(left, right):
        return gram(right, left, weight.mT).mT
    pairs = left.new_empty(_count(left), _count(right))
    step = _step(left, right)
    for rows, left_products in _pair_products(left, step):
        half = left_products.mT @ weight  # [pairs of g, n]
        for columns, right_products in _pair_products(right, step):
            pairs[rows, columns] = half @ right_products
    return pairs


def squared_norms(left: Tensor, right: Tensor, rows: Tensor) -> Tensor:
    """Squared lengths of the columns of B Vᵀ, as an [m, n] matrix: Σ_k (U_g B_k U_aᵀ)².

    Args:
        left: U_g, [m, g].
        right: U_a, [n, a].
        rows: B_k, [K, g, a].
    """
    count, g, a = rows.shape
    if g < a:  # the second contraction costs the most, so it goes over the shorter side
        return squared_norms(right, left, rows.mT).mT
    norms = []
    for part in left.split(max(1, CHUNK // (count * a))):
        for half in torch.einsum("mg,kga->mka", part, rows):
            blocks = right.split(max(1, CHUNK // (4 * count)))
            norms.append(torch.cat([(half @ block.mT).square().sum(0) for block in blocks]))
    return torch.stack(norms)


def unfold(pairs: Tensor, scale: Tensor) -> Tensor:
    """The full matrix diag(l) M₀ diag(l) [L, L] from the pairs of M₀, with l = `scale` [g, a]."""
    g, a = scale.shape
    left_pair, right_pair = _pair_index(g, pairs.device), _pair_index(a, pairs.device).flatten()
    full = scale.new_empty(g, a, g, a)
    for row in range(g):
        block = pairs[left_pair[row]].index_select(1, right_pair).view(g, a, a)  # [ζ', β, β']
        full[row] = scale[row, :, None, None] * block.transpose(0, 1) * scale
    return full.view(g * a, g * a)


def _count(basis: Tensor) -> int:
    return basis.shape[1] * (basis.shape[1] + 1) // 2


def _right_first(left: Tensor, right: Tensor) -> bool:
    (m, _), (n, _) = left.shape, right.shape
    p, q = _count(left), _count(right)
    return q * m * (n + p) < p * n * (m + q)


def _step(left: Tensor, right: Tensor) -> int:
    """So many pairs that no product of them with rows or with other pairs has more than `CHUNK` entries."""
    return max(1, min(isqrt(CHUNK), CHUNK // max(len(left), len(right))))


def _pair_products(basis: Tensor, step: int) -> Iterator[tuple[slice, Tensor]]:
    """Products of pairs of columns, `step` pairs at a time."""
    first, second = torch.triu_indices(basis.shape[1], basis.shape[1], device=basis.device)
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        yield part, basis[:, first[part]] * basis[:, second[part]]


def _pair_index(size: int, device: torch.device) -> Tensor:
    """The number of the pair (i, j) in the upper triangle, for every i and j."""
    i, j = torch.triu_indices(size, size, device=device)
    index = torch.empty(size, size, dtype=torch.long, device=device)
    index[i, j] = index[j, i] = torch.arange(len(i), device=device)
    return index
