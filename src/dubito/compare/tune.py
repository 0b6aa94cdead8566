"""A search for the best settings of each method, by Optuna: as many trials for every method, judged on validation rows.

A batch of trials is asked for when all before it are told, each under a seed of its own. So the trials are the same
however many run at a time, and whatever was interrupted.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import jobs, seeds
from ..errors import DubitoWarning, TrainingError, require_extra
from ..registry import methods
from .folder import Folder
from .settings import Settings
from .task import MOST_WATCHED
from .work import fitted, task_of

#: Trials asked for together, and trials drawn from the whole space before the sampler learns from any.
BATCH, STARTUP = 4, 8

PRIOR, RATE, START = {"prior_std": (0.05, 5.0)}, {"lr": (2e-4, 2e-2)}, {"initial_std": (1e-3, 0.2)}
LAPLACE = "laplace-diag laplace-kfac laplace-efb laplace-inf"
#: What is searched, by method: settings of its own or of its training, on a logarithmic scale or among words.
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    name: space
    for names, space in (
        ("map deep-ensemble swa", {**PRIOR, **RATE}),
        ("mean-field k-tied vadam", {**PRIOR, **START, **RATE}),
        ("noisy-adam vogn noisy-kfac", {**PRIOR, **START, "kl_weight": (0.01, 1.0)}),
        ("mc-dropout", {"rate": (0.01, 0.5), **PRIOR, **RATE}),
        ("swag", {"scale": (0.1, 3.0), **PRIOR, **RATE}),
        ("batch-ensemble", {"initial": (0.05, 1.0), "factor_rate": (0.1, 3.0), **RATE}),
        ("rank1", {"initial": (0.05, 1.0), "initial_rate": (1e-6, 0.1), **RATE}),
        ("implicit", {"prior_std": (0.01, 1.0), "mean_std": (0.05, 1.0), **RATE}),
        ("bali", {"step_size": (0.01, 0.5), "update_rate": (0.01, 0.5), "prior_scale": (0.3, 30.0)}),
        (LAPLACE, {"prior_precision": (0.1, 1e5), "subset": ("all", "last_layer")}),
    )
    for name in names.split()
}


def search(
    searches: Sequence[tuple[str, Settings, Path]], workers: jobs.Workers, threads: int, say: Callable[[str], None]
) -> list[Settings]:
    """For each method's name, settings and folder, the settings with the values of the least validation loss.

    The first trial is the method as it is, and the choice where all failed; failures count. Optuna's journal
    `<method>.trials` holds what was tried.
    """
    optuna = require_extra("optuna", "tune", "a search of settings")
    with ExitStack() as stack:
        stack.callback(optuna.logging.set_verbosity, optuna.logging.get_verbosity())
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        studies = [_study(optuna, *entry) for entry in searches]
        while waiting := [
            (study, trial.number, name, replace(settings, overrides=tuple(trial.params.items())), path)
            for study, (name, settings, path) in zip(studies, searches, strict=True)
            for trial in _batch(optuna, study, name, settings)
        ]:
            trials = [(*arguments, threads) for _, _, *arguments in waiting]
            for place, loss, failure in jobs.surviving(validation_loss, trials, workers):
                study, number, name, *_ = waiting[place]
                study.tell(number, loss, optuna.trial.TrialState.FAIL if failure else None)
                if failure:
                    say(f"{name}: trial {number} failed: {failure}")
            say(f"tuning: {1 + max(number for _, number, *_ in waiting)} trials of each method are done")
    chosen = []
    for study, (_, settings, _) in zip(studies, searches, strict=True):
        trials = [trial for trial in study.trials[: settings.tune] if trial.value is not None]
        values = min(trials, key=lambda trial: trial.value).params if trials else {}
        chosen.append(replace(settings, overrides=tuple(values.items())))
    return chosen


def _study(optuna: Any, name: str, settings: Settings, path: Path) -> Any:
    """A method's trials so far, under the checksum of all that decides their losses."""
    path.mkdir(parents=True, exist_ok=True)
    journal = import_module("optuna.storages.journal").JournalFileBackend(str(path / f"{name}.trials"))
    storage, digest = optuna.storages.JournalStorage(journal), settings.digest(methods()[name])
    return optuna.create_study(storage=storage, study_name=digest, load_if_exists=True)


def _batch(optuna: Any, study: Any, name: str, settings: Settings) -> list[Any]:
    """The trials to run next: those left by an interruption, and those that fill their batch."""
    space, kinds = {}, optuna.distributions
    for key, ends in SPACES[name].items():
        words = isinstance(ends[0], str)
        space[key] = kinds.CategoricalDistribution(ends) if words else kinds.FloatDistribution(*ends, log=True)
    trials, most = study.get_trials(deepcopy=False), settings.tune or 0
    first = next((trial.number for trial in trials if not trial.state.is_finished()), len(trials))
    for number in range(len(trials), min(first - first % BATCH + BATCH, most)):
        seed = seeds.derived(settings.seed, "tune", name, number) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        study.ask(space if number else None)
    return [trial for trial in study.get_trials(deepcopy=False)[:most] if not trial.state.is_finished()]


def validation_loss(name: str, settings: Settings, path: Path, threads: int) -> float:
    """The mean negative log-likelihood of the validation rows under a method fitted to the training rows."""
    with jobs.alone(threads), warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)  # the fit of the best trial says it again
        task = task_of(settings)
        posterior, *_ = fitted(name, settings, task, Folder(path))
        inputs, targets = (tensor[:MOST_WATCHED] for tensor in task.validation)
        prediction = posterior.predict(inputs, num_samples=settings.num_samples, seed=settings.seed)
    loss = -float(prediction.log_prob(targets).double().mean())
    if math.isnan(loss):
        raise TrainingError("its predictions are not numbers")
    return loss
