"""A posterior under training: its differentiable loss, its parameters, and the posterior so far."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .errors import NetworkError, require_positive
from .fitting import answered
from .hints import checked
from .inputs import Batch, Inputs, TensorOptions, checked_batch
from .layers.shell import Lease, take
from .likelihoods import at_least_float
from .posterior import Posterior, detached
from .training import GradientStepper, Loss, Plan, Processes, Stepper, Training


class Objective(nn.Module, ABC):
    """What `method.build` returns, for the library's loop and for people with their own.

    Args:
        draft: the posterior whose tensors are trained in place.
        num_data: the number of training rows, or the sum of their weights, by which the divergence is shared out.
        modes: modules by name that stay in evaluation mode while training.
    """

    def __init__(self, draft: Posterior, *, num_data: float, modes: Mapping[str, bool] | None = None) -> None:
        super().__init__()
        require_positive(num_data=num_data)
        self.draft = draft
        like = TensorOptions.of(draft.network)
        draft.likelihood.to(like.device, like.dtype)  # built without outputs, it may lie elsewhere
        self.num_data = num_data
        self.modes = dict(modes or {})
        take(draft.network).release()  # a shell, of which others are made once the network is spread over processes
        self.register_buffer("_no_kl", torch.zeros((), dtype=like.dtype, device=like.device), persistent=False)
        for parameter in draft.tensors.parameters():
            parameter.requires_grad_(True)

    #: Whether `outputs` draws from its generator.
    noisy: bool = True
    #: Whether parameters ask a context in training passes, which Python alone can answer: they are not compiled.
    asks: bool = False

    @abstractmethod
    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        """Outputs of the network in training mode, with the method's noise in it.

        Noise per example is drawn for the whole batch that the rows belong to, and sliced.
        """

    def kl(self) -> Tensor:
        """Divergence from the prior in nats; 0 for methods without one."""
        zero = self._buffers["_no_kl"]
        assert zero is not None
        return zero

    def lease(self, tensors: Mapping[str, Tensor] | None = None) -> Lease:
        """A shell of the network for a training pass, with `tensors` in place of its own."""
        return take(self.draft.network, tensors, training=self.modes)

    def bind(self, inputs: Inputs) -> None:
        """Learn from a first batch what only a run of the network tells; called before every loss."""

    @checked
    def loss(
        self,
        inputs: Inputs,
        targets: Any,
        *,
        weights: Any = None,
        kl_weight: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Loss:
        """The loss of some rows; noise comes from `generator`.

        Args:
            inputs: what the network reads.
            targets: what it should answer.
            weights: how often each row counts, [B]; None for once. The loss is a mean over rows, whatever they weigh.
            kl_weight: the weight of the divergence, 1 for the evidence bound itself.
            generator: the source of noise; None takes PyTorch's global one.
        """
        require_positive(zero=True, kl_weight=kl_weight)
        given = (inputs, targets) if weights is None else (inputs, targets, weights)
        batch = checked_batch(given, TensorOptions.of(self.draft.network))
        try:
            self.bind(batch.inputs)
            return self.batch_loss(batch, kl_weight, generator, checked=False)
        except (RuntimeError, TypeError, ValueError, IndexError):
            answered(self.draft.network, batch.inputs)  # says what the network cannot read
            raise

    def batch_loss(
        self, batch: Batch, kl_weight: float, generator: torch.Generator | None, *, checked: bool = True
    ) -> Loss:
        """The loss of a batch whose tensors were checked when the data came in, in training mode."""
        return self.joined(self.outputs(batch, generator), self.kl, batch, kl_weight, checked=checked)

    def joined(
        self, outputs: Tensor, kl: Callable[[], Tensor], batch: Batch, kl_weight: float, *, checked: bool
    ) -> Loss:
        """The loss of a batch from its outputs and the divergence.

        Args:
            outputs: of a training pass.
            kl: gives the divergence.
            batch: what the outputs belong to.
            kl_weight: the weight of the divergence.
            checked: whether the batch's tensors were checked when the data came in.
        """
        outputs = at_least_float(outputs)  # autocast may have lowered them
        targets, weights = self.judged(outputs, batch, checked)
        nll = self.draft.likelihood.mean_nll(outputs, targets, weights)
        divergence = kl()
        none = divergence is self._buffers["_no_kl"]
        total = nll if none else nll + (kl_weight / self.num_data) * divergence
        return Loss(total, nll, divergence)

    def judged(self, outputs: Tensor, batch: Batch, checked: bool) -> tuple[Tensor, Tensor | None]:
        """Targets in the likelihood's form, and what the rows weigh; the arguments are those of `joined`."""
        likelihood = self.draft.likelihood
        if checked:
            return batch.targets, batch.weights
        likelihood.check_outputs(outputs)
        targets = likelihood.check_targets(outputs, batch.targets)
        others = likelihood.row_weights(targets, outputs.dtype)
        return targets, batch.weights if others is None else batch.weighted(others)

    def parameter_groups(
        self, lr: float, *, variational_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Groups for an optimiser: the network's weights, and what the method learns beside them.

        Args:
            lr: learning rate of the weights.
            variational_lr: of the rest; None takes `lr`.
            weight_decay: for the weights; never for the rest.
        """
        weights = [p for p in self.draft.network.parameters() if p.requires_grad]
        beside = [p for p in (*self.draft.tensors.parameters(), *self.draft.likelihood.parameters())
                  if p.requires_grad]  # fmt: skip
        groups = [
            {"name": "weights", "params": weights, "lr": lr, "weight_decay": weight_decay},
            {"name": "variational", "params": beside, "lr": variational_lr or lr, "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> Stepper:
        """The update rule of the library's loop; methods with one of their own override it."""
        return GradientStepper(self, training, plan, processes, seed)

    def posterior(self) -> Posterior:
        """The posterior as it stands now; further training does not change it."""
        for name, tensor in self.draft.named_parameters():
            if isinstance(tensor, nn.UninitializedParameter):
                raise NetworkError(f"{name} takes its shape from the outputs: call loss(...) once first")
        return detached(self.draft)


def with_rate(groups: list[dict[str, Any]], parameters: Iterable[Tensor], rate: float, **changes: Any) -> list[Any]:
    """Groups of parameters in which some have another rate, and what else changes, in groups of their own.

    Args:
        groups: as `parameter_groups` gives them.
        parameters: those that differ.
        rate: multiplies their learning rate.
        changes: other settings of their groups.
    """
    chosen, parted = {id(parameter) for parameter in parameters}, []
    if rate == 1 and not changes:
        return groups
    for group in groups:
        some = [parameter for parameter in group["params"] if id(parameter) in chosen]
        rest = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        # Both keep the group's name: they follow the same schedule.
        parted += [{**group, "params": rest}, {**group, "lr": rate * group["lr"], **changes, "params": some}]
    return [group for group in parted if group["params"]]


class PlainObjective(Objective):
    """The network as it is, with no noise of ours."""

    noisy = False

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        return self.lease().outputs(batch.inputs)
