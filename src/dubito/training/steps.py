"""One optimiser step: gradients of all passes and processes, clipped, at the rates of the moment."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from .. import seeds
from ..devices import HostCopy, moved
from ..inputs import Batch, TensorOptions
from ..precision import autocast
from ..processes import Processes
from ..storage.schema import Count, Multiplier, conform
from . import checkpoint
from .contract import ObjectiveLike, Stepper, StepRecord, Terms
from .plan import Plan
from .settings import Training

#: A gradient norm is taken at every so many steps, enough to see noise with heavy tails.
NORM_EVERY = 8


class StepperFacts(TypedDict):
    """What an optimiser keeps beside tensors: what it has instead of some, and the state of loss scaling."""

    optimizer: dict[str, None]
    scaler: dict[str, Multiplier]
    snapshots: NotRequired[Count]


class GradientStepper(Stepper):
    """Gradient descent on an objective's loss.

    A step is scaled by its rows over those of a full step, so that the gradients of an epoch add up to that
    of the whole objective, likelihood once and divergence once, whatever the sizes of its batches.
    """

    def __init__(
        self, objective: ObjectiveLike, training: Training, plan: Plan, processes: Processes, seed: int
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
        # Without the label for profilers that PyTorch puts around every step: a tenth of the step of a small network.
        labelled = type(self.optimizer).step
        self._plain_step: Callable[..., Any] = getattr(labelled, "__wrapped__", labelled)
        self.parameters = [p for group in groups for p in group["params"]]
        self.device = TensorOptions.of(objective.draft).device
        self.wish: HostCopy | None = None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=training.precision == "fp16")

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        for parameter in self.parameters:  # `zero_grad` without its bookkeeping
            parameter.grad = None
        weight = self.kl_weight(number)
        seen: list[tuple[int, tuple[Tensor, ...]]] = []
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
            nll = loss.nll.detach()
            total = nll if loss.total is loss.nll else loss.total.detach()
            seen.append((len(batch.targets), (total, nll, loss.kl.detach().to(nll))))
            del loss  # and with its graph the lease on a shell, which the next pass takes again
        terms, stop = self._combine(seen, rows, stop)
        self.scaler.unscale_(self.optimizer)
        norm = self.norm(number)
        lr = self.descend(number)
        return StepRecord(number, terms, rows, lr, norm, stop)

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
        conform(facts, StepperFacts, "the optimiser's facts")
        state: dict[int, dict[str, Any]] = {}
        for name, value in {**facts["optimizer"], **tensors}.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        self._check(state)
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter, slots in self.optimizer.state.items():
            for key, value in slots.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    # Fused kernels walk through memory: what belongs together must lie in the same order.
                    slots[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        if facts["scaler"]:
            self.scaler.load_state_dict(dict(facts["scaler"]))

    def _check(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Refuse slots that this optimiser would not have made: those of a number show what they are."""
        example = torch.zeros(1, dtype=torch.float32, device=self.device).requires_grad_()
        example.grad = torch.zeros_like(example)
        scratch = self.training.optimizer.make([{"params": [example], "lr": 1.0}])
        scratch.step()
        for index, slots in state.items():
            parameter, where = self.parameters[index], f"the optimiser's state of parameter {index}"
            made = {key: value for key, value in scratch.state[example].items() if value is not None}
            tensors = {key: value for key, value in slots.items() if value is not None}
            forms = {
                key: (tuple(parameter.shape), parameter.dtype) if value.ndim else ((), value.dtype)
                for key, value in made.items()
            }
            checkpoint.check_forms(tensors, forms, where)

    def _autocast(self) -> AbstractContextManager[Any]:
        return autocast(self.training.precision, self.device)

    def _combine(self, seen: list[tuple[int, tuple[Tensor, ...]]], rows: int, stop: bool) -> tuple[Terms, bool]:
        """Means over the rows of all passes and processes; gradients and the wish to stop go in the same message."""
        if self.processes.count == 1 and len(seen) == 1:
            return seen[0][1], stop
        total = torch.zeros(3, device=self.device)
        if seen:
            total = torch.stack([torch.stack(terms) * count for count, terms in seen]).sum(0)
        if self.processes.count > 1:
            stop = self._shared(total, stop)
        return (total / rows).unbind(), stop

    def _shared(self, total: Tensor, stop: bool) -> bool:
        """Sums over processes; whether one of them wished to stop is known, to all alike, a step later."""
        reached = [parameter.grad is not None for parameter in self.parameters]
        told = moved(torch.tensor([*reached, stop], dtype=total.dtype), total.device)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.sum([*(p.grad for p in self.parameters if p.grad is not None), total, told])
        before, self.wish = self.wish, HostCopy(told[-1:])
        if not all(reached):
            for parameter, use in zip(self.parameters, (told[:-1] > 0).tolist(), strict=True):
                if not use:  # reached in no process: one process alone would not decay or move it either
                    parameter.grad = None
        return before is not None and before.read()[0] > 0

    def norm(self, number: int) -> Tensor | None:
        """The norm of the gradient that is there, clipped where that is asked for; None at steps that skip it."""
        if self.training.clip_norm is not None:
            return torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm)
        if number % NORM_EVERY:
            return None
        return torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])

    def descend(self, number: int) -> float:
        """Make the optimiser's step along the gradient that is there, at the rates of the moment.

        Returns the rate of the first parameter group. Steppers with an update rule of their own call it for what
        the optimiser trains beside that.
        """
        lr = self._set_rates(number)
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self._plain_step(self.optimizer)
        return lr

    def _set_rates(self, number: int) -> float:
        progress, rise = self.plan.progress(number), self.plan.rise(number, self.training.warmup)
        for group, rate, schedule in zip(self.optimizer.param_groups, self.rates, self.schedules, strict=True):
            group["lr"] = rate * rise * schedule.factor(progress)
        return self.optimizer.param_groups[0]["lr"]
