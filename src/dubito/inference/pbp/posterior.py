"""Predictions of PBP in closed form, and the layers that have them."""

from collections.abc import Sequence
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
    """Refuse what is no real target with noise to be learned."""
    if isinstance(likelihood, GaussianLikelihood) and likelihood.raw_std is not None:
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
        stream = seeds.generator(0, "pbp")
        others = {
            name: torch.randn(p.shape, generator=stream).to(p) / max(1, p[0].numel()) ** 0.5
            for name, p in weights.items()
        }
        rows = torch.cat([rows, -rows])
        with torch.no_grad():
            truth, answers = run(network, others, rows), rows.flatten(1)
            for number, (weight, bias) in enumerate(names):
                answers = F.linear(answers.relu() if number else answers, others[str(weight)], others.get(str(bias)))
        if truth.shape == answers.shape and agree(answers, truth):
            if answers.shape[1] == 1:
                return names
            raise NetworkError(f"PBP is for networks with one output, got {answers.shape[1]}; fit one network for each")
    raise NetworkError(
        "PBP has moments for dense layers with ReLU between them, each used once and trained, that read one tensor; "
        f"this network ({type(network).__name__}) is another; take MeanField() or another method"
    )


def joined(names: Sequence[str | None], tensors: Any) -> Tensor:
    """The weight of a layer with its bias as the last column."""
    weight, bias = names
    return tensors[weight] if bias is None else torch.cat([tensors[weight], tensors[bias].unsqueeze(1)], 1)


def columns(matrix: Tensor, names: Sequence[str | None]) -> tuple[Tensor, Tensor]:
    """Weight and bias of a layer's matrix."""
    inputs = matrix.shape[1] - (names[1] is not None)
    return matrix[:, :inputs], matrix[:, inputs:]
