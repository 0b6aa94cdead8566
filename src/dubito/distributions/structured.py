"""What every structured Gaussian over a weight matrix shares: densities, draws and dense forms."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.distributions import Independent, Normal
from torch.distributions.kl import register_kl
from torch.distributions.utils import lazy_property

from dubito.errors import ConfigError, DataError, require_positive

from ..hints import checked
from .base import MatrixDistribution
from .pair_products import CHUNK

DENSE_LIMIT = 2 * 2**30
"""Bytes a dense square matrix and its one temporary copy may take."""


class StructuredNormal(MatrixDistribution, ABC):
    """A Gaussian over an m × n weight matrix (outputs × inputs, a bias column included).

    Its precision is that of `num_data` times a Fisher information plus a prior precision. A subclass
    gives products with the precision, its inverse and a root of the inverse, so nothing dense is formed
    except by `precision_matrix` and `covariance_matrix`. Vectors are matrices read row by row. What is computed
    once is kept, with its graph: build the distribution anew for every step of an optimisation.
    """

    #: What is computed once and depends on `num_data` and `prior_precision`.
    _scaled: ClassVar[tuple[str, ...]] = ("_marginal_variance", "precision_logdet")

    def __init__(
        self, mean: Tensor, *, num_data: float, prior_precision: float | Tensor, validate_args: bool | None = None
    ) -> None:
        if mean.ndim != 2 or mean.numel() == 0 or mean.dtype not in (torch.float32, torch.float64):
            raise DataError(
                f"mean must be an m x n matrix of float32 or float64, got {mean.dtype} of shape "
                f"{tuple(mean.shape)}; reshape a layer's weight to outputs x inputs and cast it"
            )
        self._mean = mean
        self.num_data = num_data
        self.prior_precision = prior_precision
        super().__init__(event_shape=mean.shape, validate_args=validate_args)
        require_positive(num_data=num_data)
        self._require_prior(prior_precision)
        self._require("mean", mean, mean.shape)

    @property
    def variance(self) -> Tensor:
        """The marginal variances, diag(P⁻¹), [m, n]."""
        return self._marginal_variance

    @lazy_property
    def _marginal_variance(self) -> Tensor:
        return self._compute_variance()

    @lazy_property
    def precision_logdet(self) -> Tensor:
        """The logarithm of the determinant |P|."""
        return self._compute_logdet()

    @property
    @abstractmethod
    def relative_logdet(self) -> Tensor:
        """The logarithm of |P/τ|: 0 where the data say nothing; for one τ."""

    @property
    @abstractmethod
    def num_determined(self) -> Tensor:
        """γ = tr(P⁻¹ (P − τ)): how many weights the data determine, and not the prior; for one τ."""

    @checked
    def rescaled(self, *, num_data: float, prior_precision: float) -> Self:
        """The same information at another data scale and under another prior.

        What does not depend on them is shared.

        Args:
            num_data: N_s.
            prior_precision: τ.
        """
        require_positive(num_data=num_data, prior_precision=prior_precision)
        other = copy.copy(self)
        for name in self._scaled:
            vars(other).pop(name, None)
        other.num_data, other.prior_precision = num_data, prior_precision
        return other

    @abstractmethod
    def _compute_variance(self) -> Tensor:
        """The value of `variance`."""

    @abstractmethod
    def _compute_logdet(self) -> Tensor:
        """The value of `precision_logdet`."""

    @abstractmethod
    def precision_matmul(self, vectors: Tensor) -> Tensor:
        """P x for each matrix x of [..., m, n]."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """P⁻¹ x for each matrix x of [..., m, n]."""

    @abstractmethod
    def quadratic_form(self, vectors: Tensor) -> Tensor:
        """xᵀ P x for each matrix x of [..., m, n], never negative."""

    @property
    @abstractmethod
    def _noise_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the unit noise that one draw takes."""

    @abstractmethod
    def _apply_root(self, *noise: Tensor) -> Tensor:
        """F e for unit noise e, where F Fᵀ = P⁻¹; one [..., shape] tensor for each of `_noise_shapes`."""

    @checked
    def rsample(
        self, sample_shape: Sequence[int] = torch.Size(), *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws of shape `sample_shape` + [m, n], differentiable in the parameters."""
        noise = (self._unit_noise(sample_shape, shape, generator) for shape in self._noise_shapes)
        deviation = self._apply_root(*noise)
        return self._mean + deviation if torch.is_grad_enabled() else deviation.add_(self._mean)

    @checked
    def log_prob(self, value: Tensor) -> Tensor:
        """The log-density of each matrix of [..., m, n]."""
        self._require_event("value", value)
        if self._validate_args:
            self._validate_sample(value)
        # log N = ½ (log|P| − mn log 2π − (x − μ)ᵀ P (x − μ))
        constant = self.precision_logdet - self._mean.numel() * math.log(2 * math.pi)
        return (constant - self.quadratic_form(value - self._mean)) / 2

    def entropy(self) -> Tensor:
        """In nats."""
        # H = ½ (mn (1 + log 2π) − log|P|)
        return (self._mean.numel() * (1 + math.log(2 * math.pi)) - self.precision_logdet) / 2

    @property
    def precision_matrix(self) -> Tensor:
        """The dense P, [mn, mn], for small layers.

        Raises:
            ConfigError: beyond 2 GiB.
        """
        return self._dense(self.precision_matmul)

    @property
    def covariance_matrix(self) -> Tensor:
        """The dense P⁻¹, [mn, mn], for small layers.

        Raises:
            ConfigError: beyond 2 GiB.
        """
        return self._dense(self.solve)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' x '.join(map(str, self.event_shape))})"

    def _dense(self, product: Callable[[Tensor], Tensor]) -> Tensor:
        size = self._mean.numel()
        require_square(size, self._mean.element_size(), "use solve, variance or quadratic_form, which never form it")
        matrix = self._mean.new_empty(size, size)
        step = max(1, CHUNK // size)
        for start in range(0, size, step):
            units = self._mean.new_zeros(min(step, size - start), size)
            units.diagonal(start).fill_(1.0)
            matrix[start : start + step] = product(units.view(-1, *self.event_shape)).flatten(1)
        # Symmetric but for rounding, and torch's own checks of a covariance forgive less than that.
        return (matrix + matrix.mT).mul_(0.5)

    def _require(self, name: str, tensor: Tensor, shape: tuple[int, ...], *, nonnegative: bool = False) -> None:
        mean = self._mean
        if tensor.shape != shape:
            raise DataError(
                f"{name} must have shape {tuple(shape)} for a mean of shape {tuple(mean.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        if tensor.dtype != mean.dtype or tensor.device != mean.device:
            raise DataError(
                f"{name} must be {mean.dtype} on {mean.device} like the mean, got {tensor.dtype} on "
                f"{tensor.device}; move it with .to(mean)"
            )
        if self._validate_args and not tensor.isfinite().all():
            raise DataError(f"{name} must be finite, got NaN or infinity; check the statistics of this layer")
        if self._validate_args and nonnegative and bool((tensor < 0).any()):
            raise DataError(
                f"{name} must not be negative, got {float(tensor.min()):.3g}; clamp what rounding left below 0"
            )

    def _require_prior(self, prior_precision: float | Tensor) -> None:
        if not isinstance(prior_precision, Tensor):
            require_positive(prior_precision=prior_precision)
            return
        if prior_precision.ndim > 0:
            raise ConfigError(
                f"prior_precision must be one number for {type(self).__name__}, got shape "
                f"{tuple(prior_precision.shape)}; take SparseInformationNormal for one per weight"
            )
        self._require_positive_prior(prior_precision)

    def _require_positive_prior(self, prior_precision: Tensor) -> None:
        if self._validate_args and not ((prior_precision > 0) & prior_precision.isfinite()).all():
            raise ConfigError(
                f"prior_precision must be finite and above 0, got a least of {float(prior_precision.min()):.3g}"
            )

    def _require_vectors(self, name: str, vectors: Tensor, shape: tuple[int, int]) -> None:
        """Refuse what cannot be eigenvectors, such as a factor passed in their place."""
        self._require(name, vectors, shape)
        if self._validate_args and bool(((vectors.square().sum(0) - 1).abs() > 1e-3).any()):
            raise DataError(f"{name} must hold eigenvectors as columns of length 1; take them from linalg.eigh")

    def _require_event(self, name: str, value: Tensor) -> None:
        if value.shape[-2:] != self.event_shape:
            raise DataError(
                f"{name} must have shape [..., {', '.join(map(str, self.event_shape))}], got {tuple(value.shape)}"
            )


def total(values: Tensor) -> Tensor:
    """The sum, in float64 where the device has it: many small terms make up what is compared later."""
    return values.sum() if values.device.type == "mps" else values.sum(dtype=torch.float64)


def require_square(size: int, itemsize: int, remedy: str) -> None:
    """Refuse a dense square matrix that, with one copy of it, would take more than `DENSE_LIMIT` bytes."""
    needed = 2 * size**2 * itemsize
    if needed > DENSE_LIMIT:
        raise ConfigError(
            f"a dense {size} x {size} matrix and a copy of it would take {needed / 2**30:.1f} GiB, "
            f"expected at most {DENSE_LIMIT / 2**30:.0f} GiB; {remedy}"
        )


@register_kl(StructuredNormal, Independent)
def _kl_structured_independent(p: StructuredNormal, q: Independent) -> Tensor:
    prior = q.base_dist
    if not isinstance(prior, Normal) or q.event_shape != p.event_shape:
        raise NotImplementedError
    # KL = ½ (Σ ρ (diag P⁻¹ + (μ − ν)²) − mn − Σ log ρ + log|P|) for the prior N(ν, 1/ρ)
    precision = prior.scale**-2
    spread = (precision * (p.variance + (p.mean - prior.loc).square())).sum((-2, -1))
    return (spread - p.mean.numel() - precision.log().sum((-2, -1)) + p.precision_logdet) / 2
