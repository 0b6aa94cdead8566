"""Conformal prediction sets: at least a share `level` of new rows find their class in its set.

The guarantee holds for rows exchangeable with the calibration rows, on average over both, whatever the network; it
says nothing of single classes or regions. The calibration rows must not have been trained on.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError, require_fraction
from ..hints import Checked, checked
from ..prediction import BernoulliPrediction, CategoricalPrediction, Prediction
from ..seeds import RowNoise, derived


@dataclass(frozen=True, kw_only=True)
class ConformalSets:
    """A rule from predictions to sets of classes.

    Attributes:
        rule: the settings it was made with.
        threshold: the largest score of a class in a set.
        num_data: calibration rows.
    """

    rule: "LAC | APS"
    threshold: float
    num_data: int

    @checked
    def sets(self, prediction: Prediction) -> Tensor:
        """Which classes are in each row's set, as booleans [B, C]; of yes and no, [B, (no, yes)]."""
        scores = self.rule.scores(class_log_probs(prediction), "prediction")
        return scores <= scores.new_tensor(self.threshold)


@dataclass(frozen=True, kw_only=True)
class LAC(Checked):
    """Least ambiguous sets: all classes above one probability [Sadinle et al. 2019].

    The smallest sets on average; some may be empty, where no class reaches the probability.

    Args:
        level: the share of new rows whose class is to be in its set.
    """

    level: float = 0.9

    def __post_init__(self) -> None:
        require_fraction(zero=False, level=self.level)

    @checked
    def fit(self, prediction: Prediction, targets: Tensor) -> ConformalSets:
        """The rule for a network whose prediction of calibration rows this is.

        Args:
            prediction: of rows that were not trained on.
            targets: their classes.
        """
        return _fitted(self, prediction, targets)

    def scores(self, log_probs: Tensor, stream: str) -> Tensor:
        """−log p of every class, [B, C]: it orders classes as 1 − p does, and keeps more digits."""
        return -log_probs


@dataclass(frozen=True, kw_only=True)
class APS(Checked):
    """Adaptive sets: the likeliest classes until their probabilities add up to a threshold [Romano et al. 2020].

    Larger sets for harder rows.

    Args:
        level: the share of new rows whose class is to be in its set.
        randomised: whether a random part of the last class's probability counts, which makes the coverage exact;
            without it sets are larger than they need be, and never empty.
        seed: of that part: the row at the same place gets the same.
    """

    level: float = 0.9
    randomised: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_fraction(zero=False, level=self.level)
        derived(self.seed)

    @checked
    def fit(self, prediction: Prediction, targets: Tensor) -> ConformalSets:
        """The rule for a network whose prediction of calibration rows this is.

        Args:
            prediction: of rows that were not trained on.
            targets: their classes.
        """
        return _fitted(self, prediction, targets)

    def scores(self, log_probs: Tensor, stream: str) -> Tensor:
        """Σ of the probabilities of likelier classes, and a share u of the class's own, [B, C]."""
        ordered, order = log_probs.exp().sort(dim=1, descending=True, stable=True)
        before = ordered.cumsum(1) - ordered
        share = ordered.new_ones(len(ordered), 1)
        if self.randomised:
            noise = RowNoise(self.seed, "adaptive sets", stream).rows(0, ordered[:, 0])
            share = torch.special.ndtr(noise).unsqueeze(1)
        # the first class at its own probability times u; sums of floats must not pass 1, the largest threshold
        scores = (before + share * ordered).clamp(max=1)
        if not self.randomised:
            scores[:, 0] = 0  # the likeliest class is in every set
        return torch.empty_like(scores).scatter_(1, order, scores)


def _fitted(rule: "LAC | APS", prediction: Prediction, targets: Tensor) -> ConformalSets:
    log_probs = class_log_probs(prediction)
    labels = torch.as_tensor(targets, device=log_probs.device)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.shape != (len(log_probs),) or not bool((labels == labels.long()).all()):
        raise DataError(
            f"targets must be one class number for each of {len(log_probs)} rows, got {labels.dtype}, "
            f"{list(labels.shape)}"
        )
    labels = labels.long()
    if labels.min() < 0 or labels.max() >= log_probs.shape[1]:
        raise DataError(
            f"targets must be class numbers from 0 to {log_probs.shape[1] - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}"
        )
    scores = rule.scores(log_probs, "calibration").gather(1, labels[:, None]).squeeze(1)
    return ConformalSets(rule=rule, threshold=float(conformal_quantile(scores, rule.level)), num_data=len(scores))


def class_log_probs(prediction: Prediction) -> Tensor:
    """Log-probabilities [B, C] of predictions with one class per row."""
    if isinstance(prediction, CategoricalPrediction) and prediction.log_probs.ndim == 2:
        return prediction.log_probs
    if isinstance(prediction, BernoulliPrediction) and prediction.log_probs[0].numel() == 1:
        pair = (prediction.log_complements.reshape(-1), prediction.log_probs.reshape(-1))
        return torch.stack(pair, 1)
    shape = list(getattr(prediction, "log_probs", torch.empty(0)).shape)
    raise DataError(
        f"prediction sets need one class per row, got {type(prediction).__name__} with probabilities {shape}; "
        "positions of one row are not exchangeable with rows, and reals have intervals"
    )


def conformal_quantile(scores: Tensor, level: float) -> Tensor:
    """The ⌈(n + 1) level⌉-th smallest score along the first axis: a new one is at most that with chance `level`.

    Refused where there are too few scores for any finite answer.
    """
    count = len(scores)
    # the product of floats may fall just above a whole number that it is
    place = math.ceil(round((count + 1) * level, 9))
    if place > count:
        needed = math.ceil(round(level / (1 - level), 9))
        raise DataError(
            f"a level of {level:g} needs at least {needed} calibration rows, got {count}; add rows or lower level"
        )
    if not scores.isfinite().all():
        # A class of probability 0 has an infinite score, which counts as the largest.
        scores = scores.nan_to_num(nan=math.inf, posinf=math.inf)
    return scores.sort(dim=0).values[place - 1]
