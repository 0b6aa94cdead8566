"""Likelihoods of classes at a temperature: every logit is divided by T before it is judged."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..errors import require_positive
from ..likelihoods import Bernoulli, BernoulliLikelihood, BuiltLikelihood, Categorical, CategoricalLikelihood
from ..prediction import ClassPrediction


@dataclass(frozen=True)
class TemperedCategorical(Categorical):
    """One of C classes from logits over T.

    Args:
        class_axis: as in `Categorical`.
        ignore_index: as in `Categorical`.
        shift: as in `Categorical`.
        temperature: T; above 1 makes predictions less sure, below 1 surer.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(temperature=self.temperature)

    def build(self, example_outputs: Any, example_targets: Any = None) -> BuiltLikelihood:
        return TemperedCategoricalLikelihood(self.resolved(example_outputs))


@dataclass(frozen=True)
class TemperedBernoulli(Bernoulli):
    """Yes or no from logits over T.

    Args:
        temperature: T; above 1 makes predictions less sure, below 1 surer.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_positive(temperature=self.temperature)

    def build(self, example_outputs: Any, example_targets: Any = None) -> BuiltLikelihood:
        return TemperedBernoulliLikelihood(self)


class Tempered(BuiltLikelihood):
    """What both share, before the likelihood whose logits are divided."""

    settings: Any

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        return super().log_prob(outputs / self.settings.temperature, targets, draw)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        return super().sample_with(outputs / self.settings.temperature, noise, draw)

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        # ∂²/∂f² of ℓ(f/T) is ℓ''(f/T) / T², so its root is over T
        temperature = self.settings.temperature
        return super().hessian_root(outputs / temperature, draw, targets) / temperature

    def predictive(self, draws: Iterable[Tensor]) -> Any:
        return super().predictive(over(draws, self.settings.temperature))


class TemperedCategoricalLikelihood(Tempered, CategoricalLikelihood):
    """See `TemperedCategorical`."""


class TemperedBernoulliLikelihood(Tempered, BernoulliLikelihood):
    """See `TemperedBernoulli`."""


def over(draws: Iterable[Tensor], temperature: float) -> Iterable[Tensor]:
    """Outputs per draw, or of all draws in one tensor, over T."""
    return draws / temperature if isinstance(draws, Tensor) else (outputs / temperature for outputs in draws)


class Recording:
    """What a likelihood is asked to predict from, kept: the draws of each call of `predictive`."""

    def __init__(self) -> None:
        self.calls: list[list[Tensor]] = []

    def last(self, rows: int) -> list[Tensor]:
        """The draws behind a prediction of `rows` rows: those of the last calls that together have as many.

        A prediction may be made in pieces of rows, each a call, and may ask for others on the way (a linearised one
        asks for that of the centre first).
        """
        last_calls: list[list[Tensor]] = []
        while sum(len(call[0]) for call in last_calls) < rows:
            last_calls.insert(0, self.calls.pop())
        self.calls.clear()
        return [torch.cat(pieces) for pieces in zip(*last_calls, strict=True)]


def recording(likelihood: BuiltLikelihood) -> tuple[BuiltLikelihood, Recording]:
    """The likelihood of classes without a temperature, and where it keeps what it predicts from."""
    record, settings = Recording(), likelihood.settings
    categorical = isinstance(settings, Categorical)
    base: Any = CategoricalLikelihood if categorical else BernoulliLikelihood

    class RecordingLikelihood(base):
        def predictive(self, draws: Iterable[Tensor]) -> ClassPrediction:
            record.calls.append(list(draws))
            return super().predictive(record.calls[-1])

    return RecordingLikelihood(Categorical(**plain(settings)) if categorical else Bernoulli()), record


def plain(settings: Categorical) -> dict[str, Any]:
    """The settings without a temperature, by name."""
    return {item.name: getattr(settings, item.name) for item in fields(Categorical)}
