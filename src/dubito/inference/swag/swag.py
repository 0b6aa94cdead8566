"""SWAG: a Gaussian over the weights along the end of a run, diagonal and low rank [Maddox et al. 2019]."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NotRequired

import torch
from torch import Tensor

from ... import seeds
from ...errors import require_count, require_positive
from ...hints import checked
from ...inputs import TensorOptions
from ...networks import duplicate
from ...posterior import Details, Drawer, Posterior, ShapeRule
from ...sources import as_source
from ...storage.schema import Count, Size
from .averages import AveragedObjective, Gathering
from .batch_norm import normalising, refresh, statistics_of
from .swa import Averaging


class SWAGDetails(Details):
    """Facts of SWAG; `atoms` and `seed` where draws have statistics of their own."""

    rank: Count
    snapshots: Count
    atoms: NotRequired[Size]
    seed: NotRequired[int]


class SWAGPosterior(Posterior):
    """w ~ N(mean, s/2 · (diag(variance) + D Dᵀ / (K − 1))), all weights together.

    D holds the last K deviations as columns; one vector of K numbers per draw moves all layers, so that they stay
    correlated. A posterior from `refreshed` has finitely many draws, each with batch norm statistics of its own.
    """

    details_type, optional_groups = SWAGDetails, ("statistics",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_atoms = self.details.get("atoms")
        self.scalable = self.num_atoms is None  # statistics were taken at the draws as they are

    def shapes(self) -> dict[str, ShapeRule]:
        rules = {"variance": self.stacked_like_weights(), "deviations": self.stacked_like_weights(self.rank)}
        return rules | ({"statistics": self.stacked_like_weights(self.num_atoms)} if self.num_atoms is not None else {})

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights() | dict(self.drawer()(index, generator))

    def drawer(self) -> Drawer:
        weights = self.weights()
        means = {name: weights[name] for name in self.group("variance").names}
        stds = {name: variance.sqrt() for name, variance in self.group("variance").items()}
        statistics = {} if self.num_atoms is None else dict(self.group("statistics").items())
        like = next(iter(means.values()))

        def draw(index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
            if self.num_atoms is not None:
                index = index % self.num_atoms
                generator = self.generator(self.details["seed"], index)
            common = torch.randn(self.rank, generator=generator, dtype=like.dtype, device=like.device)
            drawn = {name: values[index] for name, values in statistics.items()}
            for name, mean in means.items():
                noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
                drawn[name] = self.deviation(name, noise.mul_(stds[name]), common.to(mean.dtype)).add_(mean)
            return drawn

        return draw

    @property
    def rank(self) -> int:
        """K, the number of deviations that are kept."""
        return self.details["rank"]

    def deviation(self, name: str, total: Tensor, common: Tensor) -> Tensor:
        """A parameter's deviation from its mean, times the posterior's scale, as a linear map of noise.

        w − w̄ = √(s/2) (σ ∘ z₁ + D z₂ / √(K − 1))   [Maddox et al. 2019, Section 3.3, with s = 1]

        Args:
            name: of the parameter.
            total: σ ∘ z₁, in its shape; overwritten.
            common: z₂, [K], the same for all parameters.
        """
        if self.rank > 1:
            low = common.unsqueeze(0) @ self.group("deviations")[name].reshape(self.rank, -1)
            total.add_(low.view(total.shape).div_(math.sqrt(self.rank - 1)))
        return total.mul_(self.scale * math.sqrt(self.method.scale / 2))

    @checked
    @torch.no_grad()
    def refreshed(self, data: Any, *, num_samples: int = 32, seed: int = 0, batch_size: int = 128) -> "SWAGPosterior":
        """The posterior cut down to some draws, each with batch norm statistics of its own from data.

        Statistics at the mean, which all draws share otherwise, fit other weights only roughly. A network without
        batch norm needs nothing, and the posterior itself comes back.

        Args:
            data: the training data: a pair, a `Dataset` or a `DataLoader`.
            num_samples: draws to keep.
            seed: of the draws, and of the order of the rows.
            batch_size: rows at once, best as in training.
        """
        require_count(num_samples=num_samples, batch_size=batch_size)
        seeds.derived(seed)
        network = duplicate(self.network)
        source = as_source(data, TensorOptions.of(network))
        layers = normalising(network)
        if not layers:
            return self
        infinite = SWAGPosterior(
            network,
            duplicate(self.likelihood),
            method=self.method,
            tensors=self._groups(),
            details={key: value for key, value in self.details.items() if key not in ("atoms", "seed")},
            trainable=self.trainable,
        )
        collected: dict[str, list[Tensor]] = {}
        for index in range(num_samples):
            weights = infinite.draw(index, infinite.generator(seed, index))
            refresh(network, weights, layers, source, batch_size, seed)
            for name, value in statistics_of(network, layers).items():
                collected.setdefault(name, []).append(value.clone())
        statistics = {name: torch.stack(values) for name, values in collected.items()}
        return SWAGPosterior(
            duplicate(self.network),
            duplicate(self.likelihood),
            method=self.method,
            tensors={**self._groups(), "statistics": statistics},
            details={**self.details, "atoms": num_samples, "seed": int(seed)},
            history=self.history,
            trainable=self.trainable,
        ).finished()

    def _groups(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the tensors of the Gaussian."""
        return {
            key: {name: tensor.detach().clone() for name, tensor in self.group(key).items()}
            for key in self.tensors
            if key != "statistics"
        }

    def holds(self, name: str) -> str:
        if name not in self.group("variance"):
            return super().holds(name)
        return f"Normal, own variance and rank {self.rank} of {self.details['snapshots']} snapshots"


class SWAGObjective(AveragedObjective):
    """See `SWAG`."""

    def around(self, draft: Posterior) -> SWAGPosterior:
        averages = self.averages
        rank = min(averages.count, averages.gathering.rank)
        key = "network."
        # In the network's order, not a checkpoint's: draws take their noise in it.
        names = [name for name in draft.weights() if key + name in averages.mean]
        tensors: Mapping[str, Mapping[str, Tensor]] = {
            "variance": {name: averages.squares[key + name] / averages.count for name in names},
            "deviations": {name: averages.deviations[key + name][:rank].clone() for name in names} if rank else {},
        }
        return SWAGPosterior(
            draft.network,
            draft.likelihood,
            method=draft.method,
            tensors=tensors,
            details={"rank": rank, "snapshots": averages.count},
            trainable=draft.trainable,
        ).finished()


@dataclass(frozen=True, kw_only=True)
class SWAG(Averaging):
    """The Gaussian with the mean, the variances and the last deviations of the weights along the end of a run.

    Batch norm's statistics are taken anew from the training data at the mean; `posterior.refreshed(data)` takes them
    for every draw.

    Args:
        prior_std: standard deviation of a Normal prior around 0 on all weights; None is the flat prior.
        start: the share of the run after which weights are gathered; the learning rate should then stay high
            enough to move about, as `Linear(start=0.4, end=0.5, final=0.3)` lets it.
        snapshots: how many times weights are gathered, evenly spaced to the end; fewer where there are fewer steps.
        rank: K, how many of the last deviations are kept; 0 for the diagonal alone.
        scale: s, by which the covariance is multiplied.
    """

    rank: int = 20
    scale: float = 1.0

    posterior_type = SWAGPosterior
    objective_type = SWAGObjective

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(0, rank=self.rank)
        require_positive(scale=self.scale)

    def gathering(self) -> Gathering:
        return Gathering(start=self.start, snapshots=self.snapshots, variance=True, rank=self.rank)
