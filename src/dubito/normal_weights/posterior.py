"""Posteriors of independent Normals: a mean for every weight, standard deviations in one of several forms."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..distributions.spectrum import Spectrum, truncate
from ..errors import require_count, require_positive
from ..inputs import Inputs, Place, checked_inputs, chunks, rows_of
from ..layers.shell import leased
from ..layers.weight_noise import (
    Moments,
    OwnSpread,
    Placement,
    RowStreams,
    Spread,
    TiedSpread,
    TrainedSpread,
    TruncatedSpread,
    full_precision,
    local_noise,
    place,
    summed,
)
from ..networks import Subset, duplicate, run, with_flags
from ..posterior import MAX_ROWS, Posterior
from ..prediction import Prediction
from ..priors import prior_std_of
from ..seeds import derived, forked
from .ties import matrix_shape, tied_ranks

#: The least standard deviation a truncation leaves: truncated matrices go below 0, where no logarithm is.
FLOOR = 1e-6


@dataclass
class Shared:
    """What `NormalPosterior.sharing` keeps.

    Attributes:
        weights: the means by parameter name.
        spreads: likewise.
        kls: divergences of several parameters, computed with their draws.
        drawn: the names of those.
    """

    weights: dict[str, Tensor]
    spreads: dict[str, Spread] = field(default_factory=dict)
    kls: list[Tensor] = field(default_factory=list)
    drawn: set[str] = field(default_factory=set)


class NormalPosterior(Posterior):
    """w ~ N(mean, σ²) for each weight, the means being the network's own.

    σ is softplus(raw_std), one per weight; U Vᵀ with U = exp(log_u) over the outputs and V = exp(log_v) over
    the inputs; or max(U Vᵀ, floor) with `u` and `v` of any sign, the floors being in `details`. Parameters in
    none of these groups are points.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keys = [key for key in ("raw_std", "log_u", "u") if key in self.structure]
        self._forms = {name: key for key in keys for name in self.group(key).names}
        self._shared: Shared | None = None
        self.random = tuple(name for name in self.weights() if name in self._forms)

    # -- the distribution ----------------------------------------------------------------------------------

    def spread(self, name: str) -> Spread:
        """The standard deviations of one parameter, in the form they are kept in."""
        if self._shared is None:
            return self._spread(name)
        if name not in self._shared.spreads:
            self._shared.spreads[name] = self._spread(name)
        return self._shared.spreads[name]

    def _spread(self, name: str) -> Spread:
        form = self._forms[name]
        if form == "raw_std":
            return OwnSpread(self.group("raw_std")[name])
        shape = self.weights()[name].shape
        if form == "log_u":
            return TiedSpread(self.group("log_u")[name], self.group("log_v")[name], shape)
        u, v, floor = self.group("u")[name], self.group("v")[name], self.details["floors"][name]
        return TruncatedSpread(u, v, floor, shape)

    def weights(self) -> dict[str, Tensor]:
        return super().weights() if self._shared is None else dict(self._shared.weights)

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        weights = self.weights()
        with _full_precision(weights):
            return weights | {n: self.spread(n).draw(weights[n], generator) for n in self.random}

    def drawn(
        self, names: Sequence[str], generator: torch.Generator | None, *, centred: bool = False
    ) -> dict[str, Tensor]:
        """μ + σ ε, or σ ε alone where `centred`, for some parameters.

        Inside `sharing` their divergences are computed along the way, which saves passes over memory.
        """
        weights, prior_std, terms = self.weights(), self.method.prior_std, []
        with _full_precision(weights):
            for name in names:
                spread, mean = self.spread(name), weights[name]
                assert isinstance(spread, TrainedSpread)
                terms.append(spread.draw_term(mean, prior_std_of(prior_std, mean), generator, centred))
            kl, draws = summed(terms) if terms else (None, [])
        if self._shared is not None and kl is not None:
            self._shared.kls.append(kl)
            self._shared.drawn.update(names)
        return dict(zip(names, draws, strict=True))

    def kl(self) -> Tensor:
        """Divergence from the prior in nats."""
        prior_std, weights, shared = self.method.prior_std, self.weights(), self._shared
        rest = [name for name in self.random if shared is None or name not in shared.drawn]
        kls = [] if shared is None else list(shared.kls)
        if rest:
            with _full_precision(weights):
                means = ((name, weights[name]) for name in rest)
                kls.append(summed([self.spread(n).term(w, prior_std_of(prior_std, w)) for n, w in means])[0])
        return kls[0] if len(kls) == 1 else torch.stack(kls).sum()

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """While open, and while no parameter changes, what was computed once serves all that ask for it."""
        outer, self._shared = self._shared, Shared(self.weights())
        try:
            yield
        finally:
            self._shared = outer

    def holds(self, name: str) -> str:
        if name not in self.random:
            return "point"
        key, form = self._forms[name], "own std"
        if key != "raw_std":
            words = "std of rank" if key == "log_u" else "std truncated to rank"
            form = f"{words} {len(self.group(key)[name])}"
        how = self.details.get("in_training", {}).get(name)
        return f"Normal, {form}" + (f", {how}" if how else "")

    # -- predictions ---------------------------------------------------------------------------------------

    def sample_outputs(
        self,
        inputs: Inputs,
        num_samples: int,
        *,
        seed: int = 0,
        max_rows: int = MAX_ROWS,
        keep_graph: bool = False,
    ) -> Tensor:
        with self.sharing():
            return super().sample_outputs(
                inputs, num_samples, seed=seed, max_rows=max_rows, keep_graph=keep_graph
            )

    def predict(
        self,
        inputs: Inputs,
        num_samples: int = 32,
        *,
        seed: int = 0,
        max_rows: int = MAX_ROWS,
        marginal: bool = False,
    ) -> Prediction:
        """The prediction for some rows, averaged over draws.

        Args:
            inputs: what the network reads.
            num_samples: draws in all.
            seed: the same seed, dtype and device give the same draws.
            max_rows: rows that go through the network at once.
            marginal: draw the outputs of layers anew for each row (as `LocalReparameterised` does in training)
                instead of one function for all rows: cheaper for networks of few layers, right for each row by
                itself where layers are dense, and an approximation for convolutions.
        """
        with self.sharing():
            if not marginal:
                return super().predict(inputs, num_samples, seed=seed, max_rows=max_rows)
            return self._marginal(inputs, num_samples, seed, max_rows)

    @torch.no_grad()
    def _marginal(self, inputs: Inputs, num_samples: int, seed: int, max_rows: int) -> Prediction:
        require_count(num_samples=num_samples, max_rows=max_rows)
        inputs = checked_inputs(inputs, Place.of(self.network))
        placement = place(self.network, self.random, None, inputs)
        predictions, first, total = [], 0, rows_of(inputs)
        for piece in chunks(inputs, max_rows):
            draws = self._marginal_draws(piece, placement, num_samples, seed, first, total)
            predictions.append(self.likelihood.predictive(draws))
            first += rows_of(piece)
        return type(predictions[0]).cat(predictions)

    def _marginal_draws(
        self, inputs: Inputs, placement: Placement, num_samples: int, seed: int, first: int, total: int
    ) -> Iterator[Tensor]:
        """Outputs of some of `total` rows, the first of which is number `first`, draw by draw."""
        spreads = {name: self.spread(name) for name in self.random if name not in placement.drawn}
        moments: Moments = {}
        own, device = self.weights(), Place.of(self.network).device
        for index in range(num_samples):
            generator = self.generator(seed, index)
            weights = {name: self.spread(name).draw(own[name], generator) for name in placement.drawn}
            streams = RowStreams(derived(seed, "marginal", index), first, rows_of(inputs), total)
            with (
                torch.no_grad(),
                forked(seed, "network", index, device=device),  # noise of the network's own
                leased(self.network) as shell,
                local_noise(shell, placement.layers, spreads, streams, moments),
            ):
                outputs = self._read(partial(run, shell, weights), inputs)
            yield outputs

    # -- low rank ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def spectrum(self) -> dict[str, Spectrum]:
        """Shares of variance per singular value of the means and of σ, plain and centred, by parameter name.

        For all matrices with a distribution; kernels are read as outputs × (inputs · positions).
        """
        weights = self.weights()
        matrices = [name for name in self.random if min(matrix_shape(weights[name])) > 1]
        return {
            name: Spectrum.of(weights[name].flatten(1), self.spread(name).std.flatten(1)) for name in matrices
        }

    @torch.no_grad()
    def tied(self, rank: int = 2, *, subset: Subset = None, floor: float = FLOOR) -> "NormalPosterior":
        """A posterior whose matrices σ are cut down to their first singular values; the means stay.

        Args:
            rank: singular values to keep.
            subset: the parameters to cut down; None takes all matrices whose both sides exceed the rank.
            floor: the least σ, where the truncated matrix falls below it.
        """
        require_count(rank=rank)
        require_positive(floor=floor)
        weights = self.weights()
        own = {name: weights[name] for name in self.random}
        ranks = tied_ranks(own, subset, rank, self.network, stacklevel=3)
        factors = {name: truncate(self.spread(name).std.flatten(1), k) for name, k in ranks.items()}
        structure = {
            key: {name: tensor.clone() for name, tensor in self.group(key).items() if name not in ranks}
            for key in self.structure
        }
        for key, side in (("u", 0), ("v", 1)):
            structure[key] = structure.get(key, {}) | {name: pair[side] for name, pair in factors.items()}
        floors = {**self.details.get("floors", {}), **dict.fromkeys(ranks, floor)}
        return NormalPosterior(
            with_flags(duplicate(self.network), self.trainable),
            duplicate(self.likelihood),
            method=self.method,
            structure=structure,
            details={**self.details, "floors": floors},
            history=self.history,
        ).finished()


def _full_precision(weights: Mapping[str, Tensor]) -> AbstractContextManager[object]:
    """Autocast off where the weights are."""
    return full_precision(next(iter(weights.values())).device)
