"""Live progress of all jobs: each writes how far it is into a small file, the terminal shows them all."""

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..training import Reached
from .folder import Folder

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
        folder: where jobs write.
        methods: their names.
        console: where to show them.
    """

    def __init__(self, folder: Folder, methods: Sequence[str], console: Console) -> None:
        columns = (
            TextColumn("{task.description}"), BarColumn(bar_width=30), TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self.folder, self.progress = folder, Progress(*columns, console=console, refresh_per_second=4)
        self.tasks = {
            name: self.progress.add_task(name, total=None, start=False, state="waiting") for name in methods
        }
        self._done: set[str] = set()
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

    def ended(self, name: str, failed: bool) -> None:
        """A job has ended: its bar is full."""
        self._done.add(name)
        task = self.tasks[name]
        self.progress.start_task(task)
        state = "[red]failed" if failed else "[green]done"
        self.progress.update(task, total=1, completed=1, state=state)
        self.progress.stop_task(task)

    def _watch(self) -> None:
        while not self._end.wait(PAUSE):
            for name, task in self.tasks.items():
                if name in self._done or (reached := read(self.folder.work(name, "progress"))) is None:
                    continue
                if not self.progress.tasks[task].started:
                    self.progress.start_task(task)
                over = reached["step"] == reached["total"]
                state = "judging" if over else f"step {reached['step']:,}, nll {reached['nll']:.3g}"
                self.progress.update(task, total=reached["total"], completed=reached["step"], state=state)
