"""Likelihoods: frozen settings that build the small module which judges a network's outputs.

`Categorical`, `Bernoulli` and `Gaussian` are settings, shared freely. `build(example_outputs)` makes the module
`posterior.likelihood`, which holds what is learned (a Gaussian's noise), so two fits never share state.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import ConfigError, DataError, NetworkError, require_positive
from .inputs import RowNumbers, row_number
from .prediction import (
    BernoulliPrediction,
    CategoricalPrediction,
    Prediction,
    RealPrediction,
    aligned,
    entropy,
    normal_log_prob,
    not_binary,
    sum_events,
)


class Likelihood(ABC):
    """Settings of a likelihood."""

    @abstractmethod
    def build(
        self, example_outputs: Tensor | None, example_targets: Tensor | None = None
    ) -> "BuiltLikelihood":
        """The module for outputs of this shape; targets, where given, tell a good start for learned noise."""


class BuiltLikelihood(nn.Module, ABC):
    """Judges outputs: log-densities, draws of targets, curvature, predictions.

    `draw` is the number of the posterior draw behind the outputs: noise may differ between components.
    """

    def __init__(self, settings: Likelihood) -> None:
        super().__init__()
        self.settings = settings

    @abstractmethod
    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse outputs of a shape this likelihood cannot judge."""

    @abstractmethod
    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        """The targets in the form `log_prob` takes, or an error that says what is wrong with which row."""

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        """Log-density of each row's target, summed over event axes, [B]."""

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None, draw: int = 0) -> Tensor:
        """Targets drawn from the likelihood, one per row."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return self.sample_with(outputs, noise, draw)

    @abstractmethod
    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        """Targets drawn with given standard Normal noise of the outputs' shape."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor, draw: int = 0) -> Tensor:
        """R with R Rᵀ = ∂²(−log p)/∂f∂fᵀ, [B, …, C, C]: one block per position of C coupled outputs."""

    @abstractmethod
    def predictive(self, draws: Iterable[Tensor]) -> Prediction:
        """The prediction from outputs per draw, each [B, ...], read one at a time."""


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes from logits; targets are whole numbers.

    Args:
        class_axis: the axis of the outputs that holds the classes: 1 as in PyTorch's own losses, so that
            outputs [B, C, H, W] with targets [B, H, W] are one label per pixel.
    """

    class_axis: int = 1

    def __post_init__(self) -> None:
        whole = isinstance(self.class_axis, int) and not isinstance(self.class_axis, bool)
        if not whole or self.class_axis == 0:
            raise ConfigError(
                f"class_axis must be a whole number other than 0, the axis of rows, got {self.class_axis!r}"
            )

    def build(
        self, example_outputs: Tensor | None, example_targets: Tensor | None = None
    ) -> "BuiltLikelihood":
        return CategoricalLikelihood(self)


class CategoricalLikelihood(BuiltLikelihood):
    """See `Categorical`."""

    settings: Categorical

    def check_outputs(self, outputs: Tensor) -> None:
        axis = self.settings.class_axis
        exists = -outputs.ndim < axis < outputs.ndim  # neither beyond the last axis nor that of the rows
        if not exists or outputs.shape[axis] < 2 or not outputs.is_floating_point():
            raise NetworkError(
                f"Categorical needs real outputs [B, C, ...] with at least 2 classes on axis {axis}, "
                f"got {outputs.dtype}, {tuple(outputs.shape)}; for one logit use Bernoulli()"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(f"Categorical targets must be whole numbers, got {targets.dtype}; use y.long()")
        axis = self._axis(outputs)
        expected = outputs.shape[:axis] + outputs.shape[axis + 1 :]
        if targets.shape[1:] != expected[1:]:
            remedy = "y.squeeze(-1)" if targets.shape[-1] == 1 else f"one-hot targets: y.argmax({axis})"
            raise DataError(
                f"targets must have shape [B{''.join(f', {n}' for n in expected[1:])}], "
                f"got {tuple(targets.shape)}; {remedy}"
            )
        classes = outputs.shape[axis]
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            wrong = high if high >= classes else low
            row = row_number(int((targets == wrong).nonzero()[0][0]), rows)
            raise DataError(f"labels must lie in 0..{classes - 1} (the network has {classes} outputs), "
                            f"got {wrong} at row {row}")  # fmt: skip
        return targets.long()

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        return sum_events(-F.cross_entropy(self._classes_second(outputs), targets, reduction="none"), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        # Gumbel-max: argmax(logits + G), with -log U ~ Exp(1) from the upper tail, which keeps its digits.
        exponential = -torch.special.log_ndtr(at_least_float(noise))
        return (outputs.detach() - exponential.log()).argmax(self._axis(outputs))

    def hessian_root(self, outputs: Tensor, draw: int = 0) -> Tensor:
        probs = outputs.detach().movedim(self._axis(outputs), -1).softmax(-1)
        root = probs.sqrt()
        # (diag(√p) − p √pᵀ)(diag(√p) − p √pᵀ)ᵀ = diag(p) − p pᵀ, because √pᵀ√p = 1
        return root.diag_embed() - probs.unsqueeze(-1) * root.unsqueeze(-2)

    def predictive(self, draws: Iterable[Tensor]) -> CategoricalPrediction:
        log_probs = aleatoric = torch.empty(())
        kept: list[Tensor] = []
        count, axis = 0, 1
        for outputs in draws:
            axis = self._axis(outputs)
            one = at_least_float(outputs).log_softmax(axis)
            log_probs = one if count == 0 else torch.logaddexp(log_probs, one)
            aleatoric = entropy(one, axis) + (aleatoric if count else 0)
            if one.ndim > 2:
                kept.append(one)
            count += 1
        samples = torch.stack(kept) if kept else None
        if count > 1:
            log_probs = log_probs.log_softmax(axis)  # Σ_c Σ_s p_sc = S: this divides by S, to 1 exactly
        return CategoricalPrediction(log_probs, aleatoric / count, axis, samples)

    def _axis(self, outputs: Tensor) -> int:
        return self.settings.class_axis % outputs.ndim

    def _classes_second(self, outputs: Tensor) -> Tensor:
        axis = self._axis(outputs)
        return outputs if axis == 1 else outputs.movedim(axis, 1)


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no from logits, one or many per row; targets are 0 and 1."""

    def build(
        self, example_outputs: Tensor | None, example_targets: Tensor | None = None
    ) -> "BuiltLikelihood":
        return BernoulliLikelihood(self)


class BernoulliLikelihood(BuiltLikelihood):
    """See `Bernoulli`."""

    def check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim < 1 or not outputs.is_floating_point():
            raise NetworkError(
                f"Bernoulli needs real outputs [B] or [B, ...], got {outputs.dtype}, {tuple(outputs.shape)}"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        values = aligned(targets, outputs.new_empty(len(targets), *outputs.shape[1:]))
        wrong = not_binary(values)
        if wrong is not None:
            raise DataError(
                f"Bernoulli targets must be 0 or 1, got {values[wrong].item():g} at row {row_number(wrong[0], rows)}"
            )
        return values

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        return sum_events(-F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        return (torch.special.ndtr(at_least_float(noise)) < outputs.detach().sigmoid()).to(outputs.dtype)

    def hessian_root(self, outputs: Tensor, draw: int = 0) -> Tensor:
        logits = outputs.detach()
        # −d² log p / df² = p(1 − p) = σ(f) σ(−f), which keeps its digits where p is close to 1
        root = (logits.sigmoid() * (-logits).sigmoid()).sqrt()
        return root.reshape(len(root), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor]) -> BernoulliPrediction:
        yes = no = aleatoric = torch.empty(())
        kept: list[Tensor] = []
        count = 0
        for outputs in draws:
            logits = at_least_float(outputs)
            pair = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], -1)
            no = pair[..., 0] if count == 0 else torch.logaddexp(no, pair[..., 0])
            yes = pair[..., 1] if count == 0 else torch.logaddexp(yes, pair[..., 1])
            aleatoric = entropy(pair, -1) + (aleatoric if count else 0)
            if logits.ndim > 2 or (logits.ndim == 2 and logits.shape[1] > 1):
                kept.append(logits)
            count += 1
        if count > 1:
            no, yes = torch.stack([no, yes]).log_softmax(0)  # Σ_s p_s + Σ_s (1 − p_s) = S: this divides by S
        samples = torch.stack(kept) if kept else None
        return BernoulliPrediction(yes, aleatoric / count, no, samples)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Real outputs with Normal noise.

    Args:
        std: the noise's standard deviation, one number or one per output; None learns it, per output.
        covariance: a full noise covariance [C, C] instead, as nested sequences.
    """

    std: float | tuple[float, ...] | None = None
    covariance: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if self.std is not None and self.covariance is not None:
            raise ConfigError("Gaussian takes std or covariance, got both")
        if self.std is not None:
            if isinstance(self.std, tuple | list):
                if not self.std:
                    raise ConfigError("std must be a number, or one per output, got none")
                require_positive(**{f"std[{i}]": value for i, value in enumerate(self.std)})
                object.__setattr__(self, "std", tuple(map(float, self.std)))
            else:
                require_positive(std=self.std)
                object.__setattr__(self, "std", float(self.std))
        if self.covariance is not None:
            object.__setattr__(self, "covariance", checked_covariance(self.covariance))

    def build(
        self, example_outputs: Tensor | None, example_targets: Tensor | None = None
    ) -> "GaussianLikelihood":
        # Without outputs the noise keeps all its digits, until it is moved to where the network lives.
        like = torch.empty(0, dtype=torch.float64) if example_outputs is None else example_outputs
        if self.covariance is not None:
            full = torch.tensor(self.covariance, dtype=torch.float64)
            return GaussianLikelihood(self, scale_tril=torch.linalg.cholesky(full).to(like))
        if self.std is not None:
            return GaussianLikelihood(self, noise_std=torch.tensor(self.std, dtype=torch.float64).to(like))
        if example_outputs is None:
            return GaussianLikelihood(self, raw_std=nn.UninitializedParameter())
        start = torch.ones(noise_shape(example_outputs)).to(like)
        if example_targets is not None and len(example_targets) > 1:
            flat = aligned(example_targets, example_outputs.new_empty(len(example_targets), *like.shape[1:]))
            spread = flat.detach().transpose(0, 1).flatten(1).std(1) if flat.ndim > 1 else flat.std()
            start = torch.where(spread > 0, spread, 1.0).reshape(start.shape).to(like)
        return GaussianLikelihood(self, raw_std=nn.Parameter(inverse_softplus(start)))


class GaussianLikelihood(BuiltLikelihood):
    """Normal noise of one of three forms, each with an optional leading axis of components.

    Args:
        settings: what was asked for.
        raw_std: learned, std = softplus(raw_std), [(K,) C].
        noise_std: fixed standard deviations, [(K,) C] or a scalar.
        scale_tril: Cholesky factors of full covariances, [(K,) C, C].
        num_components: K where the leading axis is one of components, else 1: draw s uses noise s mod K.
    """

    settings: Gaussian
    raw_std: nn.Parameter | nn.UninitializedParameter | None
    noise_std: Tensor | None
    scale_tril: Tensor | None

    def __init__(
        self,
        settings: Gaussian,
        *,
        raw_std: nn.Parameter | nn.UninitializedParameter | None = None,
        noise_std: Tensor | None = None,
        scale_tril: Tensor | None = None,
        num_components: int = 1,
    ) -> None:
        super().__init__(settings)
        self.num_components = num_components
        self.register_parameter("raw_std", raw_std)  # pyright: ignore[reportArgumentType]
        self.register_buffer("noise_std", noise_std)
        self.register_buffer("scale_tril", scale_tril)

    def std(self, draw: int = 0) -> Tensor:
        """Standard deviation per output of draw `draw`; of a full covariance that of its diagonal."""
        if self.scale_tril is not None:
            return self._of(self.scale_tril, draw).square().sum(-1).sqrt()
        if self.raw_std is not None:
            return F.softplus(self._of(self.raw_std, draw))
        assert isinstance(self.noise_std, Tensor)
        return self._of(self.noise_std, draw)

    def _std_for(self, outputs: Tensor, draw: int = 0) -> Tensor:
        """Standard deviations in a shape that meets the outputs: positions after the output axis share one."""
        std = self.std(draw)
        return std.reshape(-1, *[1] * (outputs.ndim - 2)) if std.ndim == 1 else std

    def check_outputs(self, outputs: Tensor) -> None:
        if outputs.ndim < 1 or not outputs.is_floating_point():
            raise NetworkError(
                f"Gaussian needs real outputs [B, ...], got {outputs.dtype}, {tuple(outputs.shape)}"
            )
        if isinstance(self.raw_std, nn.UninitializedParameter):
            return
        shape = tuple(self._std_for(outputs).shape)
        dense = self.scale_tril is not None and outputs.ndim != 2
        if dense or shape not in ((), tuple(noise_shape(outputs))):
            kind = "covariance" if self.scale_tril is not None else "std"
            raise NetworkError(
                f"the noise's {kind} is for {shape[0]} outputs, "
                f"but the network's outputs have shape {tuple(outputs.shape)}"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        return aligned(targets, outputs.new_empty(len(targets), *outputs.shape[1:]))

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        if isinstance(self.raw_std, nn.UninitializedParameter):
            self._materialise(outputs)
        if self.scale_tril is not None:
            return normal_log_prob(targets - outputs, scale_tril=self._of(self.scale_tril, draw))
        return sum_events(normal_log_prob(targets - outputs, std=self._std_for(outputs, draw)), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        if self.scale_tril is not None:
            return outputs.detach() + noise @ self._of(self.scale_tril, draw).mT
        return outputs.detach() + noise * self._std_for(outputs, draw).detach()

    def hessian_root(self, outputs: Tensor, draw: int = 0) -> Tensor:
        if self.scale_tril is not None:
            tril = self._of(self.scale_tril, draw)
            eye = torch.eye(len(tril), dtype=tril.dtype, device=tril.device)
            root = torch.linalg.solve_triangular(tril, eye, upper=False).mT  # Σ⁻¹ = L⁻ᵀ L⁻¹
            return root.expand(len(outputs), *root.shape)
        inverse = (1 / self._std_for(outputs, draw).detach()).expand_as(outputs)
        return inverse.reshape(len(outputs), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor]) -> RealPrediction:
        means = torch.stack([at_least_float(outputs) for outputs in draws])
        each = range(min(self.num_components, len(means)))
        times = -(-len(means) // len(each))

        def per_draw(values: list[Tensor]) -> Tensor:  # [S or 1, 1, ...], draw s has noise s mod K
            stacked = torch.stack(values).to(means).unsqueeze(1)
            return stacked if len(values) == 1 else torch.cat([stacked] * times)[: len(means)]

        with torch.no_grad():
            variances = per_draw([self._std_for(means[0], s).square().expand(means.shape[2:]) for s in each])
            full = None
            if self.scale_tril is not None:
                trils = [self._of(self.scale_tril, draw) for draw in each]
                full = per_draw([tril @ tril.mT for tril in trils])
        return RealPrediction(means, variances, full)

    def with_noise(
        self, *, std: Tensor | None = None, covariance: Tensor | None = None
    ) -> "GaussianLikelihood":
        """The same likelihood with fixed noise: `std` [(K,) C] or `covariance` [(K,) C, C]."""
        if covariance is not None:
            components = len(covariance) if covariance.ndim == 3 else 1
            tril = torch.linalg.cholesky(covariance)
            return GaussianLikelihood(self.settings, scale_tril=tril, num_components=components)
        assert std is not None
        components = len(std) if std.ndim > self.std().ndim else 1
        return GaussianLikelihood(self.settings, noise_std=std, num_components=components)

    def _of(self, noise: Tensor, draw: int) -> Tensor:
        return noise if self.num_components == 1 else noise[draw % self.num_components]

    def _materialise(self, outputs: Tensor) -> None:
        assert isinstance(self.raw_std, nn.UninitializedParameter)
        self.raw_std.materialize(noise_shape(outputs), device=outputs.device, dtype=outputs.dtype)
        with torch.no_grad():
            self.raw_std.copy_(inverse_softplus(torch.ones_like(self.raw_std)))


def checked_covariance(rows: Any) -> tuple[tuple[float, ...], ...]:
    """A covariance as nested tuples, after checking that it is one."""
    try:
        full = torch.tensor([[float(value) for value in row] for row in rows], dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"covariance must be a matrix of numbers [C, C], got {rows!r}") from error
    if full.ndim != 2 or full.shape[0] != full.shape[1] or not full.isfinite().all():
        raise ConfigError(f"covariance must be a square matrix of finite numbers, got {rows!r}")
    if not torch.allclose(full, full.mT):
        raise ConfigError(f"covariance must be symmetric, got {rows!r}")
    full = (full + full.mT) / 2  # of matrices that are symmetric but for rounding
    if torch.linalg.cholesky_ex(full).info:
        raise ConfigError(f"covariance must be positive definite, got {rows!r}")
    return tuple(map(tuple, full.tolist()))


def noise_shape(outputs: Tensor) -> torch.Size:
    """One noise per output; positions after the output axis (an image's) share it."""
    return torch.Size([n if axis == 0 else 1 for axis, n in enumerate(outputs.shape[1:])])


def inverse_softplus(value: Tensor) -> Tensor:
    """X with softplus(x) = value, stable for small and large values: log(eᵛ − 1) = v + log(1 − e⁻ᵛ)."""
    return value + torch.log(-torch.expm1(-value))


def at_least_float(outputs: Tensor) -> Tensor:
    """Outputs in at least single precision, in which probabilities are computed."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def settings_of(value: Any) -> Likelihood:
    """The likelihood settings, or an error where something else was given."""
    if isinstance(value, Likelihood):
        return value
    raise ConfigError(
        f"the likelihood must be Categorical(), Bernoulli() or Gaussian(), got {value!r}"
        + ("; give an instance: add ()" if isinstance(value, type) else "")
    )
