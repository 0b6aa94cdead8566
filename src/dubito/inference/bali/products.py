"""Sums of products of what a layer saw: all that the data say to its regression."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers.form import PIECE
from ...layers.grams import LINE, WIDE, add_gram, mirrored
from ...layers.record import BlockPart, Call, Record


def gram(
    parts: Sequence[BlockPart], record: Record, rows: int, targets: Tensor | None = None, noise: Tensor | None = None
) -> tuple[Tensor, float]:
    """[X G]ᵀ[X G] of a block, [K, w, w], and the cases (rows times positions) it was summed over.

    X are the inputs of the layer, patches where it is a convolution, with a last column of ones for the bias, and
    G the gradients at its outputs. Every position of every row is a case.

    Args:
        parts: of the block's weight.
        record: of the pass.
        rows: of the batch.
        targets: in place of the gradients, [B, ...].
        noise: E on the outputs [B, K, T, m], for [X E G].
    """
    grams = [_gram(part, record.of(part.key), rows, targets, noise) for part in parts]
    return torch.cat([sums for sums, _ in grams]) if len(grams) > 1 else grams[0][0], grams[0][1]


def cases(
    parts: Sequence[BlockPart],
    record: Record,
    rows: int,
    targets: Tensor | None = None,
    noise: Tensor | None = None,
    *,
    always: bool = False,
) -> list[Tensor] | None:
    """The inputs X, where given the noise E, and the gradients or targets of a block, [K, P, ...] each.

    None where sums of products are cheaper, or where they do not fit into memory together, unless they are wanted
    `always`; the other arguments are those of `gram`.
    """
    columns = []
    for part in parts:
        calls, product = record.of(part.key), part.product
        assert product is not None
        positions = sum(call.gradient.numel() for call in calls if call.gradient is not None)
        many = positions > product.groups * product.rows * (product.rows + product.columns)
        if not always and (many or len(_slices(part, calls, rows)) > 1):
            return None  # a map of sums takes (n + m) n m multiplications, one of P cases P n m
        columns.append(_columns(part, calls, rows, slice(0, rows), targets, noise))
    inner = _order(parts[0], columns[0][0])
    if inner is not None:
        columns = [[some[0][..., inner], *some[1:]] for some in columns]
    return columns[0] if len(columns) == 1 else [torch.cat(alike) for alike in zip(*columns, strict=True)]


def _columns(
    part: BlockPart, calls: list[Call], rows: int, some: slice, targets: Tensor | None, noise: Tensor | None
) -> list[Tensor]:
    a, g = part.matrices(calls, rows, some)  # [b, K, T, n], [b, K, m, T]
    last = g.mT if targets is None else targets[some].reshape(len(a), 1, 1, -1)
    columns = [a, last] if noise is None else [a, noise[some], last]
    return [column.transpose(0, 1).flatten(1, 2) for column in columns]  # [K, b · T, ...]


def _order(part: BlockPart, a: Tensor) -> Tensor | None:
    """The columns of patches in the order of weights; None where they stand so."""
    assert part.product is not None
    if part.product.order is None:
        return None
    inner = part.product.order.argsort().to(a.device)
    return torch.cat([inner, torch.arange(len(inner), a.shape[-1], device=a.device)])


def _gram(
    part: BlockPart, calls: list[Call], rows: int, targets: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, float]:
    sums, total, width = None, 0.0, 0
    for some in _slices(part, calls, rows):
        columns = _columns(part, calls, rows, some, targets, noise)
        width = sum(column.shape[-1] for column in columns)
        if width >= WIDE:
            columns.append(columns[0].new_zeros(*columns[0].shape[:-1], -width % LINE))
        joint = torch.cat(columns, -1)
        if sums is None:
            sums = joint.new_zeros(len(joint), joint.shape[-1], joint.shape[-1])
        add_gram(sums, joint)
        total += joint.shape[1]
    assert sums is not None
    return in_order(part, mirrored(sums)[:, :width, :width]), total


def in_order(part: BlockPart, sums: Tensor) -> Tensor:
    """Sums of products from the order of patches to that of weights."""
    inner = _order(part, sums)
    return sums if inner is None else sums[:, inner][:, :, inner]


def _slices(part: BlockPart, calls: list[Call], rows: int) -> list[slice]:
    """Slices of rows whose patches fit into memory together."""
    product = part.product
    assert product is not None
    outputs = sum(call.gradient.numel() for call in calls if call.gradient is not None)
    width = outputs // product.rows * product.columns
    step = max(1, rows * PIECE // max(width, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
