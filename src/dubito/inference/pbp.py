"""PBP: probabilistic backpropagation, moments forwards, gradients backwards [Hernández-Lobato & Adams 2015]."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, TypeVar

import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from .. import seeds
from ..distributions.linalg import float64_device
from ..draws.base import agree
from ..errors import ConfigError, NetworkError, TrainingError, require_count, require_positive
from ..fitting import Prepared, answered
from ..inputs import Inputs, TensorOptions, checked_inputs, chunks
from ..layers import Survey, survey
from ..layers.linear import Dense
from ..likelihoods import BuiltLikelihood, GaussianLikelihood
from ..likelihoods.noise import inverse_softplus
from ..method import Method
from ..networks import require_full, run, trainable
from ..noise_check import check_noise
from ..prediction import Prediction, PredictionOptions
from ..storage.schema import Positive, conform
from ..training import RunFacts, Training, checkpoint, told
from ..weight_normals import NormalPosterior
from ..weight_normals.posterior import NormalDetails

#: Numbers, or tensors of them.
Number = TypeVar("Number", float, Tensor)
#: Mean and variance of a layer's weight, the bias as its last column where it has one, [m, n].
LayerMoments = tuple[Tensor, Tensor]


class Gamma(NamedTuple):
    """A Gamma distribution of a precision; 1/precision has mean rate/(shape − 1)."""

    shape: Any
    rate: Any

    def variances(self) -> tuple[Any, Any, Any]:
        """Those of a Normal by which Student's t under this, and under shape + 1 and + 2, are approximated."""
        return tuple(self.rate / (self.shape + more) for more in (-1, 0, 1))  # pyright: ignore[reportReturnType]


def matched(gamma: Gamma, first: Any, second: Any) -> Gamma:
    """The Gamma with the first two moments of the precision after a factor with evidence Z(shape, rate).

    Args:
        gamma: before it.
        first: Z(shape + 1) / Z(shape).
        second: Z(shape + 2) / Z(shape + 1).
    """
    shape, rate = gamma  # E[λ] = first · shape/rate, E[λ²] = first · second · shape (shape + 1)/rate²
    new_shape = 1 / (second / first * (shape + 1) / shape - 1)
    return Gamma(new_shape, 1 / (second * (shape + 1) / rate - first * shape / rate))


def rectified(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of max(0, a) for a ~ N(mean, variance)."""
    std = variance.clamp(min=1e-24).sqrt()
    ratio = (mean / std).clamp(-30, 30)  # beyond, all or nothing passes
    below, above = torch.special.ndtr(-ratio), torch.special.ndtr(ratio)
    # φ(r)/Φ(r), stable where both vanish
    hazard = (-0.5 * ratio.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(ratio)).exp()
    lifted = ratio + hazard  # of a positive a, over std
    spread = above * (below * lifted.square() + 1 - hazard * lifted)
    return above * (mean + std * hazard), std.square() * spread.clamp(min=0)


def propagated(inputs: Tensor, layers: Sequence[LayerMoments]) -> tuple[Tensor, Tensor]:
    """Mean and variance [B, m] of a network of dense layers with ReLU between them, moments matched layer by layer.

    Args:
        inputs: [B, n].
        layers: moments of the weights.
    """
    mean, variance = inputs, torch.zeros_like(inputs)
    for number, (weight, spread) in enumerate(layers):
        if number:
            mean, variance = rectified(mean, variance)
        if weight.shape[1] > mean.shape[1]:  # the bias
            mean, variance = F.pad(mean, (0, 1), value=1.0), F.pad(variance, (0, 1))
        squared = mean.square() @ spread.mT + variance @ (weight.square() + spread).mT
        mean, variance = mean @ weight.mT, squared
    return mean, variance


class PBPDetails(NormalDetails, total=False):
    """Names of the layers' weights and biases in their order, and the learned precisions."""

    layers: list[list[str | None]]
    noise: "GammaFacts"
    prior: "GammaFacts"


class FilterContent(TypedDict):
    """What a checkpoint holds beside the filter's state."""

    fingerprint: dict[str, Any]
    history: list[dict[str, float]]


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


@dataclass(frozen=True, kw_only=True)
class PBP(Method):
    """Normals over the weights of a dense network with ReLU, filtered row by row; for one real target.

    A row moves means and variances by the gradients of the logarithm of its evidence, and after every pass over the
    rows the factors of the prior are refreshed. Precisions of noise and prior have Gamma distributions and are learned.
    Weights of a layer with n inputs, the bias counted, have the prior N(0, 1/(λ n)).

    Args:
        epochs: passes over the rows.
        prior_shape: of the Gamma distribution of λ.
        prior_rate: likewise.
        noise_shape: of the Gamma distribution of the noise's precision.
        noise_rate: likewise, times the variance of the targets.
        initial_std: of the first means, drawn, times 1/n; None starts from the network's own weights.
    """

    epochs: int = 40
    prior_shape: float = 6.0
    prior_rate: float = 6.0
    noise_shape: float = 6.0
    noise_rate: float = 6.0
    initial_std: float | None = 1.0

    posterior_type = PBPPosterior

    def __post_init__(self) -> None:
        require_count(epochs=self.epochs)
        require_positive(prior_rate=self.prior_rate, noise_rate=self.noise_rate)
        for name in ("prior_shape", "noise_shape"):
            if not getattr(self, name) > 1:
                raise ConfigError(f"{name} must be above 1, so that variances have a mean, got {getattr(self, name)}")
        if self.initial_std is not None:
            require_positive(initial_std=self.initial_std)

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> PBPPosterior:
        if training is not None:
            raise ConfigError("PBP filters rows one by one and descends no gradient; leave training= out")
        if prepared.source.total_weight is not None:
            raise ConfigError(
                "PBP takes rows in one by one and knows no weights of them; repeat rows with whole weights"
            )
        likelihood = require_learned_noise(prepared.likelihood)
        surveyed = survey(prepared.network, prepared.example.inputs)
        names = dense_layers(prepared.network, prepared.example.inputs, surveyed)
        batches = list(prepared.source.batches(1024))
        like = TensorOptions.of(prepared.network)
        device = float64_device(like.device)
        inputs = torch.cat([batch.inputs.flatten(1) for batch in batches]).to(device).double()
        targets = likelihood.standardised(torch.cat([batch.targets for batch in batches]))
        targets = targets.reshape(-1, 1).to(device).double()
        weights = {name: p.detach().to(device).double() for name, p in trainable(prepared.network).items()}
        means = [joined(layer, weights) for layer in names]
        if self.initial_std is not None:
            stream = seeds.generator(prepared.seed, "initial weights")
            means = [
                torch.randn(mean.shape, generator=stream, dtype=torch.float64).to(device)
                * (self.initial_std / mean.shape[1])
                for mean in means
            ]
        variance = float(targets.var(unbiased=False)) or 1.0
        noise = Gamma(self.noise_shape, self.noise_rate * variance)
        filtering = Filter(means, noise, Gamma(self.prior_shape, self.prior_rate))
        history = self._filtered(prepared, filtering, inputs, targets)
        return self._posterior(prepared, likelihood, surveyed, names, filtering, history)

    def _filtered(
        self, prepared: Prepared, filtering: "Filter", inputs: Tensor, targets: Tensor
    ) -> list[dict[str, float]]:
        """Take all rows in, pass by pass, each kept in the checkpoint; the record of the passes."""
        path, count, history = prepared.run.checkpoint, len(inputs), []
        expected = checkpoint.of_fit(self, prepared)
        stored = None if path is None else checkpoint.load(path, expected)
        if stored is not None:
            tensors, content = stored
            with checkpoint.altered(path):
                conform(content, FilterContent, "its content")
                checkpoint.check_forms(tensors, checkpoint.forms_of(filtering.state()), "the filter")
            filtering.restore(tensors)
            history = content["history"]
        elif path is not None:  # what cannot be written is found before work starts
            checkpoint.save(path, filtering.state(), {"fingerprint": expected, "history": history})
        facts = RunFacts(title="PBP", total=self.epochs * count, done=len(history) * count)
        with told(facts, prepared.run.progress, prepared.run.callbacks) as watching:
            for epoch in range(len(history), self.epochs):
                order = torch.randperm(count, generator=seeds.generator(prepared.seed, "order", epoch)).tolist()
                evidence = torch.zeros((), dtype=torch.float64)
                for place, row in enumerate(order, epoch * count + 1):
                    evidence = evidence + filtering.take_in(inputs[row : row + 1], targets[row]).to(evidence)
                    watching.step(place, {})
                filtering.refresh()
                history.append({"epoch": epoch + 1, "step": (epoch + 1) * count, "loss": -float(evidence) / count})
                if not math.isfinite(history[-1]["loss"]):
                    raise TrainingError(
                        "the evidence of rows is no number; standardise inputs and targets, as "
                        "Gaussian(standardise=True)"
                    )
                watching.epoch(history[-1])
                if path is not None:
                    checkpoint.save(path, filtering.state(), {"fingerprint": expected, "history": history})
        return history

    def _posterior(
        self,
        prepared: Prepared,
        likelihood: GaussianLikelihood,
        surveyed: Survey,
        names: list[list[str | None]],
        filtering: "Filter",
        history: list[dict[str, float]],
    ) -> PBPPosterior:
        """What was filtered, in the network's own dtype."""
        parameters, raw = trainable(prepared.network), {}
        for layer, (mean, variance) in zip(names, filtering.layers, strict=True):
            for name, centre, spread in zip(layer, columns(mean, layer), columns(variance, layer), strict=True):
                if name is not None:
                    shape = parameters[name].shape
                    parameters[name].data.copy_(centre.reshape(shape))
                    raw[name] = inverse_softplus(spread.sqrt()).reshape(shape).to(parameters[name])
        std, (shape, rate) = likelihood.std().detach(), map(float, filtering.noise)
        unit = (rate / (shape - 1)) ** 0.5
        scale = 1.0 if likelihood.scale is None else likelihood.scale.reshape(std.shape)
        posterior = PBPPosterior(
            prepared.network,
            likelihood.with_noise(std=torch.full_like(std, unit) * scale),
            method=self,
            tensors={"raw_std": raw},
            details={
                "survey": surveyed.to_json(),
                "layers": names,
                "noise": {"shape": shape, "rate": rate},
                "prior": dict(zip(("shape", "rate"), map(float, filtering.prior), strict=True)),
            },
            history=history,
        ).finished()
        check_noise(posterior, None, prepared)
        return posterior


class Filter:
    """The state of assumed-density filtering.

    Args:
        means: of the weights, by layer, in the network's units.
        noise: the distribution of the noise's precision.
        prior: that of λ.
    """

    def __init__(self, means: Sequence[Tensor], noise: Gamma, prior: Gamma) -> None:
        self.noise = Gamma(*(means[0].new_tensor(value) for value in noise))
        self.prior = prior
        self.layers = [(mean, torch.full_like(mean, prior.variances()[0] / mean.shape[1])) for mean in means]
        count = sum(mean.numel() for mean in means)
        # What each weight's factor of the prior adds: to its precision, and to shape and rate of λ
        self._precisions = [1 / prior.variances()[0]] * count
        self._gammas = [Gamma(0.0, 0.0)] * count

    def state(self) -> dict[str, Tensor]:
        """All that later rows depend on."""
        like = self.layers[0][0].detach()
        return {
            **{f"mean/{number}": mean.detach() for number, (mean, _) in enumerate(self.layers)},
            **{f"variance/{number}": variance.detach() for number, (_, variance) in enumerate(self.layers)},
            "noise": torch.stack(tuple(self.noise)),
            "prior": like.new_tensor(self.prior),
            "precisions": like.new_tensor(self._precisions),
            "gammas": like.new_tensor(self._gammas),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        like = self.layers[0][0]
        state = {name: tensor.to(like.device) for name, tensor in state.items()}
        self.layers = [(state[f"mean/{number}"], state[f"variance/{number}"]) for number in range(len(self.layers))]
        self.noise, self.prior = Gamma(*state["noise"].unbind()), Gamma(*state["prior"].tolist())
        self._precisions = state["precisions"].tolist()
        self._gammas = [Gamma(*pair) for pair in state["gammas"].tolist()]

    def take_in(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Take in a row [1, n]; the logarithm of its evidence."""
        layers = [tuple(moment.requires_grad_() for moment in layer) for layer in self.layers]
        with torch.enable_grad():
            mean, variance = propagated(inputs, layers)  # pyright: ignore[reportArgumentType]
            totals = variance.squeeze(1) + torch.stack(self.noise.variances())
            logs = -0.5 * ((2 * math.pi * totals).log() + (target - mean.squeeze(1)).square() / totals)
            gradients = torch.autograd.grad(logs[0], [moment for layer in layers for moment in layer])
        with torch.no_grad():
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            self.layers = [filtered(*layer, *pair) for layer, pair in zip(layers, pairs, strict=True)]
            new = matched(self.noise, *logs.detach().diff().exp())
            valid = (new.shape > 1) & (new.rate > 0) & new.shape.isfinite() & new.rate.isfinite()
            self.noise = Gamma(*(torch.where(valid, *pair) for pair in zip(new, self.noise, strict=True)))
        return logs[0].detach()

    def refresh(self) -> None:
        """Take every weight's factor N(0, 1/λ) of the prior out and in again, one after the other."""
        place, refreshed = 0, []
        for mean, variance in self.layers:
            scale = mean.shape[1]  # in the units where all layers share one λ
            means = (mean.detach() * scale**0.5).flatten().tolist()
            variances = (variance.detach() * scale).flatten().tolist()
            for number, (centre, spread) in enumerate(zip(means, variances, strict=True)):
                means[number], variances[number] = self._refreshed(place, centre, spread)
                place += 1
            both = (mean.new_tensor(values).view(mean.shape) for values in (means, variances))
            refreshed.append(tuple(value / root for value, root in zip(both, (scale**0.5, scale), strict=True)))
        self.layers = refreshed

    def _refreshed(self, place: int, mean: float, variance: float) -> tuple[float, float]:
        """Mean and variance of one weight; where the rest without the factor is no distribution, nothing changes."""
        rest = 1 / variance - self._precisions[place]
        gamma = Gamma(*(whole - part for whole, part in zip(self.prior, self._gammas[place], strict=True)))
        if rest < 1e-6 or gamma.shape <= 1 or gamma.rate <= 0:
            return mean, variance
        spread, centre = 1 / rest, mean / variance / rest
        totals = [spread + other for other in gamma.variances()]
        logs = [-0.5 * (math.log(total) + centre**2 / total) for total in totals]
        new = matched(gamma, math.exp(logs[1] - logs[0]), math.exp(logs[2] - logs[1]))
        if not (new.shape > 1 and new.rate > 0):
            return mean, variance
        self._precisions[place] = 1 / gamma.variances()[0]
        self._gammas[place] = Gamma(new.shape - gamma.shape, new.rate - gamma.rate)
        self.prior = new
        precision = rest + self._precisions[place]
        return rest * centre / precision, 1 / precision


def filtered(mean: Tensor, variance: Tensor, by_mean: Tensor, by_variance: Tensor) -> LayerMoments:
    """Moments after a factor, from the gradients of the logarithm of its evidence; those that are none stay."""
    new_mean = mean + variance * by_mean
    new_variance = variance - variance.square() * (by_mean.square() - 2 * by_variance)
    valid = new_mean.isfinite() & new_variance.isfinite() & (new_variance > 1e-100)
    return torch.where(valid, new_mean, mean.detach()), torch.where(valid, new_variance, variance.detach())


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
