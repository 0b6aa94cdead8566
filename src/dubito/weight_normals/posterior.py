"""Posteriors of independent Normals: a mean for every weight, standard deviations in one of several forms."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..curvature.blocks import Block, diagonal_block
from ..distributions.spectrum import Spectrum, truncate
from ..errors import require_count, require_positive
from ..fitting import read
from ..hints import checked
from ..inputs import Inputs, TensorOptions, call, checked_inputs, chunks, rows_of
from ..layers.passes import asking
from ..layers.shell import seeded
from ..matrices import BlockDrawer, BlockPosterior
from ..networks import Subset, duplicate
from ..posterior import Details, ShapeRule
from ..prediction import Prediction, PredictionOptions
from ..priors import Around
from ..seeds import derived
from ..storage.schema import Names, Positive
from .noise import LocalNoise, Moments
from .normals import Normals
from .placement import Placement, assign_noise
from .scales import FormedScale, OwnScale, TiedScale, TruncatedScale, WeightScale
from .streams import RowStreams
from .ties import matrix_shape, tied_ranks

#: The least standard deviation a truncation leaves: truncated matrices go below 0, where no logarithm is.
FLOOR = 1e-6


class NormalDetails(Details, total=False):
    """Facts of independent Normals: the floors of truncated scales, and how weights were drawn in training."""

    floors: dict[str, Positive]
    in_training: Names


class NormalPosterior(BlockPosterior):
    """w ~ N(mean, σ²) for each weight, the means being the network's own.

    σ is softplus(raw_std), one per weight; U Vᵀ with U = exp(log_u) over the outputs and V = exp(log_v) over
    the inputs; or max(U Vᵀ, floor) with `u` and `v` of any sign, the floors being in `details`. Parameters in
    none of these groups are points.
    """

    scalable = True
    details_type, optional_groups = NormalDetails, ("raw_std", "log_u", "log_v", "u", "v")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        keys = [key for key in ("raw_std", "log_u", "u") if key in self.tensors]
        self._forms = {name: key for key in keys for name in self.group(key).names}
        self.random = tuple(name for name in self.weights() if name in self._forms)

    def shapes(self) -> dict[str, ShapeRule]:
        weights = self.weights()

        def side(first: str, axis: int) -> ShapeRule:
            return lambda name, _: (len(self.group(first)[name]), matrix_shape(weights[name])[axis])

        if not self.random:
            raise KeyError("none of the weights has a standard deviation")
        tied = {"log_u": side("log_u", 0), "log_v": side("log_u", 1), "u": side("u", 0), "v": side("u", 1)}
        return {"raw_std": self.stacked_like_weights(), **tied}

    # -- the distribution ----------------------------------------------------------------------------------

    def weight_scale(self, name: str, shape: torch.Size | None = None) -> WeightScale:
        """The standard deviations of one parameter: in the form they are kept in, or times the posterior's scale.

        Args:
            name: the parameter's.
            shape: the parameter's, where it is known.
        """
        stored = self._stored(name, shape)
        return stored if self.scale == 1 else FormedScale(stored.std * self.scale)

    def _stored(self, name: str, shape: torch.Size | None = None) -> WeightScale:
        form = self._forms[name]
        if form == "raw_std":
            return OwnScale(self.group("raw_std")[name])
        shape = shape or self.weights()[name].shape
        if form == "log_u":
            return TiedScale(self.group("log_u")[name], self.group("log_v")[name], shape)
        u, v, floor = self.group("u")[name], self.group("v")[name], self.details["floors"][name]
        return TruncatedScale(u, v, floor, shape)

    @property
    def prior(self) -> Around | None:
        """The prior, where it is centred on a network's weights."""
        return getattr(self.method, "prior", None)

    def standard_deviations(self) -> list[Tensor]:
        return [self.weight_scale(name).std for name in self.random]

    def drawn_blocks(self) -> list[Block]:
        weights = self.weights()
        return [diagonal_block(name, tuple(weights[name].shape)) for name in self.random]

    def block_drawer(self) -> BlockDrawer:
        normals = Normals(self)
        draws = {name: partial(normals.scale(name).draw, normals.means[name]) for name in self.random}
        return lambda block, generator: {block.weight: draws[block.weight](generator)}

    def kl(self) -> Tensor:
        """Divergence from the prior in nats."""
        return Normals(self).kl()

    def holds(self, name: str) -> str:
        if name not in self.random:
            return super().holds(name)
        key, form = self._forms[name], "own std"
        if key != "raw_std":
            words = "std of rank" if key == "log_u" else "std truncated to rank"
            form = f"{words} {len(self.group(key)[name])}"
        how = self.details.get("in_training", {}).get(name)
        return f"Normal, {form}" + (f", {how}" if how else "")

    # -- predictions ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def marginal_prediction(self, inputs: Inputs, options: PredictionOptions) -> Prediction:
        """Averaged over draws of the outputs of layers, anew for each row."""
        inputs = checked_inputs(inputs, TensorOptions.of(self.network))
        placement = assign_noise(self.survey(inputs), self.network, self.random)
        normals = Normals(self)
        predictions, first, total = [], 0, rows_of(inputs)
        for piece in chunks(inputs, options.max_rows):
            draws = self._marginal_draws(piece, placement, normals, options, first, total)
            predictions.append(self.likelihood.predictive(draws))
            first += rows_of(piece)
        return type(predictions[0]).cat(predictions)

    def _marginal_draws(
        self, inputs: Inputs, placement: Placement, normals: Normals, options: PredictionOptions, first: int, total: int
    ) -> Iterator[Tensor]:
        """Outputs of some of `total` rows, the first of which is number `first`, draw by draw."""
        moments: Moments = {}
        means, rows = {name: normals.means[name] for name in placement.names}, rows_of(inputs)
        seed, scales = options.seed, {name: self._stored(name) for name in placement.names}
        for index in range(options.num_samples):
            weights = normals.draw(tuple(placement.drawn), self.generator(seed, index))
            streams = RowStreams(derived(seed, "marginal", index), first, rows, total, self.scale)
            noise = LocalNoise(placement, scales.__getitem__, streams, moments)
            with (
                torch.no_grad(),
                seeded(self.network, seed, "network", index),  # noise of the network's own
                asking(self.network, noise, placement.names, means | weights) as shell,
            ):
                outputs = read(partial(call, shell), inputs)
            yield outputs

    # -- low rank ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def spectrum(self) -> dict[str, Spectrum]:
        """Shares of variance per singular value of the means and of σ, plain and centred, by parameter name.

        For all matrices with a distribution; kernels are read as outputs × (inputs · positions).
        """
        weights = self.weights()
        names = [name for name in self.random if min(matrix_shape(weights[name])) > 1]
        return {name: Spectrum.of(weights[name].flatten(1), self._stored(name).std.flatten(1)) for name in names}

    @checked
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
        random_weights = {name: weights[name] for name in self.random}
        ranks = tied_ranks(random_weights, subset, rank, self.network)
        factors = {name: truncate(self._stored(name).std.flatten(1), k) for name, k in ranks.items()}
        tensors = {
            key: {name: tensor.clone() for name, tensor in self.group(key).items() if name not in ranks}
            for key in self.tensors
        }
        for key, side in (("u", 0), ("v", 1)):
            tensors[key] = tensors.get(key, {}) | {name: pair[side] for name, pair in factors.items()}
        floors = {**self.details.get("floors", {}), **dict.fromkeys(ranks, floor)}
        return NormalPosterior(
            duplicate(self.network),
            duplicate(self.likelihood),
            method=self.method,
            tensors=tensors,
            details={**self.details, "floors": floors},
            history=self.history,
            trainable=self.trainable,
        ).finished()
