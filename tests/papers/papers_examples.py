"""A made-up experiment whose numbers are known in advance, and counters of what was run."""

import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dubito.errors import DataError
from dubito.metrics import Over
from papers.runner import Cell, Claim, Experiment, Metric, Outcome, Published, Scale, Table, Variant

#: What every job leaves behind, one line per cell, in the file this variable names.
TRACE = "DUBITO_TEST_TRACE"


@dataclass(frozen=True, kw_only=True)
class Toy:
    """Settings: the error of a cell is `base`, plus its split; `wait` seconds go by."""

    base: float
    wait: float = 0.0


def load(cell: Cell) -> float:
    if cell.data == "broken":
        raise DataError("broken data")
    return float(cell.split)


def run(cells, data, settings: Toy, steps) -> list[Outcome]:
    start = time.monotonic()
    time.sleep(settings.wait)
    if trace := os.environ.get(TRACE):
        with Path(trace).open("a") as file:
            file.writelines(
                f"{cell} threads={torch.get_num_threads()} pid={os.getpid()} thread={threading.get_ident()} "
                f"start={start} end={time.monotonic()} with={len(cells)}\n"
                for cell in cells
            )
    return [
        Outcome(metrics={"error": settings.base + value, "score": -value}, details={"steps": steps}) for value in data
    ]


def experiment(
    *,
    base: float = 1.0,
    splits: int = 4,
    seeds: int = 1,
    together: int = 1,
    wait: float = 0.0,
    data: tuple[str, ...] = ("alpha", "beta"),
    revision: int = 1,
) -> Experiment:
    def variants(shift: float) -> dict:
        return {
            (name, method): Variant(settings=Toy(base=base + extra + shift, wait=wait), cpu_seconds=30)
            for name in data
            for method, extra in (("one", 0.0), ("two", 0.5))
        }

    return Experiment(
        paper="toys",
        name="toy",
        scales={
            "paper": Scale(variants=variants(0), splits=splits, seeds=seeds),
            "small": Scale(variants=variants(1), splits=2, smaller="2 splits for 4"),
        },
        load=load,
        generate=lambda cell: 0.0,
        run=run,
        together=together,
        revision=revision,
    )


ERROR = Metric(name="error", title="error", lower_is_better=True)
SCORE = Metric(name="score", title="score", lower_is_better=False)


def table(made: Experiment | None = None, **changes) -> Table:
    fields = {
        "name": "toy-table",
        "title": "errors of toys",
        "paper": "Toys, Table 1",
        "plus_minus": "standard error over 4 splits",
        "differs": "toys are made of wood [oak]",
        "experiment": made or experiment(),
        "metrics": (ERROR, SCORE),
        "published": {
            ("alpha", "one", "error"): Published(2.5, 0.5, Over.RUNS),
            ("alpha", "two", "error"): Published(2.5),
            ("beta", "one", "error"): Published(2.5, 0.1, Over.EXAMPLES),
        },
        "claims": (Claim(text="one errs less", metric="error", better="one", than="two", data=("alpha", "beta")),),
    }
    return Table(**{**fields, **changes})


#: As a module of the index has them.
TABLES = (table(),)


class IVON(torch.optim.SGD):
    """Stands in for the optimiser of `ivon-opt`: the same calls, without noise."""

    def __init__(self, parameters, lr: float, **settings: float) -> None:
        assert set(settings) == {"ess", "weight_decay", "hess_init", "beta1", "beta2"}
        super().__init__(parameters, lr=lr)

    @contextmanager
    def sampled_params(self, train: bool = False):
        yield
