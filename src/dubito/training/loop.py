"""The training loop."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import seeds
from ..inputs import Place
from ..sources import Source
from .settings import Training

if TYPE_CHECKING:
    from ..objective import Objective


@dataclass(frozen=True, kw_only=True)
class Run:
    """What surrounds a training run.

    Attributes:
        seed: of data order and noise.
        progress: show a bar; None on terminals only.
        checkpoint: a file to go on from.
        validation: rows that watch over training.
    """

    seed: int = 0
    progress: bool | None = None
    checkpoint: str | os.PathLike[str] | None = None
    validation: Source | None = None


def train(objective: "Objective", source: Source, training: Training, run: Run) -> list[dict[str, float]]:
    """Minimise the objective's loss; returns one record per epoch."""
    device = Place.of(objective.draft).device
    optimizer = torch.optim.Adam(objective.parameter_groups(training.lr))
    batch_size = training.batch_size or source.batch_size or 128
    history: list[dict[str, float]] = []
    step = 0
    with seeds.forked(run.seed, "training", device=device):
        for epoch in range(training.epochs):
            order = torch.randperm(objective.num_data, generator=seeds.generator(run.seed, "order", epoch))
            total = count = 0.0
            for batch in source.batches(batch_size, order if source.ordered else None):
                seeds.reseed(seeds.derived(run.seed, "network", step), device)
                generator = seeds.generator(run.seed, "noise", step, device=device)
                loss = objective.batch_loss(batch, 1.0, generator)
                optimizer.zero_grad()
                loss.total.backward()
                optimizer.step()
                total += float(loss.total.detach()) * len(batch.targets)
                count += len(batch.targets)
                step += 1
            history.append({"epoch": epoch + 1, "loss": total / count})
    return history
