"""What a posterior says about new rows: the answer, how sure it is, and where the doubt comes from."""

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from numbers import Integral
from statistics import NormalDist
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from .errors import ConfigError, DataError, require_fraction


def rows_on(axis: int) -> Any:
    """A tensor field whose rows lie along `axis`; optional fields may be None."""
    return field(metadata={"rows": axis})


@dataclass(frozen=True, eq=False)
class Prediction(ABC):
    """Base of predictions: rows can be indexed, moved, and turned into arrays or a table."""

    #: Names of the per-row quantities that `to_numpy` and `to_pandas` show.
    columns: ClassVar[tuple[str, ...]]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def log_prob(self, targets: Tensor) -> Tensor:
        """Log-density of each row's target under the exact mixture over draws, [B]."""

    def __getitem__(self, index: Any) -> Self:
        """The prediction for some rows; a single number keeps the row axis."""
        if isinstance(index, Integral) or (isinstance(index, Tensor) and index.ndim == 0):
            index = int(index)
            if not -len(self) <= index < len(self):  # also what ends a plain `for row in prediction`
                raise IndexError(f"row {index} of a prediction with {len(self)} rows")
            index = slice(index, index + 1 or None)
        return self._replaced(lambda tensor, axis: tensor[(slice(None),) * axis + (index,)])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The prediction on another device or with another dtype, as `Tensor.to` takes them."""
        return self._replaced(lambda tensor, _: tensor.to(*args, **kwargs))

    def to_numpy(self) -> dict[str, Any]:
        """Arrays by name, one entry per row quantity."""
        return {name: getattr(self, name).detach().cpu().numpy() for name in self.columns}

    def to_pandas(self) -> Any:
        """One row per example; a quantity with several outputs becomes columns `name_0`, `name_1`, …"""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError(
                "to_pandas needs pandas; install it with: pip install dubito[tabular]"
            ) from error
        columns: dict[str, Any] = {}
        for name, array in self.to_numpy().items():
            if array.ndim == 1:
                columns[name] = array
            elif array.ndim == 2 and array.shape[1] == 1:
                columns[name] = array[:, 0]
            elif array.ndim == 2:
                columns |= {f"{name}_{i}": array[:, i] for i in range(array.shape[1])}
            else:
                raise DataError(
                    f"a table needs at most one axis of outputs, but {name} has shape {array.shape}; use to_numpy"
                )
        return pd.DataFrame(columns)

    @classmethod
    def cat(cls, parts: list[Self]) -> Self:
        """The rows of several predictions of the same draws, one after the other."""
        values = {}
        for item in dataclasses.fields(cls):
            pieces = [getattr(part, item.name) for part in parts]
            axis = item.metadata.get("rows")
            if axis is not None and isinstance(pieces[0], Tensor):
                values[item.name] = torch.cat(pieces, dim=axis)
            else:
                values[item.name] = pieces[0]
        return cls(**values)

    def _replaced(self, change: Any) -> Self:
        values = {}
        for item in dataclasses.fields(self):
            value, axis = getattr(self, item.name), item.metadata.get("rows")
            values[item.name] = (
                change(value, axis) if axis is not None and isinstance(value, Tensor) else value
            )
        return type(self)(**values)


@dataclass(frozen=True, eq=False)
class ClassPrediction(Prediction):
    """Classes: probabilities and the split of their entropy (in nats).

    Attributes:
        log_probs: log of the mean probability over draws, laid out like the network's outputs.
        aleatoric: mean entropy of the single draws: doubt that more data would not remove.
    """

    log_probs: Tensor = rows_on(0)
    aleatoric: Tensor = rows_on(0)

    columns: ClassVar[tuple[str, ...]] = ("labels", "confidence", "total", "aleatoric", "epistemic", "probs")

    def __len__(self) -> int:
        return len(self.log_probs)

    @property
    def probs(self) -> Tensor:
        """Mean probability over draws."""
        return self.log_probs.exp()

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """The likeliest class."""

    @property
    @abstractmethod
    def confidence(self) -> Tensor:
        """The probability of the likeliest class."""

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Entropy of the mean probabilities."""

    @property
    def epistemic(self) -> Tensor:
        """Mutual information of label and weights: doubt that more data would remove."""
        return (self.total - self.aleatoric).clamp(min=0)  # below 0 only by rounding

    @abstractmethod
    def sets(self, level: float = 0.95) -> Tensor:
        """Smallest sets of classes that together hold at least `level`, as booleans along the class axis."""


@dataclass(frozen=True, eq=False)
class CategoricalPrediction(ClassPrediction):
    """One class out of C per position; `probs` has the classes on `class_axis`, as the network has.

    Attributes:
        class_axis: where the classes lie.
        sample_log_probs: per draw, only kept where a row has several positions, whose joint density needs them.
    """

    class_axis: int = 1
    sample_log_probs: Tensor | None = field(default=None, metadata={"rows": 1})

    @property
    def labels(self) -> Tensor:
        return self.log_probs.argmax(self.class_axis)

    @property
    def confidence(self) -> Tensor:
        return self.log_probs.amax(self.class_axis).exp()

    @property
    def total(self) -> Tensor:
        return entropy(self.log_probs, self.class_axis)

    def sets(self, level: float = 0.95) -> Tensor:
        require_fraction(zero=False, one=True, level=level)
        ordered, order = self.probs.sort(dim=self.class_axis, descending=True, stable=True)
        enough = ordered.cumsum(self.class_axis) >= level
        inside = ~enough.roll(1, self.class_axis)  # the classes before it do not yet hold the level
        inside.select(self.class_axis, 0).fill_(True)
        return torch.zeros_like(inside).scatter(self.class_axis, order, inside)

    def log_prob(self, targets: Tensor) -> Tensor:
        targets = torch.as_tensor(targets, device=self.log_probs.device)
        if self.sample_log_probs is None:
            return gathered(self.log_probs, targets, self.class_axis)
        draws = torch.stack([gathered(one, targets, self.class_axis) for one in self.sample_log_probs])
        return log_mean_exp(draws)  # log 1/S Σ_s Π_positions p_s


@dataclass(frozen=True, eq=False)
class BernoulliPrediction(ClassPrediction):
    """Yes or no per output; `probs` is the probability of yes (1).

    Attributes:
        log_complements: log of the mean probability of no (0).
        sample_logits: per draw, only kept where a row has several outputs, whose joint density needs them.
    """

    log_complements: Tensor = rows_on(0)
    sample_logits: Tensor | None = field(default=None, metadata={"rows": 1})

    @property
    def labels(self) -> Tensor:
        return (self.log_probs > self.log_complements).long()

    @property
    def confidence(self) -> Tensor:
        return torch.maximum(self.log_probs, self.log_complements).exp()

    @property
    def total(self) -> Tensor:
        return entropy(torch.stack([self.log_complements, self.log_probs], -1), -1)

    def sets(self, level: float = 0.95) -> Tensor:
        require_fraction(zero=False, one=True, level=level)
        likeliest = torch.nn.functional.one_hot(self.labels, 2).bool()  # [..., (no, yes)]
        return likeliest | (self.confidence < level).unsqueeze(-1)

    def log_prob(self, targets: Tensor) -> Tensor:
        values = aligned(targets, self.log_probs)
        wrong = not_binary(values)
        if wrong is not None:
            raise DataError(f"targets must be 0 or 1, got {values[wrong].item():g} at row {wrong[0]}")
        yes = values.bool()
        if self.sample_logits is None:
            return sum_events(torch.where(yes, self.log_probs, self.log_complements), 1)
        signed = torch.where(yes, self.sample_logits, -self.sample_logits)
        return log_mean_exp(sum_events(torch.nn.functional.logsigmoid(signed), 2))


@dataclass(frozen=True, eq=False)
class RealPrediction(Prediction):
    """Real outputs: a mixture of Gaussians, one per draw, kept whole so that nothing is moment matched.

    Attributes:
        means: the network's outputs per draw, [S, B, ...].
        variances: noise variance, broadcastable to `means`; of a full covariance its diagonal.
        covariances: full noise covariance, broadcastable to [S, B, C, C], or None.
        spreads: covariance of a component's mean itself where doubt about weights is not drawn but known in
            closed form, over a row's outputs read in order, [S, B, E, E], or None.
    """

    means: Tensor = rows_on(1)
    variances: Tensor = rows_on(1)
    covariances: Tensor | None = field(default=None, metadata={"rows": 1})
    spreads: Tensor | None = field(default=None, metadata={"rows": 1})

    columns: ClassVar[tuple[str, ...]] = ("mean", "std", "aleatoric", "epistemic")

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
        return self.means.mean(0)

    @property
    def aleatoric(self) -> Tensor:
        """Mean noise variance."""
        return self.variances.expand_as(self.means).mean(0)

    @property
    def epistemic(self) -> Tensor:
        """Variance of the draws' means (of the mixture itself, so divided by S), and their own spread."""
        return self.means.var(0, unbiased=False) + self._spread_variances.mean(0)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the mixture: Var[y] = E[Var[y|w]] + Var[E[y|w]]."""
        return (self.aleatoric + self.epistemic).sqrt()

    @property
    def component_variances(self) -> Tensor:
        """Variance of each output under each component, noise and spread together, [S, B, ...]."""
        return (self.variances + self._spread_variances).expand_as(self.means)

    @property
    def _spread_variances(self) -> Tensor:
        if self.spreads is None:
            return torch.zeros_like(self.variances)
        return self.spreads.diagonal(dim1=-2, dim2=-1).reshape(self.means.shape)

    def log_prob(self, targets: Tensor) -> Tensor:
        """Joint log-density of a row's outputs under the exact mixture, [B]."""
        errors = aligned(targets, self.means[0]) - self.means  # [S, B, ...]
        if self.spreads is not None:
            flat = errors.reshape(*errors.shape[:2], -1)  # [S, B, E]
            noise = self.covariances
            if noise is None:
                noise = self.variances.expand_as(self.means).reshape(flat.shape).diag_embed()
            tril = torch.linalg.cholesky(noise + self.spreads)
            return log_mean_exp(normal_log_prob(flat, scale_tril=tril))
        if self.covariances is not None:
            return log_mean_exp(normal_log_prob(errors, scale_tril=torch.linalg.cholesky(self.covariances)))
        return log_mean_exp(sum_events(normal_log_prob(errors, std=self.variances.sqrt()), 2))

    def quantile(self, q: float | Tensor) -> Tensor:
        """Quantiles of each output's marginal mixture, by root finding; the axes of `q` come first."""
        levels = torch.as_tensor(q, dtype=torch.float64, device="cpu")
        if not ((levels > 0) & (levels < 1)).all():
            raise ConfigError(f"quantile levels must lie strictly between 0 and 1, got {q}")
        if levels.ndim:
            return torch.stack([self.quantile(level) for level in levels.unbind()])
        # The nearer tail keeps its digits: the q-quantile of y is minus the (1 - q)-quantile of -y.
        tail, sign = (float(levels), 1) if levels <= 0.5 else (float(1 - levels), -1)
        means, std = sign * self.means, (self.variances + self._spread_variances).sqrt()
        # Every component's own quantile brackets the mixture's: F(min) <= q <= F(max).
        own = means + std * NormalDist().inv_cdf(tail)
        low, high = own.amin(0), own.amax(0)
        # A step gains one bit; those of the dtype are counted from the narrowest component on.
        width = (high - low) / std.amin(0)
        bits = math.log2(float(width.max()) / torch.finfo(own.dtype).eps + 1) if width.numel() else 0
        for _ in range(math.ceil(bits)):
            middle = (low + high) / 2
            # F(y) = 1/S Σ_s Φ((y - mean_s) / std_s) with Φ(z) = ½ erfc(-z / √2), exact in the lower tail
            below = torch.erfc((means - middle) / (std * math.sqrt(2))).mean(0) < 2 * tail
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return sign * (low + high) / 2

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """Central interval of each output's marginal mixture that holds `level` of it."""
        require_fraction(zero=False, level=level)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def rescaled(self, shift: Any, scale: Any) -> Self:
        """The prediction of `shift + scale · y`: back from standardised targets to original units."""
        shift, scale = self._per_output("shift", shift), self._per_output("scale", scale)
        if not (scale > 0).all():
            raise ConfigError(f"scale must be above 0, got {scale.tolist()}")
        per_output = scale.expand(self.means.shape[2:]).reshape(-1)  # [E]
        full, spreads = (
            None if matrices is None else matrices * per_output[:, None] * per_output
            for matrices in (self.covariances, self.spreads)
        )
        return type(self)(self.means * scale + shift, self.variances * scale**2, full, spreads)

    def _per_output(self, name: str, value: Any) -> Tensor:
        """A finite number, or numbers that broadcast to a row's outputs and never to the rows themselves."""
        value = torch.as_tensor(value, dtype=self.means.dtype, device=self.means.device)
        value = value.reshape(()) if value.numel() == 1 else value
        row = tuple(self.means.shape[2:])
        fits = all(n in (1, m) for n, m in zip(reversed(value.shape), reversed(row), strict=False))
        if value.ndim > len(row) or not fits:
            raise ConfigError(
                f"{name} must be one number or fit a row's outputs {row}, got {tuple(value.shape)}"
            )
        if not value.isfinite().all():
            raise ConfigError(f"{name} must be finite, got {value.tolist()}")
        return value


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its row axis (the second) expanded to `rows`."""
    return tensor.expand(tensor.shape[0], rows, *tensor.shape[2:]) if tensor.shape[1] != rows else tensor


def entropy(log_probs: Tensor, axis: int) -> Tensor:
    """-Σ p log p along `axis`, with 0 log 0 = 0."""
    return torch.special.entr(log_probs.exp()).sum(axis)


def sum_events(values: Tensor, start: int) -> Tensor:
    """The sum over all axes from `start` on."""
    return values.flatten(start).sum(start) if values.ndim > start else values


def log_mean_exp(draws: Tensor) -> Tensor:
    """Log 1/S Σ_s exp(draws_s) over the leading axis."""
    return draws.logsumexp(0) - math.log(len(draws))


def gathered(log_probs: Tensor, targets: Tensor, class_axis: int) -> Tensor:
    """Log-probability of each row's targets, summed over positions, [B]."""
    expected = log_probs.shape[:class_axis] + log_probs.shape[class_axis:][1:]
    if targets.shape != expected:
        raise DataError(f"targets must have shape {tuple(expected)}, got {tuple(targets.shape)}")
    if targets.is_floating_point() or targets.min() < 0 or targets.max() >= log_probs.shape[class_axis]:
        raise DataError(f"targets must be class numbers below {log_probs.shape[class_axis]}")
    chosen = log_probs.gather(class_axis, targets.long().unsqueeze(class_axis)).squeeze(class_axis)
    return sum_events(chosen, 1)


def aligned(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the shape, device and dtype of the outputs; a missing or extra axis of size 1 is mended."""
    targets = torch.as_tensor(targets, device=outputs.device).to(outputs.dtype)
    if targets.shape == outputs.shape:
        return targets
    if targets.ndim + 1 == outputs.ndim and outputs.shape[-1] == 1 and targets.shape == outputs.shape[:-1]:
        return targets.unsqueeze(-1)
    if targets.ndim == outputs.ndim + 1 and targets.shape[-1] == 1 and targets.shape[:-1] == outputs.shape:
        return targets.squeeze(-1)
    raise DataError(
        f"targets must have the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}"
    )


def not_binary(values: Tensor) -> tuple[int, ...] | None:
    """Where the first value stands that is neither 0 nor 1, if there is one."""
    wrong = (values != 0) & (values != 1)
    return tuple(wrong.nonzero()[0].tolist()) if wrong.any() else None


def normal_log_prob(errors: Tensor, *, std: Tensor | None = None, scale_tril: Tensor | None = None) -> Tensor:
    """Log N(errors | 0, ·): per element for `std`, joint over the last axis for `scale_tril`."""
    if scale_tril is None:
        assert std is not None
        return -0.5 * (errors / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    # log N(e | 0, L Lᵀ) = -½ |L⁻¹ e|² - Σ log L_ii - C/2 log 2π
    white = torch.linalg.solve_triangular(scale_tril, errors.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * white.square().sum(-1) - log_det - 0.5 * errors.shape[-1] * math.log(2 * math.pi)
