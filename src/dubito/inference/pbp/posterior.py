"""Predictions of PBP in closed form, and the layers that have them."""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from ... import seeds
from ...draws.base import agree
from ...errors import ConfigError, NetworkError
from ...fitting import answered
from ...inputs import Inputs, TensorOptions, checked_inputs, chunks
from ...layers import Survey
from ...layers.linear import Dense
from ...likelihoods import BuiltLikelihood, GaussianLikelihood
from ...networks import require_full, run, trainable
from ...prediction import Prediction, PredictionOptions
from ...storage.schema import Positive
from ...weight_normals import NormalPosterior
from ...weight_normals.posterior import NormalDetails
from .moments import Gamma, LayerMoments, propagated

#: Sizes of rows and outputs at which a network is tried: beyond the ends of functions that are linear between them.
SIZES = (1.0, 10.0, 100.0)


class PBPDetails(NormalDetails, total=False):
    """Names of the layers' weights and biases in their order, and the learned precisions."""

    layers: list[list[str | None]]
    noise: "GammaFacts"
    prior: "GammaFacts"


class GammaFacts(TypedDict):
    """A `Gamma`."""

    shape: Positive
    rate: Positive


class PBPPosterior(NormalPosterior):
    """Independent Normals whose predictions are in closed form: moments, matched layer by layer.

    `predict(x, linearised=False)` draws weights instead.
    """

    details_type = PBPDetails

    @property
    def default_form(self) -> str:
        return "propagated"

    @torch.no_grad()
    def propagated_prediction(self, inputs: Inputs, options: PredictionOptions) -> Prediction:
        """Normal, with the moments of the outputs."""
        rows = checked_inputs(inputs, TensorOptions.of(self.network))
        layers, predictions = self.layer_moments(), []
        assert isinstance(rows, Tensor) and isinstance(self.likelihood, GaussianLikelihood)  # as in the fit
        for piece in chunks(rows, options.max_rows):
            answered(self.network, piece)  # says what it cannot read
            mean, variance = propagated(piece.flatten(1), layers)
            predictions.append(self.likelihood.predictive(mean.unsqueeze(0), variance[None, ..., None]))
        return type(predictions[0]).cat(predictions)

    def layer_moments(self) -> list[LayerMoments]:
        """Means and variances of all layers."""
        weights = self.weights()
        variances = {name: self.weight_scale(name).std.square() for name in self.random}
        return [(joined(names, weights), joined(names, variances)) for names in self.details["layers"]]

    def kl(self) -> Tensor:
        """Divergence in nats from the Normal with the mean variance that the learned prior gives."""
        gamma, total = Gamma(**self.details["prior"]), []
        for mean, variance in self.layer_moments():
            prior = Normal(0.0, (gamma.variances()[0] / mean.shape[1]) ** 0.5)
            total.append(kl_divergence(Normal(mean, variance.sqrt()), prior).sum())
        return torch.stack(total).sum()


def require_learned_noise(likelihood: BuiltLikelihood) -> GaussianLikelihood:
    """Refuse what is no real target with noise to be learned; a fit before this one may have fixed it."""
    if isinstance(likelihood, GaussianLikelihood):
        settings = likelihood.settings
        if settings.std is None and settings.covariance is None:
            return likelihood
    raise ConfigError(
        "PBP has its evidence in closed form for real targets whose noise is learned, Gaussian(), got "
        f"{likelihood.settings!r}; take MeanField() or another method"
    )


def dense_layers(network: nn.Module, inputs: Inputs, surveyed: Survey) -> list[list[str | None]]:
    """Names of weight and bias of the layers in their order, of a network of dense layers with ReLU between them.

    Whatever its modules are, it must answer as such layers do, also under other weights.

    Args:
        network: in evaluation mode.
        inputs: a few rows.
        surveyed: how it uses its parameters.
    """
    require_full(network, "PBP's moments")
    weights, rows = trainable(network), inputs if isinstance(inputs, Tensor) else torch.zeros(0)
    names: list[list[str | None]] = [[use.weight, use.bias] for use in surveyed.uses]
    used = [name for layer in names for name in layer if name is not None]
    plain = all(isinstance(use.form, Dense) and not use.form.turned for use in surveyed.uses)
    if plain and rows.numel() and sorted(used) == sorted(weights) == sorted(dict(network.named_parameters())):
        rows = torch.cat([rows, -rows])
        if all(_answers_as_dense(network, names, weights, rows, size) for size in SIZES):
            outputs = len(weights[str(names[-1][0])])
            if outputs == 1:
                return names
            raise NetworkError(f"PBP is for networks with one output, got {outputs}; fit one network for each")
    raise NetworkError(
        "PBP has moments for dense layers with ReLU between them, each used once and trained, that read one tensor; "
        f"this network ({type(network).__name__}) is another; take MeanField() or another method"
    )


@torch.no_grad()
def _answers_as_dense(
    network: nn.Module, names: Sequence[Sequence[str | None]], weights: Mapping[str, Tensor], rows: Tensor, size: float
) -> bool:
    """Whether a network answers as dense layers with ReLU between them do, under random weights and their opposites.

    Args:
        network: in evaluation mode.
        names: of weight and bias of the layers.
        weights: all parameters.
        rows: to answer.
        size: what the last layer is multiplied with, so that outputs leave the range of a function that bounds them.
    """
    stream, width = seeds.generator(0, "pbp", str(size)), rows[0].numel()
    drawn = {
        name: torch.randn(p.shape, generator=stream).to(p) / max(1, p[0].numel()) ** 0.5 for name, p in weights.items()
    }
    for weight, _ in names:
        if drawn[str(weight)].shape[1] != width:
            return False
        width = len(drawn[str(weight)])
    for factor in (size, -size):
        last = {name: factor * drawn[name] for name in names[-1] if name is not None}
        others, answers = {**drawn, **last}, size * rows.flatten(1)
        truth = run(network, others, size * rows)
        for number, (weight, bias) in enumerate(names):
            answers = F.linear(answers.relu() if number else answers, others[str(weight)], others.get(str(bias)))
        if truth.shape != answers.shape or not agree(answers, truth):
            return False
    return True


def joined(names: Sequence[str | None], tensors: Any) -> Tensor:
    """The weight of a layer with its bias as the last column."""
    weight, bias = names
    return tensors[weight] if bias is None else torch.cat([tensors[weight], tensors[bias].unsqueeze(1)], 1)


def columns(matrix: Tensor, names: Sequence[str | None]) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer's matrix."""
    inputs = matrix.shape[1] - (names[1] is not None)
    return matrix[:, :inputs], matrix[:, inputs:]
