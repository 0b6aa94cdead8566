"""Natural-gradient training in the library's loop: an optimiser whose gradients are taken at draws."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from ... import seeds
from ...errors import ConfigError, StorageError
from ...inputs import Batch, TensorOptions, rows_of
from ...layers import Layout
from ...layers.passes import asked
from ...networks import trainable
from ...objective import PlainObjective
from ...optim import NoisyKFAC, NoisyOptimizer
from ...storage.schema import Count, Multiplier, Positive, Size, conform
from ...training import GradientStepper, Plan, Processes, Stepper, StepRecord, Training
from ...training.checkpoint import check_forms
from .posterior import NaturalPosterior

#: What changes while an optimiser runs, among its settings.
COUNTED: dict[str, Any] = {"lr": Multiplier, "kl_now": Multiplier, "kl_weight": Positive}
COUNTED |= dict.fromkeys(("draws", "steps", "passes", "rows"), Count)
#: The slots of Kronecker factors.
SIDES = ("inputs", "outputs")


class NaturalFacts(TypedDict):
    """What a stepper keeps beside tensors."""

    plain: dict[str, int | bool]
    groups: list[dict[str, Any]]
    beside: NotRequired[dict[str, Any]]


class NaturalObjective(PlainObjective):
    """The negative log-likelihood at a draw; the optimiser knows the prior.

    Args:
        draft: the posterior under training.
        make: the optimiser for given parameters and rows.
        layouts: where the uses of parameters hold the rows, by name, of those whose rows tell their gradients.
        num_data: the number of training rows, or the sum of their weights.
        modes: modules by name that stay in evaluation mode while training.
        mean_weight: of the rows.
    """

    draft: NaturalPosterior

    def __init__(
        self,
        draft: NaturalPosterior,
        make: Callable[[list[Tensor], float], NoisyOptimizer],
        layouts: Mapping[str, Layout],
        *,
        num_data: float,
        modes: Mapping[str, bool],
        mean_weight: float = 1.0,
    ) -> None:
        super().__init__(draft, num_data=num_data, modes=modes)
        self.mean_weight = mean_weight
        draft.tensors.requires_grad_(False)
        self.names, self.layouts = list(trainable(draft.network)), layouts
        self.optimizer = make([draft.network.get_parameter(name) for name in self.names], num_data)
        self.asks = self.optimizer.watches
        for weight, bias in draft.biases.items():  # known before any row is seen
            index = -1 if bias is None else self.names.index(bias)
            self.optimizer.state[draft.network.get_parameter(weight)]["bias"] = index

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        if not self.optimizer.watches:
            return super().outputs(batch, generator)
        context = self.optimizer.watch.context(self.layouts, rows_of(batch.inputs), batch.weights)
        return asked(self.draft.network, context, self.layouts, training=self.modes).outputs(batch.inputs)

    def parameter_groups(
        self, lr: float, *, variational_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """What the library's own optimiser trains: the likelihood's noise."""
        groups = super().parameter_groups(lr, variational_lr=variational_lr, weight_decay=weight_decay)
        return [group for group in groups if group["name"] != "weights"]

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> "NaturalStepper":
        return NaturalStepper(self, training, plan, processes, seed)

    @torch.no_grad()
    def commit(self) -> None:
        """Put the optimiser's standard deviations where the posterior keeps them."""
        optimizer, draft = self.optimizer, self.draft
        (group,) = optimizer.param_groups
        for name, std in draft.group("std").items():
            std.copy_(optimizer.std(draft.network.get_parameter(name), group))
        if isinstance(optimizer, NoisyKFAC):
            scale = (group["num_data"] / group["kl_weight"]) ** 0.5
            for name in draft.biases:
                parameter = draft.network.get_parameter(name)
                if "inputs" in optimizer.state[parameter]:
                    right, left = optimizer.roots(parameter, group)
                    draft.group("input_tril")[name].copy_(right * scale)
                    draft.group("output_tril")[name].copy_(left)


class NaturalStepper(Stepper):
    """Steps of a natural-gradient optimiser, and of the usual one for the likelihood's noise.

    Args:
        objective: what is trained.
        training: settings of the run.
        plan: of the run.
        processes: who share it.
        seed: of the noise.
    """

    def __init__(
        self, objective: NaturalObjective, training: Training, plan: Plan, processes: Processes, seed: int
    ) -> None:
        if training.precision != "full":
            raise ConfigError(
                f'natural gradients are squares of gradients, which need precision="full", got {training.precision!r}'
            )
        self.objective, self.training, self.plan = objective, training, plan
        self.processes, self.seed, self.optimizer = processes, seed, objective.optimizer
        learned = objective.parameter_groups(1.0)
        self.beside = GradientStepper(objective, training, plan, processes, seed) if learned else None
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.device = TensorOptions.of(objective.draft.network).device

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        parameters = self.parameters + ([] if self.beside is None else self.beside.parameters)
        for parameter in parameters:
            parameter.grad = None
        total = torch.zeros((), device=self.device, dtype=parameters[0].dtype)
        for index, batch in enumerate(passes):
            stream = seeds.generator(self.seed, "noise", number, index, device=self.device)
            with self.optimizer.sampled(stream, watched=False):
                if batch is None:  # the draw counts in every process
                    continue
                loss = self.objective.batch_loss(batch, 1.0, None)
                (loss.nll * (len(batch.targets) / rows)).backward()
            total += loss.nll.detach() * (len(batch.targets) / rows)
            del loss  # and with its graph the lease on a shell, which the next pass takes again
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        stop = self._combine(total, parameters, stop)
        norm = None
        if self.training.clip_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.training.clip_norm)
        lr = self._set_rates(number)
        self.optimizer.step(rows=rows * self.objective.mean_weight)
        if self.beside is not None:
            self.beside.descend(number)
        return StepRecord(number, torch.stack([total, total, torch.zeros_like(total)]), rows, lr, norm, stop)

    def settle(self, step: int) -> None:
        if step:
            self.objective.commit()

    def _combine(self, total: Tensor, parameters: list[Tensor], stop: bool) -> bool:
        if self.processes.count == 1:
            return stop
        states = [self.optimizer.state[p] for p in self.parameters]
        flags = [key in state for state in states for key in self.optimizer.sums]
        told = torch.tensor([*flags, stop], device=self.device).float()
        self.processes.sum([told])
        *anywhere, stop = (told > 0).tolist()
        wanted = iter(anywhere)
        for name, parameter, state in zip(self.objective.names, self.parameters, states, strict=True):
            for key in self.optimizer.sums:
                if next(wanted) and key not in state:  # seen by other processes alone
                    state[key] = parameter.new_zeros(self._shape(name, parameter, key))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.processes.sum([*gradients, *self.optimizer.pending(), total])
        return stop

    def _shape(self, name: str, parameter: Tensor, key: str) -> torch.Size:
        """The shape of a sum that this process has not seen."""
        if key == "squares":
            return parameter.shape
        factor = {"seen_inputs": "input_tril", "seen_outputs": "output_tril"}.get(key)
        return torch.Size() if factor is None else self.objective.draft.group(factor)[name].shape

    def _check(self, state: Mapping[int, Mapping[str, Any]], groups: Any, stored: Any) -> None:
        """Refuse settings that a run does not change, numbers that scale, and slots that belong to no parameter."""
        for group, was in zip(groups, stored, strict=True):
            for key in {*group, *was} - {"params"}:
                if key in COUNTED:
                    conform(was[key], COUNTED[key], f"the optimiser's {key}")
                elif list(np.ravel(was[key])) != list(np.ravel(group[key])):
                    raise StorageError(f"the optimiser's {key} was {was[key]!r} and is {group[key]!r}")
        factored, places = (self.objective.draft.biases, {name: n for n, name in enumerate(self.objective.names)})
        plain: set[frozenset[str]] = set()
        for index, slots in state.items():
            name, where = self.objective.names[index], f"the optimiser's state of parameter {index}"
            parameter, tensors = (self.parameters[index], {k: v for k, v in slots.items() if isinstance(v, Tensor)})
            forms = {key: (tuple(self._shape(name, parameter, f"seen_{key}" if key in SIDES else "squares")),
                           parameter.dtype) for key in tensors}  # fmt: skip
            check_forms(tensors, forms, where)
            conform(slots.get("step", 1), Size, f"{where}: the step")
            if name in factored:
                bias, begun = factored[name], any(was.get("draws") for was in stored)
                needed = {*SIDES, "bias", "turned"} if begun else {"bias"}  # a run that has made no step has no factors
                if {*slots} != needed or slots["bias"] != (-1 if bias is None else places[bias]):
                    raise StorageError(f"{where} does not fit its Kronecker factors")
                conform(slots.get("turned", False), bool, where)
            else:
                plain.add(frozenset(slots))
        if len(plain) > 1:
            raise StorageError("the optimiser keeps other slots of one parameter than of another")

    def _set_rates(self, number: int) -> float:
        lr = self.training.lr * self.plan.rise(number, self.training.warmup)
        lr *= self.training.schedule.factor(self.plan.progress(number))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        held = self.optimizer.state_dict()
        entries = {f"{i}.{key}": value for i, slots in held["state"].items() for key, value in slots.items()}
        tensors = {f"natural:{name}": value for name, value in entries.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in held["param_groups"]]
        facts: dict[str, Any] = {"plain": plain, "groups": groups}
        if self.beside is not None:
            beside, facts["beside"] = self.beside.state()
            tensors |= {f"beside:{name}": tensor for name, tensor in beside.items()}
        return tensors, facts

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        conform(facts, NaturalFacts, "the optimiser's facts")
        state: dict[int, dict[str, Any]] = {}
        natural = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("natural:")}
        for name, value in {**facts["plain"], **natural}.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = value
        groups = self.optimizer.state_dict()["param_groups"]
        self._check(state, groups, facts["groups"])
        restored = [{**group, **was} for group, was in zip(groups, facts["groups"], strict=True)]
        for group in restored:
            if "betas" in group:
                group["betas"] = tuple(group["betas"])
        self.optimizer.load_state_dict({"state": state, "param_groups": restored})
        if self.beside is not None:
            beside = {name[7:]: tensor for name, tensor in tensors.items() if name.startswith("beside:")}
            self.beside.restore(beside, facts["beside"])
