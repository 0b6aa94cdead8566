"""What a queue says: its ranked list, a line that moves on a terminal, one line per finished cell elsewhere."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table as Shown

from ..jobs import Finished
from ..show import duration, line
from .ranking import Group
from .state import Ended, State


def listing(groups: Sequence[Group]) -> Shown:
    """The ranked groups, what each would close and cost."""
    shown = Shown("rank", "rows per CPU-hour", "rows", "cells left", "CPU time", "by", "what")
    for rank, group in enumerate(groups, 1):
        cost = duration(group.cpu_seconds), "measured" if group.measured else "estimate"
        counts = f"{group.rows_per_hour:.3g}", str(group.rows), str(len(group.waiting))
        shown.add_row(str(rank), *counts, *cost, escape(str(group)))
    return shown


class Line:
    """The words of a running queue.

    Args:
        console: where they go.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status: Status | None = None

    def __enter__(self) -> "Line":
        if self.console.is_terminal:
            self.status = self.console.status("the workers start")
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def tick(self, state: State) -> None:
        """Renew the line on a terminal."""
        if self.status is not None:
            self.status.update(escape(told(state)))

    def report(self, group: Group, finished: Finished, state: State) -> None:
        """A line that stays."""
        words = f"{group.experiment.name} ({group.scale}) {line(finished)}"
        if self.status is None:
            words += f"; {left(state)}"
        self.console.print(escape(words), highlight=False, soft_wrap=True)
        self.tick(state)


def told(state: State) -> str:
    """What runs, what is left and how long it will take."""
    running = ", ".join(f"{task} since {duration(seconds)}" for task, seconds in state.running)
    return f"running: {running or 'nothing'}; {left(state)}"


def left(state: State) -> str:
    """What is left and how long it will take."""
    cells, running = state.cells, sum(len(task.cells) for task, _ in state.running)
    words = f"{running} running, {cells} waiting, {state.rows} rows open"
    return f"{words}, about {duration(state.seconds)} left"


def summary(ended: Ended) -> str:
    """What became of a queue."""
    words = [f"{ended.finished} cells finished, {ended.rows} rows closed"]
    if ended.failed:
        words.append(f"{len(ended.failed)} cells failed:")
        words += [f"  {cell}: {reason}" for cell, reason in ended.failed.items()]
    if ended.elsewhere:
        words.append(f"{ended.elsewhere} cells are run by another queue")
    if ended.stopped:
        words.append("stopped; what is finished is kept, and the same command goes on from there")
    return "\n".join(words)
