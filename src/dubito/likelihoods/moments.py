"""Mean and standard deviation of real targets, output by output."""

from collections.abc import Iterable

import torch
from torch import Tensor


def per_output(values: Tensor) -> Tensor:
    """[B, C, ...] as [C, values], [B] as [1, B]."""
    return values.transpose(0, 1).flatten(1) if values.ndim > 1 else values.unsqueeze(0)


def moments(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each output [C], over rows and positions; 1 where all targets are the same.

    Batches are read once, in double precision: means and sums of squares around them are joined pair by pair
    [Chan, Golub and LeVeque 1983]. All is relative to the first row, so that a constant stays one exactly.
    """
    count, first, mean, squares = 0, torch.empty(0), torch.zeros(()), torch.zeros(())
    for targets in batches:
        values = per_output(targets.detach()).cpu().double()
        first = first if count else values[:, :1]
        values = values - first
        rows = values.shape[1]
        gap = values.mean(1) - mean
        squares = squares + (values - values.mean(1, keepdim=True)).square().sum(1)
        squares = squares + gap.square() * (count * rows / (count + rows))
        mean = mean + gap * (rows / (count + rows))
        count += rows
    std = (squares / max(count - 1, 1)).sqrt()
    return first[:, 0] + mean, torch.where(std > 0, std, 1.0)
