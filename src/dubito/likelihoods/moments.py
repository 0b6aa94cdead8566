"""Mean and standard deviation of real targets, output by output."""

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..errors import warn

#: Means that a network's bias reaches in time, as a number and in standard deviations, and standard deviations that its
#: weights do: beyond them 150 steps of Adam at 0.001 explain less than half of what they explain of standard targets.
FAR_MEAN, FAR_IN_STDS, NEAR_STDS = 10.0, 5.0, (0.02, 10.0)


class WeightedTargets(NamedTuple):
    """Targets [B, ...] of rows that count several times, or less than once.

    Attributes:
        targets: of the rows.
        weights: how often each counts, [B].
    """

    targets: Tensor
    weights: Tensor


#: What a likelihood is built from: targets whole, or batch by batch.
Targets: TypeAlias = Tensor | WeightedTargets | Iterable[Tensor | WeightedTargets]


def per_output(values: Tensor) -> Tensor:
    """[B, C, ...] as [C, values], [B] as [1, B]."""
    return values.transpose(0, 1).flatten(1) if values.ndim > 1 else values.unsqueeze(0)


def moments(batches: Iterable[Tensor | WeightedTargets]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each output [C], over rows and positions; 1 where all targets are the same.

    Batches are read once, in double precision: means and sums of squares around them are joined pair by pair
    [Chan, Golub and LeVeque 1983]. All is relative to the first row, so that a constant stays one exactly.
    """
    count, first, mean, squares = 0, torch.empty(0), torch.zeros(()), torch.zeros(())
    for batch in batches:
        targets, weights = batch if isinstance(batch, WeightedTargets) else (batch, None)
        values = per_output(targets.detach()).cpu().double()
        first = first if count else values[:, :1]
        values = values - first
        if weights is None:
            rows, centre, shares = values.shape[1], values.mean(1, keepdim=True), 1.0
        else:
            shares = weights.cpu().double().repeat_interleave(values.shape[1] // len(targets))
            rows = float(shares.sum())
            if not rows:
                continue
            centre = (values * shares).sum(1, keepdim=True) / rows
        gap = centre[:, 0] - mean
        squares = squares + ((values - centre).square() * shares).sum(1)
        squares = squares + gap.square() * (count * rows / (count + rows))
        mean = mean + gap * (rows / (count + rows))
        count += rows
    std = (squares / (count - 1 if count >= 2 else count)).sqrt()
    return first[:, 0] + mean, torch.where(std > 0, std, 1.0)


def warn_if_far(targets: Tensor, outputs: Tensor) -> None:
    """Warn of targets far from mean 0 and standard deviation 1, unless the network answers in their units already.

    Args:
        targets: of the training rows at hand, [N, ...].
        outputs: of a few rows before training, [B, ...].
    """
    mean, std = moments([targets])
    answer, spread = moments([outputs])
    shift, (low, high) = mean.abs(), NEAR_STDS
    far = (shift > FAR_MEAN) | ((shift > 1) & (shift > FAR_IN_STDS * std)) | (std < low) | (std > high)
    ready = ((answer - mean).abs() <= 2 * std) & (spread > std / 10) & (spread < std * 10)
    if not bool((far & ~ready).any()):
        return
    output = int((far & ~ready).nonzero()[0])
    warn(
        f"the targets of output {output} have mean {mean[output]:.4g} and standard deviation {std[output]:.4g}; "
        "training starts near mean 0 and standard deviation 1 and may not reach them: take "
        'Gaussian(standardise=True), or training="auto", which does'
    )
