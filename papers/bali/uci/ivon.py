"""IVON [Shen et al. 2024] on the UCI tables, by its authors' package: see `papers/references/ivon.py`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dubito import Gaussian, seeds
from dubito.data import Part
from dubito.errors import TrainingError, require_count, require_positive

from ...runner import provenance
from ...runner.experiment import Outcome
from ...runner.ivon_package import package
from ...settings import explicit
from .baselines import SideBySide, StandardisedTables


@dataclass(frozen=True, kw_only=True)
class IvonRun:
    """Settings of IVON on one table; its target is the posterior of a standard Normal prior, as the others'.

    Args:
        lr: the first rate, which falls by 5 after 60 % and 80 % of the run.
        iterations: steps.
        prior_std: of the Normal prior.
        hess_init: the curvature to start from.
        beta1: decay rate of the momentum.
        beta2: decay rate of the curvature.
        noise_lr: Adam's, of the noise.
        batch_size: rows per step.
        hidden: units of the hidden layer.
        num_samples: draws of a prediction.
    """

    lr: float
    iterations: int
    prior_std: float = 1.0
    hess_init: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    noise_lr: float = 0.01
    batch_size: int = 128
    hidden: int = 50
    num_samples: int = 256

    def __post_init__(self) -> None:
        require_positive(lr=self.lr, prior_std=self.prior_std, hess_init=self.hess_init, noise_lr=self.noise_lr)
        require_count(iterations=self.iterations, batch_size=self.batch_size)
        require_count(hidden=self.hidden, num_samples=self.num_samples)


def run_ivon(
    trains: Sequence[Part],
    tests: Sequence[Part],
    settings: IvonRun,
    *,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> list[Outcome]:
    """Train on every table, all side by side, and judge its test rows.

    Args:
        trains: training rows in original units; as many in every table.
        tests: test rows likewise.
        settings: of the run.
        seeds_of_parts: one per table; order of rows and noise are the first's.
        steps: ends training after so many steps, and prediction after as many draws.
    """
    tables = StandardisedTables.of(trains)
    inputs, targets, count = tables.inputs(trains), tables.targets(trains), len(trains[0].targets)
    network = SideBySide(trains[0].inputs.shape[1], settings.hidden, seeds_of_parts)
    provenance.record(settings, network, (inputs, targets), explicit(Gaussian), seeds=list(seeds_of_parts))
    optimizer = package().IVON(
        network.parameters(),
        lr=settings.lr,
        ess=count,
        weight_decay=1 / (count * settings.prior_std**2),
        hess_init=settings.hess_init,
        beta1=settings.beta1,
        beta2=settings.beta2,
    )
    log_std = nn.Parameter(torch.zeros(len(trains)))
    noise = torch.optim.Adam([log_std], lr=settings.noise_lr)
    iterations = steps or settings.iterations
    falls = [round(0.6 * iterations), round(0.8 * iterations)]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(each, falls, 0.2) for each in (optimizer, noise)]
    loss, rows = torch.zeros(()), torch.empty(0, dtype=torch.long)
    with seeds.forked(seeds_of_parts[0], "ivon"):
        for _ in range(iterations):
            if len(rows) < min(settings.batch_size, count):
                rows = torch.cat([rows, torch.randperm(count)])
            batch, rows = rows[: settings.batch_size], rows[settings.batch_size :]
            noise.zero_grad()
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                loss = surprise(network(inputs[batch]), targets[batch], log_std)
                loss.backward()
            optimizer.step()
            noise.step()
            for schedule in schedules:
                schedule.step()
        if not loss.isfinite():
            raise TrainingError("IVON's loss is no number; lower its learning rate")
        means = drawn(network, optimizer, tables.inputs(tests), steps or settings.num_samples)
    return tables.judged(tests, means, log_std.detach().exp())


def surprise(outputs: Tensor, targets: Tensor, log_std: Tensor) -> Tensor:
    """Mean over rows of the negative log-likelihood, summed over the networks, without its constant."""
    return (0.5 * ((targets - outputs) / log_std.exp()).square() + log_std).sum(1).mean()


@torch.no_grad()
def drawn(network: nn.Module, optimizer, inputs: Tensor, num_samples: int) -> Tensor:
    """Outputs under draws, [S, B, R]."""
    outputs = []
    for _ in range(num_samples):
        with optimizer.sampled_params():
            outputs.append(network(inputs))
    return torch.stack(outputs)
