"""Mixtures: K posteriors of one kind around K modes, as one posterior."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from .. import seeds
from ..draws import Draws, MixtureModule
from ..errors import ConfigError, unknown_name
from ..hints import checked
from ..inputs import Inputs
from ..layers import Survey
from ..likelihoods import BuiltLikelihood
from ..networks import duplicate
from ..prediction import Prediction, PredictionOptions, mixed
from ..summary import Summary, SummaryRow
from .base import MAX_ROWS, Drawer, Posterior
from .sampled import SampledPosterior
from .stored import MixtureDetails
from .tensors import NamedTensors, stored_tensors

#: How components are weighted: all alike, by their evidence, or by what held-out rows say of their mixture.
Weighting = Literal["equal", "evidence", "stacking"]
#: How far, in nats of a row, stacking may end from the best weights, and after how many steps at the latest.
GAP, MOST_STEPS = 1e-9, 50_000


class MixturePosterior(Posterior):
    """K posteriors; draw s belongs to component s mod K, and is number s // K of its draws.

    Predictions are mixtures of the components' predictions in whatever form they have; those in closed form stay in
    closed form. Parameters that the user had frozen are held once.

    Args:
        components: posteriors of one kind around networks of one architecture; they are the mixture's from now on.
        likelihood: in which draw s has the noise of its component; None joins those of the components.
        method: the settings that made the mixture.
        details: plain facts; `component_weights` where components do not count alike.
        history: what training recorded.
    """

    details_type = MixtureDetails
    components: nn.ModuleList

    def __init__(
        self,
        components: Sequence[Posterior],
        likelihood: BuiltLikelihood | None = None,
        *,
        method: Any,
        details: dict[str, Any] | None = None,
        history: list[dict[str, float]] | None = None,
    ) -> None:
        first, *others = components
        if any(type(part) is not type(first) for part in others) or isinstance(first, MixturePosterior):
            kinds = ", ".join(type(part).__name__ for part in components)
            raise ConfigError(f"components must be posteriors of one kind, and no mixtures, got {kinds}")
        joined = likelihood or first.likelihood.joined([part.likelihood for part in components])
        shared = {"method": method, "history": history, "trainable": first.trainable}
        super().__init__(first.network, joined, details=details, **shared)
        for part in others:
            _tie(first, part)
        self.components = nn.ModuleList(components)
        self.likelihood = joined
        self.num_components = len(components) * first.num_components
        self.num_atoms = None if first.num_atoms is None else len(components) * first.num_atoms
        self.scalable = all(part.scalable for part in self._parts())
        weights = self.component_weights
        if weights is not None and (len(weights) != len(components) or abs(sum(weights) - 1) > 1e-6):
            raise ConfigError(f"{len(components)} weights that sum to 1 are needed, got {list(weights)}")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "likelihood" and "components" in self._modules:  # also of a temperature
            for number, part in enumerate(self._parts()):
                part.likelihood = value.component(number, len(self.components))

    def _parts(self) -> Iterator[Any]:
        return iter(self.components)

    def seeded(self, seed: int) -> Iterator[tuple[Any, int]]:
        """The components with their seeds; that of the first is the mixture's."""
        for number, part in enumerate(self._parts()):
            yield part, seeds.derived(seed, "component", number) if number else seed

    def _placed(self, index: int, seed: int = 0) -> tuple[Any, int, int]:
        """The component of a draw, its seed, and the number of the draw among its own."""
        place, number = divmod(index, len(self.components))
        return *list(self.seeded(seed))[number], place

    @property
    def component_weights(self) -> tuple[float, ...] | None:
        """Weights of the components; None where all count alike."""
        weights = self.details.get("component_weights")
        return None if weights is None else tuple(weights)

    # -- draws ---------------------------------------------------------------------------------------------

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return dict(self.drawer()(index, generator))

    def drawer(self) -> Drawer:
        parts = [(stored_tensors(part.network), part.drawer()) for part in self._parts()]

        def draw(index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
            centre, drawn = parts[index % len(parts)]
            return {**centre, **drawn(index // len(parts), generator)}

        return draw

    def generator(self, seed: int, index: int, device: torch.device | None = None) -> torch.Generator:
        part, part_seed, place = self._placed(index, seed)
        return part.generator(part_seed, place, device)

    def _made(self, indices: range, seed: int, linearised: bool) -> Draws:
        if len(indices) > 1:
            return super()._made(indices, seed, linearised=False)
        part, part_seed, place = self._placed(indices.start, seed)
        return part._made(range(place, place + 1), part_seed, linearised)

    def draws(self, indices: range, seed: int) -> Draws:
        return self._made(indices, seed, False) if len(indices) == 1 else super().draws(indices, seed)

    def _outputs(
        self, inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool = False
    ) -> Iterator[Tensor]:
        count = len(self.components)
        shares = [len(range(number, num_samples, count)) for number in range(count)]
        streams = [
            iter(part._outputs(inputs, share, part_seed, max_rows, keep_graph)) if share else iter(())
            for (part, part_seed), share in zip(self.seeded(seed), shares, strict=True)
        ]
        return (next(streams[index % count]) for index in range(num_samples))

    @checked
    def sampled(self, num_samples: int, *, seed: int = 0, linearised: bool | None = None) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As of every posterior: the mixture of the components' draws, as many of each, made once."""
        share = -(-num_samples // len(self.components))
        parts = [part.sampled(share, seed=s, linearised=linearised) for part, s in self.seeded(seed)]
        return self._with(parts)

    def as_module(self, inputs: Inputs = None) -> MixtureModule:
        """As of draws made once, which the components must be."""
        if not all(isinstance(part, SampledPosterior) for part in self._parts()):
            raise ConfigError("as_module needs draws made once; take sampled(num_samples).as_module()")
        return MixtureModule([part.as_module(inputs) for part in self._parts()], self.component_weights)

    def _with(self, parts: Sequence[Posterior]) -> Self:
        details = {key: self.details[key] for key in self.details if key != "survey"}
        facts = {"method": self.method, "details": details, "history": self.history}
        return type(self)(parts, duplicate(self.likelihood), **facts).finished()

    def _view(self, scale: float) -> Self:
        view = copy.copy(self)
        view._modules = {**self._modules, "components": nn.ModuleList([p._view(scale) for p in self._parts()])}
        return view

    @property
    def scale(self) -> float:
        return next(self._parts()).scale

    # -- predictions ---------------------------------------------------------------------------------------

    def predictor(self, options: PredictionOptions) -> Callable[[Inputs], Prediction]:
        share = -(-options.num_samples // len(self.components))
        changes = {"num_samples": share, "moments": True}
        parts = [
            part.predictor(dataclasses.replace(options, seed=seed, **changes))
            for part, seed in self.seeded(options.seed)
        ]
        weights = self.component_weights

        def predicted(inputs: Inputs) -> Prediction:
            prediction = mixed([predict(inputs) for predict in parts], weights)
            has_mean = not options.moments and hasattr(prediction, "function_mean")
            return dataclasses.replace(prediction, **{"function_mean": None} if has_mean else {})

        return predicted

    @property
    def default_form(self) -> str:
        return next(self._parts()).default_form

    def _linearises(self, linearised: bool | None) -> bool:
        return next(self._parts())._linearises(linearised)

    def survey(self, inputs: Inputs) -> Survey:
        return next(self._parts()).survey(inputs)

    # -- weights and what components share -------------------------------------------------------------------

    @checked
    def weighted(self, weighting: Weighting, data: Any = None, *, num_samples: int = 32, seed: int = 0) -> Self:
        """A mixture of the same components with other weights.

        Args:
            weighting: "equal"; "evidence", in proportion to the components' marginal likelihoods; or "stacking", the
                weights under which held-out rows are likeliest [Yao et al. 2018].
            data: for stacking: rows that were not trained on, a pair, a `Dataset` or a `DataLoader`.
            num_samples: for stacking, as in `predict`.
            seed: for stacking, as in `predict`.
        """
        weights = ("weighting", "component_weights")
        others = {key: value for key, value in self.details.items() if key not in weights}
        chosen: list[float] | None = None
        if weighting == "evidence":
            require_evidence(next(self._parts()))
            logs = [part.log_marginal_likelihood() for part in self._parts()]
            chosen = torch.tensor(logs, dtype=torch.float64).softmax(0).tolist()
        elif weighting == "stacking":
            if data is None:
                raise ConfigError('"stacking" needs rows that were not trained on: weighted("stacking", rows)')
            chosen = stacking_weights(*self._judged(data, num_samples, seed))
        mixture = duplicate(self).finished()
        facts = {} if chosen is None else {"weighting": weighting, "component_weights": chosen}
        mixture.details = {**others, **facts}
        return mixture

    def _judged(self, data: Any, num_samples: int, seed: int) -> tuple[Tensor, Tensor | None]:
        """Log-densities of held-out rows under each component, [K, N], and what the rows weigh."""
        share = -(-num_samples // len(self.components))
        logs, weights = [], None
        for part, part_seed in self.seeded(seed):
            options = PredictionOptions(num_samples=share, seed=part_seed, max_rows=MAX_ROWS)
            prediction, targets, weights = part.predicted(data, options, "held-out rows")
            logs.append(prediction.log_prob(targets))
        return torch.stack(logs), weights

    @checked
    @torch.no_grad()
    def shared(self, group: str) -> Self:
        """A mixture whose components share one group of tensors, their mean: `shared("diagonal")` of INF.

        Args:
            group: of the tensors that a component keeps beside its weights, in one shape for all.
        """
        mixture = duplicate(self)
        parts = list(mixture._parts())
        if group not in parts[0].tensors:
            raise unknown_name("group of tensors", group, list(parts[0].tensors))
        groups = [dict(part.group(group).items()) for part in parts]
        if len({tuple((name, tuple(t.shape)) for name, t in tensors.items()) for tensors in groups}) > 1:
            raise ConfigError(f"components can share what has one shape in all of them, and {group!r} has not")
        means = {name: torch.stack([tensors[name] for tensors in groups]).mean(0) for name in groups[0]}
        common = NamedTensors(means, buffers=group == "statistics")
        for part in parts:
            part.tensors[group] = common
            part._apply(lambda tensor: tensor)  # what was built from the old ones is forgotten
        return mixture.finished()

    # -- size and storage ----------------------------------------------------------------------------------

    def holds(self, name: str) -> str:
        count = len({id(dict(part.network.named_parameters())[name]) for part in self._parts()})
        return f"{count} × {next(self._parts()).holds(name)}" if count > 1 else "shared point"

    def summary(self) -> Summary:
        rows = []
        for name, parameter in self.network.named_parameters():
            tensors = [part.network.get_parameter(name) for part in self._parts()]
            for part in self._parts():
                groups = (part.group(key) for key in part.tensors if key != "statistics")
                tensors += [group[name] for group in groups if name in group]
            size = sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in tensors}.values())
            rows.append(SummaryRow(name, tuple(parameter.shape), self.holds(name), size))
        weights = self.component_weights
        shown = ", ".join(f"{weight:.3g}" for weight in weights or ())
        notes = () if weights is None else (f"components weighted by {self.details['weighting']}: {shown}",)
        return Summary(type(self.method).__name__, tuple(rows), self.num_parameters, self.nbytes, notes)

    def content(self) -> dict[str, Any]:
        return {**super().content(), "components": [part.content() for part in self._parts()]}

    def stored(self) -> dict[str, Tensor]:
        """As of every posterior, by component; what components share is stored with the first."""
        tensors = {f"likelihood.{name}": tensor for name, tensor in self.likelihood.state_dict().items()}
        seen: set[int] = set()
        for number, part in enumerate(self._parts()):
            for name, tensor in part.stored().items():
                if not name.startswith("likelihood.") and id(tensor) not in seen:
                    tensors[f"component{number}.{name}"] = tensor
            seen = seen or {id(tensor) for tensor in part.stored().values()}
        return tensors


def _tie(first: Posterior, other: Posterior) -> None:
    """Hold once what two components have in the same memory, and what the user had frozen."""
    frozen = {id(p) for name, p in first.network.named_parameters() if name not in first.trainable}
    for module, source in zip(other.modules(), first.modules(), strict=False):
        for key, tensor in module._parameters.items():
            held = source._parameters.get(key)
            if tensor is None or held is None or tensor.shape != held.shape:
                continue
            if tensor.data_ptr() == held.data_ptr() or (id(held) in frozen and torch.equal(tensor, held)):
                module._parameters[key] = held


def require_evidence(kind: Any) -> None:
    """Refuse posteriors, or their class, that have no marginal likelihood."""
    if not hasattr(kind, "log_marginal_likelihood"):
        name = getattr(kind, "__name__", type(kind).__name__)
        raise ConfigError(
            f'"evidence" needs components with a marginal likelihood, such as those of Laplace, got {name}; take '
            '"stacking"'
        )


def stacking_weights(log_probs: Tensor, row_weights: Tensor | None = None) -> list[float]:
    """The weights w that maximise Σ_n log Σ_k w_k p_kn, from log-densities [K, N] of held-out rows.

    The objective is concave, and w_k ← w_k g_k with g_k = mean_n p_kn / Σ_j w_j p_jn climbs it; what is left to gain is
    at most max_k g_k − 1, which tells when to stop.

    Args:
        log_probs: of rows under each component.
        row_weights: how often each row counts, [N]; None for once.
    """
    rows = log_probs.new_ones(log_probs.shape[1]) if row_weights is None else row_weights.to(log_probs)
    log_probs, shares = log_probs[:, rows > 0], (rows / rows.sum())[rows > 0].double()
    probs = (log_probs.double() - log_probs.double().amax(0)).exp()
    weights = probs.new_full((len(probs), 1), 1 / len(probs))
    for _ in range(MOST_STEPS):
        gains = (probs / (weights * probs).sum(0) * shares).sum(1, keepdim=True)
        if float(gains.max()) - 1 <= GAP:
            break
        weights = weights * gains
    return (weights / weights.sum()).flatten().tolist()
