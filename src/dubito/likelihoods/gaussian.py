"""Real targets with Normal noise."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..devices import on_host
from ..errors import ConfigError, DataError, NetworkError
from ..inputs import RowNumbers, row_number
from ..prediction import RealPrediction, aligned, normal_log_prob, sum_events
from .base import BuiltLikelihood, Likelihood, real_outputs, stacked
from .moments import Targets, WeightedTargets, warn_if_far
from .noise import RealLikelihood, checked_numbers, differ, inverse_softplus, noise_shape, spread_of, units_of

#: What targets may be at most in float32, whose squares end at 3e38.
LARGEST = 1e16


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """Real outputs with Normal noise.

    Args:
        std: the noise's standard deviation, one number or one per output; None learns it, per output.
        covariance: a full noise covariance [C, C] instead, as nested sequences.
        standardise: the network answers in units of the training targets, whose mean and standard deviation per output
            are stored beside the noise; predictions, `std` and `covariance` are in the targets' own units.
    """

    std: float | tuple[float, ...] | None = None
    covariance: tuple[tuple[float, ...], ...] | None = None
    standardise: bool = False

    def __post_init__(self) -> None:
        if self.std is not None and self.covariance is not None:
            raise ConfigError("Gaussian takes std or covariance, got both")
        object.__setattr__(self, "std", checked_numbers(std=self.std)["std"])
        if self.covariance is not None:
            object.__setattr__(self, "covariance", checked_covariance(self.covariance))

    def build(self, example_outputs: Tensor | None, example_targets: Targets | None = None) -> "GaussianLikelihood":
        """As in the base; `standardise` asks for all training targets, whole or batch by batch."""
        if not self.standardise:
            assert example_targets is None or isinstance(example_targets, Tensor | WeightedTargets)
            return self._plain(example_outputs, example_targets)
        if example_outputs is None:
            raise ConfigError(
                "Gaussian(standardise=True) reads the training targets, which a loop of your own brings later; "
                "standardise them yourself, and take prediction.rescaled(mean, std)"
            )
        if example_targets is None:
            return self._plain(example_outputs, None)
        like = example_outputs
        units = units_of(example_targets, like, aligned)
        scale = units["scale"]
        raw_std = nn.Parameter(inverse_softplus(torch.ones_like(scale)))  # as wide as the standardised targets
        built = GaussianLikelihood(self, raw_std=raw_std, **units)
        if self.covariance is not None:
            built = built.with_noise(covariance=scale.new_tensor(self.covariance))
        elif self.std is not None:  # one number for all outputs becomes one for each
            built = built.with_noise(std=scale.new_tensor(self.std).expand(scale.numel()).reshape(scale.shape))
        return built

    def _plain(
        self, example_outputs: Tensor | None, example_targets: Tensor | WeightedTargets | None
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
        start = spread_of(example_targets, like, aligned)
        return GaussianLikelihood(self, raw_std=nn.Parameter(inverse_softplus(start)))


class GaussianLikelihood(RealLikelihood):
    """Normal noise of one of three forms, each with an optional leading axis of components.

    Args:
        settings: what was asked for.
        raw_std: learned, std = softplus(raw_std), [(K,) C].
        noise_std: fixed standard deviations, [(K,) C] or a scalar.
        scale_tril: Cholesky factors of full covariances, [(K,) C, C].
        location: mean of the training targets per output where outputs and all noise above are in their units.
        scale: their standard deviation.
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
        location: Tensor | None = None,
        scale: Tensor | None = None,
        num_components: int = 1,
    ) -> None:
        super().__init__(settings)
        self.num_components = num_components
        self.register_parameter("raw_std", raw_std)  # pyright: ignore[reportArgumentType]
        self.register_buffer("noise_std", noise_std)
        self.register_buffer("scale_tril", scale_tril)
        self.register_buffer("location", location)
        self.register_buffer("scale", scale)

    def std(self, draw: int = 0) -> Tensor:
        """Standard deviation per output of draw `draw`, in the targets' units; of a full covariance its diagonal's."""
        std = self._unit_std(draw)
        return std if self.scale is None else std * self.scale.reshape(std.shape)

    def _unit_std(self, draw: int) -> Tensor:
        """The same in the outputs' units."""
        if self.scale_tril is not None:
            return self._of(self.scale_tril, draw).square().sum(-1).sqrt()
        return self._of(self._stds(), draw)

    def _stds(self) -> Tensor:
        """Those of all components."""
        if self.raw_std is not None:
            return F.softplus(self.raw_std)
        assert isinstance(self.noise_std, Tensor)
        return self.noise_std

    def _std_for(self, outputs: Tensor, draw: int = 0) -> Tensor:
        """Standard deviations that meet the outputs, in their units: positions after the output axis share one."""
        std = self._unit_std(draw)
        return std.reshape(-1, *[1] * (outputs.ndim - 2)) if std.ndim == 1 else std

    def check_outputs(self, outputs: Tensor) -> None:
        real_outputs("Gaussian", outputs)
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
        reals = aligned(targets, outputs.new_empty(len(targets), *outputs.shape[1:]))
        sizes = reals.abs().reshape(len(reals), -1).amax(1)
        limit = LARGEST if reals.dtype != torch.float64 else LARGEST**8
        if on_host(sizes) and sizes.max() > limit:
            row = int(sizes.argmax())
            raise DataError(
                f"targets must be below {limit:.0e} in size, so that squares can be summed, got "
                f"{float(sizes[row]):.3g} at row {row_number(row, rows)}; give them in larger units"
            )
        return reals

    def warn(self, outputs: Tensor, targets: Tensor) -> None:
        if self.scale is None:
            warn_if_far(self.check_targets(outputs, targets), outputs)

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        if isinstance(self.raw_std, nn.UninitializedParameter):
            self._materialise(outputs)
        errors = self.standardised(targets) - outputs
        if self.scale_tril is not None:
            log_prob = normal_log_prob(errors, scale_tril=self._of(self.scale_tril, draw))
        else:
            log_prob = sum_events(normal_log_prob(errors, std=self._std_for(outputs, draw)), 1)
        return self.in_units(log_prob, outputs.shape[1:])

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        if self.scale_tril is not None:
            return self.restored(outputs.detach() + noise @ self._of(self.scale_tril, draw).mT)
        return self.restored(outputs.detach() + noise * self._std_for(outputs, draw).detach())

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        if self.scale_tril is not None:
            tril = self._of(self.scale_tril, draw)
            eye = torch.eye(len(tril), dtype=tril.dtype, device=tril.device)
            root = torch.linalg.solve_triangular(tril, eye, upper=False).mT  # Σ⁻¹ = L⁻ᵀ L⁻¹
            return root.expand(len(outputs), *root.shape)
        inverse = (1 / self._std_for(outputs, draw).detach()).expand_as(outputs)
        return inverse.reshape(len(outputs), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor], mean_covariances: Tensor | None = None) -> RealPrediction:
        """The prediction, in the targets' units; `mean_covariances` [S, B, E, E] are of outputs not drawn but known."""
        means = stacked(draws)
        components = range(min(self.num_components, len(means)))
        times = -(-len(means) // len(components))

        def per_draw(values: list[Tensor]) -> Tensor:  # [S or 1, 1, ...], draw s has noise s mod K
            stacked = torch.stack(values).to(means).unsqueeze(1)
            return stacked if len(values) == 1 else torch.cat([stacked] * times)[: len(means)]

        with torch.no_grad():
            variances = per_draw([self._std_for(means[0], s).square().expand(means.shape[2:]) for s in components])
            full = None
            if self.scale_tril is not None:
                trils = [self._of(self.scale_tril, draw) for draw in components]
                full = per_draw([tril @ tril.mT for tril in trils])
        prediction = RealPrediction(means, variances, full, mean_covariances)
        if self.scale is None or self.location is None:
            return prediction
        return prediction.mapped(self.location, self.scale)

    def with_noise(self, *, std: Tensor | None = None, covariance: Tensor | None = None) -> "GaussianLikelihood":
        """The same likelihood with fixed noise in the targets' units: `std` [(K,) C] or `covariance` [(K,) C, C]."""
        if covariance is not None:
            tril = torch.linalg.cholesky(covariance)
            tril = tril if self.scale is None else tril / self.scale.unsqueeze(-1)
            return self._fixed(len(tril) if tril.ndim == 3 else 1, scale_tril=tril)
        assert std is not None
        shape = self.std().shape
        unit_std = std if self.scale is None else std / self.scale.reshape(shape)
        return self._fixed(len(std) if std.ndim > len(shape) else 1, noise_std=unit_std)

    def with_noise_times(self, factor: float) -> "GaussianLikelihood":
        """The same likelihood with fixed noise, its standard deviations multiplied by `factor`."""
        if self.scale_tril is not None:
            return self._fixed(self.num_components, scale_tril=factor * self.scale_tril)
        return self._fixed(self.num_components, noise_std=factor * self._stds().detach())

    def joined(self, members: Sequence[BuiltLikelihood]) -> BuiltLikelihood:
        count = len(members)
        parts = [member for member in members if isinstance(member, GaussianLikelihood)]
        if count == 1 or not differ([[*member.parameters(), *member.buffers()] for member in parts]):
            return self
        if self.raw_std is not None:
            return self.with_noise(std=torch.stack([member.std().detach() for member in parts]))
        draws = range(count * max(member.num_components for member in parts))
        return self._with_noises([parts[s % count]._noise(s // count) for s in draws])

    def component(self, index: int, count: int) -> "GaussianLikelihood":
        return self._with_noises([self._noise(s) for s in range(index, max(count, self.num_components), count)])

    def _noise(self, draw: int) -> Tensor:
        """The numbers behind the noise of a draw, in the outputs' units."""
        return self._of(self._stds().detach() if self.scale_tril is None else self.scale_tril, draw)

    def _with_noises(self, noises: list[Tensor]) -> "GaussianLikelihood":
        """The same likelihood with fixed noise of this form, one for each component."""
        noise = torch.stack(noises) if len(noises) > 1 else noises[0]
        return self._fixed(len(noises), **{"noise_std" if self.scale_tril is None else "scale_tril": noise})

    def _fixed(self, components: int, **noise: Tensor) -> "GaussianLikelihood":
        units = {"location": self.location, "scale": self.scale, "num_components": components}
        return GaussianLikelihood(self.settings, **units, **noise)  # pyright: ignore[reportArgumentType]

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
