"""What the network as it stands says about the data: its likelihood, its residuals, and whether it learned at all."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import DubitoWarning
from ...inputs import call
from ...likelihoods import BernoulliLikelihood, BuiltLikelihood, CategoricalLikelihood, GaussianLikelihood
from ...sources import Source


@dataclass(frozen=True)
class Point:
    """The data under the network's own weights.

    Attributes:
        likelihood: with the noise that residuals show, where that was asked for.
        rows: how many were read.
        log_likelihood: log p(D|w*).
        constant: the same for the best network that answers every row alike.
        squared_errors: Σ ((y − f)/σ)² where a Gaussian's noise is learned, else None.
        num_values: the number of squares in it.
    """

    likelihood: BuiltLikelihood
    rows: int
    log_likelihood: float
    constant: float
    squared_errors: float | None = None
    num_values: int | None = None

    def details(self, num_data: float) -> dict[str, Any]:
        """Plain facts for `num_data` rows like these."""
        scale = num_data / self.rows
        learned = self.squared_errors is not None and self.num_values is not None
        return {
            "log_likelihood": scale * self.log_likelihood,
            "squared_errors": scale * self.squared_errors if learned else None,  # pyright: ignore
            "num_values": scale * self.num_values if learned else None,  # pyright: ignore
        }

    def warn_if_constant(self) -> None:
        """Warn if the network is no better than a constant."""
        if self.log_likelihood - self.constant <= 1e-6 * self.rows:  # the constant itself, but for rounding
            warnings.warn(
                "the network is no better than a constant: the log-likelihood of a row is "
                f"{self.log_likelihood / self.rows:.4g}, and {self.constant / self.rows:.4g} without looking at the "
                "inputs; Laplace stands around a trained network: train it longer, or give training=Training(...)",
                DubitoWarning,
                stacklevel=4,
            )


@torch.no_grad()
def look(
    network: nn.Module, likelihood: BuiltLikelihood, source: Source, batch_size: int, *, residual_noise: bool
) -> Point:
    """Read the data once.

    Args:
        network: in evaluation mode.
        likelihood: judges its outputs.
        source: the rows.
        batch_size: rows per step.
        residual_noise: whether a Gaussian's noise becomes that of the residuals, per output.
    """
    if isinstance(likelihood, GaussianLikelihood):
        return _look_at_reals(network, likelihood, source, batch_size, residual_noise)
    rows, log_likelihood, counts = 0, 0.0, torch.zeros(())
    for batch in source.batches(batch_size):
        outputs = call(network, batch.inputs)
        rows += len(outputs)
        log_likelihood += float(wide(likelihood.log_prob(outputs, batch.targets)).sum())
        counts = counts + wide(_counts(likelihood, outputs, batch.targets))
    # The best constant says how often each class came: Σ_c n_c log(n_c / n)
    constant = float(torch.special.xlogy(counts, counts / counts.sum(-1, keepdim=True)).sum())
    return Point(likelihood, rows, log_likelihood, constant)


def _counts(likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """How often each class came: [C], or [..., 2] for each output that is yes or no."""
    if isinstance(likelihood, CategoricalLikelihood):
        return torch.bincount(targets.flatten(), minlength=outputs.shape[likelihood.settings.class_axis])
    assert isinstance(likelihood, BernoulliLikelihood)
    yes = targets.sum(0)
    return torch.stack([len(targets) - yes, yes], -1)


def _look_at_reals(
    network: nn.Module, likelihood: GaussianLikelihood, source: Source, batch_size: int, residual_noise: bool
) -> Point:
    """The same for real targets, per output: positions after the output axis count as more rows."""
    rows = count = 0
    log_likelihood = 0.0
    errors = sums = squares = torch.zeros(())
    shift: Tensor | None = None
    for batch in source.batches(batch_size):
        outputs = call(network, batch.inputs)
        targets = per_output(batch.targets)
        shift = (
            targets.mean(1, keepdim=True) if shift is None else shift
        )  # squares of differences keep digits
        errors = errors + wide((targets - per_output(outputs)).square().sum(1))
        sums = sums + wide((targets - shift).sum(1))
        squares = squares + wide((targets - shift).square().sum(1))
        if not residual_noise:
            log_likelihood += float(wide(likelihood.log_prob(outputs, batch.targets)).sum())
        rows, count = rows + len(outputs), count + targets.shape[1]
    if residual_noise:
        std = likelihood.std()
        found = (errors / count).sqrt().to(std).reshape(std.shape)
        likelihood = likelihood.with_noise(std=found.clamp(min=torch.finfo(found.dtype).eps))
    std = wide(likelihood.std()).reshape(-1).expand_as(errors)
    chi_square, constant = (
        float((values / std.square()).sum()) for values in (errors, squares - sums.square() / count)
    )
    if residual_noise:
        # Σ log N(y | f, σ²) = −½ Σ ((y − f)/σ)² − Σ (log σ + ½ log 2π)
        log_likelihood = -0.5 * chi_square - count * float((std.log() + 0.5 * math.log(2 * math.pi)).sum())
    learned = likelihood.settings.std is None and likelihood.settings.covariance is None
    return Point(
        likelihood,
        rows,
        log_likelihood,
        constant=log_likelihood + 0.5 * (chi_square - constant),
        squared_errors=chi_square if learned else None,
        num_values=count * len(errors) if learned else None,
    )


def per_output(values: Tensor) -> Tensor:
    """[B, C, ...] as [C, values], [B] as [1, B]."""
    return values.transpose(0, 1).flatten(1) if values.ndim > 1 else values.unsqueeze(0)


def wide(values: Tensor) -> Tensor:
    """In float64, on the CPU, which always has it."""
    return values.detach().cpu().double()
