"""Posteriors with distributions on the nodes: shared weights, and K components of factors on their sides."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..draws import FactorDraws
from ..inputs import Inputs
from ..layers import Survey, Use
from ..layers.declared import stored_uses
from ..layers.factors import Factor, NodeFactors, fold
from ..likelihoods import BuiltLikelihood
from ..posterior import FactorDetails, Posterior, ShapeRule, Streams
from ..weight_normals import GROUPS, Normals
from . import beside, members, rows
from .laws import Family

#: The sides of a weight, in the order in which their noise is drawn.
SIDES = ("input", "output")
#: Noise of the sides of a weight; None where factors are points or the side has none.
Noise = tuple[Tensor | None, Tensor | None]
#: Standard deviations of the sides of a weight by (side, parameter name).
Stds = dict[tuple[str, str], Tensor]


class NodePosterior(Posterior):
    """W ∘ r sᵀ (or W + r sᵀ) with factors s on the input and r on the output nodes, and biases per component.

    `tensors` holds locations (`input_mean`, `output_mean`, [K, nodes]), raw scales (`input_raw_std`,
    `output_raw_std`) and the biases of the components after the first (`biases`, [K − 1, nodes]); the first
    component's are the network's own. The method tells `components`, the `families` of both sides (None where a
    side has no factors), the `bound` of random factors, and whether they are `additive`; the weights that its method
    `beside` picks, if there is one, are independent Normals, the same for all components: `random` names them.
    """

    method: Any
    details_type, optional_groups = FactorDetails, GROUPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: How each weight with factors stands between its nodes, by name.
        self.uses = stored_uses(self.details)
        self.num_components = self.method.components
        #: The law of each side.
        self.families: dict[str, Family | None] = dict(zip(SIDES, self.method.families, strict=True))
        self._latest: tuple[Any, Stds] | None = None
        self.random = () if self.normals is None else self.normals.random
        random = any(family is not None and family.random for family in self.families.values())
        self.scalable = random or bool(self.random)
        if not self.scalable:
            self.num_atoms = self.num_components

    @classmethod
    def draft(
        cls,
        method: Any,
        network: nn.Module,
        likelihood: BuiltLikelihood,
        uses: Mapping[str, Use],
        tensors: dict[str, dict[str, Tensor]],
        facts: Survey | None = None,
        normal: beside.NormalStart = beside.NONE,
    ) -> Self:
        """A posterior to be trained, of a method that from now on knows its weights, and those beside, by name."""
        known = {} if facts is None else {"survey": facts.to_json()}
        named = {} if method.subset is None else {"subset": tuple(uses)}
        named |= {} if normal.method is None else {"beside": normal.method}
        return cls(
            network,
            likelihood,
            method=replace(method, **named) if named else method,
            tensors={**tensors, **normal.tensors},
            details={"uses": [use.to_json() for use in uses.values()], **known},
        )

    def shapes(self) -> dict[str, ShapeRule]:
        count, rules = self.num_components, {}
        for side, family in self.families.items():
            rule = partial(self._nodes_of, f"{side}_shape")
            rules |= {f"{side}_mean": rule} if family is not None else {}
            rules |= {f"{side}_raw_std": rule} if family is not None and family.random else {}
        rules |= {"biases": self.stacked_like_weights(count - 1)} if count > 1 else {}
        return rules if self.normals is None else rules | self.normals.shapes()

    def _nodes_of(self, side: str, name: str, tensor: Tensor) -> tuple[int, ...]:
        return (self.num_components, *getattr(self.uses[name], side))

    @property
    def normals(self) -> Normals | None:
        """The Normal weights beside the factors."""
        return None if self.method.beside is None else Normals(self, self.method.beside)

    @property
    def shared(self) -> set[str]:
        """The weights whose factors are drawn once per component and batch in training."""
        return set(self.details.get("shared", ()))

    # -- the distribution ----------------------------------------------------------------------------------

    def stds(self) -> Stds:
        """Standard deviations of all random factors, [K, *nodes]."""
        keys = [(side, name) for side in (*SIDES, "bias") for name in self._names(f"{side}_raw_std")]
        if not keys:
            return {}
        raw = [self.group(f"{side}_raw_std")[name] for side, name in keys]
        state = None
        if not torch.compiler.is_compiling() and not any(t.requires_grad or t.is_inference() for t in raw):
            state = [self.scale, *((values.data_ptr(), values._version) for values in raw)]
            latest = self._latest  # read once: other threads may replace it
            if latest is not None and latest[0] == state:
                return latest[1]
        whole = F.softplus(torch.cat([values.flatten() for values in raw]))
        whole = whole if self.scale == 1 else whole * self.scale
        parts = whole.split([values.numel() for values in raw])
        alike = zip(keys, parts, raw, strict=True)  # weights of several dtypes are one in `whole`
        stds = {key: part.view(values.shape).to(values.dtype) for key, part, values in alike}
        self._latest = None if state is None else (state, stds)
        return stds

    def standard_deviations(self) -> list[Tensor]:
        return [*self.stds().values(), *(() if self.normals is None else self.normals.stds())]

    def noise(self, name: str, shape: tuple[int, ...], generator: torch.Generator | None, like: Tensor) -> Noise:
        """Noise for the random factors of a weight, [*shape, *nodes] per side."""
        drawn, use = [], self.uses[name]
        for side, nodes in zip(SIDES, (use.input_shape, use.output_shape), strict=True):
            family = self.families[side]
            random = family is not None and family.random
            drawn.append(family.noise((*shape, *nodes), like, generator) if random and family else None)
        return drawn[0], drawn[1]

    def factors(
        self,
        name: str,
        chosen: slice | Tensor,
        noise: Noise,
        stds: Stds,
        bound: float | None,
        flips: Noise | None = None,
    ) -> NodeFactors:
        """The factors of some components on the sides of a weight."""
        sides: list[Factor | None] = []
        for index, side in enumerate(SIDES):
            family = self.families[side]
            if family is None:
                sides.append(None)
                continue
            mean = self.group(f"{side}_mean")[name][chosen]
            if not family.random:
                sides.append(Factor(mean))
                continue
            std = stds[side, name][chosen]
            if flips is not None and (signs := flips[index]) is not None:
                std = std * signs[chosen]
            sides.append(Factor(mean, std, noise[index], bound, family.positive))
        return NodeFactors(*sides)

    @property
    def other_biases(self) -> dict[str, Tensor]:
        """The biases of the components after the first, [K − 1, C] by name."""
        return dict(self.group("biases").items()) if "biases" in self.tensors else {}

    @property
    def varied_biases(self) -> tuple[str, ...]:
        """The biases that differ between draws."""
        return self._names("biases")

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights() | self._drawn(range(index, index + 1), [generator], 0).weights(0)

    @torch.no_grad()
    def _drawn(self, indices: range, streams: Streams, seed: int) -> FactorDraws:
        """The noise of each draw from its own stream, the rest for all at once."""
        weights, stds = self.weights(), self.stds()
        device = next(iter(weights.values())).device
        components = torch.arange(indices.start, indices.stop, device=device) % self.num_components
        groups = {"biases": self.bias_draws(components, streams), "input_factors": {}, "output_factors": {}}
        for name in self.uses:
            noise = [self.noise(name, (1,), stream, weights[name]) for stream in streams]
            sides = (None if side[0] is None else torch.stack(side) for side in zip(*noise, strict=True))
            factors = self.factors(name, components, (next(sides), next(sides)), stds, self.method.bound)
            for side, factor in zip(SIDES, factors, strict=True):
                if factor is not None:
                    groups[f"{side}_factors"][name] = factor.tensor().squeeze(1)
        if self.normals is not None:
            groups["draws"] = beside.draws(self.normals, streams)
        facts = self._facts(indices, seed, uses=self.details["uses"], additive=self.method.additive)
        draws = FactorDraws(self.network, {key: group for key, group in groups.items() if group}, **facts)
        draws.uses = self.uses
        return draws

    def bias_draws(self, components: Tensor, streams: Streams) -> dict[str, Tensor]:
        """The biases of draws of some components, [S, C] by name, where they are not the network's own."""
        weights = self.weights()
        return {
            name: torch.cat([weights[name].unsqueeze(0), others])[components]
            for name, others in self.other_biases.items()
        }

    def _outputs(
        self, inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool = False
    ) -> Iterable[Tensor]:
        if self.random:
            return beside.outputs(self, inputs, num_samples, seed, max_rows, keep_graph)
        return self.draws(range(num_samples), seed).once(inputs, max_rows, keep_graph)

    def folded(self, name: str, weight: Tensor, factors: NodeFactors) -> Tensor:
        """The weight with the factors of one pass in it, whose rows share them."""
        return fold(self.uses[name], weight, factors, additive=self.method.additive)

    def kl(self) -> Tensor:
        """Divergence in nats of all factors, and of the Normal weights beside them, from their priors."""
        factors = self.factor_kl(self.stds())
        return factors if self.normals is None else factors + self.normals.kl()

    def factor_kl(self, stds: Stds) -> Tensor:
        """KL(q(r) ‖ p(r)) + KL(q(s) ‖ p(s)) of the factors in nats, summed over all components   [rank-1, Eq. 2]."""
        total = next(iter(self.weights().values())).new_zeros(())
        for side, family in self.families.items():
            names = [name for where, name in stds if where == side]
            if family is None or not names:
                continue
            means = torch.cat([self.group(f"{side}_mean")[name].flatten() for name in names])
            total = total + family.kl(means, torch.cat([stds[side, name].flatten() for name in names])).sum()
        return total

    def holds(self, name: str) -> str:
        if name in self._names("biases"):
            return f"{self.num_components} points"
        if self.normals is not None and name in self.random:
            return self.normals.holds(name)
        use = self.uses.get(name)
        if use is None:
            return super().holds(name)
        sizes = {"input": use.input_shape, "output": use.output_shape}
        parts = [
            f"{type(family).__name__} on {torch.Size(sizes[side]).numel()} {side}s"
            for side, family in self.families.items()
            if family is not None
        ]
        together = ", one draw per component and batch in training" if name in self.shared else ""
        return f"{self.num_components} × {' and '.join(parts)}{together}"

    def _names(self, key: str) -> tuple[str, ...]:
        return tuple(self.group(key).names) if key in self.tensors else ()

    # -- components, and a draw per row --------------------------------------------------------------------

    @property
    def components(self) -> Sequence[Self]:
        """Each component as a posterior of its own."""
        return members.Components(self)

    component = members.component
    diversity = members.diversity
    per_example_prediction = rows.per_example_prediction
