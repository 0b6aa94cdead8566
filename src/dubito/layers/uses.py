"""Uses: how a layer uses one of its parameters, and so what each row's own gradient for it is.

A use reads what a layer saw: its inputs `x` and the gradients `g` at its outputs, both with an axis of N cases
first (rows, or frames of rows).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import reduce
from math import prod

import torch
from torch import Tensor

#: Numbers that patches of one case may take at a time.
PIECE = 1 << 23

#: From this width on, only the upper part of a symmetric product is computed, in blocks.
WIDE = 256
#: Numbers in a cache line: products of columns that start with one are a fifth faster.
LINE = 16


class Use(ABC):
    """How a layer's outputs depend on one parameter, or on one of the equal parts it is cut in.

    Attributes:
        trailing: whether the parameter meets the last axes of the inputs, so that all axes before them may
            hold positions; else it meets axis 1, that of channels.
    """

    trailing: bool = True

    @abstractmethod
    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of each case, [N, ...], in the parameter's own order of axes."""

    def squares(self, x: Tensor, g: Tensor, rows: int) -> Tensor | None:
        """Σ over rows of squared gradients where that is cheaper than from `gradients`, else None."""
        return None

    def numbers(self, x: Tensor, g: Tensor) -> int:
        """How many numbers `gradients` takes beside its answer."""
        return g.numel()


class Product(Use):
    """A matrix that multiplies the features at every position: y = W x.

    As matrices, the inputs are [N, G, T, n] and the gradients [N, G, m, T]: T positions, G groups.

    Args:
        rows: m.
        columns: n.
    """

    groups = 1
    #: Column j of the inputs as matrices belongs to column `order[j]` of the weight; None if the same.
    order: Tensor | None = None

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    @property
    def form(self) -> tuple[object, ...]:
        """What two uses must share to be parts of the same product."""
        return (type(self), self.groups, self.rows, self.columns)

    def inputs(self, x: Tensor) -> Tensor:
        """The inputs as matrices [N, G, T, n]."""
        return x.reshape(len(x), 1, prod(x.shape[1:-1]), self.columns)

    def outputs(self, g: Tensor) -> Tensor:
        """The gradients as matrices [N, G, m, T]."""
        return g.reshape(len(g), 1, prod(g.shape[1:-1]), self.rows).mT

    def pieces(self, x: Tensor, numbers: int) -> Iterator[tuple[slice, Tensor]]:
        """The inputs as matrices [N, G, t, n] of some positions each, of about `numbers` numbers if they are new."""
        yield slice(None), self.inputs(x)

    def add_moment(self, sums: Tensor, x: Tensor) -> None:
        """Add Σ a aᵀ over all positions to the upper triangle of [G, n, n]."""
        add_gram(sums, x.reshape(1, -1, self.columns))

    def total(self, x: Tensor) -> Tensor:
        """Σ a over all positions, [G, n]."""
        return x.reshape(1, -1, self.columns).sum(1)

    def products(self, x: Tensor, g: Tensor) -> Tensor:
        """δ = Σ_t g_t a_tᵀ of each case, [N, G, m, n], in the inputs' order of columns."""
        outputs = self.outputs(g)
        return reduce(Tensor.add_, (outputs[..., part] @ a for part, a in self.pieces(x, PIECE)))

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        own = self.products(x, g)
        return own[..., self.order.argsort()] if self.order is not None else own


class Shift(Use):
    """A bias that is added at every position.

    Args:
        shape: of the bias.
        trailing: see `Use`.
    """

    def __init__(self, shape: tuple[int, ...], trailing: bool) -> None:
        self.shape, self.trailing = shape, trailing

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        return self._summed(g)

    def _summed(self, values: Tensor) -> Tensor:
        """Over all positions of a case, [N, *shape]."""
        if self.trailing:
            return values.reshape(len(values), -1, *self.shape).sum(1)
        return values.reshape(*values.shape[:2], -1).sum(2)


class Scale(Shift):
    """A factor on features that were normalised before.

    Args:
        shape: of the factors.
        trailing: see `Use`.
        normalised: gives what the factors multiply.
    """

    def __init__(
        self, shape: tuple[int, ...], trailing: bool, normalised: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(shape, trailing)
        self.normalised = normalised

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        return self._summed(g * self.normalised(x).to(g.dtype))


class Lookup(Use):
    """A table of which each position reads one row.

    Args:
        count: the rows of the table.
        padding: the row that is never learned, or None.
    """

    def __init__(self, count: int, padding: int | None) -> None:
        self.count, self.padding = count, padding

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        table = g.new_zeros(len(x), self.count, g.shape[-1])
        read = x.reshape(len(x), -1, 1).expand(-1, -1, g.shape[-1])
        return table.scatter_add_(1, read, self._learned(x, g).reshape(read.shape))

    def squares(self, x: Tensor, g: Tensor, rows: int) -> Tensor:
        width = g.shape[-1]
        owner = torch.arange(rows, device=x.device).repeat_interleave(x.numel() // rows)
        # Only entries that a row reads have a gradient: one sum for each pair of a row and an entry it reads.
        pairs, place = torch.unique(owner * self.count + x.reshape(-1), return_inverse=True)
        sums = g.new_zeros(len(pairs), width).index_add_(0, place, self._learned(x, g).reshape(-1, width))
        return g.new_zeros(self.count, width).index_add_(0, pairs % self.count, sums.square_())

    def _learned(self, x: Tensor, g: Tensor) -> Tensor:
        return g if self.padding is None else g.masked_fill((x == self.padding).unsqueeze(-1), 0)


def add_gram(sums: Tensor, matrices: Tensor, scale: float = 1.0) -> None:
    """Add scale · XᵀX of [G, P, n] to the upper triangle of [G, n, n]; below it anything may stand."""
    groups, _, width = matrices.shape
    if width < WIDE and groups > 1:
        sums.baddbmm_(matrices.mT, matrices, alpha=scale)
        return
    step = width if width < WIDE else -(-width // (8 * LINE)) * LINE  # eight blocks: 9/16 of the products
    for own, matrix in zip(sums, matrices, strict=True):
        for start in range(0, width, step):
            block = slice(start, start + step)
            own[block, start:].addmm_(matrix[:, block].mT, matrix[:, start:], alpha=scale)


def mirrored(sums: Tensor) -> Tensor:
    """The symmetric matrices whose upper triangles these are; what is given becomes them."""
    for start in range(0, sums.shape[-1], WIDE // 2):  # blocks that stay in the cache while they are turned
        block, rest = slice(start, start + WIDE // 2), slice(start + WIDE // 2, None)
        corner = sums[..., block, block].triu_()
        corner.add_(corner.triu(1).mT)
        sums[..., rest, block].copy_(sums[..., block, rest].mT)
    return sums
