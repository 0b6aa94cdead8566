"""Moments of dense layers with ReLU between them, and of precisions [Hernández-Lobato & Adams 2015]."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Mean and variance of a layer's weight, the bias as its last column where it has one, [..., m, n].
LayerMoments = tuple[Tensor, Tensor]


class Gamma(NamedTuple):
    """A Gamma distribution of a precision; 1/precision has mean rate/(shape − 1)."""

    shape: Any
    rate: Any

    def variances(self) -> tuple[Any, Any, Any]:
        """Those of a Normal by which Student's t under this, and under shape + 1 and + 2, are approximated."""
        return tuple(self.rate / (self.shape + more) for more in (-1, 0, 1))  # pyright: ignore[reportReturnType]


def matched(gamma: Gamma, first: Any, second: Any) -> Gamma:
    """The Gamma with the first two moments of the precision after a factor with evidence Z(shape, rate).

    Args:
        gamma: before it.
        first: Z(shape + 1) / Z(shape).
        second: Z(shape + 2) / Z(shape + 1).
    """
    shape, rate = gamma  # E[λ] = first · shape/rate, E[λ²] = first · second · shape (shape + 1)/rate²
    new_shape = 1 / (second / first * (shape + 1) / shape - 1)
    return Gamma(new_shape, 1 / (second * (shape + 1) / rate - first * shape / rate))


def rectified(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(0, a) for a ~ N(mean, variance)."""
    std = variance.clamp(min=1e-24).sqrt()
    ratio = (mean / std).clamp(-30, 30)  # beyond, all or nothing passes
    below, above = torch.special.ndtr(-ratio), torch.special.ndtr(ratio)
    # φ(r)/Φ(r), stable where both vanish
    hazard = (-0.5 * ratio.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(ratio)).exp()
    lifted = ratio + hazard  # of a positive a, over std
    spread = above * (below * lifted.square() + 1 - hazard * lifted)
    return above * (mean + std * hazard), std.square() * spread.clamp(min=0)


def propagated(inputs: Tensor, layers: Sequence[LayerMoments]) -> tuple[Tensor, Tensor]:
    """Mean and variance [..., B, m] of dense layers with ReLU between them, moments matched layer by layer.

    Args:
        inputs: [..., B, n].
        layers: moments of the weights.
    """
    mean, variance = inputs, torch.zeros_like(inputs)
    for number, (weight, spread) in enumerate(layers):
        if number:
            mean, variance = rectified(mean, variance)
        if weight.shape[-1] > mean.shape[-1]:  # the bias
            mean, variance = F.pad(mean, (0, 1), value=1.0), F.pad(variance, (0, 1))
        squared = mean.square() @ spread.mT + variance @ (weight.square() + spread).mT
        mean, variance = mean @ weight.mT, squared
    return mean, variance
