"""Layouts: where the inputs and outputs of a layer hold the rows of the batch."""

from enum import Enum

import torch
from torch import Tensor


class Layout(Enum):
    """How a layer's inputs hold the rows of the batch."""

    ROWS = "rows first"  # [B, ...]
    SECOND = "rows second"  # [T, B, ...], time-major sequences
    FLAT = "positions of a row together"  # [B·T, ...], row by row
    FLAT_SECOND = "rows of a position together"  # [T·B, ...], position by position
    NONE = "no rows"  # the same whatever the rows are
    UNKNOWN = "unknown"


def candidates(many: Tensor, single: Tensor, rows: int) -> set[Layout]:
    """Where `single`, seen in a run of the first row alone, stands in `many`, seen in a run of `rows` rows.

    In evaluation mode rows do not touch each other, so that what the single row shows stands somewhere in the larger
    run; several layouts are possible where values repeat.
    """
    if many.shape == single.shape:
        return {Layout.NONE} if _same(many, single) else set()
    if not single.ndim or many.ndim != single.ndim:
        return set()
    possible = set()
    if single.shape[0] == 1 and many.shape[0] == rows and _same(many[:1], single):
        possible.add(Layout.ROWS)
    if single.ndim > 1 and single.shape[1] == 1 and many.shape[1] == rows and _same(many[:, :1], single):
        possible.add(Layout.SECOND)
    if many.shape[0] == rows * single.shape[0]:
        if _same(many[: len(single)], single):
            possible.add(Layout.FLAT)
        if _same(many[::rows], single):
            possible.add(Layout.FLAT_SECOND)
    return possible


def decided(possible: set[Layout]) -> Layout:
    """The layout that remains: rows on an axis of their own go before rows on a shared one."""
    for layout in (Layout.ROWS, Layout.SECOND, Layout.NONE):
        if layout in possible:
            return layout
    return next(iter(possible)) if len(possible) == 1 else Layout.UNKNOWN


def rows_first(tensor: Tensor, layout: Layout, rows: int, part: slice = slice(None)) -> Tensor:
    """Some of the rows, whatever the layout: [b · cases, ...], a row's cases (frames) one after the other."""
    if layout is Layout.SECOND:
        return tensor.transpose(0, 1)[part]
    if layout is Layout.FLAT:
        return tensor.unflatten(0, (rows, -1))[part].flatten(0, 1)
    if layout is Layout.FLAT_SECOND:
        return tensor.unflatten(0, (-1, rows)).transpose(0, 1)[part].flatten(0, 1)
    return tensor if part == slice(None) else tensor[part]


def per_row(values: Tensor, layout: Layout, like: Tensor) -> Tensor:
    """Values of the rows, [B], to be multiplied with a tensor `like` of this layout."""
    if layout is Layout.SECOND:
        return values.reshape(1, -1, *[1] * (like.ndim - 2))
    cases = len(like) // len(values)
    values = values.repeat(cases) if layout is Layout.FLAT_SECOND else values.repeat_interleave(cases)
    return values.reshape(-1, *[1] * (like.ndim - 1))


def _same(part: Tensor, single: Tensor) -> bool:
    if part.shape != single.shape or not single.is_floating_point():
        return torch.equal(part, single)
    # Rounding differs a little between batch sizes; other rows differ a lot.
    rtol = max(1e-3, 8 * torch.finfo(single.dtype).eps)
    atol = 0.1 * rtol * float(single.abs().max()) if single.numel() else 0.0
    return torch.allclose(part.float(), single.float(), rtol=rtol, atol=atol)
