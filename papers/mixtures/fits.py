"""One posterior on one split: fitted around four modes, its width and temperature chosen on validation rows.

Deep ensembles of every size, and the Laplace mixtures, stand on one pool of MAP members, so that they differ in nothing
but what is kept around the modes.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from dubito import MAP, DeepEnsemble, Laplace
from dubito.calibration import temperature_scaled
from dubito.data import Part
from dubito.inference.map import PointPosterior
from dubito.likelihoods import Likelihood
from dubito.method import Method
from dubito.metrics import ece
from dubito.posterior import MixturePosterior, Posterior
from dubito.prediction import BernoulliPrediction, ClassPrediction, Prediction, RealPrediction
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Outcome
from ..runner.scores import area, epistemic, interval_scores, losses_of, packed, total
from ..settings import explicit


class Ground(NamedTuple):
    """What a split is judged on.

    Attributes:
        train: training rows.
        validation: rows that choose width and temperature.
        test: rows to judge on.
        outside: out-of-distribution rows.
        network: as it starts.
        likelihood: of the targets.
    """

    train: Part
    validation: Part
    test: Part
    outside: Tensor
    network: nn.Module
    likelihood: Likelihood


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All that decides the numbers.

    Args:
        method: around each mode; MAP keeps the modes alone.
        members: K.
        pool: how many MAP members a split trains, of which the first K are taken.
        prior_std: of the pool's members.
        training: of the pool, or of the method from each start.
        shared: a group of tensors that the components share.
        scales: of the posterior's standard deviations, of which validation rows choose one.
        num_samples: draws per prediction, where it is made by draws.
    """

    method: Method
    members: int
    pool: int
    prior_std: float
    training: Training
    shared: str | None = None
    scales: tuple[float, ...] = ()
    num_samples: int = 32


_pools: dict[Any, tuple[tuple[Posterior, float], list[dict[str, Any]]]] = {}


def pool_of(cell: Cell, ground: Ground, settings: Fit, training: Training) -> tuple[Posterior, float]:
    """The MAP members of a split, trained once for all that stand on them, and the CPU-seconds they took."""

    def made() -> tuple[Posterior, float]:
        started = time.process_time()
        method = DeepEnsemble(members=settings.pool, prior_std=settings.prior_std, of=None, weights="equal")
        fitted = provenance.fit(
            method, ground.network, ground.train, ground.likelihood,
            training=training, seed=cell.split, progress=False,
        )  # fmt: skip
        return fitted, time.process_time() - started

    key = cell.data, cell.split, settings.pool, settings.prior_std, training
    for old in [old for old in _pools if old[0] != cell.data]:
        del _pools[old]
    return provenance.shared(_pools, key, made)


def run_cells(cells: Sequence[Cell], data: Sequence[Ground], settings: Fit, steps: int | None) -> list[Outcome]:
    """A method on splits of one data set."""
    return [run_split(cell, ground, settings, steps) for cell, ground in zip(cells, data, strict=True)]


def run_split(cell: Cell, ground: Ground, settings: Fit, steps: int | None) -> Outcome:
    """A method on one split."""
    training, samples = settings.training, settings.num_samples
    if steps is not None:
        training, samples = replace(training, epochs=None, iterations=steps), steps
        settings = replace(settings, pool=min(settings.pool, 2), members=min(settings.members, 2))
    posterior, seconds = fitted(cell, ground, settings, training)
    posterior, scale = chosen(posterior, ground, settings.scales or (None,), samples)
    return judged(posterior, ground, samples, {"seconds": seconds, "scale": scale})


def fitted(cell: Cell, ground: Ground, settings: Fit, training: Training) -> tuple[Posterior, float]:
    """The mixture, and the CPU-seconds of its fit; members trained beside others take their share."""
    method, started = settings.method, time.process_time()
    if not isinstance(method, MAP | Laplace):
        ensemble = DeepEnsemble(members=settings.members, prior_std=None, of=method, weights="equal")
        posterior = provenance.fit(
            ensemble, ground.network, ground.train, ground.likelihood,
            training=training, seed=cell.split, progress=False,
        )  # fmt: skip
        return posterior, time.process_time() - started
    pool, seconds = pool_of(cell, ground, settings, training)
    started = time.process_time()
    points = [
        PointPosterior(
            pool.fold(number), pool.likelihood.component(number, settings.pool), method=explicit(MAP)
        ).finished()
        for number in range(settings.members)
    ]
    mixture = MixturePosterior(points, method=explicit(MAP)).finished()
    if isinstance(method, Laplace):
        provenance.record(method, ground.network, ground.train, ground.likelihood, around="the pool's members")
        mixture = method.around(mixture, ground.train, seed=cell.split)
        mixture = mixture if settings.shared is None else mixture.shared(settings.shared)
    return mixture, seconds * settings.members / settings.pool + time.process_time() - started


def chosen(
    posterior: Posterior, ground: Ground, scales: Sequence[float | None], samples: int
) -> tuple[Posterior, float]:
    """The posterior at the scale, and the temperature, of the least negative log-likelihood of validation rows."""
    (inputs, targets), tried = ground.validation, []
    for scale in scales:
        scaled = posterior if scale is None else posterior.scaled(scale)
        tempered = temperature_scaled(scaled, ground.validation, num_samples=samples, smoothed=True)
        loss = float(losses_of(tempered.predict(inputs, samples), targets).mean())
        tried.append((loss, scale or 1.0, tempered))
    _, scale, best = min(tried, key=lambda choice: choice[0])
    return best, scale


def judged(posterior: Posterior, ground: Ground, samples: int, facts: dict[str, float]) -> Outcome:
    """What test rows and out-of-distribution rows say."""
    inputs, targets = ground.test
    prediction, outside = (posterior.predict(rows, samples) for rows in (inputs, ground.outside))
    losses = losses_of(prediction, targets)
    metrics = {
        "nll": float(losses.mean()),
        "calibration_error": calibration_error(prediction, targets),
        "auroc_total": area(total(prediction), total(outside)),
        "auroc_epistemic": area(epistemic(prediction), epistemic(outside)),
        "bytes": float(posterior.nbytes),
        "share_of_networks": posterior.nbytes / sum(p.nbytes for p in ground.network.parameters()),
        **facts,
    }
    return Outcome(metrics=metrics, details={"losses": packed(losses)})


def calibration_error(prediction: Prediction, targets: Tensor) -> float:
    """The expected calibration error; of reals how far the coverage of 90 % intervals is from .9."""
    if isinstance(prediction, RealPrediction):
        return abs(interval_scores(prediction, targets)["coverage_90"] - 0.9)
    assert isinstance(prediction, ClassPrediction)
    probs = prediction.probs.flatten() if isinstance(prediction, BernoulliPrediction) else prediction.probs
    return ece(probs, targets.flatten().long())
