"""Made-up tables for queues: their cells wait, fail or kill their process, as their method says."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from dubito import MAP, Categorical, Training, models
from dubito.errors import DataError
from papers.runner import Cell, Experiment, Metric, Outcome, Scale, Table, Variant, provenance
from papers.settings import explicit

#: A folder for what the cells leave behind.
TRACE = "DUBITO_TEST_QUEUE"


@dataclass(frozen=True, kw_only=True)
class Waits:
    seconds: float = 0.0


def trace(words: str) -> None:
    with (Path(os.environ[TRACE]) / "trace.txt").open("a") as file:
        file.write(f"{words} pid={os.getpid()} nice={os.nice(0)} threads={torch.get_num_threads()}\n")


def run(cells, data, settings: Waits, steps) -> list[Outcome]:
    method = cells[0].method
    trace(f"start {cells[0]}")
    time.sleep(settings.seconds)
    if method == "fails":
        raise DataError("no such data")
    if method == "breaks":
        raise ZeroDivisionError("by chance")
    once = Path(os.environ[TRACE]) / f"killed-{method}"
    if method == "dies" or (method == "dies-once" and not once.exists()):
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    trace(f"end {cells[0]}")
    return [Outcome(metrics={"error": float(cell.split)}) for cell in cells]


def fit(cells, data, settings: Waits, steps) -> list[Outcome]:
    inputs, targets = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    net = models.mlp(3, (4,), num_classes=2, seed=0)
    training = explicit(Training, iterations=2)
    provenance.fit(explicit(MAP), net, (inputs, targets), explicit(Categorical), training=training, seed=3)
    return [Outcome(metrics={"error": 0.0}) for _ in cells]


def nothing(cell: Cell) -> None:
    return None


def made(name: str, seconds: dict[str, tuple[float, float]], splits: int = 2, run=run, **options) -> Table:
    """A table by method: what a cell waits, and what it is thought to cost."""
    variants = {
        ("data", method): Variant(settings=Waits(seconds=wait), cpu_seconds=cost)
        for method, (wait, cost) in seconds.items()
    }
    return Table(
        name=name,
        title=name,
        paper="none",
        plus_minus="none",
        experiment=Experiment(
            paper="toys",
            name=name,
            scales={"paper": Scale(variants=variants, splits=splits)},
            load=nothing,
            generate=nothing,
            run=run,
            **options,
        ),
        metrics=(Metric(name="error", title="error", lower_is_better=True),),
        published={},
    )


def first_split(cell: Cell) -> int:
    return 0


TABLES = (
    made("quick", {"dear": (0.0, 50.0), "cheap": (0.0, 5.0)}),
    made("slow", {"waits": (0.6, 1.0)}, splits=6),
    made("bad", {"fails": (0.0, 1.0), "breaks": (0.0, 1.0)}, splits=1),
    made("deadly", {"dies": (0.0, 1.0), "dies-once": (0.0, 1.0)}, splits=1),
    made("fitted", {"fits": (0.0, 1.0)}, splits=1, run=fit),
    made("shared", {"one": (0.3, 1.0), "two": (0.3, 1.0)}, splits=1, shares=first_split),
)
MODULES = {table.name: "papers_queue" for table in TABLES}
