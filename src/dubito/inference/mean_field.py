"""Mean field: an independent Normal for every weight."""

from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from ..fitting import Start
from ..networks import Subset, resolve
from ..priors import Around, PriorStd, check_prior_std, require_one_prior
from ..storage import LATER
from ..weight_normals import (
    Estimator,
    NormalMethod,
    NormalPosterior,
    Reparameterised,
    check_estimator,
    check_stds,
    initial_raw_std,
)


@dataclass(frozen=True, kw_only=True)
class MeanField(NormalMethod):
    """Mean-field variational inference for any module: w ~ N(mean, softplus(raw_std)²).

    Args:
        prior_std: standard deviation of the Normal prior around 0, or `He()` to scale it per layer.
        initial_std: standard deviation every weight starts with.
        initial_spread: standard deviation of the logarithms of those, 0 for all alike.
        max_std: the largest standard deviation a weight may have; None sets no limit.
        estimator: `Reparameterised()`, or `LocalReparameterised()` or `Flipout()` for less noise in gradients.
        subset: the parameters that get a distribution, by names or by a predicate of (name, tensor); the rest
            are point estimates.
        prior: `Around(network, std=...)` for one around pretrained weights, in place of `prior_std`.
    """

    prior_std: PriorStd = 1.0
    initial_std: float = 0.01
    initial_spread: float = 0.0
    max_std: float | None = None
    estimator: Estimator = Reparameterised()
    subset: Subset = None
    prior: Around | None = field(default=None, metadata=LATER)

    posterior_type = NormalPosterior

    def __post_init__(self) -> None:
        check_prior_std(self.prior_std)
        require_one_prior(self.prior, self.prior_std, 1.0, "prior_std")
        check_stds(self.initial_std, self.initial_spread, self.max_std)
        check_estimator(self.estimator)

    def started(self, start: Start) -> tuple[Self, dict[str, dict[str, Tensor]]]:
        names = resolve(self.subset, start.network)
        weights = dict(start.network.named_parameters())
        law = (self.initial_std, self.initial_spread, start.seed)
        method = self if self.subset is None else replace(self, subset=names)
        return method, {"raw_std": {name: initial_raw_std(weights[name], *law, name) for name in names}}
