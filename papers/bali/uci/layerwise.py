"""BALI on the UCI tables: Table 4's settings, splits of one table trained side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dubito import BALI, Gaussian, metrics, seeds
from dubito.data import Part, Scaling
from dubito.errors import require_count
from dubito.inference.bali import BALIPosterior
from dubito.likelihoods import GaussianLikelihood
from dubito.training import Training

from ...runner import provenance
from ...runner.experiment import Outcome
from ...settings import explicit
from .dropout import standardising
from .replicas import fit_many


@dataclass(frozen=True, kw_only=True)
class LayerwiseRun:
    """Settings of BALI on one table.

    Args:
        method: BALI's own settings.
        iterations: steps.
        batch_size: rows per step.
        hidden: units of the hidden layer.
        num_samples: draws of a prediction.
    """

    method: BALI
    iterations: int = 20_000
    batch_size: int = 1024
    hidden: int = 50
    num_samples: int = 256

    def __post_init__(self) -> None:
        require_count(iterations=self.iterations, batch_size=self.batch_size)
        require_count(hidden=self.hidden, num_samples=self.num_samples)


def run_layerwise(
    trains: Sequence[Part],
    tests: Sequence[Part],
    settings: LayerwiseRun,
    *,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> list[Outcome]:
    """Train on every table and judge its test rows.

    Args:
        trains: training rows in original units; as many in every table.
        tests: test rows likewise.
        settings: of the run.
        seeds_of_parts: one per table.
        steps: ends training after so many steps, and prediction after as many draws.
    """
    inputs_by = [standardising(part.inputs) for part in trains]
    targets_by = [standardising(part.targets) for part in trains]
    data = [
        (by.apply(part.inputs).float(), own.apply(part.targets).float())
        for by, own, part in zip(inputs_by, targets_by, trains, strict=True)
    ]
    features = trains[0].inputs.shape[1]
    with seeds.forked(seeds_of_parts[0], "network"):  # its weights are drawn anew for every fit
        net = nn.Sequential(nn.Linear(features, settings.hidden), nn.ReLU(), nn.Linear(settings.hidden, 1))
    iterations = settings.iterations if steps is None else steps
    training = explicit(Training, iterations=iterations, batch_size=settings.batch_size)
    provenance.record(settings.method, net, data[0], explicit(Gaussian), training=training, seeds=list(seeds_of_parts))
    posteriors = fit_many(
        settings.method,
        net,
        data,
        explicit(Gaussian),
        training=training,
        seed=seeds_of_parts[0],
        seeds_of_fits=seeds_of_parts,
    )
    outcomes = []
    for posterior, part, by, own in zip(posteriors, tests, inputs_by, targets_by, strict=True):
        outcomes.append(judged(posterior, by.apply(part.inputs).float(), part, own, steps or settings.num_samples))
    return outcomes


def judged(posterior: BALIPosterior, inputs: Tensor, part: Part, scaling: Scaling, num_samples: int) -> Outcome:
    """A table's result: errors of the mixture's mean, and its likelihood, in original units."""
    means = scaling.undo(posterior.sample_outputs(inputs, num_samples).double())
    likelihood = posterior.likelihood
    assert isinstance(likelihood, GaussianLikelihood)
    std = likelihood.std().double() * scaling.scale
    details = {"output_floor": posterior.method.output_floor, "effective_data": posterior.method.effective_data}
    return scored(part, means, std, details)


def scored(part: Part, means: Tensor, std: Tensor, details: Mapping[str, Any]) -> Outcome:
    """Errors and likelihood of a mixture with means [S, N, 1] and one noise, all in original units."""
    return Outcome(
        metrics={
            "rmse": metrics.rmse(part.targets, means.mean(0)),
            "log_likelihood": metrics.mixture_log_prob(part.targets, means, std),
        },
        details={"noise": float(std), **details},
    )
