"""One optimiser step: gradients of all passes and processes, clipped, at the rates of the moment."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import seeds
from ..inputs import Batch, Place
from .processes import Processes
from .settings import Training

if TYPE_CHECKING:
    from ..objective import Objective

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: A gradient norm is taken at every so many steps, enough to see noise with heavy tails.
NORM_EVERY = 8


@dataclass(frozen=True)
class Plan:
    """The size of a run.

    Attributes:
        batch_size: rows of a full pass.
        step_rows: rows of a full step, B: those of all its passes, never more than there are.
        passes: forward passes of an epoch, None where only reading tells.
        steps_per_epoch: optimiser steps of an epoch, None likewise.
        total: optimiser steps of the run, None likewise.
    """

    batch_size: int
    step_rows: int
    passes: int | None
    steps_per_epoch: int | None
    total: int | None

    def progress(self, number: int) -> float:
        """How much of the run lies before a step, from 0 to 1; 0 where nothing tells its length."""
        return min(1.0, number / self.total) if self.total else 0.0

    def rise(self, number: int, warmup: float) -> float:
        """The factor on rates at a step, where they rise in a straight line over so many epochs."""
        steps = warmup * (self.steps_per_epoch or 1)
        return min(1.0, (number + 1) / steps) if steps else 1.0


@dataclass(frozen=True)
class Record:
    """What one step saw: the terms of its loss, a mean over its rows, as [total, nll, kl].

    Attributes:
        step: its number.
        terms: the three terms.
        rows: rows it saw, over all processes.
        lr: the rate of the first parameter group.
        norm: the norm of its gradient, where it was taken.
        stop: whether some process was asked to stop.
    """

    step: int
    terms: Tensor
    rows: int
    lr: float
    norm: Tensor | None
    stop: bool


class Stepper(ABC):
    """A method's update rule; the loop around it is always the same."""

    @abstractmethod
    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> Record:
        """Make step `number` from its passes; None is a pass of which this process has no rows.

        Args:
            number: counts the steps of the run.
            passes: this process's rows of each pass.
            rows: rows of all passes, over all processes.
            stop: whether this process was asked to stop.
        """

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain facts that a checkpoint must keep beside the posterior's own."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""


class GradientStepper(Stepper):
    """Gradient descent on an objective's loss.

    A step is scaled by its rows over those of a full step, so that the gradients of an epoch add up to that
    of the whole objective, likelihood once and divergence once, whatever the sizes of its batches.
    """

    def __init__(
        self, objective: "Objective", training: Training, plan: Plan, processes: Processes, seed: int
    ) -> None:
        self.objective, self.training, self.plan = objective, training, plan
        self.processes, self.seed = processes, seed
        groups = objective.parameter_groups(
            training.lr, variational_lr=training.variational_lr, weight_decay=training.weight_decay
        )
        self.rates = [group["lr"] for group in groups]
        self.schedules = [
            training.variational_schedule
            if group.get("name") == "variational" and training.variational_schedule
            else training.schedule
            for group in groups
        ]
        self.optimizer = training.optimizer.make(groups)
        self.parameters = [p for group in groups for p in group["params"]]
        self.device = Place.of(objective.draft).device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=training.precision == "fp16")

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> Record:
        self.optimizer.zero_grad(set_to_none=True)
        weight = self.kl_weight(number)
        sums: list[Tensor] = []
        for index, batch in enumerate(passes):
            if batch is None:
                continue
            noise = None
            if self.objective.noisy:
                noise = seeds.generator(self.seed, "noise", number, index, device=self.device)
            with self._autocast():
                loss = self.objective.batch_loss(batch, weight, noise)
            share = len(batch.targets) / self.plan.step_rows
            self.scaler.scale(loss.total if share == 1 else loss.total * share).backward()
            terms = torch.stack([loss.total.detach(), loss.nll.detach(), loss.kl.detach().to(loss.nll)])
            sums.append(terms * len(batch.targets))
            del loss  # and with its graph the lease on a shell, which the next pass takes again
        total = torch.stack(sums).sum(0) if sums else torch.zeros(3, device=self.device)
        total, stop = self._combine(total, stop)
        self.scaler.unscale_(self.optimizer)
        norm = self._norm(number)
        lr = self._set_rates(number)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return Record(number, total / rows, rows, lr, norm, stop)

    def kl_weight(self, number: int) -> float:
        """The weight of the divergence at a step."""
        assert not isinstance(self.training.kl, float | int)
        return self.training.kl.at(number, self.plan.steps_per_epoch or 1)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        states = self.optimizer.state_dict()["state"]
        entries = {f"{index}.{key}": value for index, state in states.items() for key, value in state.items()}
        tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
        return tensors, {"optimizer": plain, "scaler": self.scaler.state_dict()}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        for name, value in {**facts["optimizer"], **tensors}.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, kept in self.optimizer.state.items():
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    # Fused kernels walk through memory: what belongs together must lie in the same order.
                    kept[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if facts["scaler"]:
            self.scaler.load_state_dict(dict(facts["scaler"]))

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.training.precision == "full":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.training.precision])

    def _combine(self, total: Tensor, stop: bool) -> tuple[Tensor, bool]:
        """Sums over processes: gradients, terms of the loss, and the wish to stop, in one message."""
        if self.processes.count == 1:
            return total, stop
        reached = torch.tensor([p.grad is not None for p in self.parameters] + [stop], device=self.device)
        reached = reached.to(total)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.sum([*(p.grad for p in self.parameters if p.grad is not None), total, reached])
        *used, stop = (reached > 0).tolist()
        for parameter, use in zip(self.parameters, used, strict=True):
            if not use:  # reached in no process: one process alone would not decay or move it either
                parameter.grad = None
        return total, stop

    def _norm(self, number: int) -> Tensor | None:
        if self.training.clip_norm is not None:
            return torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm)
        if number % NORM_EVERY:
            return None
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def _set_rates(self, number: int) -> float:
        progress, rise = self.plan.progress(number), self.plan.rise(number, self.training.warmup)
        for group, rate, schedule in zip(
            self.optimizer.param_groups, self.rates, self.schedules, strict=True
        ):
            group["lr"] = rate * rise * schedule.factor(progress)
        return self.optimizer.param_groups[0]["lr"]


def plan_run(training: Training, rows: int | None, passes: int | None, batch_size: int) -> Plan:
    """The plan of a run from what is known of its data."""
    steps = None if passes is None else math.ceil(passes / training.accumulate)
    total = training.iterations
    if total is None and steps is not None and training.epochs is not None:
        total = steps * training.epochs
    step_rows = batch_size * training.accumulate
    if rows is not None:
        batch_size, step_rows = min(batch_size, rows), min(step_rows, rows)
    return Plan(batch_size, step_rows, passes, steps, total)
