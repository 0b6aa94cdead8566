"""Replicas of a network under training, side by side: layers beside layers, one update rule for all."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from dubito import seeds
from dubito.inference.bali.layer import Layer
from dubito.inference.bali.objective import BALIObjective
from dubito.inference.bali.posterior import sampled_root
from dubito.inference.bali.products import in_order
from dubito.inference.bali.stepper import BALIStepper, LayerwiseStepper, StepSums
from dubito.inputs import Batch, call, joined
from dubito.layers.passes import asking
from dubito.layers.record import BlockPart, Record
from dubito.layers.shell import leased
from dubito.likelihoods import BuiltLikelihood
from dubito.training import Plan, Processes, StepRecord, Training
from dubito.training.beside import JointStepper
from dubito.training.forward import TrainedStack

#: What a layer holds of each of its matrices.
STACKED = ("sums", "squares", "factor", "mean", "before", "input_tril", "output_tril", "jitter", "failures")


class ReplicaStepper(BALIStepper):
    """One replica, whose layers follow those of a stack when they are read.

    Args:
        objective: see `BALIStepper`.
        training: see `BALIStepper`.
        plan: see `BALIStepper`.
        processes: see `BALIStepper`.
        seed: of the order of the rows, which replicas share.
        noise_seed: of the replica's noise.
    """

    stack: "StackedStepper | None" = None

    def __init__(
        self,
        objective: BALIObjective,
        training: Training,
        plan: Plan,
        processes: Processes,
        seed: int,
        *,
        noise_seed: int,
    ) -> None:
        super().__init__(objective, training, plan, processes, noise_seed)

    def settle(self, step: int) -> None:
        self._follow()
        super().settle(step)

    def close_epoch(self, step: int, last: bool) -> None:
        choice = self.objective.choice
        chooses = choice is not None and choice.due(self.plan.progress(step), last)
        if self.stack is not None and not (last or chooses or max(self.every.values()) > 1):
            return  # nobody reads the posterior yet
        self._follow()
        super().close_epoch(step, last)
        if self.stack is not None:
            self.stack.stale = True

    def _follow(self) -> None:
        if self.stack is not None:
            self.stack.scatter(self)


class StackedStepper(LayerwiseStepper, JointStepper):
    """The update rule for all replicas at once.

    Args:
        steppers: of each replica, at the same step.
    """

    def __init__(self, steppers: Sequence[ReplicaStepper]) -> None:
        self.steppers, self.count, first = steppers, len(steppers), steppers[0]
        self.first, self.blocks = first.objective, first.topology.blocks
        super().__init__(self._gathered(), first.method, first.last, first.plan, first.processes)
        self.remainder, self.eager, self.device = first.remainder, first.eager, first.device
        self.judge = _Judge(first.draft.likelihood)
        self.noise = {
            name: torch.stack([dict(s.draft.likelihood.named_buffers())[name] for s in steppers])
            for name, _ in first.draft.likelihood.named_buffers()
        }
        #: The replicas whose layers are those of the stack, and whether one of them went on by itself.
        self.followed, self.stale = set(steppers), False
        for stepper in steppers:
            stepper.stack = self

    # -- one step ----------------------------------------------------------------------------------------------

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, number: int, passes: Sequence[Sequence[Batch | None]], rows: int, stop: bool
    ) -> list[StepRecord]:
        if self.stale:
            for stepper in self.steppers:
                self.scatter(stepper)
            self.layers, self.stale = self._gathered(), False
            self.commit()
        weights = self.weights(number)
        like = next(iter(weights.values()))
        seen = StepSums(like.new_zeros(self.count), {}, {})
        for parts in zip(*passes, strict=True):
            self._look([batch for batch in parts if batch is not None], weights, seen)
        rate = self.learn(number, seen, weights)
        self.followed.clear()
        terms, zero = (seen.nll / rows).unbind(), like.new_zeros(())
        return [StepRecord(number, (nll, nll, zero), rows, rate, None, stop) for nll in terms]

    @torch.no_grad()
    def weights(self, number: int) -> dict[str, Tensor]:
        """Weights of a forward pass by block: each replica's noise comes from a stream of its own."""
        if number == 0 or self.method.sampling == "deterministic":
            return {name: layer.mean for name, layer in self.layers.items()}
        like = next(iter(self.layers.values())).mean
        sizes = [block.size for block in self.blocks]
        units = like.new_empty(self.count, sum(sizes))
        streams = [seeds.generator(s.seed, "noise", number, device=self.device) for s in self.steppers]
        for unit, stream in zip(units, streams, strict=True):
            unit.normal_(generator=stream)
        weights = {}
        for block, unit in zip(self.blocks, units.split(sizes, 1), strict=True):
            layer = self.layers[block.name]
            root = layer.output_root()
            if self.method.covariance == "sampled":
                data = [stepper.method.effective_data or 0.0 for stepper in self.steppers]  # all chosen
                replicas = zip(root.split(block.groups), data, streams, strict=True)
                root = torch.cat([sampled_root(*replica) for replica in replicas])
            weights[block.name] = layer.drawn(unit.reshape(layer.mean.shape), root)
        return weights

    def _look(self, batches: Sequence[Batch], weights: dict[str, Tensor], seen: StepSums) -> None:
        """A forward and a backward pass of all replicas over their rows, and the sums of products they give."""
        cover, rows = self.first.topology.cover, len(batches[0].targets)
        targets = torch.cat([batch.targets for batch in batches])
        stacks: dict[str, Tensor] = {}
        for block in self.blocks:
            stacks |= block.tensors(weights[block.name].unflatten(0, (self.count, block.groups)))
        record = cover.record(inner=TrainedStack(stacks, None, self.count))
        network, modes = self.first.draft.network, self.first.modes
        with torch.enable_grad(), asking(network, record, cover.parameters, detached=True, training=modes) as shell:
            outputs = call(shell, joined([batch.inputs for batch in batches]))
            total = self.judge.totals(outputs, targets, self.noise, self.count)
            total.sum().backward()
        with torch.no_grad():
            seen.nll -= total
            for block in self.blocks:
                true = targets if block.name == self.last else None
                seen.add(block.name, *self._gram(cover.parts[block.name][0], record, rows, true))

    def _gram(self, part: BlockPart, record: Record, rows: int, targets: Tensor | None) -> tuple[Tensor, float]:
        """[X G]ᵀ[X G], or [X Y]ᵀ[X Y] where targets are given, [R · G, w, w], with its cases; as `products.gram`."""
        count = self.count * rows
        a, g = part.matrices(record.of(part.key), count, slice(0, count))  # [R · B, G, T, n], [R · B, G, m, T]
        last = g.mT if targets is None else targets.reshape(count, 1, 1, -1)
        cases = torch.cat([a, last], -1).unflatten(0, (self.count, rows)).transpose(1, 2).flatten(2, 3)
        columns = cases.flatten(0, 1)  # [R · G, B · T, w]
        return in_order(part, torch.bmm(columns.mT, columns)), float(columns.shape[1])

    def commit(self) -> None:
        if self.last is None or not self.first.inferred_noise:
            return
        root = self.layers[self.last].output_root()
        for name, noise in self.noise.items():
            noise.copy_(root if name == "scale_tril" else root.reshape(noise.shape))

    # -- between stack and replicas ----------------------------------------------------------------------------

    def _gathered(self) -> dict[str, Layer]:
        """The layers of all replicas as they stand."""
        return {block.name: _joined([s.layers[block.name] for s in self.steppers]) for block in self.blocks}

    def scatter(self, stepper: ReplicaStepper) -> None:
        """Give a replica what the stack has learned of it."""
        if stepper in self.followed:
            return
        self.followed.add(stepper)
        number, stepper.remainder = list(self.steppers).index(stepper), self.remainder
        for block in self.blocks:
            part = slice(number * block.groups, (number + 1) * block.groups)
            whole, layer = self.layers[block.name], stepper.layers[block.name]
            for key in STACKED:
                getattr(layer, key).copy_(getattr(whole, key)[part])
            layer.settled = whole.settled

    def part(self) -> None:
        for stepper in self.steppers:
            self.scatter(stepper)
            stepper.stack = None


def _joined(layers: Sequence[Layer]) -> Layer:
    """Several layers as one."""
    first = layers[0]
    floor, data = (torch.cat([getattr(layer.prior, key) for layer in layers]) for key in ("floor", "data"))
    tensors: dict[str, Any] = {key: torch.cat([getattr(layer, key) for layer in layers]) for key in STACKED}
    tensors["factor"] = tensors["factor"].mT.contiguous().mT  # column by column, as factorised
    settled = all(layer.settled for layer in layers)
    return replace(first, prior=replace(first.prior, floor=floor, data=data), settled=settled, **tensors)


class _Judge(nn.Module):
    """A likelihood whose call is the log-density, so that the noise of replicas can be put in by name."""

    def __init__(self, likelihood: BuiltLikelihood) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.likelihood.log_prob(outputs, targets)

    def totals(self, outputs: Tensor, targets: Tensor, noise: dict[str, Tensor], count: int) -> Tensor:
        """The log-likelihood of each replica's rows, [R]."""
        if not noise:
            return self(outputs, targets).unflatten(0, (count, -1)).flatten(1).sum(1)

        def total(noise: dict[str, Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
            with leased(self, {f"likelihood.{name}": value for name, value in noise.items()}) as judge:
                return judge(outputs, targets).sum()

        rows = (tensor.unflatten(0, (count, -1)) for tensor in (outputs, targets))
        return vmap(total)(noise, *rows)
