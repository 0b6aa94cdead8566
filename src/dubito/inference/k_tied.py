"""The k-tied Normal: mean field whose standard deviations form a matrix of low rank per layer.

[Swiatkowski et al. 2020]
"""

from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from ..errors import require_count
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
    initial_factors,
    initial_raw_std,
    tied_ranks,
)


@dataclass(frozen=True, kw_only=True)
class KTied(NormalMethod):
    """Variational inference with w ~ N(mean, σ²) and σ = U Vᵀ of rank k per weight matrix   [k-tied Normal, Eq. 8].

    Kernels are read as outputs × (inputs · positions). Weights that are not tied are mean field.

    Args:
        rank: k.
        prior_std: standard deviation of the Normal prior around 0, or `He()` to scale it per layer.
        initial_std: standard deviation weights start with, to the noise of `initial_spread`.
        initial_spread: standard deviation of the noise on the logarithms that factors (and standard deviations
            of weights that are not tied) start with, which makes the k factors differ.
        max_std: the largest standard deviation a weight may have; None sets no limit.
        estimator: `Reparameterised()`, or `LocalReparameterised()` or `Flipout()` for less noise in gradients.
        tied: the weights to tie, by names or by a predicate of (name, tensor); None ties all matrices whose both
            sides exceed the rank.
        subset: the parameters that get a distribution, by names or by a predicate; the rest are point estimates.
        match_rates: halve the learning rate of the factors, so that log σ = log u + log v moves as fast as in
            mean field.
        prior: `Around(network, std=...)` for one around pretrained weights, in place of `prior_std`.
    """

    rank: int = 2
    prior_std: PriorStd = 1.0
    initial_std: float = 0.01
    initial_spread: float = 0.1
    max_std: float | None = None
    estimator: Estimator = Reparameterised()
    tied: Subset = None
    subset: Subset = None
    match_rates: bool = True
    prior: Around | None = field(default=None, metadata=LATER)

    posterior_type = NormalPosterior

    def __post_init__(self) -> None:
        require_count(rank=self.rank)
        check_prior_std(self.prior_std)
        require_one_prior(self.prior, self.prior_std, 1.0, "prior_std")
        check_stds(self.initial_std, self.initial_spread, self.max_std)
        check_estimator(self.estimator)

    @property
    def factor_rate(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Multiplies the learning rate of tied factors."""
        return 0.5 if self.match_rates else 1.0

    def started(self, start: Start) -> tuple[Self, dict[str, dict[str, Tensor]]]:
        network = start.network
        names = resolve(self.subset, network)
        parameters = dict(network.named_parameters())
        weights = {name: parameters[name] for name in names}
        ranks = tied_ranks(weights, self.tied, self.rank, network)
        law = (self.initial_std, self.initial_spread, start.seed)
        factors = {name: initial_factors(weights[name], rank, *law, name) for name, rank in ranks.items()}
        tied = None if self.tied is None else tuple(ranks)
        return replace(self, subset=None if self.subset is None else names, tied=tied), {
            "raw_std": {n: initial_raw_std(w, *law, n) for n, w in weights.items() if n not in ranks},
            "log_u": {name: log_u for name, (log_u, _) in factors.items()},
            "log_v": {name: log_v for name, (_, log_v) in factors.items()},
        }
