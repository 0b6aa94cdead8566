"""One job: train a method, judge it, keep what it left; what fails says why."""

import math
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import jobs, models, protocol
from ..errors import DubitoError, DubitoWarning, Interrupted, NetworkError, TrainingError, warn
from ..inference.map import MAP
from ..inputs import TensorOptions
from ..likelihoods import Gaussian
from ..loading import load
from ..posterior import Posterior
from ..prediction import Prediction
from ..registry import methods
from ..training import Account, AutoTraining, Training, accounted, clock_of, listened
from . import baselines, live
from .evidence import JudgedPredictions, evidence, metrics_of
from .folder import BASELINES, FitRecord, Folder, MethodRow, StoredResult
from .settings import Settings
from .shift import shifted, wanted
from .task import MOST_WATCHED, Task, make_task
from .verdict import REFERENCE


def task_of(settings: Settings) -> Task:
    """The task, made once for jobs that follow each other in one process."""
    return _task_of(replace(settings, overrides=(), point=()), settings.tables())


@lru_cache(maxsize=1)
def _task_of(settings: Settings, tables: tuple[tuple[str, str | None], ...]) -> Task:
    return make_task(settings)


@cache
def warmed() -> None:
    """Let PyTorch load what it loads at the first training of a process, so that no method's time counts it."""
    network, rows = models.make("mlp", in_features=1, hidden=[1], num_classes=1), torch.zeros(2, 1)
    MAP().fit(network, (rows, rows), Gaussian(), training=Training(iterations=1), progress=False)


def work(name: str, settings: Settings, path: Path, checksum: str, threads: int = 1) -> StoredResult:
    """Train and judge one method on one split and keep the result in the split's folder.

    Args:
        name: of the method.
        settings: of the comparison on this split.
        path: the folder.
        checksum: of all that decides the numbers.
        threads: of PyTorch.
    """
    folder = Folder(path)
    warmed()
    with jobs.alone(threads), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DubitoWarning)
        try:
            worked = _baseline if name in BASELINES else _worked
            row, drawn = worked(name, settings, folder, checksum)
            told = [str(item.message) for item in caught if issubclass(item.category, DubitoWarning)]
            result = StoredResult(replace(row, notes=tuple(dict.fromkeys(told))), drawn, checksum)
        except Interrupted:
            raise
        except Exception as error:  # whatever a method or a network of the user's own raises is its row's
            told = str(error) if isinstance(error, DubitoError) else f"{type(error).__name__}: {error}"
            title = name if name in BASELINES else repr(methods()[name])
            fits = (FitRecord(split=settings.splits[0]),)
            row = MethodRow(name, {}, failure=" ".join(told.split()), settings=title, fits=fits)
            return StoredResult(row, {"traceback": traceback.format_exc()}, checksum)
    folder.store(result)
    folder.tidy(name)
    return result


#: What a job leaves: a method's row, and what the page draws of it.
Judged = tuple[MethodRow, dict[str, Any]]


def _worked(name: str, settings: Settings, folder: Folder, checksum: str) -> Judged:
    task = task_of(settings)
    with listened(live.Writer(folder.work(name, "progress"))):
        checkpoint = folder.work(name, "ckpt", checksum)
        posterior, account, shared = fitted(name, settings, task, folder, checkpoint)
        seconds = account.spent()
    fit = FitRecord(
        split=settings.splits[0],
        seconds=round(seconds, 2),
        shared_seconds=shared,
        ended=ended(account.endings[-1:] if name == REFERENCE else account.endings),  # pilots come before
        chosen={**dict(settings.overrides), **chosen(posterior)},
        **steps_of(posterior.history),
    )
    result = judged(name, posterior, repr(posterior.method), fit, task, settings)
    posterior.save(folder.posterior(name))
    return result


def fitted(
    name: str, settings: Settings, task: Task, folder: Folder, checkpoint: Path | None = None
) -> tuple[Posterior, Account, float]:
    """A method's posterior of a task's training rows, the account of its time, and seconds of the fit it stands on."""
    method, training = settings.applied(methods()[name])
    network = task.network.build(settings.seed)
    options = {
        "validation": tuple(tensor[:MOST_WATCHED] for tensor in task.validation),
        "checkpoint": checkpoint,
        "seed": settings.seed,
        "progress": False,
    }
    account = Account(settings.budget_per_method, clock_of(TensorOptions.of(network).device))
    with accounted(account):
        if isinstance(training, AutoTraining) and name != REFERENCE:
            options["point"], shared = standing(folder, network)
            fit = partial(protocol.fit, method, auto=training)
        else:
            fit, shared = partial(method.fit, training=training), 0.0
        return fit(network, task.train, task.likelihood, **options), account, shared


def _baseline(name: str, settings: Settings, folder: Folder, checksum: str) -> Judged:
    """As `_worked`, for a model that is no network."""
    import_module("sklearn.ensemble")  # loading is no part of a fit
    task, account = task_of(settings), Account()
    model = baselines.fit(name, task)
    fit = FitRecord(split=settings.splits[0], seconds=round(account.spent(), 2))
    title = " ".join(" ".join(map(repr, model.models)).split())
    return judged(name, model, title, fit, task, settings)


def standing(folder: Folder, network: nn.Module) -> tuple[Posterior, float]:
    """The MAP fit of a split, on which its other methods stand, and the seconds that it took."""
    result = folder.result(REFERENCE)
    if result is None:
        raise TrainingError(f"it starts from the fit of {REFERENCE}, which failed")
    return load(folder.posterior(REFERENCE), network), result.row.seconds


def judged(name: str, model: Any, title: str, fit: FitRecord, task: Task, settings: Settings) -> Judged:
    """The row of a fitted model, and what the page draws of it."""
    seen, predict_seconds = observed(model, task, settings)
    values = metrics_of(seen)
    if math.isnan(values["nll"]):
        raise TrainingError("its predictions are not numbers: training diverged; try a smaller --lr")
    watched = targets_in_units(task.validation.targets[:MOST_WATCHED], task)
    loss = -float(seen.validation.log_prob(watched).double().mean()) if len(watched) else None
    seconds, fits = round(fit.seconds + fit.shared_seconds, 2), (replace(fit, validation_nll=loss),)
    costs = (model.num_parameters, model.nbytes, seconds, round(predict_seconds, 4))
    drawn = evidence(seen, task, model, settings)
    if len(seen.ood) < len(task.ood):  # the mean over other sets than those of other methods
        values.pop("ood_auroc", None)
        drawn["replicates"].pop("ood_auroc", None)
    return MethodRow(name, values, *costs, settings=title, fits=fits), drawn


def ended(endings: Sequence[str]) -> str:
    """How the training of a fit ended, by how its runs did: by the budget where any was stopped, else as the last."""
    return "budget" if "budget" in endings else (endings[-1] if endings else "")


def steps_of(history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The steps a fit made and the one whose state was kept; of several networks the most, and that of the last."""
    best = history[-1].get("best_step") if history else None
    return {"steps": int(max((entry["step"] for entry in history), default=0)), "best_step": best}


#: What validation rows choose, where a posterior tells.
CHOSEN = ("prior_std", "prior_precision", "scale", "temperature", "warm")


def chosen(posterior: Posterior) -> dict[str, Any]:
    """The settings that validation rows chose, as plain numbers by name."""
    facts = {"temperature": getattr(posterior.likelihood.settings, "temperature", None), **posterior.details}
    facts |= {"prior_std": getattr(posterior.method, "prior_std", None), **facts.get("protocol", {})}
    return {name: facts[name] for name in CHOSEN if isinstance(facts.get(name), int | float | bool)}


def observed(posterior: Posterior, task: Task, settings: Settings) -> tuple[JudgedPredictions, float]:
    """All predictions that are judged, in original units, and the seconds that 1000 rows take."""
    options: dict[str, Any] = {"num_samples": settings.num_samples, "seed": settings.seed}

    def predicted(inputs: torch.Tensor) -> Prediction:
        return in_units(posterior.predict(inputs, **options), task)

    clock = clock_of(TensorOptions.of(posterior.network).device)
    start = clock()
    test = predicted(task.test.inputs)
    seconds = 1000 * (clock() - start) / len(task.test.targets)
    ood: dict[str, Prediction] = {}
    for name, rows in task.ood.items():
        with spared(f"out-of-distribution rows {name!r}"):
            ood[name] = predicted(rows)
    shifts: dict[str, list[Prediction]] = {}
    for shift, _, rows in shifted(task, settings) if wanted(task, settings) else ():
        shifts.setdefault(shift, []).append(predicted(rows))
    seen = JudgedPredictions(
        test=test,
        targets=targets_in_units(task.test.targets, task),
        validation=predicted(task.validation.inputs[:MOST_WATCHED]),
        ood=ood,
        shifts=shifts,
    )
    return seen, seconds


@contextmanager
def spared(what: str) -> Iterator[None]:
    """While open, a prediction that is no number is told and left out: rows that do not belong may be too far off."""
    try:
        yield
    except NetworkError as error:
        warn(f"{what} are left out for this method, which then has no AUROC: {error}")


def in_units(prediction: Prediction, task: Task) -> Any:
    """A prediction of real targets in their original units, in double precision; others as they are."""
    scaling = task.data.target_scaling
    return prediction if scaling is None else prediction.to(torch.float64).rescaled(*scaling)  # pyright: ignore


def targets_in_units(targets: torch.Tensor, task: Task) -> torch.Tensor:
    """Real targets in their original units, in double precision; others as they are."""
    scaling = task.data.target_scaling
    return targets if scaling is None else scaling.undo(targets.double())
