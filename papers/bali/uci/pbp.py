"""Probabilistic backpropagation on the UCI tables, the splits of one table filtered side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dubito import PBP, Gaussian, metrics, seeds
from dubito.data import Part
from dubito.errors import require_count
from dubito.inference.pbp.filter import Filter
from dubito.inference.pbp.moments import Gamma, propagated
from dubito.models import mlp

from ...runner import provenance
from ...runner.experiment import Outcome
from ...settings import explicit
from .dropout import standardising


@dataclass(frozen=True, kw_only=True)
class FilterRun:
    """Settings of PBP on one table.

    Args:
        method: its own settings.
        hidden: units of the hidden layer.
    """

    method: PBP
    hidden: int = 50

    def __post_init__(self) -> None:
        require_count(hidden=self.hidden)


def run_filter(
    trains: Sequence[Part],
    tests: Sequence[Part],
    settings: FilterRun,
    *,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> list[Outcome]:
    """Filter the training rows of every table and judge its test rows, in closed form.

    Args:
        trains: training rows in original units; as many in every table.
        tests: test rows likewise.
        settings: of the run.
        seeds_of_parts: one per table, of the first means and of the order of rows.
        steps: ends every pass after so many rows, and the run after as many passes.
    """
    method, features = settings.method, trains[0].inputs.shape[1]
    inputs_by = [standardising(part.inputs) for part in trains]
    targets_by = [standardising(part.targets) for part in trains]
    inputs = torch.stack([by.apply(part.inputs) for by, part in zip(inputs_by, trains, strict=True)])
    targets = torch.stack([by.apply(part.targets) for by, part in zip(targets_by, trains, strict=True)])
    net = mlp(features, (settings.hidden,), num_classes=1, seed=0)
    provenance.record(method, net, (inputs[0], targets[0]), explicit(Gaussian), seeds=list(seeds_of_parts))
    streams = [seeds.generator(seed, "initial weights") for seed in seeds_of_parts]
    assert method.initial_std is not None
    means = [
        torch.stack([torch.randn(size, generator=stream, dtype=torch.float64) for stream in streams])
        * (method.initial_std / size[1])
        for size in ((settings.hidden, features + 1), (1, settings.hidden + 1))
    ]
    spread = targets.var(dim=(1, 2), unbiased=False)
    noise = Gamma(method.noise_shape, method.noise_rate * spread)
    filtering = Filter(means, noise, Gamma(method.prior_shape, method.prior_rate))
    parts, rows = torch.arange(len(trains)), inputs.shape[1]
    for epoch in range(min(method.epochs, steps or method.epochs)):
        orders = [torch.randperm(rows, generator=seeds.generator(seed, "order", epoch)) for seed in seeds_of_parts]
        for taken in torch.stack(orders, 1)[:steps]:
            filtering.take_in(inputs[parts, taken].unsqueeze(1), targets[parts, taken])
        filtering.refresh()
    outcomes = []
    for place, (part, by, target_by) in enumerate(zip(tests, inputs_by, targets_by, strict=True)):
        layers = [(mean[place].detach(), variance[place].detach()) for mean, variance in filtering.layers]
        mean, variance = propagated(by.apply(part.inputs), layers)
        unit = filtering.noise.variances()[0][place]
        std = (variance + unit).sqrt() * target_by.scale
        centre = target_by.undo(mean)
        outcomes.append(
            Outcome(
                metrics={
                    "rmse": metrics.rmse(part.targets, centre),
                    "log_likelihood": float(torch.distributions.Normal(centre, std).log_prob(part.targets).mean()),
                },
                details={"noise": float(unit.sqrt() * target_by.scale)},
            )
        )
    return outcomes
