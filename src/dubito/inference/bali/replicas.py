"""Many fits side by side: replicas of a network on data sets of one size."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import seeds
from ...errors import ConfigError, DataError
from ...fitting import Prepared, prepare, undisturbed
from ...inputs import named_tensors
from ...likelihoods import Likelihood
from ...sources import TensorSource
from ...training import Join, Stepper, Training, train_many
from ...training.forward import StackedForward, forward_of
from .posterior import BALIPosterior
from .setup import Topology, check_training, find_layers, suffixed
from .stack import ReplicaStepper, StackedStepper

if TYPE_CHECKING:
    from .method import BALI


def fit_many(
    method: "BALI",
    net: nn.Module,
    data: Sequence[Any],
    likelihood: Likelihood,
    training: Training,
    seeds_of_fits: Sequence[int] | None,
    *,
    checkpoint: str | os.PathLike[str] | None,
    seed: int,
    progress: bool | None,
) -> list[BALIPosterior]:
    """See `BALI.fit_many`."""
    check_training(training)
    if not isinstance(data, Sequence) or isinstance(data, str | bytes) or not data:
        raise DataError(f"fit_many takes a list of data sets, one for each fit, got {type(data).__name__}")
    fit_seeds = list(seeds_of_fits or (seeds.derived(seed, "fit", number) for number in range(len(data))))
    if len(fit_seeds) != len(data):
        raise ConfigError(
            f"seeds_of_fits must hold one seed for each of {len(data)} fits, got {len(fit_seeds)}"
        )
    if training.early_stopping is not None:
        raise ConfigError("early_stopping ends each run by itself: use fit, or leave it out of fit_many")
    with torch.inference_mode(False):
        groups: dict[Any, dict[int, Prepared]] = {}
        for number, (rows, fit_seed) in enumerate(zip(data, fit_seeds, strict=True)):
            path = suffixed(checkpoint, f"fit-{number}")
            prepared = prepare(net, rows, likelihood, seed=fit_seed, checkpoint=path, progress=progress)
            groups.setdefault(_form(prepared), {})[number] = prepared
        posteriors: dict[int, BALIPosterior] = {}
        for group in groups.values():
            first = next(iter(group.values()))
            with undisturbed(replace(first, run=replace(first.run, seed=seed)), "fit"):
                fits = _fit_group(method, list(group.values()), training, seed)
            posteriors |= dict(zip(group, fits, strict=True))
    return [posteriors[number] for number in range(len(data))]


def _form(prepared: Prepared) -> Any:
    """What data sets must share to be fitted together."""
    source = prepared.source
    if not isinstance(source, TensorSource):
        return id(prepared)
    return tuple(tuple(t.shape) for _, t in named_tensors((source.batch.inputs, source.batch.targets)))


def _fit_group(method: "BALI", group: list[Prepared], training: Training, seed: int) -> list[BALIPosterior]:
    from .method import fitted

    topology = find_layers(group[0].network, group[0].example.inputs, method.subset)  # alike in all copies
    if not _stackable(method, group[0], topology):
        return [method.fit_prepared(prepared, training) for prepared in group]
    begun = [method.begun(prepared, topology) for prepared in group]
    objectives, sources = [objective for objective, _ in begun], [source for _, source in begun]
    for objective, prepared in zip(objectives, group, strict=True):
        objective.steppers = partial(ReplicaStepper, noise_seed=prepared.run.seed)

    def join(rows: int) -> Join | None:
        pair = [prepared.network for prepared in group[:2]]
        forward = forward_of(pair, group[0].modes, group[0].example.inputs, rows)
        return _joined if isinstance(forward, StackedForward) and forward.surveyed is None else None

    runs = [replace(prepared.run, seed=seed) for prepared in group]
    histories = train_many(objectives, sources, training, runs, join)
    return [fitted(*pair) for pair in zip(objectives, histories, strict=True)]


def _joined(steppers: Sequence[Stepper]) -> StackedStepper:
    return StackedStepper([stepper for stepper in steppers if isinstance(stepper, ReplicaStepper)])


def _stackable(method: "BALI", prepared: Prepared, topology: Topology) -> bool:
    """Whether the layers of replicas are all that is trained, and can stand side by side."""
    learned = any(parameter.requires_grad for parameter in prepared.likelihood.parameters())
    return (
        method.sampling != "local"
        and not topology.points
        and isinstance(prepared.source, TensorSource)
        and not any(True for _ in prepared.network.buffers())
        and all(topology.plain(block) for block in topology.blocks)
        and (topology.last is not None or not learned)
    )
