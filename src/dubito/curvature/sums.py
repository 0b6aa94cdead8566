"""Running sums over rows of what the calls of a parameter saw: what all have in common, and the diagonal of any."""

from dataclasses import dataclass, fields

from torch import Tensor

from ..layers.record import BlockPart, Call

#: Numbers one block of per-example products may hold: rows come in blocks that stay below it, in the cache.
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is summed.

    Attributes:
        factors: A and G.
        diagonal: Φ.
        basis: columns of U_A [G, n, ·] and of U_G [G, m, ·] along which Λ is taken; None for no Λ.
    """

    factors: bool = False
    diagonal: bool = False
    basis: tuple[Tensor, Tensor] | None = None


@dataclass(eq=False)
class Sums:
    """The sums of one parameter, in the order of the weight's columns once `finished`; None where not wanted.

    See `Statistics` for what they are.
    """

    inputs: Tensor | None = None
    gradients: Tensor | None = None
    eigenvalues: Tensor | None = None
    diagonal: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """All sums, to be added up over processes."""
        sums = (getattr(self, field.name) for field in fields(Sums))
        return [tensor for tensor in sums if tensor is not None]

    def flush(self) -> None:
        """Add what still waits for more rows."""

    def divide(self, count: int) -> None:
        """From sums to means."""
        for tensor in self.tensors():
            tensor.div_(count)


class DiagonalSums(Sums):
    """Σ_i δ_i^∘2 for any parameter, from each row's own gradient.

    Args:
        part: the parameter, or its part.
        shape: of the parameter, or of its part.
        like: a tensor of the dtype and device of the sums.
    """

    def __init__(self, part: BlockPart, shape: tuple[int, ...], like: Tensor) -> None:
        super().__init__(diagonal=like.new_zeros(shape))
        self.part = part

    def add(self, calls: list[Call], rows: int, weight: float, first: bool, last: bool) -> None:
        """Add what the calls saw of a batch of rows, for a share `weight` of their gradients."""
        assert self.diagonal is not None
        if not calls:
            return
        if len(calls) == 1 and calls[0].weight == self.part.parameter:
            x, g = calls[0].rows(rows, slice(None))
            squares = calls[0].form.squares(x, g.to(self.diagonal.dtype), rows)
            if squares is not None:
                self.diagonal.add_(squares, alpha=weight)
                return
        numbers = sum(call.form.numbers(*call.rows(rows, slice(None))) for call in calls) // rows
        for part in row_blocks(rows, max(numbers, self.diagonal.numel())):
            gradients = self.part.gradients(calls, rows, part, self.diagonal.dtype)
            add_squares(self.diagonal.view(-1), gradients, weight)

    def finish(self) -> None:
        """Bring the sums into their final form."""


def row_blocks(rows: int, numbers: int) -> list[slice]:
    """The rows in blocks of at most `BLOCK` numbers, where each row takes `numbers`."""
    step = max(1, BLOCK // max(numbers, 1))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def add_squares(sums: Tensor, values: Tensor, weight: float) -> None:
    """Sums += weight · Σ_b values_b^∘2; the values are used up."""
    if len(values) == 1:
        sums.addcmul_(values[0], values[0], value=weight)
    else:
        sums.add_(values.square_().sum(0), alpha=weight)
