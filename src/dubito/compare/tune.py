"""A search for the best settings of each method, by Optuna: as many trials for every method, judged on validation rows.

Trials come in batches of one size: a batch is asked for when all before it are told, each trial under a seed of its
own. So the trials are the same whatever runs at a time, and whatever was interrupted.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import jobs, seeds
from ..errors import ConfigError, DubitoWarning, Interrupted
from ..jobs import Workers
from .settings import Settings, compared_method
from .task import MOST_WATCHED
from .work import task_of

#: Trials asked for together, and trials drawn from the whole space before the sampler learns from any.
BATCH, STARTUP = 4, 8

PRIOR, RATE, START = {"prior_std": (0.05, 5.0)}, {"lr": (2e-4, 2e-2)}, {"initial_std": (1e-3, 0.2)}
LAPLACE = {"prior_precision": (0.1, 1e5), "subset": ("all", "last_layer"), **RATE}
#: What is searched, by method: settings of its own, or of its training, between two numbers (on a logarithmic scale)
#: or among words.
SPACES: dict[str, dict[str, tuple[Any, ...]]] = {
    "map": {**PRIOR, **RATE},
    "mc-dropout": {"rate": (0.01, 0.5), **PRIOR, **RATE},
    "deep-ensemble": {**PRIOR, **RATE},
    "swa": {**PRIOR, **RATE},
    "swag": {"scale": (0.1, 3.0), **PRIOR, **RATE},
    "mean-field": {**PRIOR, **START, "variational_lr": (2e-4, 5e-2)},
    "k-tied": {**PRIOR, **START, "variational_lr": (2e-4, 5e-2)},
    "batch-ensemble": {"initial": (0.05, 1.0), "factor_rate": (0.1, 3.0), **RATE},
    "rank1": {"initial": (0.05, 1.0), "initial_rate": (1e-6, 0.1), **RATE},
    "implicit": {"prior_std": (0.01, 1.0), "mean_std": (0.05, 1.0), **RATE},
    "bali": {"step_size": (0.01, 0.5), "update_rate": (0.01, 0.5), "prior_scale": (0.3, 30.0)},
    "noisy-adam": {**PRIOR, **START, "lr": (5e-4, 0.1)},
    "vadam": {**PRIOR, **START, "lr": (5e-4, 5e-2)},
    "vogn": {**PRIOR, **START, "lr": (5e-4, 0.1)},
    "noisy-kfac": {**PRIOR, "kl_weight": (0.01, 1.0), "lr": (5e-4, 0.1)},
    **dict.fromkeys(("laplace-diag", "laplace-kfac", "laplace-efb", "laplace-inf"), LAPLACE),
}


def search(
    searches: Sequence[tuple[str, Settings, Path]],
    workers: Workers,
    *,
    threads: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> list[Settings]:
    """For each method, its settings with the values of the least validation loss among all trials.

    The first trial is the method as it is; trials that fail count. What was tried is in Optuna's journal
    `<method>.trials` of the folder, from which a second call goes on.

    Args:
        searches: a method's name, its settings, which tell the number of trials, and its folder.
        workers: where trials run.
        threads: of PyTorch, for each trial.
        say: called with lines for the user.
    """
    optuna = load_optuna()
    with _quiet(optuna):
        studies = [_study(optuna, *entry) for entry in searches]
        while waiting := [
            (place, trial.number, name, replace(settings, overrides=tuple(trial.params.items())), threads)
            for place, (study, (name, settings, _)) in enumerate(zip(studies, searches, strict=True))
            for trial in _batch(optuna, study, name, settings)
        ]:
            for place, number, loss, failure in jobs.surviving(trial_of, waiting, _died, workers):
                failed = failure is not None
                state = optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE
                studies[place].tell(number, None if failed else loss, state)
                if failed:
                    say(f"{searches[place][0]}: trial {number} failed: {failure}")
            say(f"tuning: {max(number for _, number, *_ in waiting) + 1} trials of each method are done")
        return [_chosen(study, *entry, say) for study, entry in zip(studies, searches, strict=True)]


def _study(optuna: Any, name: str, settings: Settings, path: Path) -> Any:
    """A method's trials so far, under the checksum of all that decides their losses."""
    path.mkdir(parents=True, exist_ok=True)
    journal = import_module("optuna.storages.journal").JournalFileBackend(str(path / f"{name}.trials"))
    digest = replace(settings, tune=None).digest(compared_method(name))
    storage = optuna.storages.JournalStorage(journal)
    return optuna.create_study(storage=storage, study_name=digest, load_if_exists=True)


def _batch(optuna: Any, study: Any, name: str, settings: Settings) -> list[Any]:
    """The trials to run next: those left by an interruption, and those that fill their batch."""
    space = {}
    for key, (low, high, *_) in SPACES[name].items():
        numbers = isinstance(low, float)
        space[key] = (
            optuna.distributions.FloatDistribution(low, high, log=True)
            if numbers
            else (optuna.distributions.CategoricalDistribution((low, high)))
        )
    trials = study.get_trials(deepcopy=False)
    first = next((trial.number for trial in trials if not trial.state.is_finished()), len(trials))
    assert settings.tune is not None
    for number in range(len(trials), min(first - first % BATCH + BATCH, settings.tune)):
        seed = seeds.derived(settings.seed, "tune", name, number) % 2**32
        study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
        study.ask(space if number else None)
    return [trial for trial in study.get_trials(deepcopy=False) if not trial.state.is_finished()]


def trial_of(
    place: int, number: int, name: str, settings: Settings, threads: int
) -> tuple[int, int, float, str | None]:
    """One trial as a job: its search's place and its number again, its loss, and why there is none."""
    try:
        with jobs.alone(threads):
            loss = validation_loss(name, settings)
    except Interrupted:
        raise
    except Exception as error:  # whatever a method raises under settings it was not made for
        return place, number, math.nan, f"{type(error).__name__}: {error}"
    return place, number, loss, None if math.isfinite(loss) else f"its validation loss is {loss}"


def validation_loss(name: str, settings: Settings) -> float:
    """The mean negative log-likelihood of the validation rows under a method fitted to the training rows."""
    task = task_of(settings)
    method, training = settings.applied(compared_method(name))
    watched = tuple(tensor[:MOST_WATCHED] for tensor in task.validation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)  # the fit of the best trial says it again
        posterior = method.fit(
            task.network.build(settings.seed),
            task.train,
            task.likelihood,
            training=training,
            validation=watched,
            seed=settings.seed,
            progress=False,
        )
    prediction = posterior.predict(watched[0], num_samples=settings.num_samples, seed=settings.seed)
    return -float(prediction.log_prob(watched[1]).double().mean())


def _died(arguments: tuple[Any, ...], error: Exception) -> tuple[int, int, float, str | None]:
    return *arguments[:2], math.nan, jobs.death(error)


def _chosen(study: Any, name: str, settings: Settings, path: Path, say: Callable[[str], None]) -> Settings:
    """The settings of the best trial; those the method has where every trial failed."""
    trials = [trial for trial in study.get_trials(deepcopy=False)[: settings.tune] if trial.value is not None]
    best = min(trials, key=lambda trial: trial.value, default=None)
    if best is None:
        say(f"{name}: all {settings.tune} trials failed; it stays as it is")
        return settings
    chosen = replace(settings, overrides=tuple(best.params.items()))
    say(f"{name}: {chosen.tuning}; validation NLL {best.value:.4f}")
    return chosen


def load_optuna() -> Any:
    """The module Optuna, which an extra installs."""
    try:
        return import_module("optuna")
    except ImportError as error:
        raise ConfigError(
            "settings are searched with Optuna, which is not installed: pip install 'dubito[tune]'"
        ) from error


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """While open, Optuna logs warnings alone."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
