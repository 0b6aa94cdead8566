"""What the runs of a fit may spend, and how they ended: for those who give several fits the same time."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


def cpu_seconds() -> float:
    """CPU time of this process and of the children it has waited for."""
    return time.process_time() + sum(os.times()[2:4])


def clock_of(device: torch.device) -> Callable[[], float]:
    """The clock of what is done on a device: CPU time, which neighbours do not change; of accelerators the wall's."""
    return cpu_seconds if device.type == "cpu" else time.perf_counter


@dataclass
class Account:
    """The time of one fit's runs.

    Attributes:
        limit: seconds that they may take together; None for no limit.
        clock: what counts them.
        before: seconds that were spent before, by the checkpoints that the runs went on from.
        endings: how each run ended, in order: "limit" (of its steps), "patience" or "budget".
    """

    limit: float | None = None
    clock: Callable[[], float] = cpu_seconds
    before: float = 0.0
    endings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start = self.clock()

    def spent(self) -> float:
        """Seconds so far, those before an interruption among them."""
        return self.before + self.clock() - self.start

    def over(self) -> bool:
        """Whether the run at work must end."""
        return self.limit is not None and self.spent() >= self.limit

    def resumed(self, spent: float) -> None:
        """Go on from a checkpoint that was written after so many seconds of the fit."""
        self.before = max(self.before, spent)


_account: ContextVar[Account | None] = ContextVar("account", default=None)


def account() -> Account | None:
    """The account that is open, if there is one."""
    return _account.get()


@contextmanager
def accounted(opened: Account) -> Iterator[Account]:
    """While open, runs count their time there; one that meets the limit ends at its next step, with what it has."""
    token = _account.set(opened)
    try:
        yield opened
    finally:
        _account.reset(token)


@contextmanager
def part(share: float) -> Iterator[None]:
    """While open, runs may take this share of the time that is left: for fits of several runs in a row."""
    opened = account()
    if opened is None or opened.limit is None:
        yield
        return
    whole, spent = opened.limit, opened.spent()
    opened.limit = spent + share * max(0.0, whole - spent)
    try:
        yield
    finally:
        opened.limit = whole
