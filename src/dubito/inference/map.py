"""MAP: one set of weights, the point that other posteriors stand around."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import require_positive
from ..fitting import Start
from ..method import TrainedMethod
from ..networks import resolve, trainable
from ..objective import PlainObjective
from ..posterior import Details, Posterior
from ..priors import Around, normal_penalty, require_one_prior
from ..storage import LATER


class PointPosterior(Posterior):
    """All mass on one set of weights: total uncertainty is aleatoric."""

    num_atoms = 1
    details_type = Details

    def shapes(self) -> dict[str, Any]:
        return {}

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights()


class MAPObjective(PlainObjective):
    """Negative log-likelihood and the prior's penalty."""

    def __init__(
        self,
        draft: Posterior,
        prior_std: float | None,
        *,
        num_data: float,
        modes: Mapping[str, bool],
        prior: Around | None = None,
    ):
        super().__init__(draft, num_data=num_data, modes=modes)
        self.prior_std, self.prior = prior_std, prior
        if prior is not None:
            prior.check(trainable(draft.network))

    def kl(self) -> Tensor:
        """−log p(w) up to its constant; 0 under a flat prior."""
        flat = self.prior_std is None and self.prior is None
        if flat:
            return super().kl()
        moving, weights = trainable(self.draft.network), self.draft.weights()
        return self.penalty({name: weights[name] for name in moving})

    def penalty(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Σ (w − w₀)² / 2σ² of all trainable weights by name."""
        if self.prior is not None:
            return self.prior.penalty(weights)
        assert self.prior_std is not None
        return normal_penalty(weights.values(), self.prior_std)


@dataclass(frozen=True, kw_only=True)
class MAP(TrainedMethod):
    """The most probable weights.

    Args:
        prior_std: standard deviation of a Normal prior around 0; None is the flat prior.
        prior: `Around(network, std=...)` for one around pretrained weights, in place of `prior_std`.
    """

    prior_std: float | None = None
    prior: Around | None = field(default=None, metadata=LATER)

    posterior_type = PointPosterior

    def __post_init__(self) -> None:
        if self.prior_std is not None:
            require_positive(prior_std=self.prior_std)
        require_one_prior(self.prior, self.prior_std, None, "prior_std")

    def objective(self, start: Start) -> MAPObjective:
        resolve(None, start.network)  # refuses a network whose parameters are all frozen
        draft = PointPosterior(start.network, start.likelihood, method=self)
        facts = {"num_data": start.num_data, "modes": start.modes, "prior": self.prior}
        return MAPObjective(draft, self.prior_std, **facts)
