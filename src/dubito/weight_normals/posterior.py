"""Posteriors of independent Normals: their draws, predictions by marginals, and spectra."""

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
from ..seeds import derived
from ..storage.schema import Names, Positive
from .noise import LocalNoise, Moments
from .normals import GROUPS, Normals
from .placement import Placement, assign_noise
from .scales import WeightScale
from .streams import RowStreams
from .ties import matrix_shape, tied_ranks

#: The least standard deviation a truncation leaves: truncated matrices go below 0, where no logarithm is.
FLOOR = 1e-6


class NormalDetails(Details, total=False):
    """Facts of independent Normals: the floors of truncated scales, and how weights were drawn in training."""

    floors: dict[str, Positive]
    in_training: Names


class NormalPosterior(BlockPosterior):
    """w ~ N(mean, σ²) for each weight in one of the forms of `Normals`; other parameters are points.

    Attributes:
        random: the names of the Normal weights.
    """

    scalable = True
    details_type, optional_groups = NormalDetails, GROUPS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.random = Normals(self).random

    def shapes(self) -> dict[str, ShapeRule]:
        return Normals(self).shapes()

    # -- the distribution ----------------------------------------------------------------------------------

    def weight_scale(self, name: str) -> WeightScale:
        """The standard deviations of one parameter: in the form they are kept in, or times the posterior's scale."""
        return Normals(self).scale(name)

    def standard_deviations(self) -> list[Tensor]:
        return Normals(self).stds()

    def holds(self, name: str) -> str:
        return Normals(self).holds(name) if name in self.random else super().holds(name)

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
        seed, scales = options.seed, {name: normals.stored(name) for name in placement.names}
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
        normals = Normals(self)
        weights, names = normals.means, [name for name in self.random if min(matrix_shape(normals.means[name])) > 1]
        return {name: Spectrum.of(weights[name].flatten(1), normals.stored(name).std.flatten(1)) for name in names}

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
        normals = Normals(self)
        random_weights = {name: normals.means[name] for name in self.random}
        ranks = tied_ranks(random_weights, subset, rank, self.network)
        factors = {name: truncate(normals.stored(name).std.flatten(1), k) for name, k in ranks.items()}
        tensors = {
            key: {name: tensor.clone() for name, tensor in self.group(key).items() if name not in ranks}
            for key in self.tensors
        }
        for key, side in (("u", 0), ("v", 1)):
            tensors[key] = tensors.get(key, {}) | {name: pair[side] for name, pair in factors.items()}
        floors = {**self.details.get("floors", {}), **dict.fromkeys(ranks, floor)}
        return type(self)(
            duplicate(self.network),
            duplicate(self.likelihood),
            method=self.method,
            tensors=tensors,
            details={**self.details, "floors": floors},
            history=self.history,
            trainable=self.trainable,
        ).finished()
