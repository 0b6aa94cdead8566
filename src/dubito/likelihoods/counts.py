"""Counts: whole numbers from 0 on, from the logarithm of their rate."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..devices import on_host
from ..errors import ConfigError, DataError, NetworkError
from ..inputs import RowNumbers, row_number
from ..prediction import CountPrediction, aligned, count_log_prob, sum_events
from .base import BuiltLikelihood, Likelihood, at_least_float, real_outputs, stacked
from .noise import NoiseNumbers, checked_numbers, noise_shape, started, tails_of


@dataclass(frozen=True)
class Poisson(Likelihood):
    """Counts whose variance is their rate; the network answers log rates, one or many per row."""

    def build(self, example_outputs: Tensor | None, example_targets: Any = None) -> BuiltLikelihood:
        return CountLikelihood(self)


@dataclass(frozen=True)
class NegativeBinomial(Likelihood):
    """Counts that vary more than their rate tells: variance rate + rate² / total_count.

    Args:
        total_count: r, one number or one per output; None learns it, per output. Large ones are Poisson.
    """

    total_count: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_count", checked_numbers(total_count=self.total_count)["total_count"])

    def build(self, example_outputs: Tensor | None, example_targets: Any = None) -> BuiltLikelihood:
        if example_outputs is None:
            raise ConfigError("NegativeBinomial learns a number per output; build it with a few outputs")
        start = example_outputs.new_ones(noise_shape(example_outputs))
        return CountLikelihood(self, **started("total_count", self.total_count, start))


class CountLikelihood(NoiseNumbers):
    """See `Poisson` and `NegativeBinomial`."""

    settings: Poisson | NegativeBinomial

    @classmethod
    def names_of(cls, settings: Likelihood) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (("total_count",) if isinstance(settings, NegativeBinomial) else ()), ()

    def check_outputs(self, outputs: Tensor) -> None:
        real_outputs(type(self.settings).__name__, outputs)
        total = self._total(outputs)
        if total is not None and tuple(total.shape) != tuple(noise_shape(outputs)):
            raise NetworkError(
                f"total_count is for outputs {list(total.shape)} of a row, but the network's have shape "
                f"{tuple(outputs.shape)}"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        values = aligned(targets, outputs.new_empty(len(targets), *outputs.shape[1:]))
        if on_host(values):
            wrong = ((values < 0) | (values != values.round())).nonzero()
            if len(wrong):
                place = tuple(wrong[0].tolist())
                raise DataError(
                    f"counts must be whole numbers from 0 on, got {values[place].item():g} at row "
                    f"{row_number(place[0], rows)}; for other reals take Gaussian() or StudentT()"
                )
        return values

    def _total(self, outputs: Tensor, draw: int = 0) -> Tensor | None:
        return None if isinstance(self.settings, Poisson) else self.number("total_count", outputs, draw)

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        return sum_events(count_log_prob(targets, outputs, self._total(outputs, draw)), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        """By the quantile function: the least count at which as much lies below as below the noise."""
        tail, sign = tails_of(noise)
        return (
            self._mixture(at_least_float(outputs.detach()).unsqueeze(0), draw)
            .tail(tail, sign=sign, steps=53)
            .to(outputs)
        )

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        rates, total = outputs.detach().exp(), self._total(outputs.detach(), draw)
        # Fisher information of log μ: μ, and μ r / (μ + r) of the negative binomial
        information = rates if total is None else rates * total.detach() / (rates + total.detach())
        return information.sqrt().reshape(len(outputs), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor]) -> CountPrediction:
        return self._mixture(stacked(draws))

    def _mixture(self, outputs: Tensor, draw: int = 0) -> CountPrediction:
        """From outputs [S, B, ...] of draws from number `draw` on."""
        rates = outputs.exp()
        if isinstance(self.settings, Poisson):
            return CountPrediction(rates, rates)
        total = self.per_draw("total_count", rates, draw)
        return CountPrediction(rates, rates + rates.square() / total, total_count=total)
