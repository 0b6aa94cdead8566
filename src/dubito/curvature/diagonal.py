"""The exact diagonal of the curvature: squares of each example's own gradient, summed over the data."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import NetworkError
from ..inputs import Batch, call, map_tensors, rows_of
from ..layers.taps import Tap, tapped
from ..layers.trace import Layout
from ..likelihoods import BuiltLikelihood
from ..sources import Source
from .kinds import Curvature

#: Numbers one block of per-example gradients or label noise may hold: rows come in blocks that stay below it.
BLOCK = 1 << 22


def diagonal(
    network: nn.Module,
    taps: list[Tap],
    layouts: Mapping[str, Layout],
    source: Source,
    likelihood: BuiltLikelihood,
    kind: Curvature,
    *,
    batch_size: int,
    seed: int,
) -> dict[str, Tensor]:
    """Σ_i E[δ_i ∘ δ_i] for every tapped weight and bias, by the user's names.  [INF notes F1: N · Φ]"""
    named = dict(network.named_parameters())
    sums = {
        name: torch.zeros_like(named[name], requires_grad=False)
        for tap in taps
        for name in (tap.weight, tap.bias)
        if name is not None
    }
    label_noise = LabelNoise(seed)
    first_row = 0
    for batch in source.batches(batch_size):
        _add_batch(sums, network, taps, layouts, batch, likelihood, kind, label_noise, first_row)
        first_row += len(batch.targets)
    return sums


class LabelNoise:
    """Noise that draws labels: a row's labels are the same whatever batch it comes in.

    Args:
        seed: of the labels.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[int, seeds.RowNoise] = {}

    def at(self, first_row: int, outputs: Tensor) -> Callable[[int], Tensor]:
        """For rows from `first_row` on: a function from the number of the draw to its noise."""

        def drawn(number: int) -> Tensor:
            if number not in self._streams:
                block = max(1, min(1024, BLOCK // outputs[0].numel()))  # the same whatever the batch size
                self._streams[number] = seeds.RowNoise(self.seed, "labels", number, block=block)
            return self._streams[number].rows(first_row, outputs)

        return drawn


def _add_batch(
    sums: dict[str, Tensor],
    network: nn.Module,
    taps: list[Tap],
    layouts: Mapping[str, Layout],
    batch: Batch,
    likelihood: BuiltLikelihood,
    kind: Curvature,
    label_noise: LabelNoise,
    first_row: int,
) -> None:
    rows = rows_of(batch.inputs)
    with torch.enable_grad(), tapped(network, taps, layouts):
        outputs = call(network, map_tensors(Tensor.detach, batch.inputs))
        noise = label_noise.at(first_row, outputs.detach())
        for weight, gradient in kind.seeds(likelihood, outputs.detach(), batch.targets, noise):
            if outputs.requires_grad:
                outputs.backward(gradient, retain_graph=True)
            unreached = [tap.weight for tap in taps if not tap.reached]
            if unreached:
                raise NetworkError(
                    f"the curvature needs gradients of the outputs at every layer, but none reach "
                    f"{', '.join(unreached)}: the network cuts the graph there (torch.no_grad, detach) or does "
                    "not use these layers; leave them out with subset= or set requires_grad=False on them"
                )
            with torch.no_grad():
                for tap in taps:
                    _add_tap(sums, tap, rows, weight)


def _add_tap(sums: dict[str, Tensor], tap: Tap, rows: int, weight: float) -> None:
    pairs = list(tap.pairs(rows))
    # Positions of all calls of a shared layer add up inside an example, before squaring.
    inputs = torch.cat([a for a, _, _ in pairs], 1) if len(pairs) > 1 else pairs[0][0]  # [B, T, G, n]
    gradients = torch.cat([g for _, g, _ in pairs], 1) if len(pairs) > 1 else pairs[0][1]  # [B, T, G, m]
    target = sums[tap.weight]
    if tap.bias is not None:
        own = sum(g.sum(1) for _, g, biased in pairs if biased)  # [B, G, m]
        sums[tap.bias].add_(torch.as_tensor(own).square().sum(0).reshape(-1), alpha=weight)
    positions, groups, width = inputs.shape[1:]
    if positions == 1:
        # One position: (g aᵀ)^∘2 = g^∘2 (a^∘2)ᵀ, so the sum over examples is one product.
        squares = torch.einsum("bgm,bgn->gmn", gradients[:, 0].square(), inputs[:, 0].square())
        target.add_(squares.reshape(target.shape), alpha=weight)
        return
    block = max(1, BLOCK // (groups * gradients.shape[-1] * width))
    for start in range(0, rows, block):
        part = slice(start, start + block)
        own = torch.einsum("btgm,btgn->bgmn", gradients[part], inputs[part])
        target.add_(own.square_().sum(0).reshape(target.shape), alpha=weight)
