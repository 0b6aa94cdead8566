"""Laplace: a Gaussian around a trained network, as wide as the loss around it is flat."""

import warnings
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..curvature import Curvature, Fisher, diagonal
from ..errors import ConfigError, DubitoWarning, NetworkError, require_count, require_positive
from ..inputs import call, take
from ..layers.taps import TAPPED, Tap
from ..layers.trace import Layout, trace
from ..likelihoods import BuiltLikelihood, GaussianLikelihood
from ..method import Method, Prepared, probe
from ..networks import Subset, resolve, with_flags
from ..posterior import Posterior
from ..sources import Source
from ..training import Training
from .point import MAP


class Structure:
    """How much of the curvature is kept."""


@dataclass(frozen=True, kw_only=True)
class Diagonal(Structure):
    """The exact diagonal: every weight independent of the others."""


class LaplacePosterior(Posterior):
    """w ~ N(w*, (curvature + prior_precision)⁻¹) with a diagonal precision."""

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        weights = self.weights()
        for name, curvature in self.group("curvature").items():
            mean = weights[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            weights[name] = mean + noise * (curvature + self.method.prior_precision).rsqrt()
        return weights

    def holds(self, name: str) -> str:
        return "diagonal" if name in self.group("curvature") else "point"


@dataclass(frozen=True, kw_only=True)
class Laplace(Method):
    """Laplace approximation, after the fact: the network as given, or its MAP fit first with `training=`.

    Args:
        structure: how much of the curvature is kept.
        prior_precision: precision of the Normal prior around 0.
        curvature: which curvature: `Fisher(draws=...)`, `GGN()` or `Empirical()`.
        subset: the parameters that get a distribution, by names or by a predicate of (name, tensor).
        batch_size: rows per pass; None takes the loader's own, or 128.
    """

    structure: Structure = Diagonal()
    prior_precision: float = 1.0
    curvature: Curvature = Fisher()
    subset: Subset = None
    batch_size: int | None = None

    posterior_type = LaplacePosterior

    def __post_init__(self) -> None:
        require_positive(prior_precision=self.prior_precision)
        if not isinstance(self.structure, Structure):
            raise ConfigError(f"structure must be one such as Diagonal(), got {self.structure!r}")
        if not isinstance(self.curvature, Curvature):
            raise ConfigError(f"curvature must be Fisher(), GGN() or Empirical(), got {self.curvature!r}")
        if self.batch_size is not None:
            require_count(batch_size=self.batch_size)

    def _fit(self, prepared: Prepared, training: Training | None) -> LaplacePosterior:
        network, likelihood, history = prepared.network, prepared.likelihood, []
        names = resolve(self.subset, network)
        taps, layouts, left_out = find_taps(network, prepared.example.inputs, names)
        # A curvature that cannot treat such outputs says so before any work starts.
        outputs = probe(network, take(prepared.example.inputs, slice(1)))
        targets = likelihood.check_targets(outputs, prepared.example.targets[:1])
        next(self.curvature.seeds(likelihood, outputs, targets, lambda _: torch.zeros_like(outputs)))
        if training is not None:
            point = MAP(prior_std=self.prior_precision**-0.5)._fit(prepared, training)
            network = with_flags(point.network, point.trainable)
            likelihood, history = point.likelihood, point.history
        elif isinstance(likelihood, GaussianLikelihood) and likelihood.raw_std is not None:
            likelihood = with_residual_noise(network, likelihood, prepared.source, self._size(prepared))
        if left_out:
            warnings.warn(
                f"these parameters stay point estimates, because Diagonal() covers Linear and Conv2d layers: "
                f"{', '.join(left_out)}; name what to cover with subset= to say so",
                DubitoWarning,
                stacklevel=3,
            )
        curvature = diagonal(
            network,
            taps,
            layouts,
            prepared.source,
            likelihood,
            self.curvature,
            batch_size=self._size(prepared),
            seed=prepared.run.seed,
        )
        curvature = {name: total for name, total in curvature.items() if name in names}
        scale = prepared.num_data / (prepared.source.num_data or prepared.num_data)
        method = self if self.subset is None else replace(self, subset=names)
        return LaplacePosterior(
            network,
            likelihood,
            method=method,
            structure={"curvature": {name: scale * total for name, total in curvature.items()}},
            history=history,
        ).finished()

    def _size(self, prepared: Prepared) -> int:
        return self.batch_size or prepared.source.batch_size or 128


def find_taps(
    network: nn.Module, inputs: object, names: tuple[str, ...]
) -> tuple[list[Tap], dict[str, Layout], list[str]]:
    """Taps for the wanted parameters, where each layer holds its rows, and the parameters no tap reaches."""
    modules = {
        path: module
        for path, module in network.named_modules(remove_duplicate=False)
        if isinstance(module, TAPPED) and type(module).forward in (nn.Linear.forward, nn.Conv2d.forward)
    }
    visits = trace(network, inputs, modules)
    layouts = {path: visit.layout for path, visit in visits.items() if visit.layout is not Layout.UNKNOWN}
    known = {id(parameter): name for name, parameter in network.named_parameters()}
    owners: dict[str, set[str]] = {}
    for path, module in network.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(known[id(parameter)], set()).add(path)
    users: dict[str, list[str]] = {}
    for path in layouts:
        weight = known.get(id(modules[path].weight))
        if weight is not None:  # else computed from other parameters
            users.setdefault(weight, []).append(path)
    taps = []
    for weight, paths in users.items():
        if not owners[weight] <= layouts.keys():
            continue  # shared with a layer that no tap sees: a part of the curvature is not the whole
        biases = {known.get(id(modules[path].bias)) for path in paths} - {None}
        bias = biases.pop() if len(biases) == 1 else None
        bias = bias if bias is not None and owners[bias] <= set(paths) else None
        if {weight, bias} & set(names):
            taps.append(Tap(weight, bias, paths))
    reached = {name for tap in taps for name in (tap.weight, tap.bias)}
    if not reached & set(names):
        raise NetworkError(f"Laplace needs a Linear or Conv2d layer among {list(names)}, found none")
    return taps, layouts, [name for name in names if name not in reached]


@torch.no_grad()
def with_residual_noise(
    network: nn.Module, likelihood: GaussianLikelihood, source: Source, batch_size: int
) -> BuiltLikelihood:
    """The likelihood with the noise that the network's residuals on the data show, per output."""
    total, rows = torch.zeros(()), 0
    for batch in source.batches(batch_size):
        squares = (batch.targets - call(network, batch.inputs)).square()
        total = total.to(squares) + (
            squares.transpose(0, 1).flatten(1).sum(1) if squares.ndim > 1 else squares.sum()
        )
        rows += squares.numel() // (squares.shape[1] if squares.ndim > 1 else 1)
    std = (total / rows).sqrt().reshape(likelihood.std().shape)
    return likelihood.with_noise(std=std.clamp(min=torch.finfo(std.dtype).eps))
