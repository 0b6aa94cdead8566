"""The settings of the protocol: how a method is trained where nobody says how."""

from dataclasses import dataclass

from ..errors import ConfigError, require_count, require_fraction, require_positive
from ..hints import Checked
from ..precision import Precision
from .schedules import Constant, Cosine
from .settings import EarlyStopping, Training

#: `AutoTraining.longer`, unless said otherwise.
LONGER = (8_000, 32_000)
#: Fewer validation rows cannot tell whether a longer fit is better, nor how much noise it leaves: over six draws of
#: rows of yacht and of energy, log-likelihoods rose by .20 to .27 with 40 and with 80, by -.76 to .36 with 10 and 20.
LEAST_JUDGES = 40


@dataclass(frozen=True, kw_only=True)
class AutoTraining(Checked):
    """One protocol for all methods, which validation rows steer; `dubito.protocol` runs it.

    Args:
        iterations: the most steps of a run; None takes 2,000, and 10 epochs where these are more.
        longer: the most steps of further MAP fits, each made where the one before was still improving: its steps ended
            it, not its patience. None takes 8,000 and 32,000 of reals and counts; no further fit of classes, whose loss
            may fall for ever while they become too sure, nor where `iterations` is given. Fewer than 40 validation rows
            could not choose, and there are none.
        batch_size: rows per step.
        lr: the first learning rate of runs from scratch, from which it falls along half a cosine.
        patience: steps without a better validation loss before a run ends.
        every: steps between validations.
        watched: validation rows that watch over a run, drawn by seed where there are more; all choose afterwards.
        priors: standard deviations of a Normal prior on the weights that pilots try; None is the flat prior.
        pilot: the length of a pilot's run, as a share of a whole one; its patience likewise.
        held_out: the share of the rows that is kept back for validation where none are given.
        precision: "full", or autocast with "bf16" or "fp16".
    """

    iterations: int | None = None
    longer: tuple[int, ...] | None = None
    batch_size: int = 64
    lr: float = 2e-3
    patience: int = 400
    every: int = 20
    watched: int = 1000
    priors: tuple[float | None, ...] = (None, 1.0, 0.3)
    pilot: float = 0.25
    held_out: float = 0.1
    precision: Precision = "full"

    def __post_init__(self) -> None:
        require_count(batch_size=self.batch_size, patience=self.patience, every=self.every)
        require_count(watched=self.watched)
        if self.iterations is not None:
            require_count(iterations=self.iterations)
        if self.longer is not None:
            object.__setattr__(self, "longer", tuple(self.longer))
            for limit in self.longer:
                require_count(longer=limit)
        require_positive(lr=self.lr)
        require_fraction(zero=False, one=True, pilot=self.pilot)
        require_fraction(zero=False, held_out=self.held_out)
        object.__setattr__(self, "priors", tuple(self.priors))
        if not self.priors:
            raise ConfigError("priors must hold at least one standard deviation, or None for the flat prior")
        for prior in self.priors:
            if prior is not None:
                require_positive(priors=prior)

    def steps(self, rows: int) -> int:
        """The most steps of a run on so many rows."""
        return self.iterations or max(2000, 10 * -(-rows // self.batch_size))

    def limits(self, rows: int, validation_rows: int | None, *, classes: bool) -> tuple[int, ...]:
        """The most steps of the MAP fit, and of those after it; each at least twice the one before.

        Args:
            rows: of training.
            validation_rows: those that watch; None where their source does not tell.
            classes: whether targets are classes.
        """
        limits = [self.steps(rows)]
        further = LONGER if self.longer is None and self.iterations is None and not classes else self.longer or ()
        for limit in further:
            if limit >= 2 * limits[-1] and (validation_rows is None or validation_rows >= LEAST_JUDGES):
                limits.append(limit)
        return tuple(limits)

    def training(
        self,
        steps: int,
        *,
        start: bool = False,
        last: bool = False,
        falling: bool = True,
        stopping: bool = True,
        **changes: object,
    ) -> Training:
        """A run of so many steps.

        Args:
            steps: at most.
            start: whether the state it starts from may be the best.
            last: whether it runs to its end, and goes back only where an earlier state is better beyond chance.
            falling: whether the rate falls along half a cosine.
            stopping: whether validation rows may end it.
            changes: to the settings.
        """
        patience = steps + 1 if last else min(self.patience, steps)
        early = EarlyStopping(steps=patience, every=min(self.every, steps), start=start, last=last)
        settings = {
            "iterations": steps,
            "batch_size": self.batch_size,
            "lr": self.lr,
            "schedule": Cosine() if falling else Constant(),
            "early_stopping": early if stopping else None,
            "precision": self.precision,
        }
        return Training(**{**settings, **changes})  # pyright: ignore[reportArgumentType]

    def pilot_training(self, rows: int) -> Training:
        """The run of a pilot."""
        steps = max(1, round(self.pilot * self.steps(rows)))
        early = EarlyStopping(steps=max(1, round(self.pilot * self.patience)), every=min(self.every, steps))
        return self.training(steps, early_stopping=early)
