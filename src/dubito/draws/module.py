"""Draws made once as a module: from inputs to mean and uncertainties, for serving and export."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NetworkError
from ..inputs import Inputs, call
from ..likelihoods import BuiltLikelihood
from ..prediction import (
    ClassPrediction,
    MixturePrediction,
    OutputPrediction,
    Prediction,
    RealPrediction,
    Weights,
    mixed,
)
from .base import Draws

#: What the module answers, by the kind of prediction.
CLASSES = ("probs", "total", "aleatoric", "epistemic", "function_variance")
LEVEL = 0.95
REALS = ("mean", "std", "aleatoric_std", "epistemic_std")


class PredictiveModule(nn.Module):
    """Called with what `predict` takes, B rows, or with a network's inputs by name; answers as a dict of tensors.

    For classes `probs`, `total`, `aleatoric`, `epistemic` (in nats) and `function_variance`; for reals `mean`, `std`,
    `aleatoric_std`, `epistemic_std`, and, where the noise is Gaussian, the central 95 % interval, `lower` to `upper`.
    Inputs are not checked, nothing is drawn and no number is read back from a device, so that `torch.export.export` can
    trace it. Threads may share it.

    Args:
        draws: made once.
        likelihood: of the posterior.
        inputs: checked rows like those that it will read.
    """

    def __init__(self, draws: Draws, likelihood: BuiltLikelihood, inputs: Inputs = None) -> None:
        super().__init__()
        self.likelihood, self.draws = likelihood, draws
        #: The pass that tracers follow.
        self.traced = draws.traceable(inputs)

    def forward(self, inputs: Any = None, **named: Any) -> dict[str, Tensor]:
        return answers(self.prediction(named if inputs is None else inputs))

    def prediction(self, inputs: Any) -> Prediction:
        """What the answers are read off."""
        return self.likelihood.predictive(self._outputs(inputs))

    def _outputs(self, inputs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            with torch.no_grad():
                outputs = self.draws.outputs(inputs, 1 << 62)
                return outputs if isinstance(outputs, Tensor) else torch.stack(list(outputs))
        if self.traced is None:
            raise NetworkError(
                "a tracer follows linearised draws, and masks of dropout layers, where it knows some rows: make the "
                "module by as_module(inputs), or other draws, as by sampled(..., linearised=False)"
            )
        return call(self.traced, inputs)


class MixtureModule(nn.Module):
    """As `PredictiveModule`, of a mixture.

    Args:
        components: modules with `prediction`, one per component.
        weights: of the components; None where all count alike.
    """

    def __init__(self, components: Sequence[nn.Module], weights: Weights) -> None:
        super().__init__()
        self.components, self.weights = nn.ModuleList(components), weights

    def forward(self, inputs: Any = None, **named: Any) -> dict[str, Tensor]:
        rows = named if inputs is None else inputs
        parts = [part.prediction(rows) for part in self.components]  # pyright: ignore
        return answers(mixed(parts, self.weights))


def answers(prediction: Prediction) -> dict[str, Tensor]:
    """What a prediction says, by name."""
    if isinstance(prediction, ClassPrediction):
        return _named(prediction, CLASSES)
    if isinstance(prediction, OutputPrediction):
        return _named(prediction, prediction.columns)
    assert isinstance(prediction, RealPrediction)
    if isinstance(prediction, MixturePrediction):  # no graph has their distribution functions
        return _named(prediction, REALS)
    # As `prediction.interval()`, but with steps that no number of a device decides: eight beyond the dtype's bits.
    steps = 8 - math.ceil(math.log2(torch.finfo(prediction.means.dtype).eps)) if len(prediction.means) > 1 else 0
    # The upper tail of y is the lower one of −y: both as rows of one search, which halves what is traced.
    unit = prediction.means.new_ones(())
    both = type(prediction).cat([prediction, prediction.mapped(0 * unit, -unit)])
    lower, upper = both.tail((1 - LEVEL) / 2, steps=steps).unflatten(0, (2, -1))
    return {**_named(prediction, REALS), "lower": lower, "upper": -upper}


def _named(prediction: Prediction, names: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: getattr(prediction, name) for name in names}
