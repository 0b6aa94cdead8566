"""Monte Carlo dropout: Bernoulli factors on the inputs of layers [Gal & Ghahramani 2016]."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import seeds
from ..draws import FactorDraws, MaskDraws
from ..errors import NetworkError, require_fraction, require_positive
from ..fitting import Start
from ..inputs import Batch, Inputs, rows_of
from ..layers import Layout, reasons, survey
from ..layers.declared import points_of, reading_inputs, shared_weights, stored_uses, weights_with_nodes
from ..layers.dropout import find_dropouts
from ..layers.factors import Factor, Factors, NodeFactors
from ..layers.kernels import fold_values
from ..layers.passes import asked
from ..method import TrainedMethod
from ..networks import resolve, trainable
from ..objective import Objective
from ..posterior import FactorDetails, Posterior, Streams
from ..priors import normal_penalty


class MCDropoutPosterior(Posterior):
    """Weights with columns dropped at random; with `rate=None` masks on the network's own dropout layers."""

    scalable = True
    details_type = FactorDetails

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        #: How each weight with dropout on its inputs stands between its nodes, by name.
        self.uses = stored_uses(self.details)

    def shapes(self) -> dict[str, Any]:
        return {}

    @property
    def shared(self) -> set[str]:
        """The weights with one draw per batch in training."""
        return set(self.details.get("shared", ()))

    @property
    def layouts(self) -> dict[str, Layout]:
        """The network's own dropout layers, with how their inputs hold the rows."""
        return {name: Layout(value) for name, value in self.details.get("dropouts", {}).items()}

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Weights with dropped columns; masks on the network's own dropout layers are not weights."""
        return self.weights() | self._drawn(range(index, index + 1), [generator], 0).weights(0)

    @torch.no_grad()
    def _drawn(self, indices: range, streams: Streams, seed: int) -> FactorDraws | MaskDraws:
        """Draws as factors on the inputs of layers, or as the seeds of masks."""
        if self.layouts:
            mask_seeds = [seeds.drawn(stream, 31) for stream in streams]
            masks = {"seeds": mask_seeds, "dropouts": self.details["dropouts"], "scale": self.scale}
            facts = self._facts(indices, seed, **masks)
            return MaskDraws(self.network, {}, **facts)
        weights, rate = self.weights(), self.method.rate
        factors = {
            name: torch.stack([bernoulli_factors(use.input_shape, rate, weights[name], s) for s in streams])
            for name, use in self.uses.items()
        }
        if self.scale != 1:
            factors = {name: 1 + self.scale * (values - 1) for name, values in factors.items()}
        facts = self._facts(indices, seed, uses=self.details["uses"], additive=False)
        return FactorDraws(self.network, {"input_factors": factors}, **facts)

    def _outputs(
        self, inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool = False
    ) -> Iterable[Tensor]:
        return self.draws(range(num_samples), seed).once(inputs, max_rows, keep_graph)

    def holds(self, name: str) -> str:
        if name not in self.uses:
            return super().holds(name)
        per_batch = ", one draw per batch in training" if name in self.shared else ""
        return f"dropout {self.method.rate:g} on {self.uses[name].input_shape[-1]} inputs{per_batch}"


class MCDropoutObjective(Objective):
    """Factors per example on layer inputs; per batch where a layer has no axis of rows."""

    draft: MCDropoutPosterior

    @property
    def asks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether masks meet the inputs of layers, and are not those of the network's own dropout layers."""
        return self.draft.method.rate is not None

    def bind(self, inputs: Inputs) -> None:
        draft, rate = self.draft, self.draft.method.rate
        if draft.details:
            return
        facts = survey(draft.network, inputs)
        if rate is None:
            names = find_dropouts(draft.network)
            layouts = {name: facts.dropouts[name].value for name in names if name in facts.dropouts}
            if not layouts:
                raise NetworkError(
                    f"rate=None uses the network's own dropout layers, but its forward pass calls none of {names}; "
                    "give a rate, as in MCDropout(rate=0.1), to put dropout on its layers' inputs"
                )
            draft.details = {"dropouts": layouts, "survey": facts.to_json()}
            return
        first = reading_inputs(draft.network, facts)
        known = weights_with_nodes(draft.network, facts, embeddings=False)
        draft.uses = {n: use for n, use in known.items() if n not in first and n in draft.trainable}
        if not draft.uses:
            raise NetworkError(
                "dropout acts on the inputs of every layer but the first, and this network has no layer after "
                f"its first (found: {sorted(known) or 'no layer with weights'}) whose weight is a trainable parameter "
                "of its own; add a hidden layer, remove parametrisations, or thaw one"
            )
        points = points_of(draft.network, facts, draft.uses, embeddings=False, first=False)
        draft.details = {
            "uses": [use.to_json() for use in draft.uses.values()],
            "shared": shared_weights(draft.uses, facts, layouts=(Layout.ROWS,), steps=False),
            "points": points,
            "survey": facts.to_json(),
        }
        reasons.warn_points(draft.method, points, draft.network)

    def outputs(self, batch: Batch, generator: torch.Generator | None) -> Tensor:
        draft, rate, inputs = self.draft, self.draft.method.rate, batch.inputs
        if rate is None:
            return self.lease().outputs(inputs)  # its own dropout layers are at work in training mode
        rows, total = rows_of(inputs), batch.total or rows_of(inputs)
        shared = draft.shared
        folded: dict[str, Tensor] = {}
        per_row: dict[str, NodeFactors] = {}
        for name, use in draft.uses.items():
            weight = draft.network.get_parameter(name)
            if name in shared:
                columns = bernoulli_factors(use.input_shape, rate, weight, generator)
                folded[name] = fold_values(use.views, weight, columns, None)
            else:
                factors = bernoulli_factors((1, total, *use.input_shape), rate, weight, generator)
                if rows < total:
                    factors = factors[:, batch.first : batch.first + rows]
                per_row[name] = NodeFactors(Factor(factors, given=True))
        context = Factors(per_row, passes=1, rows=rows)
        lease = asked(draft.network, context, per_row, folded, training=self.modes)
        return lease.outputs(inputs)

    def kl(self) -> Tensor:
        """−log p(w) up to its constant under a Normal prior; 0 under the flat one."""
        std = self.draft.method.prior_std
        if std is None:
            return super().kl()
        return normal_penalty(trainable(self.draft.network).values(), std)

    def posterior(self) -> Posterior:
        if not self.draft.details:
            raise NetworkError("which layers carry dropout is learned from a batch: call loss(...) once first")
        return super().posterior()


@dataclass(frozen=True, kw_only=True)
class MCDropout(TrainedMethod):
    """Dropout on the inputs of layers, in training and at prediction, in networks with or without dropout layers.

    Elsewhere the name often means the network's own `nn.Dropout` layers left on at prediction: that is `rate=None`.
    With a rate, dropout layers are at work in training as they always are, and off at prediction. A draw is one mask
    for all rows, so that it is a function; dropout layers left on would draw anew for every row.

    Args:
        rate: probability of dropping an input node of a layer; None uses the network's own dropout layers.
        prior_std: standard deviation of a Normal prior around 0 on all weights; None is the flat prior.
    """

    rate: float | None = 0.1
    prior_std: float | None = None

    posterior_type = MCDropoutPosterior

    def __post_init__(self) -> None:
        if self.rate is not None:
            require_fraction(rate=self.rate, zero=False)
        if self.prior_std is not None:
            require_positive(prior_std=self.prior_std)

    def objective(self, start: Start) -> MCDropoutObjective:
        resolve(None, start.network)  # refuses a network whose parameters are all frozen
        if self.rate is None and not find_dropouts(start.network):
            raise NetworkError(
                "rate=None uses the network's own dropout layers, but it has none with a rate above 0; "
                "give a rate, as in MCDropout(rate=0.1), to put dropout on its layers' inputs"
            )
        draft = MCDropoutPosterior(start.network, start.likelihood, method=self)
        return MCDropoutObjective(draft, num_data=start.num_data, modes=start.modes)


def bernoulli_factors(shape: tuple[int, ...], rate: float, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """0 with probability `rate`, else 1 / (1 − rate), so that the mean is 1."""
    keep = torch.full(shape, 1 - rate, dtype=like.dtype, device=like.device)
    return torch.bernoulli(keep, generator=generator) / (1 - rate)
