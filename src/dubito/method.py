"""What every method is: frozen settings with one verb, `fit`, that returns a whole posterior."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import seeds
from .errors import ConfigError, DataError, DubitoError, NetworkError, require_count
from .inputs import Batch, Inputs, Place, named_tensors, rows_of
from .likelihoods import BuiltLikelihood, Likelihood, settings_of
from .networks import copied, frozen_modes, run
from .objective import Objective
from .posterior import Posterior
from .sources import Source, TensorSource, as_source
from .training import Run, Training, train


@dataclass(frozen=True)
class Prepared:
    """A fit's ingredients, all checked, before any work starts.

    Attributes:
        network: a copy of the user's network, in evaluation mode.
        modes: modules that stay in evaluation mode while training.
        source: the training rows.
        example: its first rows.
        likelihood: the built likelihood.
        num_data: the number of rows the posterior answers for.
        run: seed, progress, checkpoint and validation data.
    """

    network: nn.Module
    modes: Mapping[str, bool]
    source: Source
    example: Batch
    likelihood: BuiltLikelihood
    num_data: int
    run: Run


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Base of all methods."""

    #: The class of the posteriors this method makes.
    posterior_type: ClassVar[type[Posterior]]

    def fit(
        self,
        net: nn.Module,
        data: Any,
        likelihood: Likelihood,
        *,
        training: Training | None = None,
        validation: Any = None,
        num_data: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        seed: int = 0,
        progress: bool | None = None,
    ) -> Posterior:
        """Fit a posterior to data, starting from the network's weights; the network is not modified.

        Args:
            net: any module; it is copied.
            data: a pair (inputs, targets) of tensors or arrays, a `Dataset` or a `DataLoader`.
            likelihood: `Categorical()`, `Bernoulli()` or `Gaussian()`.
            training: how to train; post-hoc methods take the network as given without it.
            validation: data that watch over training, in any form `data` may have.
            num_data: the number of training rows, where the data do not tell (iterable datasets).
            checkpoint: a file that lets an interrupted run go on.
            seed: of everything random.
            progress: show a progress bar; None shows it on terminals only.
        """
        with torch.inference_mode(False):  # gradients are needed, also where the caller turned them off
            prepared = prepare(
                net, data, likelihood, validation, num_data, checkpoint, seed, progress, training
            )
            # What draws from the global state (loaders, networks) finds a derived one; the user's stays as it was.
            with seeds.forked(seed, "fit", device=Place.of(prepared.network).device):
                return self._fit(prepared, training)

    @abstractmethod
    def _fit(self, prepared: Prepared, training: Training | None) -> Posterior:
        """Make the posterior from checked ingredients."""


@dataclass(frozen=True, kw_only=True)
class TrainedMethod(Method):
    """A method with a differentiable loss: `build` it for a loop of your own, or `fit` with ours."""

    def build(self, net: nn.Module, likelihood: Likelihood, num_data: int) -> Objective:
        """The loss and parameters for a training loop of your own; the network is copied.

        Args:
            net: any module.
            likelihood: `Categorical()`, `Bernoulli()` or `Gaussian()`.
            num_data: the number of training rows.
        """
        network = copied(net).eval()
        built = settings_of(likelihood).build(None)
        return self._objective(network, built, num_data, frozen_modes(net), seed=0)

    def _fit(self, prepared: Prepared, training: Training | None) -> Posterior:
        run = prepared.run
        objective = self._objective(
            prepared.network, prepared.likelihood, prepared.num_data, prepared.modes, seed=run.seed
        )
        objective.bind(prepared.example.inputs)
        history = train(objective, prepared.source, training or Training(), run)
        posterior = objective.posterior()
        posterior.history = history
        return posterior

    @abstractmethod
    def _objective(
        self,
        network: nn.Module,
        likelihood: BuiltLikelihood,
        num_data: int,
        modes: Mapping[str, bool],
        *,
        seed: int,
    ) -> Objective:
        """The objective around a copy of the network."""


def prepare(
    net: nn.Module,
    data: Any,
    likelihood: Likelihood,
    validation: Any,
    num_data: int | None,
    checkpoint: str | os.PathLike[str] | None,
    seed: int,
    progress: bool | None,
    training: Training | None,
) -> Prepared:
    """Check everything a fit is given and bring it into one form."""
    if training is not None and not isinstance(training, Training):
        raise ConfigError(f"training must be a Training(...), got {training!r}")
    if num_data is not None:
        require_count(num_data=num_data)
    seeds.derived(seed)
    settings = settings_of(likelihood)
    network = copied(net).eval()
    place = Place.of(network)
    source = as_source(data, place)
    watched = None if validation is None else as_source(validation, place, "validation")
    with seeds.forked(seed, "example"):
        example = source.example()
    outputs = probe(network, example.inputs)
    seen = source.batch.targets if isinstance(source, TensorSource) else example.targets
    plain = settings.build(outputs)
    plain.check_outputs(outputs)
    for each in (source, watched):
        if each is not None:
            each.check_targets(lambda targets, rows: plain.check_targets(outputs, targets, rows))
    built = settings.build(outputs, seen)
    count = num_data or source.num_data
    if count is None:
        raise DataError("the number of rows must be known, but this data do not tell it; pass num_data=")
    return Prepared(
        network=network,
        modes=frozen_modes(net),
        source=source,
        example=example,
        likelihood=built,
        num_data=count,
        run=Run(seed=seed, progress=progress, checkpoint=checkpoint, validation=watched),
    )


def probe(network: nn.Module, inputs: Inputs) -> Tensor:
    """Outputs for a few rows, or an error that says what the network could not read or answered wrongly."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(inputs)}
    try:
        with torch.no_grad(), seeds.forked(0, "probe", device=Place.of(network).device):
            outputs = run(network, {}, inputs)
    except (DubitoError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"the network cannot read inputs of shape {shapes}: {error}") from error
    rows = rows_of(inputs)
    if outputs.ndim == 0 or len(outputs) != rows:
        raise NetworkError(
            f"the network must answer {rows} rows with {rows} rows of outputs, got shape {tuple(outputs.shape)}"
        )
    if not outputs.isfinite().all():
        raise NetworkError("the network's outputs on the first rows hold NaN or infinity; check its weights")
    return outputs
