"""What the loop and a method ask of each other: an objective to train, and steps that train it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..inputs import Batch
from ..posterior import Posterior
from ..processes import Processes
from .plan import Plan
from .settings import Training


class Loss(NamedTuple):
    """The terms of a loss: total = nll + kl_weight · kl / num_data.

    Attributes:
        total: what to minimise.
        nll: negative log-likelihood, mean over the rows.
        kl: divergence from the prior in nats, in total.
    """

    total: Tensor
    nll: Tensor
    kl: Tensor


#: Total, nll and kl of a step, three numbers of a device: a tuple or a tensor [3].
Terms: TypeAlias = Sequence[Tensor] | Tensor


class StepRecord(NamedTuple):
    """What one step saw: the terms of its loss, a mean over its rows.

    Attributes:
        step: its number.
        terms: the three terms, without their graph.
        rows: rows it saw, over all processes.
        lr: the rate of the first parameter group.
        norm: the norm of its gradient, where it was taken.
        stop: whether some process was asked to stop.
    """

    step: int
    terms: Terms
    rows: int
    lr: float
    norm: Tensor | None
    stop: bool


#: Those of `Stepper.step`.
StepArguments: TypeAlias = tuple[int, Sequence[Batch | None], int, bool]


class Stepper(ABC):
    """A method's update rule; the loop around it is always the same."""

    @abstractmethod
    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        """Make step `number` from its passes; None is a pass of which this process has no rows.

        Args:
            number: counts the steps of the run.
            passes: this process's rows of each pass.
            rows: rows of all passes, over all processes.
            stop: whether this process was asked to stop.
        """

    def settle(self, step: int) -> None:  # noqa: B027
        """Bring the posterior up to what was learned, before it is read; refuse what went wrong on the device.

        Args:
            step: the number of steps made.
        """

    def close_epoch(self, step: int, last: bool) -> None:
        """Told after each epoch, before the posterior is read.

        Args:
            step: the number of steps made.
            last: whether no further epoch is planned.
        """
        self.settle(step)

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain facts that a checkpoint must keep beside the posterior's own."""

    @abstractmethod
    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Take back what `state` gave."""


class ObjectiveLike(Protocol):
    """What the loop needs of an objective; `dubito.objective.Objective` says what each part is."""

    num_data: float
    modes: dict[str, bool]

    @property
    def draft(self) -> Posterior:
        """The posterior whose tensors are trained in place."""
        ...

    @property
    def noisy(self) -> bool:
        """Whether a loss draws from its generator."""
        ...

    @property
    def asks(self) -> bool:
        """Whether training passes are answered in Python and cannot be compiled."""
        ...

    def batch_loss(
        self, batch: Batch, kl_weight: float, generator: torch.Generator | None, *, checked: bool = True
    ) -> Loss:
        """The loss of a batch, in training mode."""
        ...

    def parameter_groups(
        self, lr: float, *, variational_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        """Groups for an optimiser."""
        ...

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> Stepper:
        """The update rule."""
        ...
