"""Mean field: an independent Normal for every weight, drawn by reparameterisation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import require_positive
from ..inputs import Batch
from ..likelihoods import BuiltLikelihood, inverse_softplus
from ..method import TrainedMethod
from ..networks import Subset, resolve, run
from ..objective import Objective
from ..posterior import Posterior
from ..priors import PriorStd, check_prior_std, normal_kl, prior_std_of


class MeanFieldPosterior(Posterior):
    """w ~ N(mean, std²) for each weight: the means are the network's own, std = softplus(raw_std)."""

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        weights = self.weights()
        for name, raw_std in self.group("raw_std").items():
            mean = weights[name]
            noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)
            weights[name] = torch.addcmul(mean, F.softplus(raw_std), noise)
        return weights

    def holds(self, name: str) -> str:
        return "Normal, own std" if name in self.group("raw_std") else "point"


class MeanFieldObjective(Objective):
    """One draw of all weights per step."""

    draft: MeanFieldPosterior

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        return run(self.draft.network, self.draft.draw(0, generator), batch.inputs)

    def kl(self) -> Tensor:
        prior_std, weights = self.draft.method.prior_std, self.draft.weights()
        terms = [
            normal_kl(weights[name], F.softplus(raw_std), prior_std_of(prior_std, weights[name]))
            for name, raw_std in self.draft.group("raw_std").items()
        ]
        return torch.stack(terms).sum()


@dataclass(frozen=True, kw_only=True)
class MeanField(TrainedMethod):
    """Mean-field variational inference for any module.

    Args:
        prior_std: standard deviation of the Normal prior around 0, or `He()` to scale it per layer.
        initial_std: standard deviation every weight starts with.
        subset: the parameters that get a distribution, by names or by a predicate of (name, tensor); the rest
            are point estimates.
    """

    prior_std: PriorStd = 1.0
    initial_std: float = 0.01
    subset: Subset = None

    posterior_type = MeanFieldPosterior

    def __post_init__(self) -> None:
        check_prior_std(self.prior_std)
        require_positive(initial_std=self.initial_std)

    def _objective(
        self,
        network: nn.Module,
        likelihood: BuiltLikelihood,
        num_data: int,
        modes: Mapping[str, bool],
        *,
        seed: int,
    ) -> MeanFieldObjective:
        names = resolve(self.subset, network)
        weights = dict(network.named_parameters())
        raw_std = {
            name: inverse_softplus(torch.full_like(weights[name], self.initial_std, requires_grad=False))
            for name in names
        }
        method = self if self.subset is None else replace(self, subset=names)
        draft = MeanFieldPosterior(network, likelihood, method=method, structure={"raw_std": raw_std})
        return MeanFieldObjective(draft, num_data=num_data, modes=modes)
