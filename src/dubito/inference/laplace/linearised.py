"""The network linearised in its weights: outputs ~ N(f(x), J P⁻¹ Jᵀ) in closed form.

One backward pass per output brings its gradients to every layer; the Jacobian of a layer's weights is made of them
and of the layer's inputs, and is never formed for all rows.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ... import seeds
from ...curvature import Block, find_blocks
from ...distributions import DiagonalNormal, StructuredNormal
from ...errors import ConfigError, NetworkError
from ...inputs import Inputs, Place, call, map_tensors, rows_of, take
from ...layers.shell import leased
from ...layers.taps import Call, Tap, by_row, tapped
from ...layers.uses import Product
from ...likelihoods import BuiltLikelihood, at_least_float
from ...prediction import BernoulliPrediction, CategoricalPrediction, Prediction, RealPrediction
from .spread import CHUNK, dense_spread, spreads

#: Numbers that the inputs and gradients of all layers may hold at once.
BUDGET = 1 << 26
#: The most outputs of a row: each takes a backward pass, and all pairs of them are kept.
MOST_OUTPUTS = 1024

#: From a block's name to the distributions of its matrices.
Normals = Callable[[str], Sequence[StructuredNormal]]
#: Gradients at a call's outputs, one for each output of the network; None where that does not depend on them.
Caught = dict[Call, list[Tensor | None]]


class Linearised:
    """Reads a network's Jacobians in factors.

    Args:
        network: at the centre of the posterior, in evaluation mode.
        blocks: of the posterior, by name.
        example: a few rows of inputs, to learn where its layers hold the rows.
    """

    def __init__(self, network: nn.Module, blocks: Mapping[str, Block], example: Inputs) -> None:
        self.network, self.blocks = network, dict(blocks)
        names = [name for block in blocks.values() for name in block.parameters]
        found, taps, left_out = find_blocks(network, example, names)
        if {block.name: block for block in found} != self.blocks:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
            raise NetworkError(
                "the linearised prediction must find the layers that the fit found, but with these inputs they "
                f"look different ({reasons or 'other blocks'}); predict with draws instead"
            )
        self.taps = taps.taps
        self.ports = list({id(link.port): link.port for own in self.taps.values() for tap in own
                           for link in tap.links}.values())  # fmt: skip
        self.step = 32  # the first rows tell how many fit into the budget

    def __call__(
        self, inputs: Inputs, posteriors: Sequence[Normals], max_rows: int
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
        device = Place.of(self.network).device
        with (
            leased(self.network, detached=True) as shell,
            tapped(shell, self.ports),
            seeds.forked(0, "linearised", device=device),
        ):
            while start < rows:
                own, caught = self._passes(
                    shell, take(inputs, slice(start, start + min(self.step, max_rows)))
                )
                with torch.no_grad():
                    for kept, part in zip(
                        covariances, self._covariances(caught, len(own), posteriors), strict=True
                    ):
                        kept.append(part)
                outputs.append(own)
                start += len(own)
                numbers = sum(
                    seen.inputs.numel() + sum(g.numel() for g in gradients if g is not None)
                    for seen, gradients in caught.items()
                )
                self.step = max(1, BUDGET * len(own) // max(1, numbers))
        return torch.cat(outputs), [torch.cat(kept) for kept in covariances]

    def _passes(self, shell: nn.Module, inputs: Inputs) -> tuple[Tensor, Caught]:
        """Outputs of some rows, and what one backward pass per output brings to every call of a layer."""
        for port in self.ports:
            port.clear()
        with torch.enable_grad():
            outputs = call(shell, map_tensors(Tensor.detach, inputs))
            flat = outputs.reshape(len(outputs), -1)
            require_few_outputs(outputs)
            caught: Caught = {seen: [] for port in self.ports for seen in port.calls}
            for output in range(flat.shape[1]):
                for seen in caught:
                    seen.gradient = None
                unit = torch.zeros_like(flat)
                unit[:, output] = 1
                flat.backward(unit, retain_graph=output + 1 < flat.shape[1])
                for seen, gradients in caught.items():
                    gradients.append(seen.gradient)
        return outputs.detach(), caught

    def _covariances(self, caught: Caught, rows: int, posteriors: Sequence[Normals]) -> list[Tensor]:
        """J P⁻¹ Jᵀ of some rows, [b, E, E], under each posterior."""
        totals: list[Tensor | int] = [0 for _ in posteriors]
        for name, block in self.blocks.items():
            each = [posterior(name) for posterior in posteriors]
            own = (self._of_product if block.kronecker else self._of_diagonal)(block, caught, rows, each)
            totals = [total + part for total, part in zip(totals, own, strict=True)]
        return totals  # pyright: ignore[reportReturnType]

    def _of_product(
        self, block: Block, caught: Caught, rows: int, each: Sequence[Sequence[StructuredNormal]]
    ) -> list[Tensor]:
        """The share of a weight that multiplies its layer's inputs."""
        like, taps = each[0][0].mean, self.taps[block.name]
        by_group = list(zip(*(_grouped(normals, block) for normals in each), strict=True))  # [G][posterior]
        count = block.groups // len(taps)
        totals: list[Tensor | int] = [0 for _ in each]
        for tap in taps:
            inputs, gradients = _matrices(tap, caught, rows, like.dtype)
            for group in range(count):
                own = spreads(by_group[tap.part * count + group], inputs[:, group], gradients[:, :, group])
                totals = [total + part for total, part in zip(totals, own, strict=True)]
        return totals  # pyright: ignore[reportReturnType]

    def _of_diagonal(
        self, block: Block, caught: Caught, rows: int, each: Sequence[Sequence[StructuredNormal]]
    ) -> list[Tensor]:
        """The share of a parameter without factors, from each row's own gradients."""
        taps = self.taps[block.name]
        outputs = len(next(iter(caught.values())))
        found: list[list[Tensor]] = [[] for _ in each]
        step = max(1, CHUNK // (outputs * block.size))
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            columns = []
            for output in range(outputs):
                _put(taps, caught, output)
                own = [tap.gradients(rows, part, each[0][0].mean.dtype) for tap in taps]
                columns.append(torch.cat(own, 1))
            jacobians = torch.stack(columns, 1).unflatten(2, (block.rows, block.columns))
            for kept, (normal,) in zip(found, each, strict=True):
                kept.append(dense_spread(normal, jacobians))
        return [torch.cat(kept) for kept in found]


def _put(taps: Sequence[Tap], caught: Caught, output: int) -> None:
    """Give the taps' calls the gradients of one output; calls that no output reaches stay without."""
    for tap in taps:
        for link in tap.links:
            for seen in link.port.calls:
                gradients = caught[seen]
                seen.gradient = gradients[output]
                reached = next((g for g in gradients if g is not None), None)
                if seen.gradient is None and reached is not None:
                    seen.gradient = torch.zeros_like(reached)


def _matrices(tap: Tap, caught: Caught, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Inputs [b, G, T, n], columns in the weight's order, and gradients [b, C, G, m, T]."""
    _put([tap], caught, 0)
    inputs, first = tap.matrices(rows, slice(0, rows), dtype)
    gradients = [first]
    for output in range(1, len(next(iter(caught.values())))):
        _put([tap], caught, output)
        own = []
        for seen, link in tap.seen():
            assert isinstance(link.use, Product)
            _, g = seen.part(rows, slice(0, rows))
            own.append(by_row(link.use.outputs(g.to(dtype)), rows, 3))
        gradients.append(own[0] if len(own) == 1 else torch.cat(own, 3))
    product = tap.product
    assert product is not None
    if product.order is not None:
        place = product.order.to(inputs.device).argsort()
        bias = place.new_tensor([len(place)] if tap.bias is not None else [])
        inputs = inputs[..., torch.cat([place, bias])]
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
        return dataclasses.replace(point, spreads=covariance.unsqueeze(0))
    variance = covariance.diagonal(dim1=1, dim2=2).clamp(min=0).reshape(outputs.shape)
    # E[Φ(λ f)] = Φ(λ μ / √(1 + λ² v)), with λ² = π/8 for the sigmoid  [MacKay 1992]
    shrunk = likelihood.predictive([outputs / (1 + math.pi / 8 * variance).sqrt()])
    assert isinstance(shrunk, CategoricalPrediction | BernoulliPrediction)
    assert isinstance(point, CategoricalPrediction | BernoulliPrediction)
    return dataclasses.replace(shrunk, aleatoric=torch.minimum(point.aleatoric, shrunk.total))
