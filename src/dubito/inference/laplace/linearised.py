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

from ...curvature import Block, Cover
from ...distributions import DiagonalNormal, StructuredNormal
from ...fitting import read
from ...inputs import Inputs, call, map_tensors, named_tensors, rows_of, take
from ...layers.form import Product
from ...layers.linear import Dense
from ...layers.record import BlockPart, recorded
from ...layers.shell import seeded
from ...likelihoods import BuiltLikelihood, GaussianLikelihood, at_least_float
from ...prediction import BernoulliPrediction, CategoricalPrediction, Prediction, RealPrediction
from .covariance import CHUNK, Share, added, contracted, in_basis, joined, output_shares, slices, unit_shares
from .passes import Last, Pass, Reading

#: Numbers that the inputs and gradients of all layers may hold at once, unless one output of one row has more.
BUDGET = 1 << 24
#: Numbers that layers answer in one backward pass, for which rows are repeated: fewer are slow.
TOGETHER = 1 << 20
#: Outputs of a row whose gradients are there at the same time, where the budget allows: they share work on its inputs.
SHARING = 8
#: A variance of less than this many roundings is taken again as a sum of squares.
CANCELLED = 1e4

#: From a block's name to the distributions of its matrices.
BlockNormals = Callable[[str], Sequence[StructuredNormal]]


@dataclass(frozen=True)
class Sizes:
    """What a pass of one row told.

    Attributes:
        outputs: E, of a row.
        inputs: numbers of all layers' inputs as matrices.
        answers: numbers that all layers answer.
        tail: those of a last layer that needs no gradients, else 0.
        closed: whether there is no other layer, so that there is nothing to send back.
    """

    outputs: int
    inputs: int
    answers: int
    tail: int
    closed: bool

    def plan(self, count: int, max_rows: int, *, pairs: bool, units: bool) -> tuple[int, int, int]:
        """Rows of a forward pass, outputs whose gradients are there at a time, and outputs of a backward pass.

        Args:
            count: of all rows.
            max_rows: the most rows that go through the network at once.
            pairs: whether all outputs of a row are wanted together.
            units: whether the gradients of the last layer are wanted too.
        """
        row = self.inputs + 4 * self.answers  # a graph holds more than what layers answer
        gradients = max(1, self.answers if units else self.answers - self.tail)
        wanted = self.outputs if pairs else min(self.outputs, SHARING)
        rows = max(1, min(count, max_rows, BUDGET // (row + wanted * gradients)))
        together = min(self.outputs, max(1, (BUDGET - rows * row) // (rows * gradients)))
        copies = min(together, max(1, TOGETHER // (rows * self.answers)), max(1, max_rows // rows))
        return rows, together, copies


class Linearised:
    """Reads a network's Jacobians in factors.

    Args:
        network: at the centre of the posterior, in evaluation mode.
        cover: the blocks of the posterior.
    """

    def __init__(self, network: nn.Module, cover: Cover) -> None:
        self.network, self.cover = network, cover
        self._sizes: dict[Any, Sizes] = {}  # by the shapes of a row

    def __call__(
        self, inputs: Inputs, posteriors: Sequence[BlockNormals], max_rows: int, *, pairs: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, ...] and, under each of some posteriors, their variances [B, E] or covariances [B, E, E].

        Args:
            inputs: checked rows.
            posteriors: the same information at several scales or under several priors.
            max_rows: rows that go through the network at once.
            pairs: covariances between all outputs of a row, not variances alone.
        """
        outputs, shares = self._read(inputs, posteriors, max_rows, pairs, precise=False)
        values = []
        for posterior, (value, rounding) in zip(posteriors, shares, strict=True):
            assert isinstance(value, Tensor)
            if isinstance(rounding, Tensor):
                # A small difference of large numbers: the only number that a prediction reads, after all its work.
                variance = value.diagonal(dim1=1, dim2=2) if pairs else value
                lost = (variance < CANCELLED * rounding).any(1)
                if bool(lost.any()):
                    again = take(inputs, lost)
                    _, (share,) = self._read(again, [posterior], max_rows, pairs, precise=True)
                    value[lost] = share.value
            values.append(value)
        return outputs, values

    def _read(
        self, inputs: Inputs, posteriors: Sequence[BlockNormals], max_rows: int, pairs: bool, precise: bool
    ) -> tuple[Tensor, list[Share]]:
        sizes, units, count = self.measured(inputs), pairs or precise, rows_of(inputs)
        rows, together, copies = sizes.plan(count, max_rows, pairs=pairs, units=units)
        outputs, pieces = [], []
        with self.reading() as (function, record):
            for some in slices(count, rows):
                part = repeated(map_tensors(Tensor.detach, take(inputs, some)), copies)
                with torch.set_grad_enabled(units or not sizes.closed):
                    answers = read(function, part)
                tail = record.tail(answers)
                done = Pass(record, answers, tail, copies, unit_gradients=units or not self.closed(tail))
                if pairs:
                    shares = self._covariances(done, together, posteriors, precise)
                else:
                    shares = self._variances(done, together, posteriors, precise)
                outputs.append(done.outputs.detach())
                pieces.append(shares)
                record.clear()
        return torch.cat(outputs), [joined(shares, 0) for shares in zip(*pieces, strict=True)]

    @contextmanager
    def reading(self, *, keep_graph: bool = False) -> Iterator[tuple[Callable[[Inputs], Tensor], Reading]]:
        """The network as a function whose passes are recorded."""
        record = Reading(self.cover.survey.layout_of, keep_graph=keep_graph)
        with (
            recorded(self.network, self.cover.parameters, record) as shell,
            seeded(self.network, 0, "linearised"),
        ):
            yield partial(call, shell), record

    def measured(self, inputs: Inputs) -> Sizes:
        """How large the layers are for rows like these."""
        key = tuple((name, tensor.shape[1:], tensor.dtype) for name, tensor in named_tensors(inputs))
        if key not in self._sizes:
            with self.reading() as (function, record), torch.no_grad():
                outputs = read(function, take(inputs, slice(1)))
            answered = {seen: zeros.numel() for seen, zeros in record.zeros.items()}
            numbers = sum(
                size // seen.form.rows * (seen.form.columns + 1)
                if isinstance(seen.form, Product)
                else seen.inputs.numel()
                for seen, size in answered.items()
            )
            tail = record.tail(outputs)
            closed = self.closed(tail)
            self._sizes[key] = Sizes(
                outputs=outputs.numel(),
                inputs=numbers,
                answers=sum(answered.values()),
                tail=answered[tail.call] if tail is not None and closed else 0,
                closed=len(closed) == len(self.cover.blocks),
            )
        return self._sizes[key]

    def closed(self, tail: Last | None) -> list[str]:
        """The blocks of a last layer, where all of them have their variances without gradients; else none."""
        if tail is None:
            return []
        names = {tail.call.weight, tail.call.bias}
        blocks = [block for block in self.cover.blocks.values() if names & set(block.parameters)]
        form = tail.call.form
        assert isinstance(form, Product)
        plain = form.groups == 1 and not (isinstance(form, Dense) and form.turned)
        return [block.name for block in blocks] if plain or all(block.kronecker for block in blocks) else []

    # -- the shares of all blocks ------------------------------------------------------------------------------

    @torch.no_grad()
    def _variances(
        self, done: Pass, together: int, posteriors: Sequence[BlockNormals], precise: bool
    ) -> list[Share]:
        """Diagonals of J P⁻¹ Jᵀ of some rows, [b, E], under each posterior."""
        count = done.flat.shape[1]
        closed = [] if done.unit_gradients else self.closed(done.tail)
        others = [name for name in self.cover.blocks if name not in closed]
        totals = [Share() for _ in posteriors]
        for name in closed:
            normals = [posterior(name) for posterior in posteriors]
            totals = added(totals, self._of_last(name, done, normals))
        if not others:
            return totals
        groups, stored = [], {}
        for some in torch.arange(count, device=done.flat.device).split(together):
            done.backward(some, last=len(groups) + 1 == -(-count // together))
            groups.append(self._sum(others, done, posteriors, False, precise, stored))
        return added(totals, [joined(shares, 1) for shares in zip(*groups, strict=True)])

    @torch.no_grad()
    def _covariances(
        self, done: Pass, together: int, posteriors: Sequence[BlockNormals], precise: bool
    ) -> list[Share]:
        """J P⁻¹ Jᵀ of some rows, [b, E, E], under each posterior."""
        everything = torch.arange(done.flat.shape[1], device=done.flat.device)
        names = list(self.cover.blocks)
        if len(everything) <= together:
            done.backward(everything, last=True)
            return self._sum(names, done, posteriors, True, precise, {})
        # Gradients of all outputs are too many: those of two groups at a time, for all pairs of groups.
        groups, stored = everything.split(max(1, together // 2)), {}
        shape = done.rows, len(everything), len(everything)
        like = posteriors[0](names[0])[0].mean
        totals = [Share(like.new_zeros(shape), like.new_zeros(shape[:2])) for _ in posteriors]
        for number, first in enumerate(groups):
            for second in groups[number:]:
                some = first if first is second else torch.cat([first, second])
                done.backward(some)
                shares = self._sum(names, done, posteriors, True, precise, stored)
                for total, share in zip(totals, shares, strict=True):
                    total.value[:, some.unsqueeze(1), some] = share.value  # pyright: ignore[reportIndexIssue]
                    total.rounding[:, some] = share.rounding  # pyright: ignore[reportIndexIssue]
        return totals

    def _sum(
        self,
        names: Sequence[str],
        done: Pass,
        posteriors: Sequence[BlockNormals],
        pairs: bool,
        precise: bool,
        stored: dict[Any, Tensor],
    ) -> list[Share]:
        """What some blocks add for the outputs whose gradients are there; `stored` are inputs in their bases."""
        totals = [Share() for _ in posteriors]
        for name in names:
            normals = [posterior(name) for posterior in posteriors]
            if not self.cover.blocks[name].kronecker:
                totals = added(totals, self._of_diagonal(name, done, normals, pairs))
                continue
            for chosen, inputs, gradients in self.matrices(name, done, normals, stored):
                shares = output_shares(chosen, inputs, gradients, pairs=pairs, precise=precise)
                totals = added(totals, shares)
        return totals

    def matrices(
        self,
        name: str,
        done: Pass,
        normals: Sequence[Sequence[StructuredNormal]],
        stored: dict[Any, Tensor],
    ) -> Iterator[tuple[Sequence[StructuredNormal], Tensor, list[Tensor]]]:
        """Of every matrix of a block: its distributions, inputs [b, T, n] in their basis, gradients [b, k, m, T] by pass."""
        for part, by_group in self._parts(name, normals):
            dtype = by_group[0][0].mean.dtype
            gradients = done.gradients(part, dtype)
            if (part.key, 0) not in stored:
                inputs = done.inputs(part, dtype)
                for group, chosen in enumerate(by_group):
                    stored[part.key, group] = in_basis(chosen[0], inputs[:, group])
            for group, chosen in enumerate(by_group):
                yield chosen, stored[part.key, group], [passed[:, :, group] for passed in gradients]

    def _parts(
        self, name: str, normals: Sequence[Sequence[StructuredNormal]]
    ) -> Iterator[tuple[BlockPart, list[Sequence[StructuredNormal]]]]:
        """The parts of a block, each with the distributions of its groups under all posteriors."""
        block, parts = self.cover.blocks[name], self.cover.parts[name]
        by_group = list(zip(*(_grouped(normal, block) for normal in normals), strict=True))  # [G][posterior]
        count = block.groups // len(parts)
        for part in parts:
            yield part, by_group[part.part * count : (part.part + 1) * count]

    def _of_last(self, name: str, done: Pass, normals: Sequence[Sequence[StructuredNormal]]) -> list[Share]:
        """Variances [b, E] by the weight of the layer whose answers are the outputs."""
        ((part, by_group),) = self._parts(name, normals)
        assert done.tail is not None and isinstance(done.tail.call.form, Product)
        form, answer, dtype = done.tail.call.form, done.tail.answer, by_group[0][0].mean.dtype
        if part.parameter == done.tail.call.weight:
            inputs = done.inputs(dataclasses.replace(part, product=form), dtype)  # [b, G, T, n]
        else:  # a bias by itself
            inputs = torch.ones(done.rows, 1, answer[0].numel() // form.rows, 1).to(by_group[0][0].mean)
        positions = inputs.shape[2]
        groups = [
            unit_shares(chosen, in_basis(chosen[0], inputs[:, group]).flatten(0, 1))
            for group, chosen in enumerate(by_group)
        ]
        # From [b, G, m, T] to the order of the outputs
        numbers = torch.arange(answer[0].numel(), device=answer.device).view(1, *answer.shape[1:])
        order = form.outputs(numbers).flatten().argsort()

        def ordered(columns: Sequence[Tensor | float]) -> Tensor | float:
            if not isinstance(columns[0], Tensor):
                return 0.0
            stacked = torch.stack(columns, 1)  # pyright: ignore[reportArgumentType] [b·T, G, m]
            if positions == 1:
                return stacked.flatten(1)[:, order]
            return stacked.unflatten(0, (-1, positions)).movedim(1, 3).flatten(1)[:, order]

        return [
            Share(*(ordered(columns) for columns in zip(*shares, strict=True)))
            for shares in zip(*groups, strict=True)
        ]

    def _of_diagonal(
        self, name: str, done: Pass, normals: Sequence[Sequence[StructuredNormal]], pairs: bool
    ) -> list[Share]:
        """The share of a parameter without factors, from each row's own gradients."""
        size, parts = self.cover.blocks[name].size, self.cover.parts[name]
        variances = [normal.variance.flatten() for (normal,) in normals]
        dtype, copies, passes = variances[0].dtype, done.copies, range(len(done.caught))
        pieces = []
        if pairs:
            for rows in slices(done.rows, CHUNK // (done.count * size)):
                some = slice(rows.start * copies, rows.stop * copies)
                columns = [done.parameter_gradients(parts, number, some, dtype) for number in passes]
                columns = [column.unflatten(0, (-1, copies)) for column in columns]
                jacobian = torch.cat(columns, 1)[:, : done.count]  # [b, q, size]
                pieces.append([contracted(jacobian * v, jacobian, True) for v in variances])
            return [Share(torch.cat(column)) for column in zip(*pieces, strict=True)]
        for number in passes:
            blocks = []
            for some in slices(done.total, CHUNK // size):
                squares = done.parameter_gradients(parts, number, some, dtype).square()
                blocks.append([squares @ v for v in variances])
            pieces.append([torch.cat(column).view(-1, copies) for column in zip(*blocks, strict=True)])
        return [Share(torch.cat(column, 1)[:, : done.count]) for column in zip(*pieces, strict=True)]


def repeated(inputs: Inputs, copies: int) -> Inputs:
    """Every row several times, its copies together."""
    return map_tensors(lambda t: t.repeat_interleave(copies, 0), inputs) if copies > 1 else inputs


def _grouped(normals: Sequence[StructuredNormal], block: Block) -> Sequence[StructuredNormal]:
    """One distribution per group: a diagonal keeps all groups in one."""
    (first, *_), groups = normals, block.groups
    if len(normals) == groups:
        return normals
    assert isinstance(first, DiagonalNormal)
    pairs = zip(first.mean.chunk(groups), first.diagonal.chunk(groups), strict=True)
    options = {"num_data": first.num_data, "prior_precision": first.prior_precision}
    return [DiagonalNormal(mean, diagonal, **options, validate_args=False) for mean, diagonal in pairs]


# -- from Normal outputs to predictions -------------------------------------------------------------------------


def predictive(likelihood: BuiltLikelihood, outputs: Tensor, covariance: Tensor) -> Prediction:
    """The prediction from outputs that are Normal around `outputs` [B, ...].

    Reals are Normal. Classes come from MacKay's probit approximation: each logit is shrunk by its own variance,
    f / √(1 + π v / 8), before the softmax or the sigmoid. Of their total entropy, as much is aleatoric as the
    network at the centre has by itself; the rest, what doubt about the weights adds, is epistemic.

    Args:
        likelihood: that reads the outputs.
        outputs: of the network at the centre.
        covariance: of a row's outputs, [B, E, E], or, where `needs_pairs` does not ask for it, variances [B, E].
    """
    outputs = at_least_float(outputs)
    point = likelihood.predictive([outputs])
    if isinstance(point, RealPrediction):
        return dataclasses.replace(point, mean_covariances=covariance.unsqueeze(0))
    variance = covariance.reshape(outputs.shape)
    # E[Φ(λ f)] = Φ(λ μ / √(1 + λ² v)), with λ² = π/8 for the sigmoid  [MacKay 1992]
    shrunk = likelihood.predictive([outputs / (1 + math.pi / 8 * variance).sqrt()])
    assert isinstance(shrunk, CategoricalPrediction | BernoulliPrediction)
    assert isinstance(point, CategoricalPrediction | BernoulliPrediction)
    return dataclasses.replace(shrunk, aleatoric=torch.minimum(point.aleatoric, shrunk.total))


def needs_pairs(likelihood: BuiltLikelihood) -> bool:
    """Whether covariances between a row's outputs enter its prediction: of reals they do, of classes variances alone."""
    return isinstance(likelihood, GaussianLikelihood)
