"""Rows of models that are no networks: a linear model and gradient boosting, by scikit-learn.

They see the training, validation and test rows of the methods and are judged by the same code. The folder keeps their
numbers, not the models: nothing is ever unpickled from there.
"""

import pickle
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from .. import seeds
from ..calibration.conformal import conformal_quantile
from ..data import Part
from ..errors import DataError
from ..prediction import Prediction, RealPrediction
from .folder import BASELINES
from .task import MOST_WATCHED, Task

#: Values of a row beyond which the models are left out, as for images that are not small.
MOST_COLUMNS = 1000
#: Penalties of the linear model on the sum of losses over rows, strongest first: 1/C for classes, alpha for reals.
PENALTIES = tuple(10.0**power for power in range(4, -3, -1))
#: Steps of logistic regression; trees of boosting, for each class; trees without a better validation loss that end it.
MOST_STEPS, MOST_TREES, PATIENCE = 500, 1000, 20
#: The least noise of reals, in standard deviations of the training targets.
LEAST_NOISE = 1e-3


@dataclass(frozen=True, eq=False)
class ConformalPrediction(RealPrediction):
    """Reals with Gaussian noise, and split-conformal intervals as far as there are rows for their level.

    Attributes:
        scores: |y − mean| / std of validation rows [Lei et al. 2018], [V, T].
    """

    scores: Tensor = field(kw_only=True)

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        try:
            reach = conformal_quantile(self.scores, level) * self.std
        except DataError:  # too few rows: the Gaussian's
            return super().interval(level)
        return self.mean - reach, self.mean + reach

    def rescaled(self, shift: Any, scale: Any) -> Self:
        plain = RealPrediction(self.means, self.variances).rescaled(shift, scale)
        return replace(self, means=plain.means, variances=plain.variances)


@dataclass(frozen=True)
class Baseline:
    """Fitted models that predict as a posterior does.

    Attributes:
        task: what was compared on.
        models: of scikit-learn; boosting of reals has one for each target.
        watched: the validation rows.
        notes: warnings.
        history: of no epochs.
        network: says that everything runs on the CPU.
    """

    task: Task
    models: tuple[Any, ...]
    watched: Part
    notes: tuple[str, ...] = ()
    history: list[dict[str, float]] = field(default_factory=list)
    network: nn.Module = field(default_factory=nn.Identity)

    @property
    def title(self) -> str:
        """The models with the settings that validation rows chose."""
        return ", ".join(" ".join(repr(model).split()) for model in self.models)

    @property
    def nbytes(self) -> int:
        """Of coefficients, or of pickled trees."""
        if hasattr(model := self.models[0], "coef_"):
            return model.coef_.nbytes + np.asarray(model.intercept_).nbytes
        return len(pickle.dumps(self.models))

    def outputs(self, inputs: Tensor) -> Tensor:
        """What a network would answer: means [B, T] of reals, the logit [B, 1] of yes, or logits [B, C]."""
        rows = inputs.flatten(1).double().numpy()
        if self.task.data.task == "regression":
            return torch.from_numpy(np.column_stack([model.predict(rows) for model in self.models]))
        (model,) = self.models
        scores = torch.from_numpy(model.decision_function(rows))
        if self.task.data.task == "binary":
            return scores.unsqueeze(1)
        if scores.ndim == 1:  # two classes: the logit of the second
            scores = torch.stack([torch.zeros_like(scores), scores], 1)
        # A class without training rows has the chance of a first one, one in N + 1, before all add up to 1.
        chance = -np.log(len(self.task.train.targets) + 1)
        logits = scores.new_full((len(rows), len(self.task.class_names)), chance)
        return logits.index_copy(1, torch.from_numpy(model.classes_), scores.log_softmax(1))

    def predict(self, inputs: Tensor, **_: Any) -> Prediction:
        """The prediction; there is nothing to draw."""
        draws = self.outputs(inputs).unsqueeze(0)
        if self.task.data.task != "regression":
            return self.task.likelihood.build(None).predictive(draws)
        std, scores = self.noise
        return ConformalPrediction(draws, std.square().reshape(1, 1, -1), scores=scores)

    @cached_property
    def noise(self) -> tuple[Tensor, Tensor]:
        """The noise's standard deviation [T] of the greatest likelihood of the validation rows, and their scores."""
        errors = self.watched.targets.double() - self.outputs(self.watched.inputs)  # [V, T]
        least = LEAST_NOISE * self.task.train.targets.double().std(0, unbiased=False)
        std = errors.square().mean(0).sqrt().maximum(least)
        return std, errors.abs() / std


def offered(task: Task) -> tuple[tuple[str, ...], str | None]:
    """Names of the models for a task, or why there are none, in one line.

    Args:
        task: what is compared on.
    """
    logistic, ridge, boosting = BASELINES
    names = (ridge if task.data.task == "regression" else logistic, boosting)
    inputs, reason = task.train.inputs, None
    if find_spec("sklearn") is None:
        reason = "they need scikit-learn: pip install 'dubito[cli]'"
    elif not inputs.is_floating_point():
        reason = "they take numbers, and inputs are words"
    elif (count := inputs[0].numel()) > MOST_COLUMNS:
        reason = f"they take at most {MOST_COLUMNS:,} values for a row, got {count:,}"
    return (names, None) if reason is None else ((), f"{' and '.join(names)} are left out: {reason}")


def fit(name: str, task: Task, seed: int = 0) -> Baseline:
    """Fit a model on a task's training rows, its penalty or its number of trees chosen on validation rows.

    Args:
        name: of the model.
        task: what is compared on.
        seed: of the bins of boosting, which only tables of more than 200,000 rows draw.
    """
    watched = Part(*(tensor[:MOST_WATCHED] for tensor in task.validation))
    if not len(watched.targets):
        raise DataError(f"{name} needs validation rows, got none; give a table with more rows")
    # One thread, as for the methods.
    with import_module("threadpoolctl").threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that steps did not suffice is in the notes
        if name == BASELINES[-1]:
            return _boosted(task, watched, seeds.derived(seed, name) % 2**32)
        return _linear(task, watched)


def _linear(task: Task, watched: Part) -> Baseline:
    """Penalties from the strongest on, until the validation loss was no better twice."""
    linear, losses, fitted = import_module("sklearn.linear_model"), [], []
    for penalty in PENALTIES:
        model = linear.LogisticRegression(C=1 / penalty, max_iter=MOST_STEPS)
        if task.data.task == "regression":
            model = linear.Ridge(alpha=penalty)
        fitted.append(Baseline(task, (model.fit(*_arrays(task.train)),), watched))
        losses.append(-float(fitted[-1].predict(watched.inputs).log_prob(watched.targets).mean()))
        if len(losses) - int(np.argmin(losses)) == 3:
            break
    best = fitted[int(np.argmin(losses))]
    late = np.max(best.models[0].n_iter_ or 0) == MOST_STEPS
    return replace(best, notes=(f"had not converged after {MOST_STEPS} steps",) if late else ())


def _boosted(task: Task, watched: Part, seed: int) -> Baseline:
    """As many trees as have the least validation loss, fitted once more."""
    ensemble, real = import_module("sklearn.ensemble"), task.data.task == "regression"
    make = ensemble.HistGradientBoostingRegressor if real else ensemble.HistGradientBoostingClassifier
    (inputs, targets), (watched_inputs, watched_targets) = _arrays(task.train), _arrays(watched)
    targets, watched_targets = (values.reshape(len(values), -1).T for values in (targets, watched_targets))
    # Classes without training rows have no trees.
    known = np.full(len(watched_inputs), True) if real else np.isin(watched_targets[0], targets)
    models = []
    for truth, watched_truth in zip(targets, watched_targets[:, known], strict=True):
        stopped = make(max_iter=MOST_TREES, early_stopping=True, n_iter_no_change=PATIENCE, random_state=seed)
        stopped.fit(inputs, truth, X_val=watched_inputs[known], y_val=watched_truth)
        trees = max(1, int(np.argmax(stopped.validation_score_)))  # the first score is that of no tree
        models.append(make(max_iter=trees, early_stopping=False, random_state=seed).fit(inputs, truth))
    return Baseline(task, tuple(models), watched)


def _arrays(part: Part) -> tuple[np.ndarray, np.ndarray]:
    targets = part.targets.double() if part.targets.is_floating_point() else part.targets
    return part.inputs.flatten(1).double().numpy(), targets.numpy()
