"""The size of a run, known before it starts."""

import math
from dataclasses import dataclass

from .settings import Training


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
