"""The tools of the table: dubito's estimators as they come, and what people use instead, all on the same rows.

Peers keep a fifth of the training rows back and stop when its loss does not fall, as the estimators do by themselves.
"""

import json
import os
import pickle
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dubito.errors import ConfigError, DataError
from dubito.integrations.sklearn import BayesianClassifier, BayesianRegressor
from dubito.likelihoods import Categorical, Gaussian
from dubito.method import Method
from dubito.prediction import CategoricalPrediction, RealPrediction
from dubito.protocol import Recipe
from dubito.training import AutoTraining

from ..runner import provenance
from ..runner.experiment import Cell
from ..runner.scores import area, epistemic
from ..settings import explicit
from .tabular_scores import LEVEL, LEVELS, Classes, Reals, of_distribution, of_normal

#: The environment of `make bench-env`, or another that this variable names.
VARIABLE = "DUBITO_PEERS"
PEERS = Path(__file__).parents[2] / ".venv-peers"


class Ground(NamedTuple):
    """The rows of a split: columns are standardised numbers, of words and gaps too, and so are real targets.

    Attributes:
        inputs: training rows.
        targets: real numbers, or numbers of classes, [N].
        test_inputs: rows to judge on.
        test_targets: likewise.
        unknown: test rows whose columns were shuffled apart.
        classes: how many; 0 for reals.
    """

    inputs: np.ndarray
    targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    unknown: np.ndarray
    classes: int


@dataclass(frozen=True, kw_only=True)
class Ours:
    """An estimator of dubito with the library's defaults, written down so that a change of them makes results stale.

    Args:
        method: with all its settings.
        estimator: the other arguments of the estimator.
        trainings: of the protocol for few rows, as an example, and for many, without longer fits.
        longer: most steps of the longer fits for few rows, in the same example.
        recipes: what the protocol makes of the method for classes and for reals, under a prior as an example.
        train_rows: at most so many of a split.
        test_rows: likewise.
    """

    method: Method
    estimator: Mapping[str, Any]
    trainings: tuple[AutoTraining, ...]
    longer: tuple[int, ...]
    recipes: tuple[Recipe, ...]
    train_rows: int
    test_rows: int


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another tool.

    Args:
        tool: a name of `TOOLS`.
        options: its settings, and how training is stopped.
        train_rows: at most so many of a split.
        test_rows: likewise.
    """

    tool: str
    options: Mapping[str, Any]
    train_rows: int
    test_rows: int


class Answer(NamedTuple):
    """What a tool says of a split.

    Attributes:
        test: of test rows.
        unknown: of shuffled ones.
        nbytes: of the model: of dubito's the posterior's tensors, of others what pickle writes.
        cpu_seconds: of the fit.
        facts: worth keeping.
        metrics: that this tool alone has.
    """

    test: Reals | Classes
    unknown: Reals | Classes
    nbytes: int
    cpu_seconds: float
    facts: Mapping[str, Any]
    metrics: Mapping[str, float] = {}


def ours(cell: Cell, ground: Ground, settings: Ours, steps: int | None) -> Answer:
    """A posterior by the estimator; in a rehearsal a few steps and draws."""
    options = dict(settings.estimator)
    if steps is not None:
        options |= {"training": explicit(AutoTraining, iterations=steps), "num_samples": steps}
    kind = BayesianClassifier if ground.classes else BayesianRegressor
    estimator = kind(settings.method, random_state=cell.split, **options)
    start = time.process_time()
    estimator.fit(ground.inputs, ground.targets)
    seconds = time.process_time() - start
    posterior = estimator.posterior_
    likelihood = explicit(Categorical) if ground.classes else explicit(Gaussian, standardise=True)
    rows = tuple(map(torch.from_numpy, (ground.inputs, ground.targets)))
    provenance.record(settings.method, posterior.network, rows, likelihood, estimator=options, seed=cell.split)
    test, unknown = (estimator.prediction(part) for part in (ground.test_inputs, ground.unknown))
    answers = []
    for prediction in (test, unknown):
        if isinstance(prediction, RealPrediction):
            answers.append(of_distribution(prediction))
        else:
            assert isinstance(prediction, CategoricalPrediction)
            answers.append(Classes(prediction.probs))
    return Answer(
        test=answers[0],
        unknown=answers[1],
        nbytes=posterior.nbytes,
        cpu_seconds=seconds,
        facts={"protocol": posterior.details.get("protocol", {})},
        metrics={"auroc_epistemic": area(epistemic(test), epistemic(unknown))},
    )


class Boosted(NamedTuple):
    """Gradient boosting of scikit-learn: a model for each level of reals, or one of classes.

    Attributes:
        models: fitted to the other rows.
        watched: the rows that stopped them, and their targets.
        cpu_seconds: of all.
    """

    models: list[Any]
    watched: tuple[np.ndarray, np.ndarray]
    cpu_seconds: float


_boosted: dict[Any, tuple[Boosted, list[dict[str, Any]]]] = {}


def parted(ground: Ground, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows that stop the training."""
    order = np.random.default_rng(seed).permutation(len(ground.targets))
    count = max(2, round(fraction * len(order)))
    return order[count:], order[:count]


def boosted(cell: Cell, ground: Ground, settings: Peer, steps: int | None) -> Boosted:
    """The models of a split, made once for the rows with and without conformal ends."""
    options = dict(settings.options)
    fraction = options.pop("watched")
    if steps is not None:
        options["max_iter"] = steps

    def made() -> Boosted:
        train, held = parted(ground, fraction, cell.split)
        (inputs, targets), watched = ((ground.inputs[rows], ground.targets[rows]) for rows in (train, held))
        ensemble = import_module("sklearn.ensemble")
        if ground.classes:
            models = [ensemble.HistGradientBoostingClassifier(**options)]
        else:
            make = ensemble.HistGradientBoostingRegressor
            models = [make(loss="quantile", quantile=level, **options) for level in LEVELS]
        start = time.process_time()
        for model in models:
            model.fit(inputs, targets, X_val=watched[0], y_val=watched[1])
        provenance.record(settings.options, None, torch.from_numpy(ground.inputs), None, seed=cell.split)
        return Boosted(models, watched, time.process_time() - start)

    for old in [key for key in _boosted if key[:2] != (cell.data, cell.split)]:
        del _boosted[old]
    key = cell.data, cell.split, json.dumps([settings.options, steps, len(ground.targets)], sort_keys=True)
    return provenance.shared(_boosted, key, made)


def boosting(cell: Cell, ground: Ground, settings: Peer, steps: int | None) -> Answer:
    """Quantiles, sorted where they cross [Chernozhukov et al. 2010], or probabilities."""
    fitted = boosted(cell, ground, settings, steps)

    def answer(rows: np.ndarray) -> Reals | Classes:
        if ground.classes:
            return Classes(torch.from_numpy(fitted.models[0].predict_proba(rows)))
        return Reals(_tensor([model.predict(rows) for model in fitted.models]).sort(0).values)

    facts = {"trees": [model.n_iter_ for model in fitted.models], "scikit-learn": version("scikit-learn")}
    return _answered(ground, answer, fitted.models, fitted.cpu_seconds, facts)


def conformal(cell: Cell, ground: Ground, settings: Peer, steps: int | None) -> Answer:
    """The same models with ends, or sets of classes, by MAPIE on the rows that stopped them [Romano et al. 2019]."""
    fitted = boosted(cell, ground, settings, steps)
    start = time.process_time()
    if ground.classes:
        make = import_module("mapie.classification").SplitConformalClassifier
        tools = [make(fitted.models[0], confidence_level=LEVEL, conformity_score="lac", prefit=True)]
    else:
        make = import_module("mapie.regression").ConformalizedQuantileRegressor
        half = len(LEVELS) // 2  # the third model would answer points, which are not asked for
        pairs = [(fitted.models[place], fitted.models[-1 - place]) for place in range(half)]
        tools = [
            make([*pair, fitted.models[half]], confidence_level=1 - 2 * level, prefit=True)
            for pair, level in zip(pairs, LEVELS, strict=False)
        ]
    for tool in tools:
        tool.conformalize(*fitted.watched)
    seconds = fitted.cpu_seconds + time.process_time() - start

    def answer(rows: np.ndarray) -> Reals | Classes:
        if ground.classes:
            probs = torch.from_numpy(fitted.models[0].predict_proba(rows))
            return Classes(probs, torch.from_numpy(tools[0].predict_set(rows)[1][:, :, 0]))
        ends = [tool.predict_interval(rows)[1][:, :, 0] for tool in tools]
        return Reals(_tensor([end for pair in ends for end in pair.T]).sort(0).values)

    return _answered(ground, answer, tools, seconds, {"mapie": version("mapie")})


def gaussian_process(cell: Cell, ground: Ground, settings: Peer, steps: int | None) -> Answer:
    """Scikit-learn's, with a length for each column where they are few, and noise."""
    options = dict(settings.options)
    few = ground.inputs.shape[1] <= options.pop("most_lengths")
    room = import_module("sklearn.gaussian_process")
    kernels = room.kernels
    lengths = np.ones(ground.inputs.shape[1]) if few else 1.0
    kernel = kernels.ConstantKernel(1.0, (1e-3, 1e3)) * kernels.RBF(lengths, (1e-2, 1e3))
    if steps is not None:
        options["optimizer"] = None
    start = time.process_time()
    if ground.classes:
        model = room.GaussianProcessClassifier(kernel, random_state=cell.split, **options)
    else:
        kernel += kernels.WhiteKernel(0.1, (1e-6, 1e1))
        model = room.GaussianProcessRegressor(kernel, random_state=cell.split, **options)
    model.fit(ground.inputs, ground.targets)
    seconds = time.process_time() - start
    provenance.record(settings.options, None, torch.from_numpy(ground.inputs), None, seed=cell.split)

    def answer(rows: np.ndarray) -> Reals | Classes:
        if ground.classes:
            return Classes(torch.from_numpy(model.predict_proba(rows)))
        return of_normal(*map(torch.from_numpy, model.predict(rows, return_std=True)))

    facts = {"kernel": str(model.kernel_), "scikit-learn": version("scikit-learn")}
    return _answered(ground, answer, model, seconds, facts)


def ngboost(cell: Cell, ground: Ground, settings: Peer, steps: int | None) -> Answer:
    """NGBoost in the peers' environment; absent, the cell fails with what to do."""
    python = peers_python()
    options = {**settings.options, "classes": ground.classes, "random_state": cell.split}
    fraction = options.pop("watched")
    if steps is not None:
        options["n_estimators"] = steps
    train, held = parted(ground, fraction, cell.split)
    arrays = {
        "train_x": ground.inputs[train], "train_y": ground.targets[train],
        "watched_x": ground.inputs[held], "watched_y": ground.targets[held],
        "test_x": ground.test_inputs, "unknown_x": ground.unknown, "settings": json.dumps(options),
    }  # fmt: skip
    provenance.record(settings.options, None, torch.from_numpy(ground.inputs), None, seed=cell.split)
    script = Path(__file__).with_name("tabular_ngboost.py")
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        question, answer = (Path(folder) / f"{name}.npz" for name in ("question", "answer"))
        np.savez(question, **arrays)
        command = [str(python), "-P", str(script), str(question), str(answer)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise DataError(f"NGBoost failed in {python}: {done.stderr.strip()[-500:]}; see `make bench-env`")
        with np.load(answer) as file:
            told = dict(file)

    def part(name: str) -> Reals | Classes:
        if ground.classes:
            return Classes(torch.from_numpy(told[f"{name}_probs"]))
        return of_normal(*(torch.from_numpy(told[f"{name}_{what}"]) for what in ("mean", "std")))

    facts = json.loads(str(told["facts"]))
    return Answer(part("test"), part("unknown"), int(told["nbytes"]), float(told["cpu_seconds"]), facts)


def peers_python() -> Path:
    """The Python of the peers' environment; a `ConfigError` where there is none."""
    folder = Path(os.environ.get(VARIABLE) or PEERS)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        raise ConfigError(
            f"NGBoost runs in an environment of its own, which needs pandas below 3, but there is no {python}; "
            f"make it by `make bench-env`, or name another by {VARIABLE}; other rows do without"
        )
    return python


TOOLS: Mapping[str, Callable[[Cell, Ground, Peer, int | None], Answer]] = {
    "boosting": boosting,
    "boosting-mapie": conformal,
    "gaussian-process": gaussian_process,
    "ngboost": ngboost,
}


def answered(cell: Cell, ground: Ground, settings: Ours | Peer, steps: int | None) -> Answer:
    """What a tool says; its warnings of steps that did not suffice, or of quantiles that cross, are left out."""
    if isinstance(settings, Ours):
        return ours(cell, ground, settings, steps)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TOOLS[settings.tool](cell, ground, settings, steps)


def _answered(
    ground: Ground,
    answer: Callable[[np.ndarray], Reals | Classes],
    model: Any,
    seconds: float,
    facts: Mapping[str, Any],
) -> Answer:
    return Answer(answer(ground.test_inputs), answer(ground.unknown), len(pickle.dumps(model)), seconds, facts)


def _tensor(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.float64))
