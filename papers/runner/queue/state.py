"""What a queue says of itself while it runs, and at its end."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .ranking import Task


@dataclass
class Ended:
    """What became of a queue.

    Attributes:
        finished: cells with a result.
        rows: rows of tables that were closed.
        failed: cells that failed for good, with the reason.
        elsewhere: cells that another queue was running.
        stopped: whether it was asked to stop.
    """

    finished: int = 0
    rows: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: int = 0
    stopped: bool = False


@dataclass
class State:
    """What runs and what is left.

    Attributes:
        running: tasks, each with the seconds since it started.
        cells: cells that wait.
        rows: rows that are not closed.
        seconds: expected until all is done.
    """

    running: Sequence[tuple[Task, float]]
    cells: int
    rows: int
    seconds: float
