"""Gradient descent on the networks of several runs at once: tensors in stacks, one pass, one optimiser."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from ..inputs import Batch, joined
from ..likelihoods import at_least_float
from ..precision import autocast
from .beside import Join, JointStepper
from .contract import Loss, Stepper, StepRecord
from .forward import Forward, forward_of, side_by_side, tensors_of
from .optimizers import SGD, Adam, AdamW
from .settings import Training
from .steps import NORM_EVERY, GradientStepper


def joined_descent(objectives: Sequence[Any], training: Training, example: Batch, rows: int) -> Join | None:
    """How networks are trained as one; None where they must be trained one after the other.

    Args:
        objectives: `MAPObjective`s of one form.
        training: how; an optimiser that looks at whole tensors would see those of all networks.
        example: some rows.
        rows: of a pass of one network.
    """
    if type(training.optimizer) not in (Adam, AdamW, SGD):
        return None
    networks = [objective.draft.network for objective in objectives]
    forward = forward_of(networks, objectives[0].modes, example.inputs, rows)
    return None if forward is None else lambda steppers: MemberStepper(steppers, forward)


class MemberStepper(JointStepper):
    """Gradient descent on the losses of all runs, whose networks' tensors are views of stacks [K, ...].

    What a likelihood learns stays with its run and its run's optimiser.

    Args:
        steppers: of each run, at the same step.
        forward: a pass of all networks.
    """

    def __init__(self, steppers: Sequence[Stepper], forward: Forward) -> None:
        self.steppers = [stepper for stepper in steppers if isinstance(stepper, GradientStepper)]
        first, drafts = self.steppers[0], [stepper.objective.draft for stepper in self.steppers]
        self.first: Any = first.objective
        self.draft, self.training, self.count = drafts[0], first.training, len(drafts)
        self.stacks = side_by_side([draft.network for draft in drafts], buffers=forward.mapped)
        self.weights = {name: stack for name, stack in self.stacks.items() if stack.requires_grad}
        self.outputs = forward.over(self.stacks, self.count)
        #: The tensors of each run's network by name.
        self.tensors = [tensors_of(draft.network, buffers=forward.mapped) for draft in drafts]
        for number, tensors in enumerate(self.tensors):
            for name, tensor in tensors.items():
                tensor.data = self.stacks[name].detach()[number]
        self.likelihoods = [draft.likelihood for draft in drafts]
        #: Whether one likelihood speaks for all.
        self.shared = not self.likelihoods[0].state_dict()
        beside = [p for likelihood in self.likelihoods for p in likelihood.parameters()]
        self.trained = [*self.weights.values(), *beside]
        self.zeros = self.trained[0].new_zeros(self.count)
        whole: Any = self  # all that a descent asks of an objective
        self.descent = GradientStepper(whole, first.training, first.plan, first.processes, first.seed)
        self.shares_state = False
        for name, stack in self.weights.items():
            states = [state for state in self._states(name) if state]
            if states:
                self.descent.optimizer.state[stack] = {
                    key: torch.stack([state[key] for state in states]) if _per_weight(key, value) else value
                    for key, value in states[0].items()
                }

    def parameter_groups(self, lr: float, *, weight_decay: float = 0.0, **_: Any) -> list[dict[str, Any]]:
        """All weights, side by side."""
        return [{"params": [*self.weights.values()], "lr": lr, "weight_decay": weight_decay}]

    def step(self, number: int, passes: Sequence[Sequence[Batch | None]], rows: int, stop: bool) -> list[StepRecord]:
        weight, step_rows = self.descent.kl_weight(number), self.descent.plan.step_rows
        for tensor in self.trained:
            tensor.grad = None
        seen: list[tuple[float, tuple[Tensor, Tensor, Tensor]]] = []
        for parts in zip(*passes, strict=True):
            batches = [batch for batch in parts if batch is not None]
            batch = Batch(joined([b.inputs for b in batches]), torch.cat([b.targets for b in batches]))
            if batches[0].weights is not None:
                batch = batch._replace(weights=joined([b.weights for b in batches]))
            with autocast(self.training.precision, self.descent.device):
                loss = self.loss(batch, weight)
            count = len(batches[0].targets)
            loss.total.backward(torch.full_like(loss.total, count / step_rows))
            seen.append((count / rows, (loss.total.detach(), loss.nll.detach(), loss.kl.detach())))
            del loss  # and with it the graph
        norms = self._norms(number)
        lr = self.descent.descend(number)
        for stepper in () if self.shared else self.steppers:  # whose networks have no gradients
            stepper.descend(number)
        if not self.shares_state:
            self._share_state()
        terms = seen[0][1]
        if len(seen) > 1:
            terms = torch.stack([share * torch.stack(part) for share, part in seen]).sum(0).unbind()
        by_run = zip(*(term.unbind() for term in terms), strict=True)
        norms = [None] * self.count if norms is None else norms.unbind()
        pairs = zip(by_run, norms, strict=True)
        return [StepRecord(number, part, rows, lr, norm, stop) for part, norm in pairs]

    def loss(self, batch: Batch, kl_weight: float) -> Loss:
        """The terms of each run's loss, [K], for rows run by run."""
        outputs = at_least_float(self.outputs(batch.inputs))
        if self.shared:
            log_probs = batch.weighted(self.likelihoods[0].log_prob(outputs, batch.targets))
            nll = -log_probs.unflatten(0, (self.count, -1)).mean(1)
        else:
            rows = [
                tensor.chunk(self.count) for tensor in (outputs, batch.targets, batch.weights) if tensor is not None
            ]
            parts = zip(self.likelihoods, *rows, strict=True)
            nll = torch.stack([likelihood.mean_nll(*part) for likelihood, *part in parts])
        if self.first.prior_std is None:
            return Loss(nll, nll, self.zeros)
        kl = vmap(self.first.penalty)(self.weights)
        return Loss(nll + (kl_weight / self.first.num_data) * kl, nll, kl)

    def part(self) -> None:
        for tensors, stepper in zip(self.tensors, self.steppers, strict=True):
            for tensor in tensors.values():
                tensor.data = tensor.data.clone()
                state = stepper.optimizer.state.get(tensor, {})
                state.update({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)})

    def _norms(self, number: int) -> Tensor | None:
        """The norm of each run's gradient, clipped where that is asked for; None at steps that skip it."""
        most = self.training.clip_norm
        if most is None and number % NORM_EVERY:
            return None
        stacked = [stack.grad for stack in self.weights.values() if stack.grad is not None]
        parts = [torch.linalg.vector_norm(g.reshape(self.count, -1), dim=1) for g in stacked]
        beside = [[p.grad for p in module.parameters() if p.grad is not None] for module in self.likelihoods]
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
        pairs = zip(self.steppers, self.tensors, strict=True)
        return [stepper.optimizer.state.setdefault(tensors[name], {}) for stepper, tensors in pairs]

    def _share_state(self) -> None:
        """Let each run's optimiser hold its part of the state, which later steps change in place."""
        self.shares_state = True
        for name, stack in self.weights.items():
            whole = self.descent.optimizer.state.get(stack, {})
            for number, state in enumerate(self._states(name)):
                state |= {k: v[number] if _per_weight(k, v) else v for k, v in whole.items()}


def _per_weight(key: str, value: Any) -> bool:
    """Whether an optimiser keeps a number of its own for each weight; the count of steps is one for all."""
    return isinstance(value, Tensor) and key != "step"
