"""The Normals of all weights for one training step or one prediction."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..precision import full_precision
from ..priors import prior_std_of
from .scales import TrainedScale, WeightScale
from .terms import summed

if TYPE_CHECKING:
    from .weights import NormalWeights


class Normals:
    """Means and scales of a posterior's weights, for one caller and while no parameter changes.

    What is computed once serves all that ask: standard deviations in every draw, divergences along with draws.

    Args:
        posterior: whose.

    Attributes:
        means: all of the network's weights, by name.
    """

    def __init__(self, posterior: "NormalWeights") -> None:
        self._posterior, self._prior = posterior, posterior.prior
        self.means = posterior.weights()
        self.device = next(iter(self.means.values())).device
        self._scales: dict[str, WeightScale] = {}
        self._kls: list[Tensor] = []
        self._counted: set[str] = set()

    def scale(self, name: str) -> WeightScale:
        """The standard deviations of one parameter."""
        scale = self._scales.get(name)
        if scale is None:
            scale = self._scales[name] = self._posterior.weight_scale(name, self.means[name].shape)
        return scale

    def draw(self, names: Sequence[str], generator: torch.Generator | None) -> dict[str, Tensor]:
        """μ + σ ε for some parameters   [k-tied Normal, Eq. 6]."""
        with full_precision(self.device):
            return {name: self.scale(name).draw(self.means[name], generator) for name in names}

    def drawn(
        self, names: Sequence[str], generator: torch.Generator | None, *, centred: bool = False
    ) -> dict[str, Tensor]:
        """μ + σ ε, or σ ε alone where `centred`, for some parameters.

        Their divergences are computed along the way, which saves passes over memory.
        """
        terms = []
        with full_precision(self.device):
            for name in names:
                scale, mean = self.scale(name), self._from_prior(name)
                assert isinstance(scale, TrainedScale)
                terms.append(scale.draw_term(mean, self._prior_std(name), generator, centred))
            kl, draws = summed(terms) if terms else (None, [])
            if self._prior is not None and not centred:
                draws = [draw + self._prior.centre(n, draw) for n, draw in zip(names, draws, strict=True)]
        if kl is not None:
            self._kls.append(kl)
            self._counted.update(names)
        return dict(zip(names, draws, strict=True))

    def kl(self) -> Tensor:
        """Divergence of all parameters from the prior in nats."""
        rest, kls = [name for name in self._posterior.random if name not in self._counted], list(self._kls)
        if rest:
            with full_precision(self.device):
                terms = [self.scale(name).term(self._from_prior(name), self._prior_std(name)) for name in rest]
                kls.append(summed(terms)[0])
        return kls[0] if len(kls) == 1 else torch.stack(kls).sum()

    def _prior_std(self, name: str) -> float:
        prior, mean = self._prior, self.means[name]
        return prior_std_of(self._posterior.normal_method.prior_std if prior is None else prior.group(name), mean)

    def _from_prior(self, name: str) -> Tensor:
        """The mean as seen from the prior's."""
        mean = self.means[name]
        return mean if self._prior is None else mean - self._prior.centre(name, mean)
