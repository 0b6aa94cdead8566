"""What the blocks of a posterior add to the covariance of a network's outputs, by a pass and its gradients."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...curvature import Cover
from ...distributions import DiagonalNormal, SparseInformationNormal, StructuredNormal
from ...layers.form import Product
from ...layers.linear import Dense
from ...layers.record import BlockPart
from .covariance import CHUNK, Contraction, contracted, in_basis, output_covariance, slices, unit_variance
from .output_gradients import Last, OutputGradients

#: From a block's name to the distributions of its matrices.
BlockNormals = Callable[[str], Sequence[StructuredNormal]]


class BlockShares:
    """Shares of blocks under some posteriors, which hold the same information at other scales or under other priors.

    Args:
        cover: the blocks.
        posteriors: their distributions.
        pairs: covariances between all outputs of a row, not variances alone.
        class_axis: of logits whose centred variances are asked for too, as `Contraction` has them.
        precise: sums of squares in float64 in place of differences.
    """

    def __init__(
        self,
        cover: Cover,
        posteriors: Sequence[BlockNormals],
        *,
        pairs: bool = True,
        class_axis: int | None = None,
        precise: bool = False,
    ) -> None:
        self.cover, self.posteriors, self.pairs, self.precise = cover, posteriors, pairs, precise
        self.class_axis = class_axis

    @property
    def differences(self) -> bool:
        """Whether some of it comes from differences, of which rounding may leave too little."""
        normals = (self.posteriors[0](name)[0] for name in self.cover.blocks)
        return any(isinstance(normal, SparseInformationNormal) for normal in normals)

    def of(self, names: Sequence[str], done: OutputGradients, stored: dict[Any, Tensor], classes: int = 0) -> Tensor:
        """The share of some blocks for the outputs whose gradients are there; inputs in their bases are `stored`."""
        total: Any = 0.0
        contraction = Contraction(self.pairs, classes)
        for name in names:
            if not self.cover.blocks[name].kronecker:
                total = total + self._of_diagonal(name, done, contraction)
                continue
            for matrix in self.matrices(name, done, stored):
                total = total + output_covariance(*matrix, contraction, precise=self.precise)
        return total

    def merged(
        self, names: Sequence[str], done: OutputGradients, stored: dict[Any, Tensor], groups: Sequence[Tensor]
    ) -> Tensor:
        """The share for one set of classes, [P, b, C + 1], where gradients are there of one group of them at a time."""
        variances, centred, seen, means = [], torch.zeros(()), 0, {}
        for some in groups:
            done.backward(some)
            value, before, seen = self.of(names, done, stored, len(some)), seen, seen + len(some)
            variances.append(value[..., :-1])
            centred = centred.to(value) + len(some) * value[..., -1:]
            # Sums of squares: Σ = Σ_1 + Σ_2 + n m / (n + m) (x̄_2 − x̄_1)²  [Chan, Golub & LeVeque 1979]
            for key, gradients, variance in self._gradients(names, done, stored):
                change = gradients.mean(1, keepdim=True) - means.get(key, 0.0)
                means[key] = means.get(key, 0.0) + len(some) / seen * change
                centred = centred + before * len(some) / seen * variance(change)
        return torch.cat([*variances, centred / seen], 2)

    def _gradients(
        self, names: Sequence[str], done: OutputGradients, stored: dict[Any, Tensor]
    ) -> Iterator[tuple[Any, Tensor, Callable[[Tensor], Tensor]]]:
        """Of each matrix: a key, gradients [b, k, ...], and the function from such to variances [P, b, k]."""
        plain = Contraction()
        for name in names:
            if self.cover.blocks[name].kronecker:
                for place, (normals, inputs, passes) in enumerate(self.matrices(name, done, stored)):
                    variance = partial(output_covariance, normals, inputs, precise=self.precise)
                    yield (name, place), torch.cat(passes, 1), lambda g, v=variance: v([g], plain)
                continue
            normal = self._diagonals(name)
            jacobian = done.jacobians(self.cover.parts[name], slice(0, done.rows), normal[0].dtype)
            yield name, jacobian, lambda g, n=normal: torch.stack([contracted(g, v, plain) for v in n])

    def matrices(
        self, name: str, done: OutputGradients, stored: dict[Any, Tensor]
    ) -> Iterator[tuple[Sequence[StructuredNormal], Tensor, list[Tensor]]]:
        """Of each matrix of a block: distributions, inputs [b, T, n] in their basis, gradients [b, k, m, T] by pass."""
        for part, by_group in self._parts(name):
            dtype = by_group[0][0].mean.dtype
            gradients = done.gradients(part, dtype)
            if (part.key, 0) not in stored:
                inputs = done.inputs(part, dtype)
                for group, normals in enumerate(by_group):
                    stored[part.key, group] = in_basis(normals[0], inputs[:, group])
            for group, normals in enumerate(by_group):
                yield normals, stored[part.key, group], [passed[:, :, group] for passed in gradients]

    def _parts(self, name: str) -> Iterator[tuple[BlockPart, Sequence[Sequence[StructuredNormal]]]]:
        """The parts of a block, each with the distributions of its groups under all posteriors."""
        parts, groups = self.cover.parts[name], self.cover.blocks[name].groups
        normals = (_grouped(posterior(name), groups) for posterior in self.posteriors)
        by_group, count = list(zip(*normals, strict=True)), groups // len(parts)
        for part in parts:
            yield part, by_group[part.part * count : (part.part + 1) * count]

    def _diagonals(self, name: str) -> list[Tensor]:
        """Variances of a parameter without factors under all posteriors."""
        return [posterior(name)[0].variance.flatten() for posterior in self.posteriors]

    def _of_diagonal(self, name: str, done: OutputGradients, contraction: Contraction) -> Tensor:
        """The share of a parameter without factors, from each row's own gradients."""
        variances, pieces = self._diagonals(name), []
        for rows in slices(done.rows, CHUNK // (done.count * len(variances[0]))):
            jacobian = done.jacobians(self.cover.parts[name], rows, variances[0].dtype)
            pieces.append(torch.stack([contracted(jacobian, v, contraction) for v in variances]))
        return torch.cat(pieces, 1)

    # -- the layer whose answers are the outputs -----------------------------------------------------------------

    def closed(self, tail: Last | None, outputs: Tensor) -> list[str]:
        """The blocks of a last layer, where variances need no gradients of any of them; else none."""
        if tail is None or self.pairs or self.precise:
            return []
        names, form = {tail.call.weight, tail.call.bias}, tail.call.form
        blocks = [block for block in self.cover.blocks.values() if names & set(block.parameters)]
        assert isinstance(form, Product)
        plain = form.groups == 1 and not (isinstance(form, Dense) and form.turned)
        if self.class_axis is not None:  # rows of the weight must be the classes
            features = outputs.ndim - 1 if form.trailing else 1
            if outputs.shape != tail.answer.shape or not plain or self.class_axis % outputs.ndim != features:
                return []
        return [block.name for block in blocks] if plain or all(block.kronecker for block in blocks) else []

    def of_last(self, name: str, done: OutputGradients) -> Tensor:
        """Variances [P, b, E] by one of its blocks; of classes as `Contraction` has them."""
        ((part, by_group),) = self._parts(name)
        assert done.tail is not None and isinstance(done.tail.call.form, Product)
        form, answer, like = done.tail.call.form, done.tail.answer, by_group[0][0].mean
        if part.parameter == done.tail.call.weight:
            inputs = done.inputs(dataclasses.replace(part, product=form), like.dtype)  # [b, G, T, n]
        else:  # a bias by itself
            inputs = like.new_ones(done.rows, 1, answer[0].numel() // form.rows, 1)
        centred = self.class_axis is not None
        variances = [
            unit_variance(normals, in_basis(normals[0], inputs[:, group]).flatten(0, 1), centred)
            for group, normals in enumerate(by_group)
        ]
        whole = torch.cat([part.reshape(len(part), done.rows, -1) for part in variances], 2)
        if centred:  # set by set
            return whole
        # From groups, positions and rows of the weight to the order of the outputs
        numbers = torch.arange(answer[0].numel(), device=answer.device).view(1, *answer.shape[1:])
        return whole[..., form.outputs(numbers)[0].mT.flatten().argsort()]


def _grouped(normals: Sequence[StructuredNormal], groups: int) -> Sequence[StructuredNormal]:
    """One distribution per group: a diagonal keeps all groups in one."""
    first = normals[0]
    if len(normals) == groups:
        return normals
    assert isinstance(first, DiagonalNormal)
    pairs = zip(first.mean.chunk(groups), first.diagonal.chunk(groups), strict=True)
    options = {"num_data": first.num_data, "prior_precision": first.prior_precision}
    return [DiagonalNormal(mean, diagonal, **options, validate_args=False) for mean, diagonal in pairs]
