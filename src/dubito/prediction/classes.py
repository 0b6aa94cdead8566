"""Predictions of classes and of yes or no: mean probabilities, and the entropies behind them."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from math import log
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError, require_fraction
from ..hints import checked
from .base import Prediction, rows_on
from .formulas import aligned, entropy, gathered, labels_for, log_mean_exp, not_binary, sum_events


@dataclass(frozen=True, eq=False, repr=False)
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
    def flat(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities [N, C] and labels [N] of all positions and outputs that count, one after the other."""

    @abstractmethod
    def sets(self, level: float = 0.95) -> Tensor:
        """Smallest sets of classes that together hold at least `level`, as booleans along the class axis."""


@dataclass(frozen=True, eq=False, repr=False)
class CategoricalPrediction(ClassPrediction):
    """One class out of C per position; `probs` has the classes on `class_axis`, as the network has.

    Attributes:
        class_axis: where the classes lie.
        sample_log_probs: per draw, only kept where a row has several positions, whose joint density needs them.
        ignore_index: the label of positions that do not count; None where all do.
    """

    class_axis: int = 1
    sample_log_probs: Tensor | None = field(default=None, metadata={"rows": 1})
    ignore_index: int | None = None

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
        places = self.class_axis, self.ignore_index
        labels = labels_for(self.log_probs, torch.as_tensor(targets), *places)
        if self.sample_log_probs is None:
            return gathered(self.log_probs, labels, *places)
        draws = torch.stack([gathered(draw, labels, *places) for draw in self.sample_log_probs])
        return log_mean_exp(draws, self.weights)  # log Σ_s w_s Π_positions p_s

    def flat(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        probs, labels = self.probs.movedim(self.class_axis, -1).flatten(0, -2), targets.flatten()
        seen = labels != self.ignore_index
        return (probs, labels) if self.ignore_index is None else (probs[seen.to(probs.device)], labels[seen])

    @classmethod
    def of_one_form(cls, parts: list[Any]) -> list[Any]:
        return parts if len({part.aleatoric.shape[1:] for part in parts}) == 1 else _as_long(parts)


@dataclass(frozen=True, eq=False, repr=False)
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

    def flat(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        yes = self.probs.flatten()
        return torch.stack([1 - yes, yes], 1), aligned(targets, self.probs).long().flatten()

    def sets(self, level: float = 0.95) -> Tensor:
        require_fraction(zero=False, one=True, level=level)
        likeliest = F.one_hot(self.labels, 2).bool()  # [..., (no, yes)]
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
        return log_mean_exp(sum_events(F.logsigmoid(signed), 2), self.weights)


def targets_as_long(targets: list[Tensor], ignored: int | None) -> Tensor:
    """Targets of several batches as one; rows of different lengths end in labels that are ignored."""
    if ignored is None or targets[0].ndim != 2:
        return torch.cat(targets)
    length = max(part.shape[1] for part in targets)
    return torch.cat([F.pad(part, (0, length - part.shape[1]), value=ignored) for part in targets])


def _as_long(parts: list[Any]) -> list[Any]:
    """Predictions of rows of different lengths, all as long as the longest: added positions are uniform.

    They have no epistemic uncertainty, and are for labels that are ignored.
    """
    first = parts[0]
    if first.ignore_index is None or first.aleatoric.ndim != 2:
        lengths = [tuple(part.aleatoric.shape[1:]) for part in parts]
        raise DataError(
            f"rows must have as many positions in one batch as in another, got {lengths}; give ignore_index= for "
            "rows of different lengths, or predict batch by batch"
        )
    classes = first.log_probs.shape[first.class_axis]
    length = max(part.aleatoric.shape[1] for part in parts)

    def padded(values: Tensor | None, axis: int, value: float) -> Tensor | None:
        if values is None:
            return None
        shape = list(values.shape)
        shape[axis] = length - shape[axis]
        return torch.cat([values, values.new_full(shape, value)], axis)

    along = 3 - first.class_axis  # positions in [B, T, C] or [B, C, T]
    return [
        replace(
            part,
            log_probs=padded(part.log_probs, along, -log(classes)),
            aleatoric=padded(part.aleatoric, 1, log(classes)),
            function_variance=padded(part.function_variance, 1, 0.0),
            function_mean=padded(part.function_mean, along, 0.0),
            sample_log_probs=padded(part.sample_log_probs, along + 1, -log(classes)),
        )
        for part in parts
    ]
