"""Live progress of all jobs: each writes how far it is into a small file, the terminal shows them all."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..training import Reached

#: Seconds between two looks.
PAUSE = 0.25


class Writer:
    """Writes how far a run is, a few times a second at most.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.last = path, 0.0

    def __call__(self, reached: Reached) -> None:
        """Told of every step."""
        now = time.monotonic()
        if now - self.last >= PAUSE or reached.step == reached.total:
            self.last = now
            # Readers skip half a file, so that no step waits for a rename.
            self.path.write_text(json.dumps(vars(reached)))


def read(path: Path) -> dict[str, Any] | None:
    """What a run wrote last; None where nothing whole is there."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


class Board:
    """All jobs on the terminal.

    Args:
        paths: the file that each job writes, by its method and split.
        console: where to show them.
    """

    def __init__(self, paths: Mapping[tuple[str, int], Path], console: Console) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self.paths, self.progress = paths, Progress(*columns, console=console, refresh_per_second=4)
        self.many = len({split for _, split in paths}) > 1  # then only those at work are shown
        self.tasks = {}
        for name, split in paths:
            title = f"{name}, split {split}" if self.many else name
            task = self.progress.add_task(title, total=None, start=False, visible=not self.many, state="waiting")
            self.tasks[name, split] = task
        self._done: set[tuple[str, int]] = set()
        self._end = threading.Event()

    @contextmanager
    def open(self) -> Iterator[None]:
        """While open, the terminal follows the files."""
        watcher = threading.Thread(target=self._watch, daemon=True)
        with self.progress:
            watcher.start()
            try:
                yield
            finally:
                self._end.set()
                watcher.join()

    def ended(self, fit: tuple[str, int], failed: bool) -> None:
        """A job has ended: its bar is full."""
        self._done.add(fit)
        task = self.tasks[fit]
        self.progress.start_task(task)
        state = "[red]failed" if failed else "[green]done"
        self.progress.update(task, total=1, completed=1, state=state, visible=failed or not self.many)
        self.progress.stop_task(task)

    def _watch(self) -> None:
        while not self._end.wait(PAUSE):
            for fit, task in self.tasks.items():
                if fit in self._done or (reached := read(self.paths[fit])) is None:
                    continue
                if not self.progress.tasks[task].started:
                    self.progress.start_task(task)
                over = reached["step"] == reached["total"]
                state = "judging" if over else f"step {reached['step']:,}, nll {reached['nll']:.3g}"
                shown = {"total": reached["total"], "completed": reached["step"], "state": state}
                self.progress.update(task, visible=True, **shown)
