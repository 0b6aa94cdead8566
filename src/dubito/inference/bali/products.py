"""Sums of products of what a layer saw: all that the data say to its regression."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...layers.taps import Tap
from ...layers.uses import LINE, PIECE, WIDE, add_gram, mirrored


def gram(
    taps: Sequence[Tap], rows: int, targets: Tensor | None = None, noise: Tensor | None = None
) -> tuple[Tensor, float]:
    """[X G]ᵀ[X G] of a block, [K, w, w], and the cases (rows times positions) it was summed over.

    X are the inputs of the layer, patches where it is a convolution, with a last column of ones for the bias, and
    G the gradients at its outputs. Every position of every row is a case.

    Args:
        taps: of the block, one for each part of its weight.
        rows: of the batch.
        targets: in place of the gradients, [B, ...].
        noise: E on the outputs [B, K, T, m], for [X E G].
    """
    each = [_gram(tap, rows, targets, noise) for tap in taps]
    return torch.cat([sums for sums, _ in each]) if len(each) > 1 else each[0][0], each[0][1]


def _gram(tap: Tap, rows: int, targets: Tensor | None, noise: Tensor | None) -> tuple[Tensor, float]:
    product = tap.product
    assert product is not None
    sums, cases, width = None, 0.0, 0
    for part in _parts(tap, rows):
        a, g = tap.matrices(rows, part)  # [b, K, T, n], [b, K, m, T]
        last = g.mT if targets is None else targets[part].reshape(len(a), 1, 1, -1)
        columns = [a, last] if noise is None else [a, noise[part], last]
        width = sum(each.shape[-1] for each in columns)
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


def _parts(tap: Tap, rows: int) -> list[slice]:
    """Slices of rows whose patches fit into memory together."""
    seen = tap.seen()
    kernel = max(link.use.columns for _, link in seen)  # pyright: ignore[reportAttributeAccessIssue]
    outputs = sum(call.gradient.numel() for call, _ in seen if call.gradient is not None)
    groups = tap.links[0].use.groups  # pyright: ignore[reportAttributeAccessIssue]
    width = outputs // tap.links[0].use.rows * kernel // max(groups, 1) * groups  # pyright: ignore
    step = max(1, rows * PIECE // max(width, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]
