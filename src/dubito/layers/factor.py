"""The factors of a weight's nodes for the passes at hand: where they come from, and how they meet activations."""

from dataclasses import dataclass, replace
from math import log, prod
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import Bounds, Scaled, ScaledDraw


@dataclass(frozen=True)
class Factor:
    """P passes of factors on C nodes: mean, or mean + std · noise held between ±bound, or its exponential.

    Attributes:
        mean: [P, *C].
        std: [P, *C], of either sign; None where factors are points.
        noise: [n, *C], the same for all passes; [P, 1, *C] where the rows of a pass share a draw.
        bound: the largest absolute value; None sets no limit.
        positive: whether factors are exponentials.
        given: whether `mean` holds the factors of every row themselves, [P, n, *C].
    """

    mean: Tensor
    std: Tensor | None = None
    noise: Tensor | None = None
    bound: float | None = None
    positive: bool = False
    given: bool = False

    @property
    def bounds(self) -> Bounds:
        """Of mean + std · noise."""
        if self.bound is None:
            return None, None
        return (None, log(self.bound)) if self.positive else (-self.bound, self.bound)

    @property
    def per_row(self) -> bool:
        """Whether each row has factors of its own."""
        return self.given or (self.noise is not None and self.noise.ndim == self.mean.ndim)

    def tensor(self) -> Tensor:
        """The factors, [P, n or 1, *C]."""
        if self.given:
            return self.mean
        mean = self.mean.unsqueeze(1)
        if self.std is None or self.noise is None:
            return mean.exp() if self.positive else mean
        values = torch.addcmul(mean, self.std.unsqueeze(1), self.noise)
        values = values if self.bounds == (None, None) else values.clamp(*self.bounds)
        return values.exp() if self.positive else values

    def part(self, index: int) -> "Factor":
        """The factors of one part of nodes [parts, C]."""
        mean, std, noise = (
            None if values is None else values[..., index, :] for values in (self.mean, self.std, self.noise)
        )
        assert mean is not None
        return replace(self, mean=mean, std=std, noise=noise)

    def gathered(self, nodes: Tensor) -> Tensor:
        """The factors of some nodes per row: nodes [1 or P, n, A] give [P, n, A]; for one axis of nodes."""
        assert not self.given
        passes = len(self.mean)
        nodes = nodes.expand(passes, -1, -1)
        flat = nodes.reshape(passes, -1)
        values = self.mean.gather(1, flat).view(nodes.shape)
        if self.std is not None and self.noise is not None:
            noise = self.noise if self.noise.ndim == 3 else self.noise.unsqueeze(0)
            drawn = noise.expand(passes, nodes.shape[1], -1).gather(2, nodes)
            values = torch.addcmul(values, self.std.gather(1, flat).view(nodes.shape), drawn)
            values = values if self.bounds == (None, None) else values.clamp(*self.bounds)
        return values.exp() if self.positive else values

    def on(self, x: Tensor, rows: int, axis: int, bias: Tensor | None = None) -> Tensor:
        """X ∘ f (+ b) on the channels of activations, whose rows are those of all passes, or of one.

        Args:
            x: activations [P·n, ...] or, before passes part, [n, ...].
            rows: n.
            axis: of the channels.
            bias: [C], [P, C], or [P, n, C] where rows have their own.
        """
        passes = self.mean.shape[0]
        if self.given and passes == 1 and bias is None and x.shape[0] == rows and not self.mean.requires_grad:
            shape = [1] * x.ndim
            shape[0], shape[axis] = rows, x.shape[axis]
            return x * self.mean.to(x.dtype).view(shape)
        blocks = as_blocks(x, passes, rows, axis)
        added = None if bias is None else bias.reshape(*(*bias.shape[:-1], 1, 1)[:2], 1, bias.shape[-1], 1)
        if self.per_row and not self.positive and not self.given:
            assert self.std is not None and self.noise is not None
            wide = [t[:, None, None, :, None] for t in (self.mean, self.std)]
            out = ScaledDraw.apply(blocks, *wide, self.noise[None, :, None, :, None], added, self.bounds)
        else:
            out = Scaled.apply(blocks, self.tensor()[:, :, None, :, None], added)
        assert isinstance(out, Tensor)
        return out.reshape(x.shape[0] * passes // blocks.shape[0], *x.shape[1:])


class NodeFactors(NamedTuple):
    """The factors on the input and on the output nodes of a weight; None where a side has none."""

    inputs: Factor | None = None
    outputs: Factor | None = None

    @property
    def per_row(self) -> bool:
        """Whether each row has factors of its own on some side."""
        inputs, outputs = self
        return (inputs is not None and inputs.per_row) or (outputs is not None and outputs.per_row)

    def part(self, index: int) -> "NodeFactors":
        """Those of one of the equal parts that a packed weight is cut in."""
        return NodeFactors(*(None if side is None else side.part(index) for side in self))


def as_blocks(x: Tensor, passes: int, rows: int, axis: int) -> Tensor:
    """Activations as [P or 1, n, positions, channels, positions]; 1 where passes have not parted yet."""
    axis %= x.ndim
    after = prod(x.shape[axis + 1 :])
    parted = 1 if x.shape[0] == rows else passes
    return x.reshape(parted, rows, -1, x.shape[axis], after)
