"""BALI on several data sets of one size, side by side: as fast as the hardware multiplies."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dubito import BALI
from dubito.fitting import prepare, undisturbed
from dubito.inference.bali import BALIPosterior
from dubito.inference.bali.method import fitted
from dubito.inference.bali.setup import find_layers
from dubito.likelihoods import Likelihood
from dubito.training import Stepper, Training
from dubito.training.beside import Join, train_many
from dubito.training.forward import forward_of

from .stack import ReplicaStepper, StackedStepper


def fit_many(
    method: BALI,
    net: nn.Module,
    data: Sequence[Any],
    likelihood: Likelihood,
    *,
    training: Training,
    seed: int,
    seeds_of_fits: Sequence[int],
) -> list[BALIPosterior]:
    """Fit r is what `fit` gives, to rounding, with the same order of rows and noise.

    Args:
        method: which draws weights, or takes means.
        net: whose trainable parameters are all weights of layers called once; every fit starts from its weights, or
            from `initial_std`.
        data: one pair of tensors per fit, all of one size.
        likelihood: as in `fit`.
        training: as in `fit`.
        seed: of the order of the rows.
        seeds_of_fits: of the noise of each.
    """
    assert method.sampling != "local" and not any(True for _ in net.buffers())
    pairs = zip(data, seeds_of_fits, strict=True)
    fits = [prepare(net, rows, likelihood, seed=own, progress=False) for rows, own in pairs]
    first, runs = fits[0], [replace(prepared.run, seed=seed) for prepared in fits]
    topology = find_layers(first.network, first.example.inputs, method.subset)  # alike in all copies
    assert not topology.points and all(topology.plain(block) for block in topology.blocks)

    def join(rows: int) -> Join | None:
        pair = [prepared.network for prepared in fits[:2]]
        forward = forward_of(pair, first.modes, first.example.inputs, rows)
        plain = forward is not None and not forward.mapped and forward.surveyed is None
        return stacked if plain else None

    with torch.inference_mode(False), undisturbed(replace(first, run=runs[0]), "fit"):
        begun = [method.begun(prepared, topology) for prepared in fits]
        objectives = [objective for objective, _ in begun]
        for objective, prepared in zip(objectives, fits, strict=True):
            objective.steppers = partial(ReplicaStepper, noise_seed=prepared.run.seed)
        histories = train_many(objectives, [source for _, source in begun], training, runs, join)
        return [fitted(*pair) for pair in zip(objectives, histories, strict=True)]


def stacked(steppers: Sequence[Stepper]) -> StackedStepper:
    """Replicas at the same step as one."""
    return StackedStepper([stepper for stepper in steppers if isinstance(stepper, ReplicaStepper)])
