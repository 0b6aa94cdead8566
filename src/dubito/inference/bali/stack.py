"""A stack of networks under training: rows beside rows, layers beside layers, one update rule for all."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import seeds
from ...inputs import Batch, Inputs, TensorOptions, map_tensors, named_tensors
from ...objective import Objective
from ...posterior import Posterior
from ...sources import OrderedSource
from ...training import Plan, Processes, StepRecord, Training
from .layer import Layer, placed
from .objective import BALIObjective
from .posterior import sampled_root
from .stacked_pass import StackedPass
from .stepper import LayerwiseStepper, StepSums


class StackedSource(OrderedSource):
    """Several tables of one size, row beside row: rows first, replicas second.

    Args:
        sources: whose rows.
    """

    def __init__(self, sources: Sequence[OrderedSource]) -> None:
        self.sources, self.num_data = sources, sources[0].num_data
        everything = [next(source.read([torch.arange(self.num_data)])) for source in sources]
        whole = [batch for batch in everything if batch is not None]
        self.inputs = stacked([batch.inputs for batch in whole])  # replicas first: each one's rows together
        self.targets = torch.stack([batch.targets for batch in whole])

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for batch in self.read(torch.arange(self.num_data).split(batch_size)):
            assert batch is not None
            yield batch

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        for group in groups:
            index = group.to(self.targets.device)

            def rows(tensor: Tensor, index: Tensor = index) -> Tensor:
                return tensor.index_select(1, index).transpose(0, 1)

            yield Batch(map_tensors(rows, self.inputs), rows(self.targets)) if len(index) else None

    def digest(self) -> str:
        return "; ".join(source.digest() for source in self.sources)


def stacked(trees: Sequence[Inputs]) -> Inputs:
    """Trees of the same form as one, their tensors along a new first axis."""
    leaves = [iter([tensor for _, tensor in named_tensors(tree)]) for tree in trees]
    return map_tensors(lambda _: torch.stack([next(tensors) for tensors in leaves]), trees[0])


class StackPosterior(Posterior):
    """The replicas under training; the posterior of each is made of it at the end."""

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        raise NotImplementedError("a stack is not a posterior: take those of its replicas")


class ReplicaObjective(Objective):
    """Replicas under training.

    Args:
        objectives: of each.
        own_seeds: of each one's noise.
    """

    def __init__(self, objectives: list[BALIObjective], own_seeds: Sequence[int]) -> None:
        first = objectives[0]
        self_layers = _stacked_layers(objectives)
        groups: dict[str, dict[str, Tensor]] = {"mean": {}, "input_tril": {}, "output_tril": {}}
        for name, layer in self_layers.items():
            for key, group in groups.items():
                group[name] = getattr(layer, key)
        draft = StackPosterior(
            first.draft.network,
            first.draft.likelihood,
            method=first.draft.method,
            tensors=groups,
            trainable=first.draft.trainable,
        )
        super().__init__(draft, num_data=first.num_data, modes=first.modes)
        draft.tensors.requires_grad_(False)
        for name, layer in self_layers.items():
            for key in groups:
                setattr(layer, key, draft.group(key)[name].data)
        self.objectives, self.own_seeds, self.layers = objectives, own_seeds, self_layers
        self.final: StackedStepper | None = None

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        raise NotImplementedError("a stack is trained by its own stepper")

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> "StackedStepper":
        self.final = StackedStepper(self, plan, processes)
        return self.final


def _stacked_layers(objectives: list[BALIObjective]) -> dict[str, Layer]:
    layers = {}
    for block in objectives[0].topology.blocks:
        replicas = [objective.layer(block) for objective in objectives]
        prior = replace(
            replicas[0].prior,
            floor=torch.cat([layer.prior.floor for layer in replicas]),
            data=torch.cat([layer.prior.data for layer in replicas]),
        )
        layers[block.name] = Layer.start(block.name, prior, torch.cat([layer.mean for layer in replicas]))
    return layers


class StackedStepper(LayerwiseStepper):
    """The update rule for all replicas at once.

    Args:
        stack: the replicas.
        plan: of the run.
        processes: who share it.
    """

    def __init__(self, stack: ReplicaObjective, plan: Plan, processes: Processes) -> None:
        first = stack.objectives[0]
        super().__init__(stack.layers, first.draft.method, first.last, plan, processes)
        self.stack, self.first = stack, first
        self.blocks = first.topology.blocks
        self.count = len(stack.objectives)
        self.pass_ = StackedPass(
            first.draft.network, first.draft.likelihood, first.topology, first.last, first.modes
        )
        self.device = TensorOptions.of(first.draft.network).device
        self.noise = {
            name: torch.stack([dict(o.draft.likelihood.named_buffers())[name] for o in stack.objectives])
            for name in self.pass_.noise_tensors()
        }

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        weights = self.weights(number)
        seen = StepSums(torch.zeros((), dtype=next(iter(weights.values())).dtype, device=self.device), {}, {})
        shaped = {b.name: weights[b.name].unflatten(0, (self.count, b.groups)) for b in self.blocks}
        for batch in passes:
            if batch is None:
                continue
            total, grams, cases = self.pass_(shaped, self.noise, batch)
            seen.nll -= total
            for name, sums in grams.items():
                seen.add(name, sums, cases[name])
        stop = self.combine(seen, [], stop)
        rate = self.learn(number, seen, weights)
        nll = seen.nll / (rows * self.count)
        return StepRecord(number, torch.stack([nll, nll, torch.zeros_like(nll)]), rows, rate, None, stop)

    @torch.no_grad()
    def weights(self, number: int) -> dict[str, Tensor]:
        """Weights of a forward pass: each replica's noise comes from a stream of its own."""
        if number == 0 or self.method.sampling == "deterministic":
            return {name: layer.mean for name, layer in self.layers.items()}
        like = next(iter(self.layers.values())).mean
        sizes = [block.size for block in self.blocks]
        units = like.new_empty(self.count, sum(sizes))
        streams = [
            seeds.generator(seed, "noise", number, device=self.device) for seed in self.stack.own_seeds
        ]
        for unit, stream in zip(units, streams, strict=True):
            unit.normal_(generator=stream)
        weights = {}
        for block, unit in zip(self.blocks, units.split(sizes, 1), strict=True):
            layer = self.layers[block.name]
            root = layer.output_tril
            if self.method.covariance == "sampled":
                replicas = zip(
                    root.split(block.groups), layer.prior.data[:: block.groups], streams, strict=True
                )
                root = torch.cat(
                    [
                        sampled_root(replica_root, float(data), stream)
                        for replica_root, data, stream in replicas
                    ]
                )
            weights[block.name] = placed(layer.mean, layer.input_tril, root, unit.reshape(layer.mean.shape))
        return weights

    def commit(self) -> None:
        if self.last is None or not self.first.inferred_noise:
            return
        tril = self.layers[self.last].output_tril
        for name, noise in self.noise.items():
            noise.copy_(tril if name == "scale_tril" else tril.reshape(noise.shape))

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        super().restore(tensors, facts)
        self.commit()
