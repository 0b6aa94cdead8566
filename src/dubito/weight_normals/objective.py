"""Variational inference with independent Normals: how they start, and the loss that trains them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import ConfigError, require_positive
from ..inputs import Batch, Inputs, rows_of
from ..layers.passes import asked
from ..likelihoods import inverse_softplus
from ..objective import Loss, Objective, with_rate
from ..posterior import Posterior
from .estimators import Estimator, LocalReparameterised, Reparameterised
from .noise import FlippedNoise, LocalNoise
from .normals import Normals
from .placement import Placement, assign_noise
from .posterior import NormalPosterior
from .streams import RowStreams

WORDS = {"LocalReparameterised": "local reparameterisation", "Flipout": "flipout"}


class NormalObjective(Objective):
    """The negative evidence bound, its expectation estimated with one draw of the noise per step.

    Args:
        draft: the posterior under training.
        estimator: where the noise is put.
        factor_rate: multiplies the learning rate of tied factors.
        num_data: the number of training rows.
        modes: modules by name that stay in evaluation mode while training.
    """

    draft: NormalPosterior

    def __init__(
        self,
        draft: NormalPosterior,
        *,
        estimator: Estimator,
        factor_rate: float = 1.0,
        num_data: float,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        super().__init__(draft, num_data=num_data, modes=modes)
        Normals(draft).check_prior()
        self.estimator, self.factor_rate = estimator, factor_rate
        self.asks = not isinstance(estimator, Reparameterised)
        self.placement: Placement | None = None

    def bind(self, inputs: Inputs) -> None:
        """Survey the network, and learn from that which parameters' noise can be put on outputs."""
        if self.placement is not None:
            return
        draft, estimator = self.draft, self.estimator
        learned = draft.survey(inputs)
        draft.details["survey"] = learned.to_json()
        if isinstance(estimator, Reparameterised):
            self.placement = Placement((), dict.fromkeys(draft.random, ""), ())
            return
        self.placement = assign_noise(learned, draft.network, draft.random, estimator.layers)
        words = WORDS[type(estimator).__name__]
        drawn = {name: f"reparameterised ({why})" for name, why in self.placement.drawn.items()}
        draft.details["in_training"] = {name: drawn.get(name, words) for name in draft.random}

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        return self._outputs(batch, generator, Normals(self.draft))

    def _outputs(self, batch: Batch, generator: torch.Generator | None, normals: Normals) -> Tensor:
        draft, inputs = self.draft, batch.inputs
        if isinstance(self.estimator, Reparameterised):
            return self.lease(normals.drawn(draft.random, generator)).outputs(inputs)
        placement = self.placement
        assert placement is not None, "bind comes first"
        streams = RowStreams(seeds.drawn(generator, 62), batch.first, rows_of(inputs), batch.total)
        weights = normals.drawn(tuple(placement.drawn), generator)
        if isinstance(self.estimator, LocalReparameterised):
            noise = LocalNoise(placement, normals.scale, streams)
        else:
            noise = FlippedNoise(placement, normals.drawn(placement.names, generator, centred=True), streams)
        tensors = {name: normals.means[name] for name in placement.names} | weights
        lease = asked(draft.network, noise, placement.names, tensors, training=self.modes)
        return lease.outputs(inputs)

    def kl(self) -> Tensor:
        return self.draft.kl()

    def batch_loss(
        self, batch: Batch, kl_weight: float, generator: torch.Generator | None, *, checked: bool = True
    ) -> Loss:
        normals = Normals(self.draft)
        normals.limit()
        outputs = self._outputs(batch, generator, normals)
        return self.joined(outputs, normals.kl, batch, kl_weight, checked=checked)

    def parameter_groups(
        self, lr: float, *, variational_lr: float | None = None, weight_decay: float = 0.0
    ) -> list[dict[str, Any]]:
        groups = super().parameter_groups(lr, variational_lr=variational_lr, weight_decay=weight_decay)
        return with_rate(groups, Normals(self.draft).trained("log_u", "log_v"), self.factor_rate)

    def posterior(self) -> Posterior:
        Normals(self.draft).limit()
        return super().posterior()


def check_stds(initial_std: float, initial_spread: float, max_std: float | None) -> None:
    """Refuse standard deviations that are none, and a start above the largest allowed."""
    require_positive(initial_std=initial_std)
    require_positive(zero=True, initial_spread=initial_spread)
    if max_std is None:
        return
    require_positive(max_std=max_std)
    if initial_std > max_std:
        raise ConfigError(
            f"initial_std must be at most max_std, got {initial_std:g} and {max_std:g}; lower initial_std"
        )


def initial_raw_std(weight: nn.Parameter, std: float, spread: float, seed: int, name: str) -> Tensor:
    """softplus⁻¹(σ) with log σ ~ N(log std, spread²)."""
    values = torch.full_like(weight, std, requires_grad=False)
    if spread:
        generator = seeds.generator(seed, "initial", name, device=weight.device)
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype, device=weight.device)
        values = values * (spread * noise).exp()
    return inverse_softplus(values)
