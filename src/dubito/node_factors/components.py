"""The loss of a mixture: every component sees every row, with factors of its own."""

from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..devices import on_host
from ..errors import warn
from ..fitting import Start
from ..inputs import Batch, Inputs, rows_of
from ..layers.declared import bias_names
from ..layers.factors import NodeFactors
from .beside import NONE, normal_start
from .objective import Drawn, NodeObjective, halved
from .posterior import NodePosterior, Noise, Stds
from .start import chosen_weights, surveyed, tensors_of

#: No standard Normal number that a generator makes lies further out.
NORMAL_REACH = 9.0


@dataclass(frozen=True)
class ComponentNoise(Drawn):
    """Noise of all components.

    Attributes:
        noise: by parameter: [n, nodes] where rows have their own, [K, 1, nodes] where those of a pass share it.
        flips: by parameter: signs [K, nodes] of that noise, None where components have noise of their own.
        bounds: by parameter: of the draws, None where none can reach it.
    """

    noise: dict[str, Noise]
    flips: dict[str, Noise]
    bounds: dict[str, float | None]


class ComponentObjective(NodeObjective):
    """The negative evidence bound of K components, averaged; a pass is a component.

    Args:
        draft: the posterior under training.
        summed: add the components' divergences up instead of averaging them.
        settings: those of every `NodeObjective`.
    """

    def __init__(self, draft: NodePosterior, *, summed: bool = False, **settings: Any) -> None:
        super().__init__(draft, **settings)
        self.summed, self.together = summed, False

    @property
    def passes(self) -> int:
        return self.draft.num_components

    def bind(self, inputs: Inputs) -> None:
        known = "shared" in self.draft.details
        super().bind(inputs)
        norms = [
            name
            for name, module in self.draft.network.named_modules()
            if isinstance(module, _BatchNorm) and module.track_running_stats and self.modes.get(name, True)
        ]
        self.together = bool(norms) and self.passes > 1
        if self.together and not known and (self.draft.shared or self.arrangement == "loop"):
            remedy = f", or leave these weights without factors: {self.draft.shared}" if self.draft.shared else ""
            warn(
                f"batch norm ({norms[0]!r}) normalises each component by itself while they train one after the other, "
                "but all by the same running statistics afterwards: predictions may be far off; take "
                f"arrangement='tile', or put batch norm into evaluation mode{remedy}"
            )

    def tiles(self, batch: Batch) -> bool:
        # Components that are to share batch norm's running statistics must share those of the batch.
        if self.together and self.arrangement == "auto" and not self.draft.shared:
            return True
        return super().tiles(batch)

    def drawn(self, batch: Batch, generator: torch.Generator | None) -> ComponentNoise:
        """Noise for a batch, at half its price."""
        draft, rows = self.draft, rows_of(batch.inputs)
        shared, weights, stds = draft.shared, draft.weights(), draft.stds()
        chosen = slice(batch.first, batch.first + rows)
        noise: dict[str, Noise] = {}
        flips: dict[str, Noise] = {}
        for name in draft.uses:
            weight = weights[name]
            if name in shared:
                noise[name] = draft.noise(name, (self.passes, 1), generator, weight)
                flips[name] = None, None
                continue
            halves = draft.noise(name, (-(-(batch.total or rows) // 2),), generator, weight)
            pairs = [
                (None, None) if half is None else halved(half, chosen, generator, passes=self.passes) for half in halves
            ]
            noise[name] = pairs[0][0], pairs[1][0]
            flips[name] = pairs[0][1], pairs[1][1]
        return ComponentNoise(stds, noise, flips, self._bounds(stds))

    def _bounds(self, stds: Stds) -> dict[str, float | None]:
        """The bound of each weight's draws, None where no draw can reach it and the check is saved."""
        draft, bound = self.draft, self.draft.method.bound
        light = all(family is None or family.light for family in draft.families.values())
        # Only a host is asked: on a device the answer costs more than the check.
        asked = light and bool(stds) and on_host(next(iter(stds.values())))
        if bound is None or not asked:
            return dict.fromkeys(draft.uses, bound)
        means = {key: draft.group(f"{key[0]}_mean")[key[1]] for key in stds}
        reach = [means[key].detach().abs().amax() + NORMAL_REACH * stds[key].detach().amax() for key in stds]
        bounds: dict[str, float | None] = dict.fromkeys(draft.uses)
        for (side, name), most in zip(stds, torch.stack(reach).tolist(), strict=True):
            family = draft.families[side]
            if most >= (log(bound) if family is not None and family.positive else bound):
                bounds[name] = bound
        return bounds

    def factors(self, name: str, chosen: slice, drawn: Any) -> NodeFactors:
        inputs, outputs = drawn.noise[name]
        if name in self.draft.shared:
            inputs, outputs = (None if values is None else values[chosen] for values in (inputs, outputs))
        noise = inputs, outputs
        return self.draft.factors(name, chosen, noise, drawn.stds, drawn.bounds[name], drawn.flips[name])

    def biases(self, chosen: slice, drawn: Any) -> dict[str, Tensor]:
        weights = self.draft.weights()
        others = self.draft.other_biases
        if chosen.start > 0:
            return {name: values[chosen.start - 1 : chosen.stop - 1] for name, values in others.items()}
        return {
            name: torch.cat([weights[name].unsqueeze(0), values[: chosen.stop - 1]]) for name, values in others.items()
        }

    def divergence(self, stds: Stds) -> Tensor:
        """KL terms of [rank-1, Eq. 2]: the mean over components that is meant, a bound of the mixture's, or the sum."""
        kl = self.draft.factor_kl(stds)
        return kl if self.summed else kl / self.draft.num_components


def component_objective(method: Any, start: Start, *, initial_std: float, summed: bool = False) -> ComponentObjective:
    """The objective of a method whose components all see every row.

    Args:
        method: its settings, which the posterior keeps, with the weights of its subset by name.
        start: network, likelihood, number of rows and seed.
        initial_std: where standard deviations of factors start.
        summed: add the components' divergences up instead of averaging them.
    """
    normal = NONE if method.beside is None else normal_start(method, start)
    facts = surveyed(start)
    uses = chosen_weights(start.network, method.subset, facts, without=normal.names)
    tensors = tensors_of(
        start.network,
        uses,
        method.families,
        method.components,
        initial=method.initial,
        initial_std=initial_std,
        additive=method.additive,
        biases=[name for name in bias_names(start.network, uses, facts) if name not in normal.names],
        seed=start.seed,
    )
    return ComponentObjective(
        NodePosterior.draft(method, start.network, start.likelihood, uses, tensors, facts, normal),
        arrangement=method.arrangement,
        log_mixture=method.log_mixture,
        summed=summed,
        factor_rate=method.factor_rate,
        num_data=start.num_data,
        modes=start.modes,
    )
