"""Which eigenvectors a sparse information form keeps: a rectangle of rows and columns of Λ."""

from dataclasses import dataclass
from math import isqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from dubito.errors import ConfigError, DataError, require_count, unknown_name
from dubito.hints import checked

Rule = Literal["algorithm1", "rectangle"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EigenvalueSelection:
    """Rows and columns of Λ that are kept, and how much of it they hold.

    Attributes:
        output_index: kept rows of Λ (columns of U_G), ascending, [g].
        input_index: kept columns of Λ (columns of U_A), ascending, [a].
        requested_rank: the K that was asked for, as a whole number and at most mn.
        rank: the K' ≤ K leading eigenvalues that fit into the size limit.
        captured_trace: the share of the sum of Λ inside the rectangle.
    """

    output_index: Tensor
    input_index: Tensor
    requested_rank: int
    rank: int
    captured_trace: float

    @property
    def size(self) -> int:
        """L = a·g, the number of eigenvalues kept: K' and those that complete the rectangle."""
        return len(self.output_index) * len(self.input_index)


@checked
def select(
    eigenvalues: Tensor, rank: int | float, *, method: Rule = "algorithm1", max_size: int | None = None
) -> EigenvalueSelection:
    """Choose the eigenvectors of a layer to keep.

    `algorithm1` keeps every row and every column that holds one of the K largest eigenvalues (Algorithm 1 of
    INF). `rectangle` looks for the rectangle with the largest sum that is no larger than that one, by
    turns over rows and columns, and never captures less.

    Args:
        eigenvalues: Λ, [m, n].
        rank: K, a whole number (capped at mn) or, as a float, a fraction of the mn eigenvalues.
        method: how the rectangle is found.
        max_size: the largest L; K is lowered until the rectangle fits. No limit if not given.
    """
    if method not in get_args(Rule):
        raise unknown_name("selection", method, get_args(Rule))
    if max_size is not None:
        require_count(max_size=max_size)
    if eigenvalues.ndim != 2 or eigenvalues.numel() == 0:
        raise DataError(f"eigenvalues must be an m x n matrix, got shape {tuple(eigenvalues.shape)}")
    if not bool((eigenvalues.isfinite() & (eigenvalues >= 0)).all()):
        raise DataError("eigenvalues must be finite and not negative; check the statistics of this layer")
    requested = resolve_rank(rank, eigenvalues.numel())
    rows, columns, leading = _algorithm1(eigenvalues, requested, max_size or eigenvalues.numel())
    if method == "rectangle":
        rows, columns = _best_rectangle(eigenvalues, rows, columns)
    total = float(eigenvalues.sum())
    captured = float(eigenvalues[rows][:, columns].sum()) / total if total > 0 else 1.0
    return EigenvalueSelection(
        output_index=rows.sort().values,
        input_index=columns.sort().values,
        requested_rank=requested,
        rank=leading,
        captured_trace=min(captured, 1.0),
    )


def resolve_rank(rank: int | float, total: int) -> int:
    """K as a whole number from 1 to `total`: a whole `rank` is capped, a float is a fraction of `total`."""
    if not isinstance(rank, float):
        require_count(rank=rank)
        return min(int(rank), total)
    if not 0 < rank <= 1:
        raise ConfigError(f"rank as a float is a fraction in (0, 1], got {rank}; for a count pass an int")
    return max(1, round(rank * total))


def _algorithm1(eigenvalues: Tensor, rank: int, max_size: int) -> tuple[Tensor, Tensor, int]:
    m, n = eigenvalues.shape
    order = eigenvalues.flatten().topk(rank).indices
    # β = floor((i − 1)/m) + 1 is meant [INF, Algorithm 1 and Definition 2, which print floor(i/m) + 1, wrong at i = m]:
    # counting from 0 gives it.
    rows, columns = order // n, order % n
    # Rows and columns only ever join, so g·a grows along the order and the last K' that fits is its count.
    sizes = _seen_so_far(rows, m) * _seen_so_far(columns, n)
    leading = int((sizes <= max_size).sum())
    return rows[:leading].unique(), columns[:leading].unique(), leading


def _seen_so_far(index: Tensor, size: int) -> Tensor:
    """How many different values the first 1, 2, ... entries of `index` hold."""
    place = torch.arange(len(index), device=index.device)
    first = place.new_full((size,), len(index)).scatter_reduce(0, index, place, "amin")
    return (first[index] == place).cumsum(0)


def _best_rectangle(eigenvalues: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The best rectangle found no larger than the given one."""
    m, n = eigenvalues.shape
    by_sum = eigenvalues.sum(1).argsort(descending=True)
    starts = [(rows, len(columns))]  # so that the result is never worse than the given one
    starts += [(by_sum[:g], a) for g, a in _shapes(len(rows) * len(columns), m, n)]
    return max(
        (_alternate(eigenvalues, *start) for start in starts),
        key=lambda rectangle: float(eigenvalues[rectangle[0]][:, rectangle[1]].sum()),
    )


def _alternate(eigenvalues: Tensor, rows: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Top columns given the rows, top rows given the columns, until the sum stops growing."""
    height, best = len(rows), -1.0
    columns = rows
    while True:
        new_columns = eigenvalues[rows].sum(0).topk(width).indices
        sums = eigenvalues[:, new_columns].sum(1).topk(height)
        if float(sums.values.sum()) <= best:
            return rows, columns
        rows, columns, best = sums.indices, new_columns, float(sums.values.sum())


def _shapes(size: int, m: int, n: int) -> list[tuple[int, int]]:
    """The g × a that fit into `size`, m and n and that no other contains: about 2√size."""
    shapes = set()
    for side in range(1, isqrt(size) + 1):
        for height in (side, size // side):
            width = min(n, size // min(height, m))
            shapes.add((min(m, size // width), width))
    return sorted(shapes)
