"""The progress bar, shown on terminals or on request, and those who listen in its place: both are callbacks."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..lazy import rich_console
from .callbacks import Callback, RunFacts, Told


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


def told(run: RunFacts, show: bool | None, callbacks: Iterable[Any] = ()) -> Told:
    """Those who watch a run, to be opened around it: the listener or the bar, and the user's callbacks.

    Args:
        run: what they are told of.
        show: show a bar; None on terminals only.
        callbacks: the user's.
    """
    listener = _listener.get()
    bar = _Listening(listener) if listener is not None else None if show is False else _bar(show)
    return Told(run, callbacks if bar is None else (bar, *callbacks))


class _Listening(Callback):
    """Hands steps on."""

    def __init__(self, listener: Callable[[Reached], None]) -> None:
        self.listener = listener

    def on_step(self, run: RunFacts, step: int, terms: Mapping[str, float]) -> None:
        self.listener(Reached(run.title, step, run.total, terms.get("nll", math.nan)))


def _bar(show: bool | None) -> "Bar | None":
    console = rich_console()(stderr=True)
    return Bar(console) if (console.is_terminal if show is None else show) else None


class Bar(Callback):
    """A bar over the steps of a run, with the terms of the last one.

    Args:
        console: of rich, where it is drawn.
    """

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[terms]}"),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, refresh_per_second=4)

    def on_start(self, run: RunFacts) -> None:
        # steps made before say nothing about the time that is left
        self._task = self._progress.add_task(run.title, total=run.total, completed=run.done, terms="")
        self._progress.start()

    def on_step(self, run: RunFacts, step: int, terms: Mapping[str, float]) -> None:
        shown = "  ".join(f"{name} {value:.4g}" for name, value in terms.items())
        self._progress.update(self._task, completed=step, terms=shown)

    def on_end(self, run: RunFacts, ended: str) -> None:
        self._progress.stop()
