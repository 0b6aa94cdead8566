"""The progress bar, shown on terminals or on request, and those who listen in its place."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reached:
    """How far a run has come.

    Attributes:
        title: what is being trained.
        step: steps made.
        total: steps of the run, None where unknown.
        nll: of the last step.
    """

    title: str
    step: int
    total: int | None
    nll: float


_listener: ContextVar[Callable[[Reached], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listened(listener: Callable[[Reached], None]) -> Iterator[None]:
    """While open, runs tell `listener` of every step and show no bar: for those who watch several runs at once."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Bar:
    """A bar over the steps of a run, with its loss, nll, kl and rate.

    Args:
        total: steps of the run, None where unknown.
        show: show it; None on terminals only.
        title: what is being trained.
        done: steps made before, which say nothing about the time that is left.
    """

    def __init__(self, total: int | None, show: bool | None, title: str, *, done: int = 0) -> None:
        self._listener, self._title, self._total = _listener.get(), title, total
        self.shown, self._progress = False, None
        if show is False or self._listener is not None:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if console.is_terminal if show is None else show:
            self.shown = True
            columns = (
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[terms]}"),
            )  # fmt: skip
            self._progress = Progress(*columns, console=console, refresh_per_second=4)
            self._task = self._progress.add_task(title, total=total, completed=done, terms="")

    def open(self) -> AbstractContextManager[Any]:
        """The context in which the bar is drawn."""
        return self._progress or nullcontext()

    def update(self, step: int, total: float, nll: float, kl: float, lr: float) -> None:
        """Show the state after `step` steps of training."""
        if self._listener is None and self._progress is None:
            return
        self.show(step, nll, f"loss {total:.4g}  nll {nll:.4g}  kl {kl:.4g}  lr {lr:.2g}")

    def show(self, step: int, nll: float, terms: str) -> None:
        """Show how far a run has come, with what there is to say of it."""
        if self._listener is not None:
            self._listener(Reached(self._title, step, self._total, nll))
        if self._progress is not None:
            self._progress.update(self._task, completed=step, terms=terms)
