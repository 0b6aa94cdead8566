"""PBP: probabilistic backpropagation, moments forwards, gradients backwards [Hernández-Lobato & Adams 2015]."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import seeds
from ...distributions.linalg import float64_device
from ...errors import ConfigError, TrainingError, require_count, require_positive
from ...fitting import Prepared
from ...inputs import TensorOptions
from ...layers import Survey, survey
from ...likelihoods import GaussianLikelihood
from ...likelihoods.noise import inverse_softplus
from ...method import Method
from ...networks import trainable
from ...noise_check import check_noise
from ...storage.schema import conform
from ...training import RunFacts, Training, checkpoint, told
from .filter import Filter, FilterContent
from .moments import Gamma
from .posterior import PBPPosterior, columns, dense_layers, joined, require_learned_noise


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
        if prepared.source.num_data not in (None, prepared.num_data):
            raise ConfigError(
                f"PBP takes each of {prepared.source.num_data:,} rows in once a pass, got num_data="
                f"{prepared.num_data:,}; leave num_data= out"
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
        self, prepared: Prepared, filtering: Filter, inputs: Tensor, targets: Tensor
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
        filtering: Filter,
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
