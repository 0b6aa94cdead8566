"""The progress bar, shown on terminals or on request."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Bar:
    """A bar over the steps of a run, with its loss, nll, kl and rate.

    Args:
        total: steps of the run, None where unknown.
        show: show it; None on terminals only.
        title: what is being trained.
        done: steps made before, which say nothing about the time that is left.
    """

    def __init__(self, total: int | None, show: bool | None, title: str, *, done: int = 0) -> None:
        console = Console(stderr=True)
        self.shown = console.is_terminal if show is None else show
        self._progress: Progress | None = None
        if self.shown:
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
        """Show the state after `step` steps."""
        if self._progress is not None:
            terms = f"loss {total:.4g}  nll {nll:.4g}  kl {kl:.4g}  lr {lr:.2g}"
            self._progress.update(self._task, completed=step, terms=terms)
