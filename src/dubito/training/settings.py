"""How to train: frozen settings that check themselves."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, require_count, require_positive
from ..hints import Checked
from ..precision import Precision
from .optimizers import Adam, OptimizerSettings
from .schedules import Constant, Schedule

if TYPE_CHECKING:
    from .auto import AutoTraining


@dataclass(frozen=True, kw_only=True)
class KL(Checked):
    """The weight of the divergence over a run.

    Args:
        weight: its final value.
        warmup: epochs over which it rises from 0 in a straight line; 0 for none.
        every: how often it moves on the way: "step", "epoch", or a number of batches.
    """

    weight: float = 1.0
    warmup: float = 0.0
    every: Literal["step", "epoch"] | int = "step"

    def __post_init__(self) -> None:
        require_positive(zero=True, weight=self.weight, warmup=self.warmup)
        if self.every not in ("step", "epoch"):
            require_count(every=self.every)

    def at(self, step: int, steps_per_epoch: int) -> float:
        """The weight at a step."""
        if not self.warmup:
            return self.weight
        size = {"step": 1, "epoch": steps_per_epoch}.get(self.every, self.every)  # pyright: ignore
        whole = step // size * size
        return self.weight * min(1.0, whole / (self.warmup * steps_per_epoch))


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Checked):
    """End a run whose validation loss no longer falls, and go back to its best state.

    Args:
        patience: epochs without a better loss before the run ends.
        margin: how much lower a loss must be to count as better.
        num_samples: draws per validation.
        steps: steps without a better loss before the run ends, in place of `patience`.
        every: steps between validations; None validates at the end of each epoch.
        start: validate the state that the run starts from, too: it may be the best.
        last: prefer the last state: go back only where the best one's loss is lower by more than two paired standard
            errors over the validation rows, and by .005 nats.
    """

    patience: int = 10
    margin: float = 0.0
    num_samples: int = 8
    steps: int | None = None
    every: int | None = None
    start: bool = False
    last: bool = False

    def __post_init__(self) -> None:
        require_count(patience=self.patience, num_samples=self.num_samples)
        for name in ("steps", "every"):
            if (value := getattr(self, name)) is not None:
                require_count(**{name: value})
        require_positive(zero=True, margin=self.margin)


@dataclass(frozen=True, kw_only=True)
class Training(Checked):
    """Settings of a training run.

    Args:
        epochs: passes over the data; 50 where neither epochs nor iterations are given.
        iterations: optimiser steps instead.
        batch_size: rows per forward pass; None takes the loader's own, or 128.
        lr: learning rate of the network's weights.
        variational_lr: learning rate of what a method learns beside them; None takes `lr`.
        optimizer: `Adam()`, `AdamW()` or `SGD()`.
        schedule: of the weights' rate: `Constant()`, `Cosine()`, `Step()` or `Linear()`.
        variational_schedule: of the other rate; None takes `schedule`.
        warmup: epochs over which both rates rise from 0 in a straight line.
        weight_decay: on the network's weights, never on what a method learns beside them.
        clip_norm: largest norm of a step's gradient; None does not clip.
        kl: the weight of the divergence: a number, or `KL(...)` for a schedule.
        accumulate: forward passes per optimiser step, so that a step sees batch_size · accumulate rows.
        precision: "full", or autocast with "bf16" or "fp16".
        compile: compile the network with `torch.compile`.
        channels_last: hold images with channels last, which convolutions prefer on many devices.
        early_stopping: needs `validation=` data.
        checkpoint_minutes: time between checkpoints.
        timeout: seconds to wait for other processes before giving up on them.
    """

    epochs: int | None = None
    iterations: int | None = None
    batch_size: int | None = None
    lr: float = 1e-3
    variational_lr: float | None = None
    optimizer: OptimizerSettings = Adam()
    schedule: Schedule = Constant()
    variational_schedule: Schedule | None = None
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    kl: KL | float = KL()
    accumulate: int = 1
    precision: Precision = "full"
    compile: bool = False
    channels_last: bool = False
    early_stopping: EarlyStopping | None = None
    checkpoint_minutes: float = 3.0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if self.epochs is not None and self.iterations is not None:
            raise ConfigError(f"give epochs or iterations, got both: {self.epochs} and {self.iterations}")
        if self.epochs is None and self.iterations is None:
            object.__setattr__(self, "epochs", 50)
        for name in ("epochs", "iterations", "batch_size"):
            if (value := getattr(self, name)) is not None:
                require_count(**{name: value})
        require_count(accumulate=self.accumulate)
        require_positive(lr=self.lr, timeout=self.timeout)
        for name in ("variational_lr", "clip_norm"):
            if (value := getattr(self, name)) is not None:
                require_positive(**{name: value})
        require_positive(zero=True, warmup=self.warmup, weight_decay=self.weight_decay)
        require_positive(zero=True, checkpoint_minutes=self.checkpoint_minutes)
        if isinstance(self.kl, int | float) and not isinstance(self.kl, bool):
            object.__setattr__(self, "kl", KL(weight=float(self.kl)))

    @staticmethod
    def auto(**settings: Any) -> "AutoTraining":
        """The protocol that trains any method with the help of validation rows; see `AutoTraining` for its settings."""
        from .auto import AutoTraining

        return AutoTraining(**settings)
