"""Predictions of real numbers: a mixture of Gaussians, kept whole."""

import math
from dataclasses import dataclass, field, replace
from importlib import import_module
from statistics import NormalDist
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, require_fraction
from ..hints import checked
from .base import Prediction, rows_on
from .formulas import aligned, averaged, log_mean_exp, normal_log_prob, sum_events, variance, with_rows


@dataclass(frozen=True, eq=False, repr=False)
class RealPrediction(Prediction):
    """Real outputs: a mixture of Gaussians, one per draw, kept whole so that nothing is moment matched.

    Attributes:
        means: the network's outputs per draw, [S, B, ...].
        variances: noise variance, broadcastable to `means`; of a full covariance its diagonal.
        covariances: full noise covariance, broadcastable to [S, B, C, C], or None.
        mean_covariances: covariance of a component's mean itself where that of the weights is not drawn but known in
            closed form, over a row's outputs read in order, [S, B, E, E], or None.
    """

    means: Tensor = rows_on(1)
    variances: Tensor = rows_on(1)
    covariances: Tensor | None = field(default=None, metadata={"rows": 1})
    mean_covariances: Tensor | None = field(default=None, metadata={"rows": 1})

    columns: ClassVar[tuple[str, ...]] = ("mean", "std", "aleatoric_std", "epistemic_std")

    def __post_init__(self) -> None:
        """Give the noise a whole row axis, so that indexing rows is the same for every tensor."""
        rows = self.means.shape[1]
        object.__setattr__(self, "variances", with_rows(self.variances, rows))
        if self.covariances is not None:
            object.__setattr__(self, "covariances", with_rows(self.covariances, rows))

    def __len__(self) -> int:
        return self.means.shape[1]

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture."""
        return averaged(self.means, self.weights)

    @property
    def aleatoric(self) -> Tensor:
        """Aleatoric variance, in the target's units squared: the mean noise variance; `aleatoric_std` is its root."""
        return averaged(self.variances.expand_as(self.means), self.weights)

    @property
    def epistemic(self) -> Tensor:
        """Epistemic variance, in the target's units squared: that of the mixture's means; `epistemic_std` is its root.

        The variance of the draws' means (of the mixture itself, so divided by S), and the mean of what
        `mean_covariances` adds.
        """
        return variance(self.means, self.weights) + averaged(self._mean_variances, self.weights)

    @property
    def aleatoric_std(self) -> Tensor:
        """Root of the aleatoric variance, in the target's units: std² = aleatoric_std² + epistemic_std²."""
        return self.aleatoric.sqrt()

    @property
    def epistemic_std(self) -> Tensor:
        """Root of the epistemic variance, in the target's units."""
        return self.epistemic.sqrt()

    @property
    def std(self) -> Tensor:
        """Standard deviation of the mixture, in the target's units: Var[y] = E[Var[y|w]] + Var[E[y|w]]."""
        return (self.aleatoric + self.epistemic).sqrt()

    @property
    def component_variances(self) -> Tensor:
        """Variance of each output under each component, noise and that of its mean together, [S, B, ...]."""
        return (self.variances + self._mean_variances).expand_as(self.means)

    @property
    def _mean_variances(self) -> Tensor:
        if self.mean_covariances is None:
            return torch.zeros_like(self.variances)
        variances = self.mean_covariances.diagonal(dim1=-2, dim2=-1).reshape(self.means.shape)
        return variances.clamp(min=0)  # below 0 only by rounding

    @checked
    def log_prob(self, targets: Tensor | np.ndarray) -> Tensor:
        """Joint log-density of a row's outputs under the exact mixture, [B]."""
        errors = aligned(targets, self.means[0]) - self.means  # [S, B, ...]
        if self.mean_covariances is not None:
            flat = errors.reshape(*errors.shape[:2], -1)  # [S, B, E]
            noise = self.covariances
            if noise is None:
                noise = self.variances.expand_as(self.means).reshape(flat.shape).diag_embed()
            tril = torch.linalg.cholesky(noise + self.mean_covariances)
            return log_mean_exp(normal_log_prob(flat, scale_tril=tril), self.weights)
        if self.covariances is not None:
            tril = torch.linalg.cholesky(self.covariances)
            return log_mean_exp(normal_log_prob(errors, scale_tril=tril), self.weights)
        return log_mean_exp(sum_events(normal_log_prob(errors, std=self.variances.sqrt()), 2), self.weights)

    @checked
    def quantile(self, q: float | Tensor) -> Tensor:
        """Quantiles of each output's marginal mixture, by root finding; the axes of `q` come first."""
        levels = torch.as_tensor(q, dtype=torch.float64, device="cpu")
        if not ((levels > 0) & (levels < 1)).all():
            raise ConfigError(f"quantile levels must lie strictly between 0 and 1, got {q}")
        if levels.ndim:
            return torch.stack([self.quantile(level) for level in levels.unbind()])
        # The nearer tail keeps its digits: the q-quantile of y is minus the (1 - q)-quantile of -y.
        return self.tail(float(levels)) if levels <= 0.5 else self.tail(float(1 - levels), sign=-1)

    def tail(self, tail: Any, *, sign: Any = 1, steps: int | None = None) -> Tensor:
        """The quantile with `tail` of the mixture below it, or above it for sign −1.

        Args:
            tail: at most ½.
            sign: of y.
            steps: halvings of the bracket of all components' quantiles; None takes as many as the dtype has bits for.
        """
        means, std = sign * self.means, (self.variances + self._mean_variances).sqrt()
        # The components' quantiles bracket the mixture's: F(min) <= q <= F(max).
        quantiles = means + std * NormalDist().inv_cdf(tail)
        low, high = quantiles.amin(0), quantiles.amax(0)
        if steps is None:
            # A step gains one bit; those of the dtype are counted from the narrowest component on.
            width = (high - low) / std.amin(0)
            bits = math.log2(float(width.max()) / torch.finfo(quantiles.dtype).eps + 1) if width.numel() else 0
            steps = math.ceil(bits)
        for _ in range(steps):
            middle = (low + high) / 2
            # F(y) = Σ_s w_s Φ((y - mean_s) / std_s) with Φ(z) = ½ erfc(-z / √2), exact in the lower tail
            tails = torch.erfc((means - middle) / (std * math.sqrt(2)))
            below = averaged(tails, self.weights) < 2 * tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return sign * (low + high) / 2

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval of each output's marginal mixture that holds `level` of it."""
        require_fraction(zero=False, level=level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        """Exact continuous ranked probability score of each row's mixture, averaged over outputs, [B]."""
        from ..metrics import crps_mixture_per_example  # a dozen modules that predictions do without

        return crps_mixture_per_example(
            aligned(targets, self.means[0]), self.means, self.component_variances.sqrt(), self.weights
        )

    def plot(self, targets: Tensor | None = None, *, inputs: Tensor | None = None, axis: Any = None) -> Any:
        """Mean and intervals of one output: `dubito.plot.regression_fan`; of several, the parts of the uncertainty.

        Args:
            targets: the true values of one output, drawn as dots.
            inputs: one number per row, to draw over; None orders rows by their mean.
            axis: of matplotlib, to draw on; None makes a figure, which a notebook shows as `plot().figure`.
        """
        if self.mean.numel() != len(self):
            return super().plot(targets, axis=axis)
        return import_module("dubito.plot").regression_fan(self, inputs, targets, axis=axis)

    def rescaled(self, shift: Any, scale: Any) -> Self:
        """The prediction of `shift + scale · y`: back from standardised targets to original units."""
        shift, scale = self._per_output("shift", shift), self._per_output("scale", scale)
        if not (scale > 0).all():
            raise ConfigError(f"scale must be above 0, got {scale.tolist()}")
        rescaled = self.mapped(shift, scale)
        if not (rescaled.variances.isfinite() & ((rescaled.variances > 0) | (self.variances == 0))).all():
            raise ConfigError(
                f"variances times the square of scale {scale.tolist()} leave the range of {self.variances.dtype}; take "
                "prediction.to(torch.float64).rescaled(...)"
            )
        return rescaled

    def mapped(self, shift: Tensor, scale: Tensor) -> Self:
        """As `rescaled`, for tensors that are known to fit and never looked at."""
        per_output = scale.expand(self.means.shape[2:]).reshape(-1)  # [E]
        full, mean_covariances = (
            None if matrices is None else matrices * per_output[:, None] * per_output
            for matrices in (self.covariances, self.mean_covariances)
        )
        means, variances = self.means * scale + shift, self.variances * scale**2
        return replace(self, means=means, variances=variances, covariances=full, mean_covariances=mean_covariances)

    def _per_output(self, name: str, value: Any) -> Tensor:
        """A finite number, or numbers that broadcast to a row's outputs and never to the rows themselves."""
        try:
            value = torch.as_tensor(value, dtype=self.means.dtype, device=self.means.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{name} must be a number, or numbers per output: {error}") from error
        value = value.reshape(()) if value.numel() == 1 else value
        row = tuple(self.means.shape[2:])
        fits = all(n in (1, m) for n, m in zip(reversed(value.shape), reversed(row), strict=False))
        if value.ndim > len(row) or not fits:
            raise ConfigError(f"{name} must be one number or fit a row's outputs {row}, got {tuple(value.shape)}")
        if not value.isfinite().all():
            raise ConfigError(f"{name} must be finite, got {value.tolist()}")
        return value
