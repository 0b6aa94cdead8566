"""Train, save and judge each method; what is finished is kept, what fails says why."""

import json
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import metrics
from ..errors import DubitoError, DubitoWarning
from ..method import Method
from ..posterior import Posterior
from ..prediction import ClassPrediction, Prediction
from ..registry import methods as known_methods
from ..storage import encode
from ..training import Training
from ..version import __version__
from .task import Task, make_task

#: What a comparison trains with where nothing else is asked for.
DEFAULT_TRAINING = Training(iterations=2000, batch_size=64, lr=2e-3)


@dataclass(frozen=True)
class Row:
    """One method's result.

    Attributes:
        method: its name.
        metrics: by name; empty where it failed.
        num_parameters: of its posterior.
        nbytes: of its posterior.
        seconds: wall-clock time of the fit.
        failure: why there is no result, else None.
        notes: warnings the fit gave.
    """

    method: str
    metrics: dict[str, float]
    num_parameters: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    failure: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """All rows of a comparison, best negative log-likelihood first, failures last.

    Attributes:
        data: the data's name.
        held_out: the classes that were unknown to all methods.
        rows: one per method.
        settings: all that decided the numbers.
    """

    data: str
    held_out: tuple[str, ...]
    rows: tuple[Row, ...]
    settings: dict[str, Any]


def compare(
    name: str,
    methods: Sequence[str] | None = None,
    *,
    out: Path | None = None,
    training: Training = DEFAULT_TRAINING,
    held_out: int | None = None,
    split: int = 0,
    seed: int = 0,
    num_samples: int = 32,
    progress: bool | None = None,
    report: Callable[[Row], None] = lambda row: None,
) -> Comparison:
    """Compare methods on one data set.

    Args:
        name: of the data, or a path.
        methods: command-line names; None takes all.
        out: the folder for results and posteriors; None keeps nothing.
        training: the same for every method.
        held_out: classes kept from training, to be told apart as unknown; None chooses.
        split: which of the data's splits.
        seed: of everything random.
        num_samples: draws per prediction.
        progress: show a bar per fit; None on terminals only.
        report: called with each row as soon as it is there.
    """
    chosen = {key: known_methods()[key] for key in (methods or known_methods())}
    task = make_task(name, held_out, split)
    settings = {
        "training": encode(training),
        "seed": seed,
        "split": split,
        "num_samples": num_samples,
        "versions": {"dubito": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for key, method in chosen.items():
        rows.append(_row(key, method, task, training, seed, num_samples, progress, out))
        report(rows[-1])
        result = Comparison(name, task.held_out, ranked(rows), settings)
        if out is not None:  # after every method, so that an interruption keeps what is finished
            (out / "results.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    return Comparison(name, task.held_out, ranked(rows), settings)


def ranked(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Best negative log-likelihood first, failures last."""
    return tuple(sorted(rows, key=lambda row: row.metrics.get("nll", float("inf"))))


def _row(
    key: str,
    method: Method,
    task: Task,
    training: Training,
    seed: int,
    num_samples: int,
    progress: bool | None,
    out: Path | None,
) -> Row:
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DubitoWarning)
            posterior = method.fit(
                task.network(seed),
                task.train,
                task.likelihood,
                training=training,
                seed=seed,
                progress=progress,
            )
        seconds = time.perf_counter() - start
        values = judged(posterior, task, num_samples, seed)
    except DubitoError as error:
        return Row(key, {}, failure=str(error))
    if out is not None:
        posterior.save(out / f"{key}.safetensors")
    notes = tuple(str(item.message) for item in caught if issubclass(item.category, DubitoWarning))
    return Row(key, values, posterior.num_parameters, posterior.nbytes, round(seconds, 2), notes=notes)


def judged(posterior: Posterior, task: Task, num_samples: int, seed: int) -> dict[str, float]:
    """Metrics on the test rows, in original units where targets were scaled, and against the unknown."""
    scaling = task.data.target_scaling
    values = posterior.evaluate(task.test, num_samples=num_samples, seed=seed)
    if scaling is not None:
        factor = float(scaling.scale.mean())
        values |= {name: values[name] * factor for name in ("rmse", "mae", "crps")}
        values["nll"] += float(
            scaling.scale.log().sum()
        )  # the density of y is that of (y − shift)/scale, / scale
    if task.unknown is not None:
        inside = doubt(posterior.predict(task.test.inputs, num_samples, seed=seed))
        outside = doubt(posterior.predict(task.unknown, num_samples, seed=seed))
        foreign = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).bool()
        values["ood_auroc"] = metrics.auroc(torch.cat([inside, outside]), foreign)
    return values


def doubt(prediction: Prediction) -> torch.Tensor:
    """The score that should be high for unknown rows: total entropy."""
    assert isinstance(prediction, ClassPrediction)
    return prediction.total
