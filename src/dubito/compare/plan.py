"""What a comparison is about to do, told before it begins: fits, steps, what is shared, and when it will end."""

import warnings
from collections.abc import Sequence
from datetime import datetime, timedelta

from ..inference.map import MAP
from ..training import AutoTraining, Training, cpu_seconds
from .folder import Folder
from .settings import Settings
from .task import Task
from .verdict import REFERENCE
from .words import duration
from .work import warmed

#: CPU time of a fit as a multiple of MAP's with as many steps, roughly, by trial on digits; of others the last.
COSTS = {
    "map": 1.0, "mc-dropout": 1.7, "deep-ensemble": 2.5, "swa": 1.0, "swag": 1.0, "mean-field": 2.8, "k-tied": 3.0,
    "batch-ensemble": 4.6, "rank1": 7.7, "implicit": 4.0, "bali": 7.0, "noisy-adam": 2.3, "vadam": 2.3, "vogn": 4.0,
    "noisy-kfac": 9.7, "": 0.5,
}  # fmt: skip
#: Steps of the trial, and what judging and loading add to a fit, in seconds.
TRIAL, JUDGING = 20, 0.5


def plan(
    methods: Sequence[str], waiting: Sequence[str], settings: Settings, task: Task, folder: Folder, jobs: int
) -> tuple[str, ...]:
    """The plan in sentences.

    Args:
        methods: all that are compared.
        waiting: the method of each fit that is not finished.
        settings: of the comparison.
        task: of its first split.
        folder: with earlier results, whose times are the best guess.
        jobs: fits at a time.
    """
    splits, limit = len(settings.splits), settings.fit_seconds(len(methods), jobs)
    fits, steps = len(methods) * splits, most_steps(settings.training, task)
    parts = f"{len(methods)} method{'s' * (len(methods) > 1)} × {splits} split{'s' * (splits > 1)}"
    done = f", {fits - len(waiting)} of them finished before" if len(waiting) < fits else ""
    told = [f"{parts} = {fits} fits of at most {steps:,} steps each{done}"]
    if isinstance(settings.training, AutoTraining):
        told.append(
            f"{REFERENCE} is fitted once per split, with pilot runs that choose its prior; the others reuse both"
        )
        counts = len(task.train.targets), len(task.validation.targets)
        if longer := settings.training.limits(*counts, classes=bool(task.data.num_classes))[1:]:
            counts = " and ".join(f"{limit:,}" for limit in longer)
            told.append(f"where its validation loss still falls at the last step, it is fitted again, of {counts}")
    if limit is not None:
        share = f"{duration(settings.budget)} shared equally" if settings.budget else "the same for each method"
        what = f"{duration(limit)} of CPU time for the training of each fit, which then stops with what it has"
        told.append(f"budget: {share}: {what}; falling learning rates are cut short")
    if settings.tune is not None:
        told.append(f"{settings.tune} trials before each fit choose its settings; those in the folder count")
    if waiting:
        earlier = {name: result.row.seconds for name in set(waiting) if (result := folder.result(name))}
        step = 0.0 if len(earlier) == len(set(waiting)) else step_seconds(settings, task)
        fit = {name: earlier.get(name, step * steps * COSTS.get(name, COSTS[""])) for name in waiting}
        expected = sum(JUDGING + min(fit[name], limit or fit[name]) for name in waiting)
        expected *= 1 + (settings.tune or 0)
        end = datetime.now() + timedelta(seconds=expected / jobs)
        told.append(f"expected: about {duration(expected)} of CPU time at most, done by {end:%H:%M}")
    return tuple(told)


def most_steps(training: Training | AutoTraining, task: Task) -> int:
    """The most steps of a fit."""
    if isinstance(training, AutoTraining):
        return training.steps(len(task.train.targets))
    batches = -(-len(task.train.targets) // (training.batch_size or 128))
    return training.iterations or -(-batches // training.accumulate) * (training.epochs or 1)


def step_seconds(settings: Settings, task: Task) -> float:
    """CPU seconds of one step of MAP, by a trial."""
    warmed()
    training = Training(iterations=TRIAL, batch_size=settings.training.batch_size)
    network, start = task.network.build(settings.seed), cpu_seconds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a network that has hardly been trained
        MAP().fit(network, task.train, task.likelihood, training=training, seed=settings.seed, progress=False)
    return (cpu_seconds() - start) / TRIAL
