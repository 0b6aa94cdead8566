"""Predictions of classes and of yes or no: mean probabilities, and the entropies behind them."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError, require_fraction
from ..hints import checked
from .base import Prediction, rows_on
from .formulas import aligned, entropy, gathered, labels_for, log_mean_exp, not_binary, sum_events


@dataclass(frozen=True, eq=False)
class ClassPrediction(Prediction):
    """Classes: probabilities and the split of their entropy (in nats).

    Attributes:
        log_probs: log of the mean probability over draws, laid out like the network's outputs.
        aleatoric: mean entropy of the single draws, in nats: uncertainty that more data would not remove.
        function_variance: variance over draws of the logits, centred over the classes of a position, their mean; of
            yes or no that of each logit. Far from the data, where all draws are sure, entropies vanish, and it grows.
        function_mean: mean over draws of these logits, where a mixture of several predictions asks for it.
    """

    log_probs: Tensor = rows_on(0)
    aleatoric: Tensor = rows_on(0)
    function_variance: Tensor = field(kw_only=True, metadata={"rows": 0})
    function_mean: Tensor | None = field(default=None, kw_only=True, metadata={"rows": 0})

    columns: ClassVar[tuple[str, ...]] = (
        "labels", "confidence", "total", "aleatoric", "epistemic", "function_variance", "probs",
    )  # fmt: skip

    def __len__(self) -> int:
        return len(self.log_probs)

    @property
    def probs(self) -> Tensor:
        """Mean probability over draws."""
        return self.log_probs.exp()

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """The likeliest class."""

    @property
    @abstractmethod
    def confidence(self) -> Tensor:
        """The probability of the likeliest class."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Entropy of the mean probabilities."""

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights, in nats: uncertainty that more data would remove."""
        return (self.total - self.aleatoric).clamp(min=0)  # below 0 only by rounding

    @abstractmethod
    def sets(self, level: float = 0.95) -> Tensor:
        """Smallest sets of classes that together hold at least `level`, as booleans along the class axis."""


@dataclass(frozen=True, eq=False)
class CategoricalPrediction(ClassPrediction):
    """One class out of C per position; `probs` has the classes on `class_axis`, as the network has.

    Attributes:
        class_axis: where the classes lie.
        sample_log_probs: per draw, only kept where a row has several positions, whose joint density needs them.
    """

    class_axis: int = 1
    sample_log_probs: Tensor | None = field(default=None, metadata={"rows": 1})

    @property
    def labels(self) -> Tensor:
        return self.log_probs.argmax(self.class_axis)

    @property
    def confidence(self) -> Tensor:
        return self.log_probs.amax(self.class_axis).exp()

    @property
    def total(self) -> Tensor:
        return entropy(self.log_probs, self.class_axis)

    def sets(self, level: float = 0.95) -> Tensor:
        require_fraction(zero=False, one=True, level=level)
        ordered, order = self.probs.sort(dim=self.class_axis, descending=True, stable=True)
        enough = ordered.cumsum(self.class_axis) >= level
        inside = ~enough.roll(1, self.class_axis)  # the classes before it do not yet hold the level
        inside.select(self.class_axis, 0).fill_(True)
        return torch.zeros_like(inside).scatter(self.class_axis, order, inside)

    @checked
    def log_prob(self, targets: Tensor | np.ndarray) -> Tensor:
        labels = labels_for(self.log_probs, torch.as_tensor(targets), self.class_axis)
        if self.sample_log_probs is None:
            return gathered(self.log_probs, labels, self.class_axis)
        draws = torch.stack([gathered(draw, labels, self.class_axis) for draw in self.sample_log_probs])
        return log_mean_exp(draws, self.weights)  # log Σ_s w_s Π_positions p_s


@dataclass(frozen=True, eq=False)
class BernoulliPrediction(ClassPrediction):
    """Yes or no per output; `probs` is the probability of yes (1).

    Attributes:
        log_complements: log of the mean probability of no (0).
        sample_logits: per draw, only kept where a row has several outputs, whose joint density needs them.
    """

    log_complements: Tensor = rows_on(0)
    sample_logits: Tensor | None = field(default=None, metadata={"rows": 1})

    @property
    def labels(self) -> Tensor:
        return (self.log_probs > self.log_complements).long()

    @property
    def confidence(self) -> Tensor:
        return torch.maximum(self.log_probs, self.log_complements).exp()

    @property
    def total(self) -> Tensor:
        return entropy(torch.stack([self.log_complements, self.log_probs], -1), -1)

    def sets(self, level: float = 0.95) -> Tensor:
        require_fraction(zero=False, one=True, level=level)
        likeliest = torch.nn.functional.one_hot(self.labels, 2).bool()  # [..., (no, yes)]
        return likeliest | (self.confidence < level).unsqueeze(-1)

    @checked
    def log_prob(self, targets: Tensor | np.ndarray) -> Tensor:
        values, given = aligned(targets, self.log_probs), torch.as_tensor(targets)
        wrong = not_binary(given)
        if wrong is not None:
            raise DataError(f"targets must be 0 or 1, got {given[wrong].item():g} at row {wrong[0]}")
        yes = values.bool()
        if self.sample_logits is None:
            return sum_events(torch.where(yes, self.log_probs, self.log_complements), 1)
        signed = torch.where(yes, self.sample_logits, -self.sample_logits)
        return log_mean_exp(sum_events(torch.nn.functional.logsigmoid(signed), 2), self.weights)
