"""A budget of time as a number of steps: a few are timed, and as many follow as fit."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path

from ..method import Method
from ..storage import write_text
from ..training import Training
from .settings import Settings
from .task import Task

#: Steps of the first trial, the share of a budget that the last one must take to be believed, and the passes over
#: the data beyond which more training is no use.
FIRST, SHARE, MOST_EPOCHS = 10, 0.05, 500


def planned(method: Method, task: Task, settings: Settings, path: Path) -> Training:
    """The training of a method: as asked for, or of as many steps as its seconds allow.

    The number is kept, so that a run that was interrupted goes on to the same end.

    Args:
        method: what is trained.
        task: on what.
        settings: with which budget.
        path: where the number of steps is kept.
    """
    if settings.seconds is None:
        return settings.training
    if path.is_file():
        return replace(settings.training, epochs=None, iterations=int(json.loads(path.read_text())))
    batch_size = settings.training.batch_size or 128
    most = MOST_EPOCHS * math.ceil(len(task.train.targets) / batch_size)
    steps, before = FIRST, _timed(method, task, settings, FIRST)
    while True:  # twice as many steps each time, so that what only the first ones cost does not count
        steps *= 2
        spent = _timed(method, task, settings, steps)
        if spent >= SHARE * settings.seconds or steps >= most:
            break
        before = spent
    # seconds = what is spent once + steps · cost of a step, by the last two trials
    per_step = (spent - before) / (steps / 2) if spent > before else spent / steps
    once = max(0.0, spent - steps * per_step)
    whole = (settings.seconds - once) / per_step
    iterations = max(FIRST, min(int(whole), most))
    write_text(path, json.dumps(iterations))
    return replace(settings.training, epochs=None, iterations=iterations)


def _timed(method: Method, task: Task, settings: Settings, steps: int) -> float:
    training = replace(settings.training, epochs=None, iterations=steps)
    network = task.network.build(settings.seed)
    start = time.perf_counter()
    method.fit(network, task.train, task.likelihood, training=training, seed=settings.seed, progress=False)
    return time.perf_counter() - start
