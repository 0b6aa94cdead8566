"""Stochastic weight averaging: the mean of the weights along the end of a run [Izmailov et al. 2018]."""

from dataclasses import dataclass

import torch

from ...fitting import Prepared, Start
from ...inputs import TensorOptions
from ...method import TrainedMethod
from ...networks import resolve
from ...posterior import Posterior
from ...training import Training, current
from ..map import PointPosterior
from .averages import AveragedObjective, Gathering, check_gathering
from .batch_norm import normalising, refresh


@dataclass(frozen=True, kw_only=True)
class Averaging(TrainedMethod):
    """What SWA and SWAG share: settings, and batch norms refreshed from the data at the mean.

    Args:
        prior_std: standard deviation of a Normal prior around 0 on all weights; None is the flat prior.
        start: the share of the run after which weights are gathered; the learning rate should then stay high
            enough to move about, as `Linear(start=0.4, end=0.5, final=0.3)` lets it.
        snapshots: how many times weights are gathered, evenly spaced to the end; fewer where there are fewer steps.
    """

    prior_std: float | None = None
    start: float = 0.5
    snapshots: int = 20

    def __post_init__(self) -> None:
        check_gathering(self.prior_std, self.start, self.snapshots)

    def gathering(self) -> Gathering:
        """What to gather, and when."""
        return Gathering(start=self.start, snapshots=self.snapshots)

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> Posterior:
        posterior = super().fit_prepared(prepared, training)
        settings, device = training or Training(), TensorOptions.of(posterior.network).device
        layers = normalising(posterior.network, prepared.modes)
        batch_size = settings.batch_size or prepared.source.batch_size or 128
        refresh(posterior.network, posterior.weights(), layers, prepared.source, batch_size, prepared.run.seed)
        processes = prepared.run.processes or current(settings.timeout, device)
        with torch.no_grad():
            processes.broadcast(list(posterior.stored().values()))  # loaders may have orders of their own
        return posterior

    def objective(self, start: Start) -> AveragedObjective:
        resolve(None, start.network)  # refuses a network whose parameters are all frozen
        draft = PointPosterior(start.network, start.likelihood, method=self)  # the weights of the moment
        return self.objective_type(draft, self.prior_std, self.gathering(), num_data=start.num_data, modes=start.modes)

    #: The class of the objective.
    objective_type = AveragedObjective


@dataclass(frozen=True, kw_only=True)
class SWA(Averaging):
    """The mean of the weights along the end of a run: one point, flatter than the last one.

    Batch norm's statistics are taken anew from the training data at the mean.

    Args:
        prior_std: standard deviation of a Normal prior around 0 on all weights; None is the flat prior.
        start: the share of the run after which weights are gathered; the learning rate should then stay high
            enough to move about, as `Linear(start=0.4, end=0.5, final=0.3)` lets it.
        snapshots: how many times weights are gathered, evenly spaced to the end; fewer where there are fewer steps.
    """

    posterior_type = PointPosterior
