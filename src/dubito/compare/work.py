"""One job: train a method, judge it, keep what it left; what fails says why."""

import math
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from .. import jobs, models
from ..errors import DubitoError, DubitoWarning, Interrupted, TrainingError
from ..inference.map import MAP
from ..inputs import TensorOptions
from ..likelihoods import Gaussian
from ..posterior import Posterior
from ..prediction import Prediction
from ..training import Training, listened
from . import live
from .budget import planned
from .evidence import JudgedPredictions, evidence, metrics_of
from .folder import Folder, MethodRow, StoredResult
from .settings import Settings, compared_method
from .shift import shifted, wanted
from .task import MOST_WATCHED, Task, make_task


def task_of(settings: Settings) -> Task:
    """The task, made once for jobs that follow each other in one process."""
    return _task_of(settings, settings.tables())


@lru_cache(maxsize=1)
def _task_of(settings: Settings, tables: tuple[tuple[str, str | None], ...]) -> Task:
    return make_task(settings)


@cache
def warmed() -> None:
    """Let PyTorch load what it loads at the first training of a process, so that no method's time counts it."""
    network, rows = models.make("mlp", in_features=1, hidden=[1], num_classes=1), torch.zeros(2, 1)
    MAP().fit(network, (rows, rows), Gaussian(), training=Training(iterations=1), progress=False)


def work(name: str, settings: Settings, path: Path, checksum: str, threads: int = 1) -> StoredResult:
    """Train and judge one method and keep the result in a comparison's folder.

    Args:
        name: of the method.
        settings: of the comparison.
        path: the folder.
        checksum: of all that decides the numbers.
        threads: of PyTorch.
    """
    folder = Folder(path)
    with jobs.alone():
        if threads != 1:
            torch.set_num_threads(threads)
        try:
            result = _worked(name, settings, folder, checksum)
        except Interrupted:
            raise
        except Exception as error:  # whatever a method or a network of the user's own raises is its row's
            told = str(error) if isinstance(error, DubitoError) else f"{type(error).__name__}: {error}"
            row = MethodRow(name, {}, failure=" ".join(told.split()), settings=repr(compared_method(name)))
            return StoredResult(row, {"traceback": traceback.format_exc()}, checksum)
    folder.store(result)
    folder.tidy(name)
    return result


def _worked(name: str, settings: Settings, folder: Folder, checksum: str) -> StoredResult:
    method, task = compared_method(name), task_of(settings)
    warmed()
    training = planned(method, task, settings, folder.work(name, "steps", checksum))
    network = task.network.build(settings.seed)
    with (
        warnings.catch_warnings(record=True) as caught,
        listened(live.Writer(folder.work(name, "progress"))),
    ):
        warnings.simplefilter("always", DubitoWarning)
        clock = clock_of(network)
        start = clock()
        posterior = method.fit(
            network,
            task.train,
            task.likelihood,
            training=training,
            validation=tuple(tensor[:MOST_WATCHED] for tensor in task.validation),
            checkpoint=folder.work(name, "ckpt", checksum),
            seed=settings.seed,
            progress=False,
        )
        seconds = clock() - start
    seen, predict_seconds = observed(posterior, task, settings)
    values = metrics_of(seen)
    if math.isnan(values["nll"]):
        raise TrainingError("its predictions are not numbers: training diverged; try a smaller --lr")
    posterior.save(folder.posterior(name))
    notes = tuple(str(item.message) for item in caught if issubclass(item.category, DubitoWarning))
    row = MethodRow(
        name,
        values,
        posterior.num_parameters,
        posterior.nbytes,
        round(seconds, 2),
        round(predict_seconds, 4),
        notes=notes,
        settings=repr(posterior.method),
    )
    drawn = evidence(seen, task, posterior, replace(settings, training=training))
    return StoredResult(row, drawn, checksum)


def observed(posterior: Posterior, task: Task, settings: Settings) -> tuple[JudgedPredictions, float]:
    """All predictions that are judged, in original units, and the seconds that 1000 rows take."""
    options: dict[str, Any] = {"num_samples": settings.num_samples, "seed": settings.seed}

    def predicted(inputs: torch.Tensor) -> Prediction:
        return in_units(posterior.predict(inputs, **options), task)

    clock = clock_of(posterior.network)
    start = clock()
    test = predicted(task.test.inputs)
    seconds = 1000 * (clock() - start) / len(task.test.targets)
    shifts: dict[str, list[Prediction]] = {}
    if wanted(task, settings):
        for shift, _, rows in shifted(task, settings):
            shifts.setdefault(shift, []).append(predicted(rows))
    scaling, targets = task.data.target_scaling, task.test.targets
    seen = JudgedPredictions(
        test=test,
        targets=targets if scaling is None else scaling.undo(targets),
        validation=predicted(task.validation.inputs[:MOST_WATCHED]),
        foreign={name: predicted(rows) for name, rows in task.foreign.items()},
        shifts=shifts,
    )
    return seen, seconds


def clock_of(network: torch.nn.Module) -> Callable[[], float]:
    """The clock of what a network costs: CPU time, which neighbours do not change, or the wall's on accelerators."""
    alone = TensorOptions.of(network).device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def in_units(prediction: Prediction, task: Task) -> Any:
    """A prediction of real targets in their original units; others as they are."""
    scaling = task.data.target_scaling
    return prediction if scaling is None else prediction.rescaled(*scaling)  # pyright: ignore
