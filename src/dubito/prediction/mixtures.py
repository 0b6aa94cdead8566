"""Predictions of reals with heavy tails and of counts: mixtures whose components are no Gaussians, kept whole."""

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..errors import ConfigError
from ..hints import checked
from .base import Prediction, rows_on
from .formulas import aligned, averaged, log_mean_exp, sum_events, variance, with_rows
from .real import RealPrediction
from .special import count_tails, student_t_tails

#: What is left out on either side of the CRPS of a mixture, as a probability.
NEGLECTED = 1e-8
#: Levels between which the CRPS of reals is integrated, and nodes of Gauss and Legendre between two of them.
PANELS, NODES, HALVINGS = (1e-5, 1e-3, 0.02, 0.1, 0.3), 8, 20
#: Steps after which a quantile is what it is.
MOST_STEPS = 80
#: Counts up to which the CRPS is summed whole; wider ones are summed in strides. Standard deviations that are reached.
SUMMED, REACH = 4096, 12.0
#: Strides of such a sum are at most this part of its width, and this part of what was summed before.
STRIDES, FINE = 512, 64
#: Numbers of components × rows that are judged at a time.
AT_ONCE = 1 << 18
#: Beyond this Stirling's series has 11 digits.
FAR = 30.0


@dataclass(frozen=True, eq=False, repr=False)
class MixturePrediction(RealPrediction):
    """A mixture of one component per draw, given by its mean and variance and by a law of its own."""

    @abstractmethod
    def component_log_prob(self, targets: Tensor) -> Tensor:
        """Log-density of targets [B, ...] under each component, [S, B, ...]."""

    @abstractmethod
    def component_tails(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """P(y ≤ value) and P(y > value) under each component, for values that broadcast to [..., S, B, ...]."""

    def tails(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """P(y ≤ value) and P(y > value) under the mixture, for values [..., B, ...], in float64."""
        axis = values.ndim - self.means.ndim + 1
        below, above = self.component_tails(values.unsqueeze(axis))
        return tuple(averaged(side.movedim(axis, 0), self.weights) for side in (below, above))  # pyright: ignore

    @checked
    def log_prob(self, targets: Tensor | np.ndarray) -> Tensor:
        """Joint log-density of a row's outputs under the exact mixture, [B]."""
        logs = sum_events(self.component_log_prob(aligned(targets, self.means[0])), 2)
        return log_mean_exp(logs, self.weights)

    def _bracket(self, tail: float | Tensor) -> tuple[Tensor, Tensor]:
        """Values between which the quantiles of both tails lie.

        P(y ≥ μ + k σ) ≤ 1/(1 + k²) for any law [Cantelli], so that k = √(1/q − 1) bounds every component's quantile.
        """
        reach = ((1 / torch.as_tensor(tail) - 1) * self.variances.double()).sqrt()
        return (self.means - reach).amin(0), (self.means + reach).amax(0)

    def _short(self, values: Tensor, tail: float | Tensor, sign: int | Tensor) -> Tensor:
        """Where values lie below the quantile with `tail` below it, or above it for sign −1."""
        below, above = self.tails(values)
        return torch.where(torch.as_tensor(sign, device=values.device) > 0, below < tail, above > tail)

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        """Continuous ranked probability score ∫ (F(z) − [y ≤ z])² dz of each row, averaged over outputs, [B]."""
        values = aligned(targets, self.means[0])
        rows = max(1, AT_ONCE // max(1, len(self.means) * values[0].numel()))
        parts = zip(
            (self[first : first + rows] for first in range(0, len(self), rows)), values.split(rows), strict=True
        )
        scores = torch.cat([part._scores(some.double()) for part, some in parts])
        return scores.reshape(len(scores), -1).mean(1).to(self.means.dtype)

    @abstractmethod
    def _scores(self, targets: Tensor) -> Tensor:
        """The CRPS of every output, [B, ...]."""


@dataclass(frozen=True, eq=False, repr=False)
class StudentTPrediction(MixturePrediction):
    """Reals with Student-t noise.

    Attributes:
        df: degrees of freedom above 2, broadcastable to `means`; `variances` are those of the noise, its scale² times
            df / (df − 2).
    """

    df: Tensor = field(kw_only=True, metadata={"rows": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "df", with_rows(self.df, self.means.shape[1]))

    @property
    def _scale(self) -> Tensor:
        return (self.variances * (self.df - 2) / self.df).sqrt()

    def component_log_prob(self, targets: Tensor) -> Tensor:
        errors, scale, df = (values.double() for values in (targets - self.means, self._scale, self.df))
        return student_t_log_prob(errors, scale, df).to(self.means.dtype)

    def component_tails(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return student_t_tails((values - self.means) / self._scale, self.df)

    def tail(self, tail: float | Tensor, *, sign: int | Tensor = 1, steps: int | None = None) -> Tensor:
        # Newton's steps on F(y) = q, and halves of the bracket where they would leave it.
        low, high = self._bracket(tail)
        value = (low + high) / 2
        for step in range(MOST_STEPS if steps is None else steps):
            below, above = self.tails(value)
            upper = torch.as_tensor(sign, device=value.device) < 0
            error = torch.where(upper, tail - above, below - tail)
            low, high = torch.where(error < 0, value, low), torch.where(error < 0, high, value)
            density = averaged(self.component_log_prob(value).exp(), self.weights)
            following = value - error / density
            following = torch.where((following > low) & (following < high), following, (low + high) / 2)
            change, value = (following - value).abs(), following
            near = torch.finfo(self.means.dtype).eps * (value.abs() + self.variances.amin(0).sqrt())
            if steps is None and step % 4 == 3 and bool((change <= near).all()):
                break
        return value.to(self.means.dtype)

    def _scores(self, targets: Tensor) -> Tensor:
        doubles = {name: getattr(self, name).double() for name in ("means", "variances", "df")}
        wide, row = replace(self, **doubles), [1] * targets.ndim
        levels = targets.new_tensor([NEGLECTED, *PANELS, 0.5, *reversed(PANELS), NEGLECTED]).reshape(-1, *row)
        sign = torch.ones_like(levels)
        sign[len(PANELS) + 2 :] = -1
        low, high = (end.expand(len(levels), *targets.shape) for end in wide._bracket(NEGLECTED))
        for _ in range(HALVINGS):  # where panels end matters little
            middle = (low + high) / 2
            short = wide._short(middle, levels, sign)
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        edges = ((low + high) / 2).cummax(0).values
        clipped = targets.clamp(min=edges[0], max=edges[-1])
        middle = clipped.clamp(min=edges[:-1], max=edges[1:])  # where the target cuts a panel, or at one of its ends
        starts, ends = torch.cat([edges[:-1], middle]), torch.cat([middle, edges[1:]])
        half, centre = (ends - starts) / 2, (starts + ends) / 2
        score = (targets - clipped).abs()  # beyond the edges F is 0 or 1
        for node, weight in zip(*np.polynomial.legendre.leggauss(NODES), strict=True):
            below, above = wide.tails(centre + half * float(node))
            tails = torch.cat([below[: len(middle)], above[len(middle) :]])  # F left of the target, 1 − F right of it
            score = score + (float(weight) * half * tails.square()).sum(0)
        return score

    def mapped(self, shift: Tensor, scale: Tensor) -> Self:
        return replace(self, means=self.means * scale + shift, variances=self.variances * scale**2)


@dataclass(frozen=True, eq=False, repr=False)
class CountPrediction(MixturePrediction):
    """Counts: Poisson, or negative binomial, given the rate that each draw answers; quantiles are whole numbers.

    Attributes:
        total_count: r of the negative binomial, whose variance is rate + rate² / r, broadcastable to `means`; None is
            Poisson.
    """

    total_count: Tensor | None = field(default=None, kw_only=True, metadata={"rows": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_count is not None:
            object.__setattr__(self, "total_count", with_rows(self.total_count, self.means.shape[1]))

    def component_log_prob(self, targets: Tensor) -> Tensor:
        # Of large counts single precision would leave few digits; a rate that was rounded to 0 is none.
        log_rates = self.means.clamp(min=torch.finfo(self.means.dtype).tiny).double().log()
        total_count = None if self.total_count is None else self.total_count.double()
        return count_log_prob(targets.double(), log_rates, total_count).to(self.means.dtype)

    def component_tails(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return count_tails(values, self.means, self.total_count)

    def tail(self, tail: float | Tensor, *, sign: int | Tensor = 1, steps: int | None = None) -> Tensor:
        low, high = self._bracket(tail)
        low, high = torch.full_like(high, -1.0), high.ceil().clamp(min=0)
        if steps is None:
            steps = math.ceil(math.log2(float(high.max()) + 2)) if high.numel() else 0
        for _ in range(steps):  # F(low) < level ≤ F(high)
            middle = ((low + high) / 2).floor()
            short = self._short(middle, tail, sign)
            low, high = torch.where(short, middle, low), torch.where(short, high, middle)
        return high.to(self.means.dtype)

    def _scores(self, targets: Tensor) -> Tensor:
        reach = (self.means + REACH * self.variances.sqrt()).amax(0).maximum(targets)
        wide = reach.reshape(len(reach), -1).amax(1) > SUMMED
        score = torch.zeros_like(targets)
        for rows, scores in ((wide, self._strided), (~wide, self._summed)):
            if bool(rows.any()):
                index = rows.nonzero().flatten()
                score[rows] = scores(self[index], targets[index])
        return score

    @staticmethod
    def _summed(rows: "CountPrediction", targets: Tensor) -> Tensor:
        """Σ (F(k) − [y ≤ k])² from 0 on, where F adds up probabilities, which cost less than tails."""
        rows = rows.to(torch.float64)
        below, score, value = torch.zeros_like(targets), torch.zeros_like(targets), torch.zeros_like(targets)
        last = float(targets.max())
        for number in range(2 * SUMMED):
            if number % 32 == 0 and number > last and bool((below > 1 - NEGLECTED).all()):
                break
            below = below + averaged(rows.component_log_prob(value).exp(), rows.weights)
            score = score + torch.where(value < targets, below, 1 - below).square()
            value = value + 1
        return score

    @staticmethod
    def _strided(rows: "CountPrediction", targets: Tensor) -> Tensor:
        """The same where counts are large, some values at a time."""
        low, high = rows.tail(NEGLECTED).double(), rows.tail(NEGLECTED, sign=-1).double()
        score = (targets - targets.clamp(min=low, max=high)).abs()  # beyond the edges F is 0 or 1
        width = high - low  # Σ (F(k) − [y ≤ k])² over low ≤ k < high, in strides that grow with the distance from low
        widest, done = (width / STRIDES).ceil().clamp(min=1), torch.zeros_like(width)
        while bool((done < width).any()):
            stride = torch.minimum((done / FINE).ceil().clamp(min=1), widest).minimum(width - done).clamp(min=0)
            first = low + done
            below, above = rows.tails(first + ((stride - 1) / 2).clamp(min=0).floor())
            before = (targets - first).clamp(min=0).minimum(stride)  # counts of this stride below the target
            score = score + before * below.square() + (stride - before) * above.square()
            done = done + stride
        return score

    def rescaled(self, shift: Any, scale: Any) -> Self:
        raise ConfigError("counts have no other units; rescale the rates of your network instead")


@dataclass(frozen=True, eq=False, repr=False)
class OutputPrediction(Prediction):
    """What a likelihood of the user's own says: outputs per draw, judged by its log-density.

    Attributes:
        outputs: per draw, [S, B, ...].
        likelihood: the settings, with `log_prob(outputs, targets)` and `mean(outputs)`.
    """

    outputs: Tensor = rows_on(1)
    likelihood: Any = None

    columns: ClassVar[tuple[str, ...]] = ("mean", "epistemic_std")

    def __len__(self) -> int:
        return self.outputs.shape[1]

    @property
    def mean(self) -> Tensor:
        """Mean over draws of what the likelihood predicts."""
        return averaged(self.likelihood.mean(self.outputs), self.weights)

    @property
    def epistemic_std(self) -> Tensor:
        """Standard deviation over draws of what the likelihood predicts."""
        return variance(self.likelihood.mean(self.outputs), self.weights).sqrt()

    @checked
    def log_prob(self, targets: Tensor | np.ndarray) -> Tensor:
        values = torch.as_tensor(targets)
        logs = torch.stack([self.likelihood.log_prob(draw, values) for draw in self.outputs])
        return log_mean_exp(logs, self.weights)


def student_t_log_prob(errors: Tensor, scale: Tensor, df: Tensor) -> Tensor:
    """Log-density of Student's t, element by element."""
    normaliser = log_gamma_ratio(df / 2, torch.full_like(df, 0.5)) - 0.5 * (df * math.pi).log() - scale.log()
    return normaliser - (df + 1) / 2 * torch.log1p((errors / scale).square() / df)


def count_log_prob(targets: Tensor, log_rates: Tensor, total_count: Tensor | None) -> Tensor:
    """Log-probability of counts with these logarithms of their means, element by element."""
    if total_count is None:
        return targets * log_rates - log_rates.exp() - torch.lgamma(targets + 1)
    # y log(μ/(r + μ)) + r log(r/(r + μ)), with log((r + μ)/r) = log(1 + μ/r)
    ratio = log_rates - total_count.log()
    more = softplus(ratio)
    normaliser = log_gamma_ratio(total_count, targets) - torch.lgamma(targets + 1)
    return normaliser + targets * (ratio - more) - total_count * more


def log_gamma_ratio(start: Tensor, step: Tensor) -> Tensor:
    """The difference log Γ(x + s) − log Γ(x), also of so large an x that rounding would leave nothing of it."""
    far = start.clamp(min=FAR)
    end = far + step
    # Stirling: log Γ(x) = (x − ½) log x − x + ½ log 2π + 1/12x − 1/360x³ + …
    series = (1 / end - 1 / far) / 12 - (end**-3 - far**-3) / 360
    stirling = (end - 0.5) * torch.log1p(step / far) + step * (far.log() - 1) + series
    return torch.where(start > FAR, stirling, torch.lgamma(start + step) - torch.lgamma(start))
