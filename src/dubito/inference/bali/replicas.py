"""Many fits as one: replicas of a network stacked along a leading axis, so that one product serves them all."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ... import seeds
from ...errors import ConfigError, DataError
from ...fitting import Prepared, Run, prepare, undisturbed
from ...inputs import Batch, map_tensors, named_tensors
from ...likelihoods import Likelihood
from ...sources import TensorSource
from ...training import Training, train
from .choose import started
from .layer import Layer
from .objective import BALIObjective
from .posterior import BALIPosterior
from .setup import Topology, check_training, find_layers, suffixed
from .stack import ReplicaObjective, StackedSource
from .stacked_pass import StackedPass

if TYPE_CHECKING:
    from .method import BALI


def fit_many(
    method: "BALI",
    net: nn.Module,
    data: Sequence[Any],
    likelihood: Likelihood,
    *,
    training: Training,
    checkpoint: str | os.PathLike[str] | None,
    seed: int,
    seeds_of_fits: Sequence[int] | None,
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
        fits = [
            prepare(net, rows, likelihood, seed=fit_seeds[number], progress=progress)
            for number, rows in enumerate(data)
        ]
        groups: dict[Any, list[int]] = {}
        for number, prepared in enumerate(fits):
            groups.setdefault(_form(prepared), []).append(number)
        fitted: dict[int, BALIPosterior] = {}
        for index, numbers in enumerate(groups.values()):
            run = Run(seed=seed, progress=progress, checkpoint=suffixed(checkpoint, f"group-{index}"))
            group = [fits[number] for number in numbers]
            with undisturbed(replace(group[0], run=run), "fit"):
                posteriors = _fit_group(method, group, training, run)
            fitted |= dict(zip(numbers, posteriors, strict=True))
    return [fitted[number] for number in range(len(data))]


def _form(prepared: Prepared) -> Any:
    """What data sets must share to be fitted together."""
    source = prepared.source
    if not isinstance(source, TensorSource):
        return id(prepared)
    shapes = [tuple(t.shape) for _, t in named_tensors((source.batch.inputs, source.batch.targets))]
    return tuple(shapes)


def _fit_group(method: "BALI", group: list[Prepared], training: Training, run: Run) -> list[BALIPosterior]:
    topology = find_layers(group[0].network, group[0].example.inputs, method.subset)  # alike in all copies
    if method.open(group[0].likelihood, topology) or not _stackable(method, group[0], topology):
        return [
            method.fit_prepared(
                replace(prepared, run=replace(prepared.run, checkpoint=suffixed(run.checkpoint, f"fit-{i}"))),
                training,
            )
            for i, prepared in enumerate(group)
        ]
    method = method.resolved(topology)
    methods = [started(method, prepared.num_data) for prepared in group]
    stack = _train(methods, group, topology, [prepared.source for prepared in group], training, run)
    return stack.posteriors()


def _stackable(method: "BALI", prepared: Prepared, topology: Topology) -> bool:
    """Whether replicas can be trained as one."""
    network = prepared.network
    if method.sampling == "local" or topology.points or not isinstance(prepared.source, TensorSource):
        return False
    if any(True for _ in network.buffers()) or not all(topology.plain(block) for block in topology.blocks):
        return False
    if (
        any(parameter.requires_grad for parameter in prepared.likelihood.parameters())
        and topology.last is None
    ):
        return False
    try:  # what `vmap` cannot run is run one after the other
        pass_ = StackedPass(network, prepared.likelihood, topology)
        weights = {b.name: b.matrix(dict(network.named_parameters())).detach()[None] for b in topology.blocks}
        batch = prepared.example
        inputs = map_tensors(lambda t: t.unsqueeze(1), batch.inputs)
        noise = {name: tensor.detach()[None] for name, tensor in pass_.noise_tensors().items()}
        pass_(weights, noise, Batch(inputs, batch.targets.unsqueeze(1)))
    except (RuntimeError, NotImplementedError, ValueError, TypeError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished stack.

    Attributes:
        objectives: one per replica, each with a posterior of its own.
        layers: what the stack learned.
        groups: matrices of each block in one replica.
        correction: of the averages' bias.
        history: of the run.
        jitters: how often a factorisation needed one, by block.
    """

    objectives: list[BALIObjective]
    layers: dict[str, Layer]
    groups: dict[str, int]
    correction: float
    history: list[dict[str, float]]
    jitters: dict[str, int]

    def layers_of(self, number: int) -> dict[str, Layer]:
        """What one replica learned, its factors being its posterior's own tensors."""
        layers = {}
        objective = self.objectives[number]
        for block in objective.topology.blocks:
            part = slice(number * self.groups[block.name], (number + 1) * self.groups[block.name])
            whole, layer = self.layers[block.name], objective.layer(block)
            for key in ("sums", "squares", "mean", "before", "input_tril", "output_tril"):
                getattr(layer, key).copy_(getattr(whole, key)[part])
            layers[block.name] = layer
        return layers

    def posteriors(self) -> list[BALIPosterior]:
        """The posterior of each replica."""
        made = []
        for number, objective in enumerate(self.objectives):
            objective.commit(self.layers_of(number))
            objective.draft.details["jitters"] = self.jitters
            posterior = objective.posterior()
            posterior.history = self.history
            assert isinstance(posterior, BALIPosterior)
            made.append(posterior)
        return made


def _train(
    methods: list["BALI"],
    group: list[Prepared],
    topology: Topology,
    sources: Sequence[Any],
    training: Training,
    run: Run,
) -> Trained:
    objectives = [
        method.objective(replace(prepared, num_data=source.num_data), topology, source, prepared.run.seed)
        for method, prepared, source in zip(methods, group, sources, strict=True)
    ]
    stack = ReplicaObjective(objectives, [prepared.run.seed for prepared in group])
    history = train(stack, StackedSource(sources), training, run)
    stepper = stack.final
    assert stepper is not None
    groups = {block.name: block.groups for block in topology.blocks}
    return Trained(objectives, stepper.layers, groups, stepper.correction, history, stepper.jitters())
