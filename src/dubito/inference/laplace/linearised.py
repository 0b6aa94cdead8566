"""The network linearised in its weights: outputs ~ N(f(x), J P⁻¹ Jᵀ) in closed form.

Backward passes bring the gradients of outputs to every layer; the Jacobian of a layer's weights is made of them and of
the layer's inputs, and is never formed for all rows. How many rows and outputs are treated at a time is known before:
one row tells how large the layers are.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import seeds
from ...curvature import Cover
from ...fitting import read
from ...inputs import Inputs, call, map_tensors, named_tensors, rows_of, take
from ...layers.form import Product
from ...layers.record import recorded
from ...layers.shell import seeded
from ...likelihoods import (
    BernoulliLikelihood,
    BuiltLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    at_least_float,
)
from ...precision import half_passes
from ...prediction import BernoulliPrediction, CategoricalPrediction, Prediction
from .covariance import slices
from .output_gradients import OutputGradients, Reading
from .shares import BlockNormals, BlockShares

#: Numbers that the inputs and gradients of all layers may hold at once, unless one output of one row has more.
BUDGET = 1 << 25
#: Numbers that layers answer in one backward pass, for which rows are repeated: fewer are slow.
TOGETHER = 1 << 21
#: Outputs of a row whose gradients are there at the same time, where the budget allows: they share work on its inputs.
SHARING = 8


@dataclass(frozen=True)
class Sizes:
    """What a pass of one row told.

    Attributes:
        outputs: E, of a row.
        inputs: numbers of the inputs of layers with distributions, as matrices.
        answers: numbers that these layers answer.
        network: numbers on the way through the whole network.
        tail: those of a last layer that needs no gradients, else 0.
        plain: numbers of the largest parameter without factors.
        closed: whether there is no other layer, so that there is nothing to send back.
    """

    outputs: int
    inputs: int
    answers: int
    network: int
    tail: int
    plain: int
    closed: bool

    def plan(self, count: int, max_rows: int, *, pairs: bool, units: bool) -> tuple[int, int, int]:
        """Rows of a forward pass, outputs whose gradients are there at a time, and outputs of a backward pass.

        Args:
            count: of all rows.
            max_rows: the most rows that go through the network at once.
            pairs: whether all outputs of a row are wanted together.
            units: whether the gradients of the last layer are wanted too.
        """
        row = self.inputs + 4 * self.network  # a graph holds more than what layers answer
        gradients = max(1, self.plain + self.answers - (0 if units else self.tail))
        wanted = self.outputs if pairs else min(self.outputs, SHARING)
        rows = max(1, min(count, max_rows, BUDGET // (row + wanted * gradients)))
        together = min(self.outputs, max(1, (BUDGET - rows * row) // (rows * gradients)))
        return rows, together, min(together, self.copies(rows), max(1, max_rows // rows))

    def copies(self, rows: int) -> int:
        """Outputs of a backward pass, for each of which every row goes through the network."""
        return 1 if self.closed else max(1, min(self.outputs, TOGETHER // (rows * self.network)))


class Linearised:
    """Reads a network's Jacobians in factors.

    Args:
        network: at the centre of the posterior, in evaluation mode.
        cover: the blocks of the posterior.
    """

    def __init__(self, network: nn.Module, cover: Cover) -> None:
        self.network, self.cover = network, cover
        self._sizes: dict[Any, Sizes] = {}  # by the shapes of a row and the precision of passes

    def __call__(
        self,
        inputs: Inputs,
        posteriors: Sequence[BlockNormals],
        max_rows: int,
        *,
        pairs: bool,
        class_axis: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, ...] and, under each of some posteriors, their variances [B, E] or covariances [B, E, E].

        Args:
            inputs: checked rows.
            posteriors: the same information at several scales or under several priors.
            max_rows: rows that go through the network at once.
            pairs: covariances between all outputs of a row, not variances alone.
            class_axis: of logits: variances come set by set of classes, as `Contraction` has them.
        """
        shares = BlockShares(self.cover, posteriors, pairs=pairs, class_axis=class_axis)
        outputs, values = self._read(inputs, shares, max_rows)
        if shares.differences:
            # The only numbers that a prediction reads, one for each posterior, after all its work
            lost = values.isnan().flatten(2).any(2)
            numbers = [number for number, lacks in enumerate(lost.any(1).tolist()) if lacks]
            if numbers:
                some, rows = [posteriors[number] for number in numbers], lost.any(0)
                precise = BlockShares(self.cover, some, pairs=pairs, class_axis=class_axis, precise=True)
                again = self._read(take(inputs, rows), precise, max_rows)[1]
                for number, exact in zip(numbers, again, strict=True):
                    values[number, lost[number]] = exact[lost[number][rows]]
        return outputs, list(values)

    def _read(self, inputs: Inputs, shares: BlockShares, max_rows: int) -> tuple[Tensor, Tensor]:
        sizes, count = self.measured(inputs, shares.class_axis), rows_of(inputs)
        variances = not (shares.pairs or shares.precise)
        rows, together, copies = sizes.plan(count, max_rows, pairs=shares.pairs, units=not variances)
        outputs, pieces = [], []
        with self.reading() as (function, record):
            for some in slices(count, rows):
                part = repeated(map_tensors(Tensor.detach, take(inputs, some)), copies)
                with torch.set_grad_enabled(not (sizes.closed and variances)):
                    answers = read(function, part)
                tail = record.tail(answers)
                closed = shares.closed(tail, answers)
                done = OutputGradients(record, answers, tail, copies, unit_gradients=not closed)
                with torch.no_grad():
                    add = _covariances if shares.pairs else _variances
                    pieces.append(add(shares, done, together, closed))
                outputs.append(done.outputs.detach())
                record.clear()
        return torch.cat(outputs), torch.cat(pieces, 1)

    @contextmanager
    def reading(self, *, keep_graph: bool = False) -> Iterator[tuple[Callable[[Inputs], Tensor], Reading]]:
        """The network as a function whose passes are recorded."""
        record = Reading(self.cover.survey.layout_of, keep_graph=keep_graph)
        with recorded(self.network, self.cover.parameters, record) as shell, seeded(self.network, 0, "linearised"):
            yield partial(call, shell), record

    def measured(self, inputs: Inputs, class_axis: int | None = None) -> Sizes:
        """How large the layers are for rows like these."""
        rows = tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in named_tensors(inputs))
        key = rows, class_axis, half_passes()  # under autocast a last layer is another
        if key not in self._sizes:
            with self.reading() as (function, record), torch.no_grad():
                outputs = read(function, take(inputs, slice(1)))
            answered = {seen: zeros.numel() for seen, zeros in record.zeros.items()}
            matrices = (
                size // seen.form.rows * (seen.form.columns + 1)
                if isinstance(seen.form, Product)
                else seen.inputs.numel()
                for seen, size in answered.items()
            )
            tail, blocks = record.tail(outputs), self.cover.blocks
            closed = BlockShares(self.cover, [], pairs=False, class_axis=class_axis).closed(tail, outputs)
            self._sizes[key] = Sizes(
                outputs=outputs.numel(),
                inputs=sum(matrices),
                answers=sum(answered.values()),
                network=max(sum(answered.values()), math.ceil(sum(use.size for use in self.cover.survey.uses))),
                tail=answered[tail.call] if tail is not None and closed else 0,
                plain=max((b.size for b in blocks.values() if not b.kronecker and b.name not in closed), default=0),
                closed=len(closed) == len(blocks),
            )
        return self._sizes[key]


def _variances(shares: BlockShares, done: OutputGradients, together: int, closed: Sequence[str]) -> Tensor:
    """Diagonals of J P⁻¹ Jᵀ of some rows, [P, b, E], as many outputs at a time as `together`; of classes by sets."""
    total: Any = sum(shares.of_last(name, done) for name in closed)
    others = [name for name in shares.cover.blocks if name not in closed]
    if not others:
        return total
    numbers, classes, groups, stored = done.numbers, 0, [], {}
    if shares.class_axis is not None:
        classes = done.outputs.shape[shares.class_axis]
        numbers = numbers.view(1, *done.outputs.shape[1:]).movedim(shares.class_axis, -1).flatten()
    if together < classes:
        sets = [some.split(together) for some in numbers.split(classes)]
        return total + torch.cat([shares.merged(others, done, stored, some) for some in sets], 2)
    parts = numbers.split(together - together % max(1, classes))
    for some in parts:
        done.backward(some, last=some is parts[-1])
        groups.append(shares.of(others, done, stored, classes))
    return total + torch.cat(groups, 2)


def _covariances(shares: BlockShares, done: OutputGradients, together: int, closed: Sequence[str]) -> Tensor:
    """J P⁻¹ Jᵀ of some rows, [P, b, E, E]; of two groups of outputs at a time where gradients of all are too many."""
    names, everything, stored = list(shares.cover.blocks), done.numbers, {}
    if len(everything) <= together:
        done.backward(everything, last=True)
        return shares.of(names, done, stored)
    groups, total = everything.split(max(1, together // 2)), torch.zeros(())
    for number, first in enumerate(groups):
        for second in groups[number:]:
            some = first if first is second else torch.cat([first, second])
            done.backward(some)
            value = shares.of(names, done, stored)
            if not total.ndim:
                total = value.new_zeros(*value.shape[:2], len(everything), len(everything))
            total[..., some.unsqueeze(1), some] = value
    return total


def repeated(inputs: Inputs, copies: int) -> Inputs:
    """Every row several times, its copies together."""
    return map_tensors(lambda t: t.repeat_interleave(copies, 0), inputs) if copies > 1 else inputs


# -- from Normal outputs to predictions -------------------------------------------------------------------------


def predictive(
    likelihood: BuiltLikelihood,
    outputs: Tensor,
    covariance: Tensor,
    centred: Tensor | None = None,
    *,
    num_samples: int = 32,
    seed: int = 0,
    noise: Tensor | None = None,
) -> Prediction:
    """The prediction from outputs that are Normal around `outputs` [B, ...].

    Reals are Normal. Classes come from MacKay's probit approximation: each logit is shrunk by its own variance,
    f / √(1 + π v / 8), before the softmax or the sigmoid. Of their total entropy, as much is aleatoric as the
    network at the centre has by itself; the rest, what uncertainty of the weights adds, is epistemic.

    Args:
        likelihood: that reads the outputs.
        outputs: of the network at the centre.
        covariance: of a row's outputs, [B, E, E], or, where `needs_pairs` does not ask for it, variances [B, E].
        centred: variances of the centred logits of classes; without them, as where only probabilities count, they are
            those of one draw, 0.
        num_samples: draws of the outputs for likelihoods without a closed form (all but classes and Normal noise).
        seed: of those draws.
        noise: their `standard_noise`, where it was made before.
    """
    outputs = at_least_float(outputs)
    if isinstance(likelihood, GaussianLikelihood):
        return likelihood.predictive(outputs.unsqueeze(0), covariance.unsqueeze(0))
    if needs_pairs(likelihood):
        if noise is None:
            noise = standard_noise(covariance.shape[-1], num_samples, seed)
        deviations = torch.einsum("bef,sf->sbe", covariance_root(covariance), noise.to(covariance))
        return likelihood.predictive(outputs + deviations.reshape(-1, *outputs.shape))
    point = likelihood.predictive(outputs.unsqueeze(0))
    variance = covariance.reshape(outputs.shape)
    # E[Φ(λ f)] = Φ(λ μ / √(1 + λ² v)), with λ² = π/8 for the sigmoid  [MacKay 1992]
    shrunk = likelihood.predictive((outputs / (1 + math.pi / 8 * variance).sqrt()).unsqueeze(0))
    assert isinstance(shrunk, CategoricalPrediction | BernoulliPrediction)
    assert isinstance(point, CategoricalPrediction | BernoulliPrediction)
    if centred is None:
        centred = variance if isinstance(shrunk, BernoulliPrediction) else shrunk.function_variance
    centred = centred / getattr(likelihood.settings, "temperature", 1.0) ** 2  # of calibrated likelihoods
    aleatoric = torch.minimum(point.aleatoric, shrunk.total)
    moments = {"function_variance": centred, "function_mean": point.function_mean}
    return dataclasses.replace(shrunk, aleatoric=aleatoric, **moments)


def closed_prediction(
    read: Linearised,
    likelihood: BuiltLikelihood,
    inputs: Inputs,
    normals: BlockNormals,
    max_rows: int,
    scale: float = 1.0,
    seed: int = 0,
    num_samples: int = 32,
) -> Prediction:
    """The prediction of checked rows in closed form, of a posterior whose standard deviations are times `scale`."""
    axis = likelihood.settings.class_axis if isinstance(likelihood, CategoricalLikelihood) else None
    outputs, (values,) = read(inputs, [normals], max_rows, pairs=needs_pairs(likelihood), class_axis=axis)
    values = values * scale**2
    if axis is None:
        return predictive(likelihood, outputs, values, num_samples=num_samples, seed=seed)
    sets = outputs.movedim(axis, -1)
    values = values.reshape(*sets.shape[:-1], sets.shape[-1] + 1)
    return predictive(likelihood, outputs, values[..., :-1].movedim(-1, axis), values[..., -1])


def needs_pairs(likelihood: BuiltLikelihood) -> bool:
    """Whether covariances between a row's outputs enter its prediction, as of reals; of classes variances do."""
    return not isinstance(likelihood, CategoricalLikelihood | BernoulliLikelihood)


def standard_noise(outputs: int, num_samples: int, seed: int) -> Tensor:
    """Standard noise of draws of a row's outputs, [S, E], in double precision.

    All rows have the same, so that a row's prediction does not depend on the others. A single output has its quantiles
    at equal probabilities in place of noise.
    """
    if outputs == 1:
        levels = (torch.arange(num_samples, dtype=torch.float64) + 0.5) / num_samples
        return torch.special.ndtri(levels).unsqueeze(1)
    stream = seeds.generator(seed, "linearised outputs")
    return torch.randn(num_samples, outputs, dtype=torch.float64, generator=stream)


def covariance_root(covariance: Tensor) -> Tensor:
    """The symmetric R with R R = covariance, [B, E, E], which may be singular: outputs that no weight moves.

    Of all roots it alone hardly moves where the covariance hardly does: eigenvectors turn where eigenvalues are alike.
    """
    if covariance.shape[-1] == 1:
        return covariance.clamp(min=0).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    return (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
