"""Real targets with heavy-tailed noise, and with noise that the network predicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, NetworkError
from ..inputs import RowNumbers
from ..prediction import RealPrediction, StudentTPrediction, aligned, normal_log_prob, student_t_log_prob, sum_events
from .base import Likelihood, at_least_float, real_outputs, stacked
from .moments import Targets, WeightedTargets, warn_if_far
from .noise import NoiseNumbers, RealLikelihood, checked_numbers, noise_shape, spread_of, started, tails_of, units_of

#: Degrees of freedom at which learned ones start, and below which no variance exists.
FIRST_DF, LEAST_DF = 10.0, 2.0


@dataclass(frozen=True)
class StudentT(Likelihood):
    """Real outputs with Student-t noise: few targets may lie far off, as Normal noise does not allow.

    Args:
        df: degrees of freedom above 2, one number or one per output; None learns them.
        std: standard deviation of the noise, one number or one per output; None learns it, per output.
        standardise: as in `Gaussian`.
    """

    df: float | tuple[float, ...] | None = None
    std: float | tuple[float, ...] | None = None
    standardise: bool = False

    def __post_init__(self) -> None:
        for name, value in checked_numbers(df=self.df, std=self.std).items():
            object.__setattr__(self, name, value)
        least = min(self.df) if isinstance(self.df, tuple) else self.df
        if least is not None and least <= LEAST_DF:
            raise ConfigError(f"df must be above {LEAST_DF:g}, below which noise has no variance, got {self.df}")

    def build(self, example_outputs: Tensor | None, example_targets: Targets | None = None) -> "StudentTLikelihood":
        if example_outputs is None:
            raise ConfigError("StudentT learns numbers per output; build it with a few outputs")
        like = example_outputs
        start, units = like.new_ones(noise_shape(like)), {}
        if self.standardise and example_targets is not None:
            units = units_of(example_targets, like, aligned)
        elif isinstance(example_targets, Tensor | WeightedTargets):
            start = spread_of(example_targets, like, aligned)
        excess = (
            None
            if self.df is None
            else tuple(df - LEAST_DF for df in (self.df if isinstance(self.df, tuple) else (self.df,)))
        )
        tensors = {
            **started("std", self.std, start),
            **started("excess", excess, torch.full_like(start, FIRST_DF - LEAST_DF)),
        }
        if units and "std" in tensors:
            tensors["std"] = tensors["std"] / units["scale"]
        return StudentTLikelihood(self, **tensors, **units)


class StudentTLikelihood(NoiseNumbers, RealLikelihood):
    """See `StudentT`: `std` is the noise's, and `excess` what df exceeds 2 by, so that the variance exists."""

    settings: StudentT
    needed, optional = ("std", "excess"), ("location", "scale")

    def __init__(self, settings: StudentT, **tensors: Any) -> None:
        super().__init__(settings, **{"location": None, "scale": None, **tensors})

    def check_outputs(self, outputs: Tensor) -> None:
        real_outputs("StudentT", outputs)
        shape = tuple(self.number("std", outputs).shape)
        if shape != tuple(noise_shape(outputs)):
            raise NetworkError(
                f"the noise is for outputs {list(shape)} of a row, but the network's have shape {tuple(outputs.shape)}"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        return aligned(targets, outputs.new_empty(len(targets), *outputs.shape[1:]))

    def warn(self, outputs: Tensor, targets: Tensor) -> None:
        if self.scale is None:
            warn_if_far(self.check_targets(outputs, targets), outputs)

    def df(self, draw: int = 0) -> Tensor:
        """Degrees of freedom per output of draw `draw`."""
        excess = self.numbers("excess")
        return LEAST_DF + (excess if self.num_components == 1 else excess[draw % self.num_components])

    def _law(self, outputs: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """Scale, in the outputs' units, and degrees of freedom."""
        excess, std = self.number("excess", outputs, draw), self.number("std", outputs, draw)
        df = LEAST_DF + excess
        return std * (excess / df).sqrt(), df

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        scale, df = self._law(outputs, draw)
        log_prob = sum_events(student_t_log_prob(self.standardised(targets) - outputs, scale, df), 1)
        return self.in_units(log_prob, outputs.shape[1:])

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        tail, sign = tails_of(noise)
        return (
            self._mixture(at_least_float(outputs.detach()).unsqueeze(0), draw)
            .tail(tail, sign=sign, steps=60)
            .to(outputs)
        )

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        scale, df = (value.detach() for value in self._law(outputs, draw))
        # Fisher information of a location: (ν + 1) / ((ν + 3) s²); the Hessian itself is indefinite
        root = (((df + 1) / (df + 3)).sqrt() / scale).expand_as(outputs)
        return root.reshape(len(outputs), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor]) -> StudentTPrediction:
        return self._mixture(stacked(draws))

    def _mixture(self, means: Tensor, draw: int = 0) -> StudentTPrediction:
        """From outputs [S, B, ...] of draws from number `draw` on."""
        variances = self.per_draw("std", means, draw).square()
        prediction = StudentTPrediction(means, variances, df=LEAST_DF + self.per_draw("excess", means, draw))
        if self.scale is None or self.location is None:
            return prediction
        return prediction.mapped(self.location, self.scale)

    def with_noise_times(self, factor: float) -> "StudentTLikelihood":
        """The same likelihood with fixed noise, its standard deviations multiplied by `factor`."""
        return self.with_numbers(self.num_components, std=factor * self.numbers("std"))


@dataclass(frozen=True)
class HeteroscedasticGaussian(Likelihood):
    """Normal noise that depends on the input: the network answers 2 C numbers for C targets.

    Of its outputs [B, 2C, ...] the first half are means, the second logarithms of standard deviations.

    Args:
        standardise: as in `Gaussian`.
    """

    standardise: bool = False

    def build(
        self, example_outputs: Tensor | None, example_targets: Targets | None = None
    ) -> "HeteroscedasticGaussianLikelihood":
        if not self.standardise or example_outputs is None or example_targets is None:
            return HeteroscedasticGaussianLikelihood(self)
        means = halves(example_outputs)[0]
        return HeteroscedasticGaussianLikelihood(self, **units_of(example_targets, means, aligned))


class HeteroscedasticGaussianLikelihood(NoiseNumbers, RealLikelihood):
    """See `HeteroscedasticGaussian`; `factor` multiplies the standard deviations that the network answers."""

    settings: HeteroscedasticGaussian
    factor: Tensor | None
    optional = ("location", "scale", "factor")

    def __init__(self, settings: HeteroscedasticGaussian, **tensors: Any) -> None:
        super().__init__(settings, **{"location": None, "scale": None, "factor": None, **tensors})

    def check_outputs(self, outputs: Tensor) -> None:
        real_outputs("HeteroscedasticGaussian", outputs)
        if outputs.ndim < 2 or outputs.shape[1] % 2:
            raise NetworkError(
                "HeteroscedasticGaussian needs a mean and the logarithm of a standard deviation per target, outputs "
                f"[B, 2C, ...], got {tuple(outputs.shape)}; give the last layer twice as many outputs"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        means = halves(outputs)[0]
        return aligned(targets, means.new_empty(len(targets), *means.shape[1:]))

    def warn(self, outputs: Tensor, targets: Tensor) -> None:
        if self.scale is None:
            warn_if_far(self.check_targets(outputs, targets), halves(outputs)[0])

    def _law(self, outputs: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, in the outputs' units."""
        means, logs = halves(outputs, axis)
        return means, logs.exp() if self.factor is None else logs.exp() * self.factor

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        means, std = self._law(outputs)
        log_prob = sum_events(normal_log_prob(self.standardised(targets) - means, std=std), 1)
        return self.in_units(log_prob, means.shape[1:])

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        means, std = self._law(outputs.detach())
        return self.restored(means + std * halves(noise)[0])

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        means, std = self._law(outputs.detach())
        # Fisher information of (μ, log σ): diag(1/σ², 2)
        root = torch.cat([1 / std, torch.full_like(means, 2**0.5)], 1)
        return root.reshape(len(outputs), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor]) -> RealPrediction:
        means, std = self._law(stacked(draws), 2)
        prediction = RealPrediction(means, std.square())
        if self.scale is None or self.location is None:
            return prediction
        return prediction.mapped(self.location, self.scale)

    def with_noise_times(self, factor: float) -> "HeteroscedasticGaussianLikelihood":
        """The same likelihood with all standard deviations multiplied by `factor`."""
        whole = factor if self.factor is None else factor * self.factor
        like = self.location if self.location is not None else torch.ones(())
        return self.with_numbers(factor=torch.as_tensor(whole, dtype=like.dtype, device=like.device))


def halves(outputs: Tensor, axis: int = 1) -> tuple[Tensor, Tensor]:
    """Means and logarithms of standard deviations, along the axis of outputs."""
    means, logs = outputs.chunk(2, axis)
    return means, logs
