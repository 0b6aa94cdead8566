"""MAP: one set of weights, the point that other posteriors stand around."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import require_positive
from ..fitting import Start
from ..method import TrainedMethod
from ..networks import resolve, trainable
from ..objective import PlainObjective
from ..posterior import Details, Posterior
from ..priors import normal_penalty


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
        self, draft: Posterior, prior_std: float | None, *, num_data: float, modes: Mapping[str, bool]
    ):
        super().__init__(draft, num_data=num_data, modes=modes)
        self.prior_std = prior_std

    def kl(self) -> Tensor:
        """−log p(w) up to its constant; 0 under a flat prior."""
        return super().kl() if self.prior_std is None else self.penalty(trainable(self.draft.network))

    def penalty(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Σ w² / 2σ² of all trainable weights by name."""
        assert self.prior_std is not None
        return normal_penalty(weights.values(), self.prior_std)


@dataclass(frozen=True, kw_only=True)
class MAP(TrainedMethod):
    """The most probable weights.

    Args:
        prior_std: standard deviation of a Normal prior around 0; None is the flat prior.
    """

    prior_std: float | None = None

    posterior_type = PointPosterior

    def __post_init__(self) -> None:
        if self.prior_std is not None:
            require_positive(prior_std=self.prior_std)

    def objective(self, start: Start) -> MAPObjective:
        resolve(None, start.network)  # refuses a network whose parameters are all frozen
        draft = PointPosterior(start.network, start.likelihood, method=self)
        return MAPObjective(draft, self.prior_std, num_data=start.num_data, modes=start.modes)
