"""Acquisition functions: how much would be learned from the label of each row of a pool.

Each is frozen settings with one verb, `scores(posterior, inputs)`, one number per row, higher for rows worth more.
Rows with several outputs or positions take the mean over them.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import seeds
from ..errors import ConfigError, DataError, require_count
from ..hints import Checked, checked
from ..inference.laplace import LaplacePosterior
from ..inputs import Inputs, TensorOptions, checked_inputs, rows_of
from ..likelihoods import Bernoulli, Categorical, Likelihood
from ..posterior import MAX_ROWS, Posterior
from ..prediction import BernoulliPrediction, CategoricalPrediction, ClassPrediction, RealPrediction, per_row


class Acquisition(Checked, ABC):
    """Base of acquisition functions."""

    #: Whether only predictions of classes have such scores.
    classes_only = False

    def check(self, likelihood: Likelihood) -> None:
        """Refuse a likelihood whose predictions have no such scores, before anything is fitted.

        Args:
            likelihood: what is to be fitted.
        """
        if self.classes_only and not isinstance(likelihood, Categorical | Bernoulli):
            raise self._refusal(type(likelihood).__name__)

    def _refusal(self, got: str) -> DataError:
        return DataError(
            f"{type(self).__name__} is for classes, got {got}; for reals take OutputVariance(), BALD() or Entropy()"
        )

    @abstractmethod
    def scores(self, posterior: Posterior, inputs: Inputs, *, num_samples: int = 32, seed: int = 0) -> Tensor:
        """Scores of the rows, [B].

        Args:
            posterior: fitted to what is labelled so far.
            inputs: the pool.
            num_samples: as in `predict`.
            seed: of draws.
        """


@dataclass(frozen=True, kw_only=True)
class OutputVariance(Acquisition):
    """The epistemic variance of the outputs [MacKay 1992].

    Laplace posteriors have it in closed form, J P⁻¹ Jᵀ of the network linearised in its weights, as MacKay does;
    others by draws.
    """

    @checked
    def scores(self, posterior: Posterior, inputs: Inputs, *, num_samples: int = 32, seed: int = 0) -> Tensor:
        if not isinstance(posterior, LaplacePosterior):
            outputs = posterior.sample_outputs(inputs, num_samples, seed=seed)
            return per_row(outputs.var(0, unbiased=False))
        with torch.inference_mode(False):  # gradients are needed, also where the caller turned them off
            rows = posterior.readable(inputs)
            _, (variance,) = posterior.linearised(rows)(rows, [posterior.normals], MAX_ROWS, pairs=False)
        return per_row(variance)


class PredictionScore(Acquisition):
    """Base of those that judge a row by its prediction."""

    @checked
    def scores(self, posterior: Posterior, inputs: Inputs, *, num_samples: int = 32, seed: int = 0) -> Tensor:
        prediction = posterior.predict(inputs, num_samples, seed=seed)
        known = ClassPrediction if self.classes_only else ClassPrediction | RealPrediction
        if not isinstance(prediction, known):
            raise self._refusal(type(prediction).__name__)
        return per_row(self.score(prediction))

    @abstractmethod
    def score(self, prediction: Any) -> Tensor:
        """Scores of outputs or positions, [B, ...]."""


@dataclass(frozen=True, kw_only=True)
class Entropy(PredictionScore):
    """The entropy of the predicted classes, or of a Normal with a real prediction's variance, up to a constant."""

    def score(self, prediction: Any) -> Tensor:
        # ½ log 2πe σ², without its constant
        return prediction.std.log() if isinstance(prediction, RealPrediction) else prediction.total


@dataclass(frozen=True, kw_only=True)
class BALD(PredictionScore):
    """The mutual information of label and weights [Houlsby et al. 2011].

    Of reals, that of Normals with the prediction's variances: ½ log((aleatoric + epistemic) / aleatoric).
    """

    def score(self, prediction: Any) -> Tensor:
        if isinstance(prediction, RealPrediction):
            return 0.5 * (prediction.epistemic / prediction.aleatoric).log1p()
        return prediction.epistemic


@dataclass(frozen=True, kw_only=True)
class LogitVariance(PredictionScore):
    """The variance of the centred logits, `function_variance`: it also grows where all draws are sure, far away."""

    classes_only = True

    def score(self, prediction: ClassPrediction) -> Tensor:
        return prediction.function_variance


@dataclass(frozen=True, kw_only=True)
class VariationRatio(PredictionScore):
    """One minus the probability of the likeliest class."""

    classes_only = True

    def score(self, prediction: ClassPrediction) -> Tensor:
        return 1 - prediction.confidence


@dataclass(frozen=True, kw_only=True)
class Margin(PredictionScore):
    """Minus the distance between the two likeliest classes' probabilities."""

    classes_only = True

    def score(self, prediction: ClassPrediction) -> Tensor:
        if isinstance(prediction, BernoulliPrediction):
            return 1 - 2 * prediction.confidence  # p − (1 − p)
        assert isinstance(prediction, CategoricalPrediction)
        first, second = prediction.probs.topk(2, prediction.class_axis).values.unbind(prediction.class_axis)
        return second - first


@dataclass(frozen=True, kw_only=True)
class Random(Acquisition):
    """No preference: what the others are measured against."""

    @checked
    def scores(self, posterior: Posterior, inputs: Inputs, *, num_samples: int = 32, seed: int = 0) -> Tensor:
        like = TensorOptions.of(posterior.network)
        stream = seeds.generator(seed, "random acquisition", device=like.device)
        return torch.rand(rows_of(checked_inputs(inputs, like)), generator=stream, device=like.device)


@dataclass(frozen=True, kw_only=True)
class Selection(Checked):
    """How several rows are chosen at once from their scores.

    Args:
        size: rows per step.
        temperature: 0 takes the highest scores. Above it rows are drawn, without putting back, with probabilities
            proportional to exp(standardised score / temperature): rows of a batch are then less alike than the
            highest ones, which often say the same [Kirsch et al. 2023].
    """

    size: int = 1
    temperature: float = 0.0

    def __post_init__(self) -> None:
        require_count(size=self.size)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be a number of at least 0, got {self.temperature!r}")

    @checked
    def choose(self, scores: Tensor, *, seed: int = 0) -> Tensor:
        """Numbers of the chosen rows, the best first; ties are broken by seed.

        Args:
            scores: of the pool, [B].
            seed: of draws and ties.
        """
        scores = torch.as_tensor(scores).detach().cpu()
        if scores.ndim != 1 or len(scores) < self.size:
            raise DataError(f"scores must be a vector of at least {self.size} rows, got {list(scores.shape)}")
        if scores.isnan().any():
            raise DataError("scores must not hold NaN; check the posterior's predictions")
        stream = seeds.generator(seed, "acquisition")
        order = torch.randperm(len(scores), generator=stream)  # a stable sort after it breaks ties by seed
        values = scores[order].double()
        if self.temperature > 0:
            spread = values.std() if len(values) > 1 else torch.tensor(0.0)
            values = (values - values.mean()) / (spread if spread > 0 else 1.0) / self.temperature
            # the largest of score + Gumbel noise is a draw from the softmax, the next largest one from the rest
            values = values - torch.empty_like(values).exponential_(generator=stream).log()
        return order[values.argsort(descending=True, stable=True)[: self.size]]
