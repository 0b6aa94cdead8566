"""The network linearised in its weights: outputs ~ N(f(x), J P⁻¹ Jᵀ) in closed form.

One backward pass per output brings its gradients to every layer; the Jacobian of a layer's weights is made of them
and of the layer's inputs, and is never formed for all rows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...curvature import Block, Cover
from ...distributions import DiagonalNormal, StructuredNormal
from ...errors import ConfigError
from ...inputs import Inputs, call, map_tensors, rows_of, take
from ...layers.form import Product
from ...layers.record import BlockPart, Call, Record, by_row, recorded
from ...layers.shell import seeded
from ...likelihoods import BuiltLikelihood, at_least_float
from ...prediction import BernoulliPrediction, CategoricalPrediction, Prediction, RealPrediction
from .covariance import CHUNK, dense_covariance, output_covariances

#: Numbers that the inputs and gradients of all layers may hold at once.
BUDGET = 1 << 26
#: The most outputs of a row: each takes a backward pass, and all pairs of them are kept.
MOST_OUTPUTS = 1024

#: From a block's name to the distributions of its matrices.
BlockNormals = Callable[[str], Sequence[StructuredNormal]]
#: Gradients at a call's outputs, one for each output of the network; None where that does not depend on them.
Caught = dict[Call, list[Tensor | None]]


class Linearised:
    """Reads a network's Jacobians in factors.

    Args:
        network: at the centre of the posterior, in evaluation mode.
        cover: the blocks of the posterior.
    """

    def __init__(self, network: nn.Module, cover: Cover) -> None:
        self.network, self.cover, self.blocks = network, cover, dict(cover.blocks)
        self.step = 32  # the first rows tell how many fit into the budget

    def __call__(
        self, inputs: Inputs, posteriors: Sequence[BlockNormals], max_rows: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Outputs [B, ...] and, under each of some posteriors, their covariances [B, E, E].

        Args:
            inputs: checked rows.
            posteriors: the same information at several scales or under several priors.
            max_rows: rows that go through the network at once.
        """
        rows, start = rows_of(inputs), 0
        outputs: list[Tensor] = []
        covariances: list[list[Tensor]] = [[] for _ in posteriors]
        record, step = self.cover.record(), self.step
        with (
            recorded(self.network, self.cover.parameters, record) as shell,
            seeded(self.network, 0, "linearised"),
        ):
            while start < rows:
                part = take(inputs, slice(start, start + min(step, max_rows)))
                answers, caught = self._passes(shell, record, part)
                with torch.no_grad():
                    covariance = self._covariances(record, caught, len(answers), posteriors)
                for pieces, piece in zip(covariances, covariance, strict=True):
                    pieces.append(piece)
                outputs.append(answers)
                start += len(answers)
                numbers = sum(
                    seen.inputs.numel() + sum(g.numel() for g in gradients if g is not None)
                    for seen, gradients in caught.items()
                )
                step = max(1, BUDGET * len(answers) // max(1, numbers))
                record.clear()
        return torch.cat(outputs), [torch.cat(pieces) for pieces in covariances]

    def _passes(self, shell: nn.Module, record: Record, inputs: Inputs) -> tuple[Tensor, Caught]:
        """Outputs of some rows, and what one backward pass per output brings to every call of a layer."""
        with torch.enable_grad():
            outputs = call(shell, map_tensors(Tensor.detach, inputs))
            flat = outputs.reshape(len(outputs), -1)
            require_few_outputs(outputs)
            caught: Caught = {seen: [] for seen in record.calls}
            for output in range(flat.shape[1]):
                record.forget_gradients()
                unit = torch.zeros_like(flat)
                unit[:, output] = 1
                flat.backward(unit, retain_graph=output + 1 < flat.shape[1])
                for seen, gradients in caught.items():
                    gradients.append(seen.gradient)
        return outputs.detach(), caught

    def _covariances(
        self, record: Record, caught: Caught, rows: int, posteriors: Sequence[BlockNormals]
    ) -> list[Tensor]:
        """J P⁻¹ Jᵀ of some rows, [b, E, E], under each posterior."""
        totals: list[Tensor | int] = [0 for _ in posteriors]
        for name, block in self.blocks.items():
            normals = [posterior(name) for posterior in posteriors]
            share = self._of_product if block.kronecker else self._of_diagonal
            parts = share(block, record, caught, rows, normals)
            totals = [total + part for total, part in zip(totals, parts, strict=True)]
        return totals  # pyright: ignore[reportReturnType]

    def _of_product(
        self,
        block: Block,
        record: Record,
        caught: Caught,
        rows: int,
        normals: Sequence[Sequence[StructuredNormal]],
    ) -> list[Tensor]:
        """The share of a weight that multiplies its layer's inputs."""
        like, parts = normals[0][0].mean, self.cover.parts[block.name]
        by_group = list(zip(*(_grouped(normal, block) for normal in normals), strict=True))  # [G][posterior]
        count = block.groups // len(parts)
        totals: list[Tensor | int] = [0 for _ in normals]
        for part in parts:
            inputs, gradients = _matrices(part, record, caught, rows, like.dtype)
            for group in range(count):
                chosen = by_group[part.part * count + group]
                shares = output_covariances(chosen, inputs[:, group], gradients[:, :, group])
                totals = [total + share for total, share in zip(totals, shares, strict=True)]
        return totals  # pyright: ignore[reportReturnType]

    def _of_diagonal(
        self,
        block: Block,
        record: Record,
        caught: Caught,
        rows: int,
        normals: Sequence[Sequence[StructuredNormal]],
    ) -> list[Tensor]:
        """The share of a parameter without factors, from each row's own gradients."""
        parts, dtype = self.cover.parts[block.name], normals[0][0].mean.dtype
        outputs = len(next(iter(caught.values())))
        shares: list[list[Tensor]] = [[] for _ in normals]
        step = max(1, CHUNK // (outputs * block.size))
        for start in range(0, rows, step):
            some = slice(start, min(start + step, rows))
            columns = []
            for output in range(outputs):
                calls = [_with_gradients(record, part, caught, output) for part in parts]
                gradients = [p.gradients(c, rows, some, dtype) for p, c in zip(parts, calls, strict=True)]
                columns.append(torch.cat(gradients, 1))
            jacobians = torch.stack(columns, 1).unflatten(2, (block.rows, block.columns))
            for pieces, (normal,) in zip(shares, normals, strict=True):
                pieces.append(dense_covariance(normal, jacobians))
        return [torch.cat(pieces) for pieces in shares]


def _with_gradients(record: Record, part: BlockPart, caught: Caught, output: int) -> list[Call]:
    """The calls of a part with the gradients of one output; calls that no output reaches are left out."""
    for seen in record.uses.get(part.key, ()):
        gradients = caught[seen]
        seen.gradient = gradients[output]
        reached = next((g for g in gradients if g is not None), None)
        if seen.gradient is None and reached is not None:
            seen.gradient = torch.zeros_like(reached)
    return record.of(part.key)


def _matrices(
    part: BlockPart, record: Record, caught: Caught, rows: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Inputs [b, G, T, n], columns in the weight's order, and gradients [b, C, G, m, T]."""
    inputs, first = part.matrices(_with_gradients(record, part, caught, 0), rows, slice(0, rows), dtype)
    gradients = [first]
    for output in range(1, len(next(iter(caught.values())))):
        matrices = []
        for seen in _with_gradients(record, part, caught, output):
            assert isinstance(seen.form, Product)
            _, g = seen.rows(rows, slice(0, rows))
            matrices.append(by_row(seen.form.outputs(g.to(dtype)), rows, 3))
        gradients.append(matrices[0] if len(matrices) == 1 else torch.cat(matrices, 3))
    assert part.product is not None
    if part.product.order is not None:
        order = part.product.order.to(inputs.device).argsort()
        bias = order.new_tensor([len(order)] if part.bias is not None else [])
        inputs = inputs[..., torch.cat([order, bias])]
    return inputs, torch.stack(gradients, 1)


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


def require_few_outputs(outputs: Tensor) -> None:
    """Refuse outputs of which there are too many for one backward pass each."""
    count = outputs[0].numel()
    if count > MOST_OUTPUTS:
        raise ConfigError(
            f"linearised predictions take one backward pass per output, expected at most {MOST_OUTPUTS} of a row, "
            f"got {count}; predict with draws instead"
        )


def predictive(likelihood: BuiltLikelihood, outputs: Tensor, covariance: Tensor) -> Prediction:
    """The prediction from outputs that are Normal around `outputs` [B, ...] with `covariance` [B, E, E].

    Reals are Normal. Classes come from MacKay's probit approximation: each logit is shrunk by its own variance,
    f / √(1 + π v / 8), before the softmax or the sigmoid. Of their total entropy, as much is aleatoric as the
    network at the centre has by itself; the rest, what doubt about the weights adds, is epistemic.
    """
    outputs = at_least_float(outputs)
    point = likelihood.predictive([outputs])
    if isinstance(point, RealPrediction):
        return dataclasses.replace(point, mean_covariances=covariance.unsqueeze(0))
    variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0).reshape(outputs.shape)
    # E[Φ(λ f)] = Φ(λ μ / √(1 + λ² v)), with λ² = π/8 for the sigmoid  [MacKay 1992]
    shrunk = likelihood.predictive([outputs / (1 + math.pi / 8 * variance).sqrt()])
    assert isinstance(shrunk, CategoricalPrediction | BernoulliPrediction)
    assert isinstance(point, CategoricalPrediction | BernoulliPrediction)
    return dataclasses.replace(shrunk, aleatoric=torch.minimum(point.aleatoric, shrunk.total))
