"""What the network as it stands says about the data: its likelihood, its residuals, and whether it learned at all."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...distributions.linalg import float64_device
from ...errors import warn
from ...inputs import weighted
from ...likelihoods import BernoulliLikelihood, BuiltLikelihood, CategoricalLikelihood, GaussianLikelihood
from ...likelihoods.moments import per_output
from ...networks import run
from ...processes import Processes
from ...sources import Source

#: Rows by which numbers of a likelihood are fitted around a trained network.
FITTED_ROWS = 20_000


@dataclass(frozen=True)
class DataFit:
    """The data under the network's own weights.

    Attributes:
        likelihood: with the noise that residuals show, where that was asked for.
        rows: how many were read.
        log_likelihood: log p(D|w*).
        constant: the same for the best network that answers every row alike; −∞ where no formula gives it.
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
            warn(
                "the network is no better than a constant: the log-likelihood of a row is "
                f"{self.log_likelihood / self.rows:.4g}, and {self.constant / self.rows:.4g} without looking at the "
                "inputs; Laplace stands around a trained network: train it longer, or give training=Training(...)"
            )


class DataFitSums:
    """Sums over the rows of what the network's answers say about them, filled batch by batch.

    Args:
        likelihood: judges its outputs.
        outputs: of a few rows.
        targets: of the same rows, checked: squares are summed around their mean, which keeps digits.
    """

    def __init__(self, likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor) -> None:
        self.likelihood = likelihood
        self.shift = per_output(targets).mean(1, keepdim=True) if self._real else None
        self.sums = {name: torch.zeros_like(value) for name, value in self._terms(outputs, targets).items()}

    @property
    def _real(self) -> bool:
        return isinstance(self.likelihood, GaussianLikelihood)

    @torch.no_grad()
    def add(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch of rows, with weights whose mean over all of them is 1."""
        for name, value in self._terms(outputs, targets, weights).items():
            self.sums[name] += value

    def read(self, network: nn.Module, source: Source, batch_size: int) -> None:
        """Add all rows, in a pass of their own."""
        with torch.no_grad():
            for batch in source.batches(batch_size):
                self.add(run(network, {}, batch.inputs), batch.targets, batch.weights)

    def join(self, processes: Processes, device: torch.device) -> None:
        """Add up the sums of all processes, in one message."""
        if processes.count > 1:
            moved = {name: value.to(device) for name, value in self.sums.items()}
            processes.sum(list(moved.values()))
            self.sums = {name: value.cpu() for name, value in moved.items()}

    def _terms(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        """What one batch adds."""
        terms = {
            "rows": torch.full((), len(outputs), device=outputs.device),
            "log_likelihood": weighted(wide(self.likelihood.log_prob(outputs, targets)), weights).sum(),
        }
        if isinstance(self.likelihood, CategoricalLikelihood | BernoulliLikelihood):
            terms["counts"] = _counts(self.likelihood, outputs, targets, weights)
        elif self.shift is not None:  # per output: positions after the output axis count as more rows
            truth = per_output(targets)
            shares = 1.0 if weights is None else weights.repeat_interleave(truth.shape[1] // len(targets))
            terms["errors"] = ((truth - per_output(self.likelihood.restored(outputs))).square() * shares).sum(1)
            terms["sums"] = ((truth - self.shift) * shares).sum(1)
            terms["squares"] = ((truth - self.shift).square() * shares).sum(1)
            terms["count"] = torch.full((), truth.shape[1], device=outputs.device)
        return {name: wide(value) for name, value in terms.items()}

    def result(self, *, residual_noise: bool = False) -> DataFit:
        """What the sums tell.

        Args:
            residual_noise: whether a Gaussian's noise becomes that of the residuals, per output.
        """
        self.sums = {name: value.cpu() for name, value in self.sums.items()}
        rows, log_likelihood = int(self.sums["rows"]), float(self.sums["log_likelihood"])
        if isinstance(self.likelihood, GaussianLikelihood):
            return self._of_reals(self.likelihood, rows, log_likelihood, residual_noise)
        if "counts" not in self.sums:
            return DataFit(self.likelihood, rows, log_likelihood, -math.inf)
        counts = self.sums["counts"]
        # The best constant says how often each class came: Σ_c n_c log(n_c / n)
        constant = float(torch.special.xlogy(counts, counts / counts.sum(-1, keepdim=True)).sum())
        return DataFit(self.likelihood, rows, log_likelihood, constant)

    def _of_reals(
        self, likelihood: GaussianLikelihood, rows: int, log_likelihood: float, residual_noise: bool
    ) -> DataFit:
        errors, sums, squares = (self.sums[name] for name in ("errors", "sums", "squares"))
        count = int(self.sums["count"])
        if residual_noise:
            std = likelihood.std()
            residual_std = (errors / count).sqrt().to(std).reshape(std.shape)
            likelihood = likelihood.with_noise(std=residual_std.clamp(min=torch.finfo(residual_std.dtype).eps))
        std = wide(likelihood.std()).cpu().reshape(-1).expand_as(errors)
        chi_square, constant = (
            float((values / std.square()).sum()) for values in (errors, squares - sums.square() / count)
        )
        if residual_noise:
            # Σ log N(y | f, σ²) = −½ Σ ((y − f)/σ)² − Σ (log σ + ½ log 2π)
            log_likelihood = -0.5 * chi_square - count * float((std.log() + 0.5 * math.log(2 * math.pi)).sum())
        learned = likelihood.settings.std is None and likelihood.settings.covariance is None
        return DataFit(
            likelihood,
            rows,
            log_likelihood,
            constant=log_likelihood + 0.5 * (chi_square - constant),
            squared_errors=chi_square if learned else None,
            num_values=count * len(errors) if learned else None,
        )


def with_fitted_numbers(
    likelihood: BuiltLikelihood, network: nn.Module, source: Source, batch_size: int
) -> BuiltLikelihood:
    """The likelihood with the numbers it learns at their most likely values, given what a trained network answers.

    Args:
        likelihood: with parameters of its own.
        network: as trained.
        source: of the rows, of which at most `FITTED_ROWS` are read.
        batch_size: of rows that are read.
    """
    outputs, targets, weights, rows = [], [], [], 0
    with torch.no_grad():
        for batch in source.batches(batch_size):
            outputs.append(run(network, {}, batch.inputs))
            targets.append(batch.targets)
            weights += [] if batch.weights is None else [batch.weights]
            rows += len(batch.targets)
            if rows >= FITTED_ROWS:
                break
    fitted, answers, truth = copy.deepcopy(likelihood), torch.cat(outputs), torch.cat(targets)
    shares = torch.cat(weights) if weights else None
    parameters = [parameter.requires_grad_() for parameter in fitted.parameters()]
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = fitted.mean_nll(answers, truth, shares)
        value.backward()
        return float(value.detach())

    with torch.enable_grad():
        optimizer.step(loss)
    return fitted


def _counts(likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """How often each class came: [C], or [..., 2] for each output that is yes or no."""
    if isinstance(likelihood, CategoricalLikelihood):
        counts = wide(outputs.new_zeros(outputs.shape[likelihood.settings.axis(outputs)]))
        seen, labels = likelihood.observed(targets), targets.flatten().to(counts.device)
        once = counts.new_ones(1).expand(len(targets), targets[0].numel())
        if seen is not None:
            once = seen.reshape(once.shape).to(once)
            labels = labels.where(once.flatten() > 0, 0)
        return counts.index_add_(0, labels, weighted(once, weights).flatten())  # `bincount` asks the device
    assert isinstance(likelihood, BernoulliLikelihood)
    yes, rows = (weighted(values, weights).sum(0) for values in (targets, torch.ones_like(targets)))
    return torch.stack([rows - yes, yes], -1)


def wide(values: Tensor) -> Tensor:
    """In float64, where the device has it; else on the CPU."""
    return values.detach().to(float64_device(values.device)).double()
