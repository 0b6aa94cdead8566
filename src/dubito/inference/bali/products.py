"""Sums of products of what a layer saw: all that the data say to its regression."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers.form import PIECE, Product
from ...layers.grams import LINE, WIDE, add_gram, mirrored
from ...layers.record import BlockPart, Call, Record


def gram(
    parts: Sequence[BlockPart],
    record: Record,
    rows: int,
    targets: Tensor | None = None,
    noise: Tensor | None = None,
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


def _gram(
    part: BlockPart, calls: list[Call], rows: int, targets: Tensor | None, noise: Tensor | None
) -> tuple[Tensor, float]:
    product = part.product
    assert product is not None
    sums, cases, width = None, 0.0, 0
    for some in _slices(product, calls, rows):
        a, g = part.matrices(calls, rows, some)  # [b, K, T, n], [b, K, m, T]
        last = g.mT if targets is None else targets[some].reshape(len(a), 1, 1, -1)
        columns = [a, last] if noise is None else [a, noise[some], last]
        width = sum(column.shape[-1] for column in columns)
        if width >= WIDE:
            columns.append(a.new_zeros(*a.shape[:-1], -width % LINE))
        joint = torch.cat(columns, -1).transpose(0, 1).flatten(1, 2)  # [K, b · T, w]
        if sums is None:
            sums = joint.new_zeros(len(joint), joint.shape[-1], joint.shape[-1])
        add_gram(sums, joint)
        cases += joint.shape[1]
    assert sums is not None
    sums = mirrored(sums)[:, :width, :width]
    if product.order is not None:  # from the order of patches to that of weights
        inner = product.order.argsort().to(sums.device)
        index = torch.cat([inner, torch.arange(len(inner), sums.shape[-1], device=sums.device)])
        sums = sums[:, index][:, :, index]
    return sums, cases


def _slices(product: Product, calls: list[Call], rows: int) -> list[slice]:
    """Slices of rows whose patches fit into memory together."""
    outputs = sum(call.gradient.numel() for call in calls if call.gradient is not None)
    width = outputs // product.rows * product.columns
    step = max(1, rows * PIECE // max(width, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
