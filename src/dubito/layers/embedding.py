"""Tables of which each position reads one row: `F.embedding`."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .context import Context
from .form import Nodes
from .kinds import Declared, NoRule, Standin, declares, kind


@dataclass(frozen=True)
class Lookup(Nodes):
    """y = W[x]: a product with one-hot inputs that nobody forms; input nodes are the rows of the table.

    Attributes:
        count: the rows of the table.
        width: their numbers.
        padding: the row that is never learned, or None.
    """

    count: int
    width: int
    padding: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, self.width)

    @property
    def input_view(self) -> tuple[int, ...]:
        return (self.count, 1)

    @property
    def output_view(self) -> tuple[int, ...]:
        return (1, self.width)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.embedding(x, weight, self.padding)

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        assert weights is not None
        first = self.count * torch.arange(draws, device=x.device)  # of each draw's rows, one table below the other
        tokens = x.unflatten(0, (draws, -1)) + first.reshape(-1, *(1 for _ in x.shape))
        return self.padded(x, F.embedding(tokens.flatten(0, 1), weights.flatten(0, 1)))

    def padded(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Vectors of all draws, from which nothing is learned where the tokens are padding."""
        if self.padding is None or not vectors.requires_grad:
            return vectors
        padding = (x == self.padding).unsqueeze(-1)
        if padding.shape[0] != vectors.shape[0]:
            padding = padding.repeat(vectors.shape[0] // padding.shape[0], *(1 for _ in x.shape))
        return torch.where(padding, vectors.detach(), vectors)

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        table = g.new_zeros(len(x), self.count, g.shape[-1])
        entries = x.reshape(len(x), -1, 1).expand(-1, -1, g.shape[-1])
        return table.scatter_add_(1, entries, self._learned(x, g).reshape(entries.shape))

    def squares(self, x: Tensor, g: Tensor, rows: int) -> Tensor:
        width = g.shape[-1]
        row = torch.arange(rows, device=x.device).repeat_interleave(x.numel() // rows)
        # Only entries that a row reads have a gradient: one sum for each pair of a row and an entry it reads.
        # Numbered along the sorted pairs: `unique` would ask the device how many there are.
        pairs, order = (row * self.count + x.reshape(-1)).sort(stable=True)
        index = pairs.diff(prepend=pairs[:1]).ne_(0).cumsum(0)
        entries = torch.zeros_like(pairs).scatter_(0, index, pairs % self.count)
        learned = self._learned(x, g).reshape(-1, width)[order]
        sums = torch.zeros_like(learned).index_add_(0, index, learned)
        return g.new_zeros(self.count, width).index_add_(0, entries, sums.square_())

    def _learned(self, x: Tensor, g: Tensor) -> Tensor:
        return g if self.padding is None else g.masked_fill((x == self.padding).unsqueeze(-1), 0)


@kind(F.embedding)
def embedding(
    at: Context,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Of nn.Embedding."""
    if isinstance(input, Standin) or max_norm is not None:
        raise NoRule("its table is renormalised by what reads it")
    if scale_grad_by_freq:
        raise NoRule("its gradients depend on how often rows of other inputs read it")
    count, width = weight.shape
    padding = padding_idx % count if padding_idx is not None and padding_idx >= -count else None
    return at.use(Lookup(count, width, padding), input, weight)


@declares(nn.Embedding)
def embedding_module(module: nn.Embedding) -> Iterator[Declared]:
    """One table."""
    yield Declared("weight", None, Lookup(module.num_embeddings, module.embedding_dim, module.padding_idx), "embedding")
