"""What every method is: frozen settings with one verb, `fit`, that returns a whole posterior."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from .errors import ConfigError, DataError, TrainingError
from .fitting import Prepared, Start, answered, prepare, prepare_start, require_agreement, undisturbed
from .hints import Checked
from .inputs import Inputs
from .likelihoods import Likelihood
from .noise_check import check_noise, logarithms
from .objective import Objective
from .posterior import Posterior, described
from .sources import named_target
from .training import AutoTraining, RunFacts, Training, require_callbacks, told, train


@dataclass(frozen=True, kw_only=True)
class Method(Checked, ABC):
    """Base of all methods."""

    #: The class of the posteriors this method makes.
    posterior_type: ClassVar[type[Posterior]]
    #: Whether a fit without `training=` has something that a checkpoint can keep.
    resumable: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "posterior_type"):
            Posterior.makers[cls.__name__] = cls.posterior_type

    def fit(
        self,
        net: nn.Module,
        data: Any,
        likelihood: Likelihood,
        *,
        training: Training | AutoTraining | Literal["auto"] | None = None,
        validation: Any = None,
        num_data: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        seed: int = 0,
        progress: bool | None = None,
        callbacks: Iterable[Any] = (),
        target: str | None = None,
    ) -> Posterior:
        """Fit a posterior to data, starting from the network's weights; the network is not modified.

        Args:
            net: any module; it is copied.
            data: a pair (inputs, targets) of tensors or arrays, a `Dataset` or a `DataLoader`; batches, or all rows,
                may also be a mapping whose entry `labels` holds the targets.
            likelihood: `Categorical()`, `Gaussian()` or another of `dubito.likelihoods`.
            training: how to train; post-hoc methods take the network as given without it. "auto", or
                `Training.auto(...)`, is the protocol of `dubito compare`: see `dubito.protocol`.
            validation: data that watch over training, in any form `data` may have.
            num_data: the number of training rows, where the data do not tell (iterable datasets).
            checkpoint: a file that lets an interrupted run go on; one of another run is refused.
            seed: of everything random.
            progress: show a progress bar; None shows it on terminals only.
            callbacks: objects that are told of steps, epochs and validations, as `dubito.Callback` has them.
            target: the name of the targets in data and validation that are mappings; None is `labels`, or `label`.
        """
        given = {"validation": validation, "num_data": num_data, "checkpoint": checkpoint}
        given |= {"seed": seed, "progress": progress, "callbacks": callbacks, "target": target}
        return self._fit(net, data, likelihood, training, given)

    def _fit(self, net: nn.Module, data: Any, likelihood: Likelihood, training: Any, given: Any) -> Posterior:
        """What `fit` does with its arguments, and with those that a method has beside them."""
        training = Training.auto() if training == "auto" else training
        given["callbacks"] = require_callbacks(given.get("callbacks", ()))
        data, given["validation"] = named_target(given.pop("target", None), data, given.get("validation"))
        if isinstance(training, AutoTraining):
            return import_module("dubito.protocol").fit(self, net, data, likelihood, training, **given)
        with torch.inference_mode(False):  # gradients are needed, also where the caller turned them off
            require_training(training)
            if given.get("checkpoint") is not None and training is None and not self.resumable:
                raise ConfigError(
                    f"{type(self).__name__} without training= makes a few passes over the data and keeps no "
                    "checkpoint of them; leave checkpoint= out, or give training= to fit the network first"
                )
            prepared = prepare(net, data, likelihood, **given)
            with undisturbed(prepared, "fit"), single_rows():
                require_agreement(prepared, (training or Training()).timeout)
                with self._watched(prepared, training):
                    posterior = self.fit_prepared(prepared, training)
            check_answers(posterior.network, prepared.example.inputs)
            return with_inputs(posterior, prepared)

    def _watched(self, prepared: Prepared, training: Training | None) -> AbstractContextManager[Any]:
        """Callbacks hear of the start and the end of a fit that makes no run, which would tell them itself."""
        if training is not None or self.resumable:
            return nullcontext()
        return told(RunFacts(title=type(self).__name__), False, prepared.run.callbacks)

    @abstractmethod
    def fit_prepared(self, prepared: Prepared, training: Training | None) -> Posterior:
        """The posterior from checked ingredients, whose network it keeps: what `fit`, and other methods, call.

        Args:
            prepared: what `dubito.fitting.prepare` gives.
            training: as in `fit`.
        """


@dataclass(frozen=True, kw_only=True)
class TrainedMethod(Method):
    """A method with a differentiable loss: `build` it for a loop of your own, or `fit` with ours."""

    def build(self, net: nn.Module, likelihood: Likelihood, num_data: int, *, seed: int = 0) -> Objective:
        """The loss and parameters for a training loop of your own; the network is copied.

        Args:
            net: any module.
            likelihood: `Categorical()`, `Gaussian()` or another of `dubito.likelihoods`.
            num_data: the number of training rows.
            seed: of the start: the one that `fit` with this seed has.
        """
        return self.objective(prepare_start(net, likelihood, num_data, seed))

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> Posterior:
        objective = self.objective(prepared)
        objective.bind(prepared.example.inputs)
        noise = logarithms(objective.draft)
        history = train(objective, prepared.source, training or Training(), prepared.run)
        posterior = objective.posterior()
        posterior.history = history
        check_noise(posterior, noise, prepared)
        return posterior

    @abstractmethod
    def objective(self, start: Start) -> Objective:
        """The objective around a copy of the network.

        Args:
            start: network, likelihood, number of rows and seed; a `Prepared` is one.
        """


def with_inputs(posterior: Posterior, prepared: Prepared) -> Posterior:
    """The posterior, which from now on knows the form of its inputs: files tell the network by it."""
    posterior.details["inputs"] = described(prepared.example.inputs)
    return posterior


def check_answers(network: nn.Module, inputs: Inputs) -> None:
    """Refuse the end of a training whose weights answer a few rows by no numbers."""
    if not answered(network, inputs).isfinite().all():
        raise TrainingError(
            "training ended in weights whose outputs are NaN or infinite; lower the learning rate, clip gradients "
            "(clip_norm=) or standardise inputs and targets"
        )


@contextmanager
def single_rows() -> Iterator[None]:
    """While open, batch norm's error about a batch of one row, which has no variance, says what to do."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise DataError(
            "batch norm needs batches of at least two rows in training, got one; change batch_size so that the last "
            "batch is larger, use a loader with drop_last=True, or put the layer in evaluation mode"
        ) from error


def require_training(training: object) -> None:
    """Refuse what is no `Training`."""
    if training is not None and not isinstance(training, Training):
        raise ConfigError(f'training must be a Training(...) or "auto", got {training!r}')
