"""Rows of models that are no networks: a linear model and gradient boosting, by scikit-learn.

They see the rows that the methods see and are judged alike. The folder keeps numbers, no models.
"""

import warnings
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..calibration.conformal import conformal_quantile
from ..data import Part
from ..errors import DataError
from ..likelihoods import NegativeBinomial, Poisson
from ..prediction import CountPrediction, Prediction, RealPrediction
from ..prediction.mixtures import count_log_prob
from .folder import BASELINES
from .task import MOST_WATCHED, Task

#: Values of a row beyond which the models are left out, as for images that are not small.
MOST_COLUMNS = 1000
#: Penalties of the linear model on the sum of losses over rows: 1/C for classes, alpha for reals.
PENALTIES = tuple(10.0**power for power in range(-2, 5))
#: The least rate of counts that a model answers: 0 would make a count of 1 impossible.
LEAST_RATE = 1e-3
#: Steps of logistic regression; trees of boosting, for each class; trees without a better validation loss that end it.
MOST_STEPS, MOST_TREES, PATIENCE = 500, 1000, 20


@dataclass(frozen=True, eq=False)
class ConformalPrediction(RealPrediction):
    """Reals with split-conformal intervals by scores [V, T], |y − mean| / std of validation rows [Lei et al. 2018]."""

    scores: Tensor = field(kw_only=True)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        try:
            reach = conformal_quantile(self.scores, level) * self.std
        except DataError:  # too few rows for this level: the Gaussian's
            return super().interval(level)
        return self.mean - reach, self.mean + reach


@dataclass(frozen=True)
class Baseline:
    """Models of scikit-learn, for reals one per target where need be, with what a comparison asks of a posterior."""

    task: Task
    models: tuple[Any, ...]
    watched: Part
    num_parameters: ClassVar[int] = 0
    history: ClassVar[list[dict[str, float]]] = []
    network: ClassVar[nn.Module] = nn.Identity()

    @property
    def nbytes(self) -> int:
        """Of all arrays that the models hold."""
        return array_bytes(self.models)

    @cached_property
    def noise(self) -> tuple[Tensor, Tensor]:
        """The standard deviation [T] under which validation rows are likeliest, and their scores [V, T]."""
        errors = self.watched.targets - self.outputs(self.watched.inputs)
        least = 1e-3 * self.task.train.targets.std(0, unbiased=False)  # few rows may be met exactly
        std = errors.square().mean(0).sqrt().maximum(least)
        return std, errors.abs() / std

    @cached_property
    def total_count(self) -> Tensor | None:
        """R of the negative binomial [T] under which validation counts are likeliest; None is Poisson."""
        if not isinstance(self.task.likelihood, NegativeBinomial):
            return None
        rates, counts = self.outputs(self.watched.inputs).unsqueeze(0), self.watched.targets.double()
        grid = torch.logspace(-2, 4, 121, dtype=torch.float64).reshape(-1, 1, 1)
        best = count_log_prob(counts, rates.log(), grid).sum(1).argmax(0)
        return grid[best, 0, 0].reshape(1, 1, -1)

    def outputs(self, inputs: Tensor) -> Tensor:
        """What a network would answer: means [B, T] of reals, the logit [B, 1] of yes, or logits [B, C]."""
        if self.task.data.task == "regression":
            means = np.column_stack([model.predict(_rows(inputs)) for model in self.models])
            return torch.from_numpy(means.clip(LEAST_RATE) if counted(self.task) else means)
        scores = torch.from_numpy(self.models[0].decision_function(_rows(inputs)))
        if self.task.data.task == "binary":
            return scores.unsqueeze(1)
        if scores.ndim == 1:  # two classes: the logit of the second
            scores = torch.stack([torch.zeros_like(scores), scores], 1)
        # A class without training rows has the chance of a first one, one in N + 1, before all add up to 1.
        shape, chance = (len(scores), len(self.task.class_names)), -np.log(len(self.task.train.targets) + 1)
        classes = torch.from_numpy(self.models[0].classes_)
        return scores.new_full(shape, chance).index_copy(1, classes, scores.log_softmax(1))

    def predict(self, inputs: Tensor, **_: Any) -> Prediction:
        """The prediction; there is nothing to draw."""
        draws = self.outputs(inputs).unsqueeze(0)
        if self.task.data.task != "regression":
            return self.task.likelihood.build(None).predictive(draws)
        if counted(self.task):
            spread = 0.0 if self.total_count is None else draws.square() / self.total_count
            return CountPrediction(draws, draws + spread, total_count=self.total_count)
        std, scores = self.noise
        return ConformalPrediction(draws, std.square().reshape(1, 1, -1), scores=scores)


def offered(task: Task) -> tuple[tuple[str, ...], str | None]:
    """Names of the models for a task, or why there are none, in one line."""
    linear = "poisson-regression" if counted(task) else BASELINES[task.data.task == "regression"]
    names = (linear, BASELINES[-1])
    inputs, reason = task.train.inputs, None
    if find_spec("sklearn") is None:
        reason = "they need scikit-learn: pip install 'dubito[cli]'"
    elif not inputs.is_floating_point():
        reason = "they take numbers, and inputs are words"
    elif (count := inputs[0].numel()) > MOST_COLUMNS:
        reason = f"they take at most {MOST_COLUMNS:,} values for a row, got {count:,}"
    return (names, None) if reason is None else ((), f"{' and '.join(names)} are left out: {reason}")


def fit(name: str, task: Task) -> Baseline:
    """A model of a task's training rows, its penalty or its number of trees chosen on validation rows."""
    watched = Part(*(tensor[:MOST_WATCHED] for tensor in task.validation))
    if not len(watched.targets):
        raise DataError(f"{name} needs validation rows, got none; give a table with more rows")
    with import_module("threadpoolctl").threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps that did not suffice: validation rows judge what they gave
        return _boosted(task, watched) if name == BASELINES[-1] else _linear(task, watched)


def _linear(task: Task, watched: Part) -> Baseline:
    """The penalty of the least validation loss."""
    linear, rows = import_module("sklearn.linear_model"), _rows(task.train.inputs)
    models = [linear.LogisticRegression(C=1 / penalty, max_iter=MOST_STEPS) for penalty in PENALTIES]
    if task.data.task == "regression":
        models = [linear.Ridge(alpha=penalty) for penalty in PENALTIES]
    truth = task.train.targets.numpy()
    if counted(task):  # penalties on the mean over rows, and one model for each target
        parts = [
            [
                linear.PoissonRegressor(alpha=penalty / len(rows), max_iter=MOST_STEPS).fit(rows, counts)
                for counts in truth.T
            ]
            for penalty in PENALTIES
        ]
        fitted = [Baseline(task, tuple(part), watched) for part in parts]
    else:
        fitted = [Baseline(task, (model.fit(rows, truth),), watched) for model in models]
    gains = [float(model.predict(watched.inputs).log_prob(watched.targets).mean()) for model in fitted]
    return fitted[int(np.argmax(gains))]


def _boosted(task: Task, watched: Part) -> Baseline:
    """As many trees as have the least validation loss, fitted once more."""
    kind = "Regressor" if task.data.task == "regression" else "Classifier"
    make = getattr(import_module("sklearn.ensemble"), f"HistGradientBoosting{kind}")
    make = partial(make, loss="poisson") if counted(task) else make
    rows, models = _rows(task.train.inputs), []
    truths = [part.targets.reshape(len(part.targets), -1).T.numpy() for part in (task.train, watched)]
    for truth, seen in zip(*truths, strict=True):
        # Classes without training rows have no trees.
        known = np.isin(seen, truth) if kind == "Classifier" else np.full(len(seen), True)
        stopped = make(max_iter=MOST_TREES, early_stopping=True, n_iter_no_change=PATIENCE, random_state=0)
        stopped.fit(rows, truth, X_val=_rows(watched.inputs)[known], y_val=seen[known])
        trees = max(1, int(np.argmax(stopped.validation_score_)))  # the first score is that of no tree
        models.append(make(max_iter=trees, early_stopping=False, random_state=0).fit(rows, truth))
    return Baseline(task, tuple(models), watched)


def counted(task: Task) -> bool:
    """Whether the targets are counts."""
    return isinstance(task.likelihood, Poisson | NegativeBinomial)


def _rows(inputs: Tensor) -> np.ndarray:
    return inputs.flatten(1).double().numpy()


def array_bytes(held: Any) -> int:
    """The bytes of all arrays that an object holds, in lists and attributes too."""
    if isinstance(held, np.ndarray):
        return held.nbytes
    if isinstance(held, dict):
        held = list(held.values())
    if isinstance(held, list | tuple):
        return sum(map(array_bytes, held))
    return array_bytes(vars(held)) if hasattr(held, "__dict__") and not isinstance(held, type) else 0
