"""Temperature scaling on validation data, for any posterior [Guo et al. 2017]."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import ConfigError, DataError, warn
from ..evaluation import weighted_mean
from ..fitting import checked_rows
from ..hints import checked
from ..inputs import rows_of
from ..likelihoods import Bernoulli, BuiltLikelihood, Categorical, RealLikelihood
from ..networks import duplicate
from ..posterior import MAX_ROWS, MixturePosterior, Posterior
from ..prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    Prediction,
    PredictionOptions,
    RealPrediction,
    mixed,
    sum_events,
)
from .tempered import (
    TemperedBernoulli,
    TemperedBernoulliLikelihood,
    TemperedCategorical,
    TemperedCategoricalLikelihood,
    plain,
    recording,
)

FittedPosterior = TypeVar("FittedPosterior", bound=Posterior)
#: Temperatures that are looked at.
LOWEST, HIGHEST = 0.02, 50.0
#: How close to the best temperature the search ends, as a ratio.
CLOSE = 1e-4


@checked
@torch.no_grad()
def temperature_scaled(
    posterior: FittedPosterior,
    validation: Any,
    *,
    num_samples: int = 32,
    seed: int = 0,
    max_rows: int = MAX_ROWS,
    linearised: bool | None = None,
    marginal: bool = False,
    per_example: bool = False,
    smoothed: bool = False,
) -> FittedPosterior:
    """The posterior at the temperature of the least negative log-likelihood of validation data.

    Classes: the logits of every draw are divided by T, which `result.likelihood.settings.temperature` tells. Reals:
    the noise's standard deviation is multiplied by T. The distribution over weights stays, the posterior that was
    given too; the result is saved and loaded like any other. T follows from the predictions it is chosen by: predict
    with the same number of draws and the same options.

    Args:
        posterior: of any method; a temperature it has already is replaced.
        validation: rows that were not trained on: a pair, a `Dataset` or a `DataLoader`.
        num_samples: as in `predict`.
        seed: as in `predict`.
        max_rows: as in `predict`.
        linearised: as in `predict`.
        marginal: as in `predict`.
        per_example: as in `predict`.
        smoothed: take each label of n rows for one that is right with probability 1 − 1/(n + 2) only [Platt 1999], so
            that few rows which are all classified rightly do not ask for certainty, T → 0. Reals have no use for it.
    """
    options = PredictionOptions(num_samples, seed, max_rows, linearised, marginal, per_example)
    posterior.predictor(options)  # refuses a form that it lacks
    result = duplicate(posterior)
    if isinstance(posterior.likelihood, RealLikelihood):
        factor = best(_real_scores(posterior, validation, options))
        result.likelihood = posterior.likelihood.with_noise_times(factor)
        return result.finished()
    settings = posterior.likelihood.settings
    if not isinstance(settings, Categorical | Bernoulli):
        raise ConfigError(
            f"temperatures are for classes and for reals, got {settings!r}, whose noise follows from its outputs"
        )
    mixture = result if isinstance(result, MixturePosterior) else None
    parts: list[Any] = [result] if mixture is None else list(mixture.components)
    records = []
    for part in parts:
        part.likelihood, record = recording(posterior.likelihood)
        records.append(record)
    predict, outputs, targets, shares = result.predictor(options), [], [], []
    rows = checked_rows(result.network, result.likelihood, validation, seed=seed, max_rows=max_rows, name="validation")
    for batch in rows:
        predict(batch.inputs)
        outputs.append([record.last(rows_of(batch.inputs)) for record in records])
        targets.append(batch.targets)
        shares += [] if batch.weights is None else [batch.weights]
    lengths = sorted({tuple(part.shape[1:]) for part in targets})
    if len(lengths) > 1:
        raise DataError(
            f"a temperature is fitted to rows of one length, got targets of shapes {lengths} after the rows' axis; pad "
            "all batches of the validation rows to one length"
        )
    draws = [[torch.cat(pieces) for pieces in zip(*batches, strict=True)] for batches in zip(*outputs, strict=True)]
    labels, weights = torch.cat(targets), torch.cat(shares) if shares else None

    def score(temperature: float) -> float:
        predictions = [tempered(settings, temperature).predictive(some) for some in draws]
        whole = predictions[0] if mixture is None else mixed(predictions, mixture.component_weights)
        return _class_score(whole, labels, weights, smoothed)

    result.likelihood = tempered(settings, best(score))
    return result.finished()


def _class_score(prediction: Prediction, labels: Tensor, weights: Tensor | None, smoothed: bool) -> float:
    """The mean negative log-likelihood of labels, some of which are taken for wrong where it is smoothed."""
    loss, rows = mean_nll(prediction, labels, weights), len(labels) if weights is None else int((weights > 0).sum())
    wrong = 1 / (rows + 2) if smoothed else 0.0
    return loss if not wrong else (1 - wrong) * loss + wrong * mean_nll_of_any(prediction, labels, weights)


def _real_scores(posterior: Posterior, validation: Any, options: PredictionOptions) -> Callable[[float], float]:
    """The mean negative log-likelihood as a function of the noise's factor."""
    whole, values, weights = posterior.predicted(validation, options, "validation")
    assert isinstance(whole, RealPrediction)

    def score(factor: float) -> float:
        full = None if whole.covariances is None else whole.covariances * factor**2
        scaled = dataclasses.replace(whole, variances=whole.variances * factor**2, covariances=full)
        return mean_nll(scaled, values, weights)

    return score


def tempered(settings: Categorical | Bernoulli, temperature: float) -> BuiltLikelihood:
    """The likelihood of classes at a temperature."""
    if isinstance(settings, Categorical):
        return TemperedCategoricalLikelihood(TemperedCategorical(**plain(settings), temperature=temperature))
    return TemperedBernoulliLikelihood(TemperedBernoulli(temperature=temperature))


def mean_nll(prediction: Prediction, targets: Tensor, weights: Tensor | None = None) -> float:
    """Mean negative log-likelihood in nats, of rows with weights or without."""
    return -weighted_mean(prediction.log_prob(targets), weights)


def mean_nll_of_any(prediction: Prediction, targets: Tensor, weights: Tensor | None = None) -> float:
    """Mean negative log-likelihood of labels drawn evenly from all classes, in nats; arguments as of `mean_nll`."""
    if isinstance(prediction, BernoulliPrediction):
        logs = (prediction.log_probs + prediction.log_complements) / 2
    else:
        assert isinstance(prediction, CategoricalPrediction)
        logs = prediction.log_probs.mean(prediction.class_axis)
        if prediction.ignore_index is not None:
            logs = logs * (targets != prediction.ignore_index)
    return -weighted_mean(sum_events(logs, 1), weights)


def best(score: Callable[[float], float]) -> float:
    """The temperature of the least score: the best of a grid, then golden sections around it, both in log T."""
    low, high, count = math.log(LOWEST), math.log(HIGHEST), 33
    width = (high - low) / (count - 1)
    grid = [low + width * index for index in range(count)]
    place = min(grid, key=lambda value: score(math.exp(value)))
    if place in (grid[0], grid[-1]):
        warn(
            f"the validation data ask for a temperature beyond {LOWEST:g} to {HIGHEST:g}, and get "
            f"{math.exp(place):g}; check that they were not trained on, and that their targets are right"
        )
        return math.exp(place)
    golden = (math.sqrt(5) - 1) / 2
    left, right = place - width, place + width
    inner = [right - golden * (right - left), left + golden * (right - left)]
    scores = [score(math.exp(value)) for value in inner]
    while right - left > CLOSE:
        if scores[0] < scores[1]:
            right, inner, scores = inner[1], [0.0, inner[0]], [0.0, scores[0]]
            inner[0] = right - golden * (right - left)
            scores[0] = score(math.exp(inner[0]))
        else:
            left, inner, scores = inner[0], [inner[1], 0.0], [scores[1], 0.0]
            inner[1] = left + golden * (right - left)
            scores[1] = score(math.exp(inner[1]))
    return math.exp((left + right) / 2)
