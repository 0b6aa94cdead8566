"""How much signal there is in stochastic gradients."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor

from . import seeds
from .errors import ConfigError, DataError, require_count
from .hints import checked
from .inputs import Batch, TensorOptions
from .layers.shell import seeded
from .objective import Objective
from .sources import OrderedSource, as_source


@dataclass(frozen=True)
class SignalToNoise:
    """The signal-to-noise ratio of one tensor's gradients, over its entries.

    Moments are over batches, variances divided by their number. Entries whose gradient never varied have no
    ratio and are left out; where there are no others all ratios are NaN.

    Attributes:
        paper: E[g²] / Var[g] (k-tied Normal, footnote 3), which is `signal` + 1, a mean over entries. Few whose
            gradient hardly varies, such as those of units that are always off, can decide it.
        signal: E[g]² / Var[g], likewise.
        median: that of E[g²] / Var[g] over the entries.
        constant: the share of entries whose gradient never varied.
    """

    paper: float
    signal: float
    median: float
    constant: float


class GradientSNR:
    """Signal-to-noise ratios of an objective's gradients, per tensor, for a training loop of one's own.

    Call `update` after each `backward`. Along a run the window should be short, because the parameters move.

    Args:
        objective: what `method.build` gave.
        window: the number of last batches to look at; None looks at all, in the memory of two.
    """

    @checked
    def __init__(self, objective: Objective, window: int | None = 10) -> None:
        if window is not None:
            require_count(2, window=window)
        self.objective, self.window = objective, window
        self._recent: dict[str, deque[Tensor]] = {}
        self._moments: dict[str, _GradientMoments] = {}

    def update(self) -> None:
        """Take in the gradients as they stand."""
        for name, parameter in trained(self.objective).items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
            if self.window is None:
                self._moments.setdefault(name, _GradientMoments(gradient)).add(gradient)
            else:
                self._recent.setdefault(name, deque(maxlen=self.window)).append(gradient.clone())

    def result(self) -> dict[str, SignalToNoise]:
        """The ratios by name: `network.` and the parameter, or the group (`raw_std.`, `log_u.`, …) and it."""
        moments = self._moments
        if self.window is not None:
            moments = {name: _GradientMoments.of(gradients) for name, gradients in self._recent.items()}
        seen = min((statistics.count for statistics in moments.values()), default=0)
        if seen < 2:
            raise ConfigError(f"a variance needs at least 2 batches, got {seen}; call update after each backward")
        return {name: statistics.ratios() for name, statistics in moments.items()}


class _GradientMoments:
    """Mean and sum of squared errors of gradients, taken in one by one about the first of them."""

    @checked
    def __init__(self, first: Tensor) -> None:
        self.first, self.count = first.clone(), 0
        self.mean, self.squares = torch.zeros_like(first), torch.zeros_like(first)

    @classmethod
    def of(cls, gradients: deque[Tensor]) -> "_GradientMoments":
        moments = cls(gradients[0])
        for gradient in gradients:
            moments.add(gradient)
        return moments

    def add(self, gradient: Tensor) -> None:
        # Welford: m ← m + (g − m)/n and M ← M + (g − m_before)(g − m_after)
        self.count += 1
        error = gradient - self.first - self.mean
        self.mean.add_(error, alpha=1 / self.count)
        self.squares.addcmul_(error, gradient - self.first - self.mean)

    def ratios(self) -> SignalToNoise:
        variance = self.squares / self.count
        varied = variance > 0
        ratios = ((self.first + self.mean).square() / variance)[varied].double()
        if not (variance.isfinite().all() and ratios.isfinite().all()):
            raise DataError("gradients must be finite, got NaN or infinity; look at the sizes of inputs and targets")
        signal, median = ratios.mean().item(), ratios.median().item() if len(ratios) else math.nan
        return SignalToNoise(signal + 1, signal, median + 1, 1 - varied.double().mean().item())


@checked
def gradient_snr(
    objective: Objective,
    data: Any,
    *,
    num_batches: int = 100,
    batch_size: int = 128,
    kl_weight: float = 1.0,
    seed: int = 0,
) -> dict[str, SignalToNoise]:
    """Signal-to-noise ratios at the posterior as it stands, which is left as it was.

    Args:
        objective: what `method.build` gave.
        data: a pair (inputs, targets), a `Dataset` or a `DataLoader`.
        num_batches: batches, each with noise of its own, over which moments are taken.
        batch_size: rows of each.
        kl_weight: the weight of the divergence; 0 looks at the data's term alone.
        seed: of the order of rows and of the noise.
    """
    require_count(2, num_batches=num_batches)
    require_count(batch_size=batch_size)
    like, network = TensorOptions.of(objective.draft), objective.draft.network
    parameters = trained(objective)
    buffers = {name: buffer.clone() for name, buffer in objective.draft.named_buffers()}
    moments: dict[str, _GradientMoments] = {}
    try:
        for number, batch in enumerate(islice(_batches(data, like, batch_size, seed), num_batches)):
            noise = seeds.generator(seed, "snr", number, device=like.device)
            with seeded(network, seed, "network", number, training=objective.modes):  # its own dropout
                loss = objective.loss(batch.inputs, batch.targets, kl_weight=kl_weight, generator=noise)
            gradients = torch.autograd.grad(
                loss.total, list(parameters.values()), allow_unused=True, materialize_grads=True
            )
            for name, gradient in zip(parameters, gradients, strict=True):
                moments.setdefault(name, _GradientMoments(gradient)).add(gradient)
    finally:
        with torch.no_grad():
            for name, buffer in objective.draft.named_buffers():  # batch norm's statistics have moved
                buffer.copy_(buffers[name])
    return {name: statistics.ratios() for name, statistics in moments.items()}


@checked
def trained(objective: Objective) -> dict[str, Tensor]:
    """The tensors that training moves, by the names a posterior stores them under."""
    return {name: tensor for name, tensor in objective.draft.stored().items() if tensor.requires_grad}


def _batches(data: Any, like: TensorOptions, batch_size: int, seed: int) -> Iterator[Batch]:
    """Batches without end: full ones in a new order each time round, or a loader's own."""
    source = as_source(data, like)
    if not isinstance(source, OrderedSource):
        return chain.from_iterable(source.batches(batch_size) for _ in count())
    rows, size = source.num_data, min(batch_size, source.num_data)

    def once(epoch: int) -> Iterator[Batch]:
        order = torch.randperm(rows, generator=seeds.generator(seed, "order", epoch))
        groups = order[: rows - rows % size].split(size)
        return (batch for batch in source.read(groups) if batch is not None)

    return chain.from_iterable(once(epoch) for epoch in count())
