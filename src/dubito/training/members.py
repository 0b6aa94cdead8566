"""Gradient descent on the networks of several runs at once: tensors in stacks, one pass, one optimiser."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..inputs import Batch, joined
from ..likelihoods import at_least_float
from ..posterior import Posterior
from .beside import Join, JointStepper
from .contract import Loss, Stepper, StepRecord
from .forward import Forward, forward_of, side_by_side, tensors_of
from .optimizers import SGD, Adam, AdamW
from .settings import Training
from .steps import NORM_EVERY, GradientStepper


def joined_descent(objectives: Sequence[Any], training: Training, example: Batch, rows: int) -> Join | None:
    """How networks are trained as one; None where they must be trained one after the other.

    Args:
        objectives: `PlainObjective`s of one form.
        training: how; an optimiser that looks at whole tensors would see those of all networks.
        example: some rows.
        rows: of a pass of one network.
    """
    if type(training.optimizer) not in (Adam, AdamW, SGD):
        return None
    networks = [objective.draft.network for objective in objectives]
    forward = forward_of(networks, objectives[0].modes, example.inputs, rows)
    return None if forward is None else lambda steppers: MemberStepper(steppers, forward)


class Members:
    """The objectives of several runs as one: the tensors of each network are views of stacks [K, ...].

    Args:
        objectives: of one form.
        forward: a pass of all networks.
    """

    def __init__(self, objectives: Sequence[Any], forward: Forward) -> None:
        self.first, self.count = objectives[0], len(objectives)
        networks = [objective.draft.network for objective in objectives]
        self.stacks = side_by_side(networks, buffers=forward.buffers)
        self.weights = {name: stack for name, stack in self.stacks.items() if stack.requires_grad}
        #: The tensors of each network by name.
        self.tensors = [tensors_of(network, buffers=forward.buffers) for network in networks]
        self.likelihoods = [objective.draft.likelihood for objective in objectives]
        self.zeros = next(iter(self.weights.values())).new_zeros(self.count)
        #: Whether one likelihood speaks for all.
        self.shared = not self.likelihoods[0].state_dict()
        self.outputs = forward.over(self.stacks, self.count)
        for number, tensors in enumerate(self.tensors):
            for name, tensor in tensors.items():
                tensor.data = self.stacks[name].detach()[number]

    @property
    def draft(self) -> Posterior:
        """That of the first."""
        return self.first.draft

    def parameter_groups(self, lr: float, *, weight_decay: float = 0.0, **_: Any) -> list[dict[str, Any]]:
        """All weights, side by side."""
        return [{"params": [*self.weights.values()], "lr": lr, "weight_decay": weight_decay}]

    def loss(self, batch: Batch, kl_weight: float) -> Loss:
        """The terms of each run's loss, [K], for rows run by run."""
        outputs = at_least_float(self.outputs(batch.inputs))
        if self.shared:
            log_probs = self.likelihoods[0].log_prob(outputs, batch.targets)
            nll = -log_probs.unflatten(0, (self.count, -1)).mean(1)
        else:
            rows = zip(outputs.chunk(self.count), batch.targets.chunk(self.count), strict=True)
            nll = torch.stack(
                [judge.mean_nll(*part) for judge, part in zip(self.likelihoods, rows, strict=True)]
            )
        if not self.first.penalised:
            return Loss(nll, nll, self.zeros)
        kl = vmap(self.first.penalty)(self.weights)
        return Loss(nll + (kl_weight / self.first.num_data) * kl, nll, kl)


class MemberStepper(JointStepper):
    """Gradient descent on the losses of all runs; what a likelihood learns stays with its run's optimiser.

    Args:
        steppers: of each run, at the same step.
        forward: a pass of all networks.
    """

    def __init__(self, steppers: Sequence[Stepper], forward: Forward) -> None:
        self.steppers = [stepper for stepper in steppers if isinstance(stepper, GradientStepper)]
        first = self.steppers[0]
        self.members = Members([stepper.objective for stepper in self.steppers], forward)
        self.descent = GradientStepper(
            self.members,  # pyright: ignore[reportArgumentType]
            first.training,
            first.plan,
            first.processes,
            first.seed,
        )
        beside = (p for likelihood in self.members.likelihoods for p in likelihood.parameters())
        #: What has gradients.
        self.trained = [*self.members.weights.values(), *beside]
        self.shared_state = False
        for name, stack in self.members.weights.items():
            states = [state for state in self._states(name) if state]
            if states:
                self.descent.optimizer.state[stack] = {
                    key: torch.stack([state[key] for state in states]) if _per_weight(key, value) else value
                    for key, value in states[0].items()
                }

    def step(
        self, number: int, passes: Sequence[Sequence[Batch | None]], rows: int, stop: bool
    ) -> list[StepRecord]:
        weight, step_rows = self.descent.kl_weight(number), self.descent.plan.step_rows
        for tensor in self.trained:
            tensor.grad = None
        seen: list[tuple[float, tuple[Tensor, Tensor, Tensor]]] = []
        for parts in zip(*passes, strict=True):
            batches = [batch for batch in parts if batch is not None]
            batch = Batch(joined([b.inputs for b in batches]), torch.cat([b.targets for b in batches]))
            with self.descent.autocast():
                loss = self.members.loss(batch, weight)
            count = len(batches[0].targets)
            loss.total.backward(torch.full_like(loss.total, count / step_rows))
            seen.append((count / rows, (loss.total.detach(), loss.nll.detach(), loss.kl.detach())))
            del loss  # and with it the graph
        norms = self._norms(number)
        lr = self.descent.descend(number)
        for stepper in () if self.members.shared else self.steppers:
            stepper.descend(number)
        if not self.shared_state:
            self._share_state()
        terms = seen[0][1]
        if len(seen) > 1:
            terms = torch.stack([share * torch.stack(part) for share, part in seen]).sum(0).unbind()
        members = zip(*(term.unbind() for term in terms), strict=True)
        by_member = [None] * self.members.count if norms is None else norms.unbind()
        return [
            StepRecord(number, part, rows, lr, norm, stop)
            for part, norm in zip(members, by_member, strict=True)
        ]

    def part(self) -> None:
        for tensors, stepper in zip(self.members.tensors, self.steppers, strict=True):
            for tensor in tensors.values():
                tensor.data = tensor.data.clone()
                state = stepper.optimizer.state.get(tensor, {})
                state.update({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)})

    def _norms(self, number: int) -> Tensor | None:
        """The norm of each run's gradient, clipped where that is asked for; None at steps that skip it."""
        most = self.descent.training.clip_norm
        if most is None and number % NORM_EVERY:
            return None
        stacked = [stack.grad for stack in self.members.weights.values() if stack.grad is not None]
        beside = [
            [p.grad for p in judge.parameters() if p.grad is not None] for judge in self.members.likelihoods
        ]
        parts = [torch.linalg.vector_norm(g, dim=tuple(range(1, g.ndim))) for g in stacked if g.ndim > 1]
        parts += [g.abs() for g in stacked if g.ndim == 1]  # of parameters that are one number
        if any(beside):
            parts.append(torch.stack([torch.nn.utils.get_total_norm(gradients) for gradients in beside]))
        norms = torch.stack(parts).norm(dim=0)
        if most is not None:
            factors = (most / (norms + 1e-6)).clamp(max=1.0)  # as in `clip_grad_norm_`
            for gradient in stacked:
                gradient.mul_(factors.reshape(-1, *[1] * (gradient.ndim - 1)))
            for factor, gradients in zip(factors, beside, strict=True):
                for gradient in gradients:
                    gradient.mul_(factor)
        return norms

    def _states(self, name: str) -> list[dict[str, Any]]:
        """What the runs' optimisers hold of a weight."""
        pairs = zip(self.steppers, self.members.tensors, strict=True)
        return [stepper.optimizer.state.get(tensors[name], {}) for stepper, tensors in pairs]

    def _share_state(self) -> None:
        """Let each run's optimiser hold its part of the state, which later steps change in place."""
        self.shared_state = True
        for name, stack in self.members.weights.items():
            whole = self.descent.optimizer.state.get(stack, {})
            for number, (stepper, tensors) in enumerate(
                zip(self.steppers, self.members.tensors, strict=True)
            ):
                stepper.optimizer.state[tensors[name]] = {
                    key: value[number] if _per_weight(key, value) else value for key, value in whole.items()
                }


def _per_weight(key: str, value: Any) -> bool:
    """Whether an optimiser keeps a number of its own for each weight; the count of steps is one for all."""
    return isinstance(value, Tensor) and key != "step"
