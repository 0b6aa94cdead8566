"""Closed-form predictions of a last layer as a module: no gradients, no number that decides, any number of rows."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...distributions import SparseInformationNormal, StructuredNormal
from ...draws.module import answers
from ...inputs import Inputs, TensorOptions, call, take
from ...layers import Context, Dense, Form
from ...layers.context import name_of
from ...layers.module import PassModule
from ...likelihoods import BuiltLikelihood, CategoricalLikelihood, GaussianLikelihood
from ...prediction import Prediction
from .covariance import CANCELLED, in_basis, unit_variance
from .linearised import needs_pairs, predictive, standard_noise
from .shares import BlockShares

if TYPE_CHECKING:
    from .posterior import LaplacePosterior


class LastInputs(Context):
    """Keeps what the layer of some weight reads."""

    def __init__(self, weight: str) -> None:
        self.weight, self.inputs = weight, torch.empty(0)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        if name_of(weight) == self.weight:
            self.inputs = x
        return super().use(form, x, weight, bias, active=active)


class SparseVariance:
    """Variances [N, m] of W a under a sparse information form, by a root that is written out.

    Args:
        normal: of W.
        dtype: in which the difference is taken.
    """

    def __init__(self, normal: SparseInformationNormal, dtype: torch.dtype) -> None:
        factor = (normal.precise_cholesky if dtype == torch.float64 else normal.cholesky).to(dtype)
        self.left, self.right, whitening, self.scale, root = normal.parts_in(dtype, factor.device)
        self.weight, self.inverse = whitening * root, root.square()
        identity = torch.eye(len(factor), dtype=dtype, device=factor.device)
        self.root = torch.linalg.solve_triangular(factor, identity, upper=False)

    def __call__(self, inputs: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
        """The variances, and the larger terms they are differences from; of centred answers after all others."""
        a = inputs.to(self.root.dtype)
        # U_gᵀ (w ∘ e_c aᵀ) U_a is the product of row c of U_g and of (w_c ∘ a) U_a
        shared = (a.unsqueeze(1) * self.weight) @ self.right  # [N, m, a]
        columns = (self.left.unsqueeze(2) * shared.unsqueeze(2) * self.scale).flatten(2) @ self.root.mT
        first, taken = a.square() @ self.inverse.mT, columns.square().sum(2)
        if centred:
            mean = first.mean(1, keepdim=True) * (1 - 1 / first.shape[1])
            spread = (columns - columns.mean(1, keepdim=True)).square().sum(2).mean(1, keepdim=True)
            first, taken = torch.cat([first, mean], 1), torch.cat([taken, spread], 1)
        return (first - taken).clamp(min=0).to(inputs.dtype), first


class ClosedForm(nn.Module):
    """What `predict` says in closed form, as the module of draws says it; see `PredictiveModule`.

    Args:
        posterior: whose blocks are those of the last layer.
        weight: of that layer, a dense one.
        inputs: checked rows, by which it is decided how precisely differences are taken.
        num_samples: draws of the outputs for likelihoods without a closed form.
        seed: of these.
    """

    def __init__(
        self, posterior: "LaplacePosterior", weight: str, inputs: Inputs, *, num_samples: int, seed: int
    ) -> None:
        super().__init__()
        self.register_buffer(
            "noise", standard_noise(1, num_samples, seed).to(TensorOptions.of(posterior.network).dtype)
        )
        self.likelihood, self.scale, self.blocks = posterior.likelihood, posterior.scale, posterior.blocks
        names = [name for block in self.blocks.values() for name in block.parameters]
        self.context = LastInputs(weight)
        self.traced = PassModule(posterior.network, self.context, dict.fromkeys([weight, *names]))
        self.class_axis = class_axis_of(self.likelihood)
        self.normals: dict[str, StructuredNormal] = {name: posterior.normals(name)[0] for name in self.blocks}
        self.sparse: dict[str, SparseVariance] = {}
        with torch.no_grad():
            call(self.traced, inputs)
            for name, normal in self.normals.items():
                if isinstance(normal, SparseInformationNormal):
                    self.sparse[name] = self._resolved(name, normal)
            _ = self(**inputs) if isinstance(inputs, Mapping) else self(inputs)  # builds what is built once

    def _resolved(self, name: str, normal: SparseInformationNormal) -> SparseVariance:
        """In float32, unless too little is left of differences, as in `predict`."""
        variance = SparseVariance(normal, normal.cholesky.dtype)
        values, first = variance(self._inputs(name), self.class_axis is not None)
        rounding = CANCELLED * torch.finfo(first.dtype).eps
        return SparseVariance(normal, torch.float64) if bool((values < rounding * first).any()) else variance

    def _inputs(self, name: str) -> Tensor:
        """What a block's matrix multiplies, [N, n]: the layer's inputs, and 1 for its bias."""
        inputs, block = self.context.inputs, self.blocks[name]
        flat = inputs.reshape(-1, inputs.shape[-1])
        ones = torch.ones_like(flat[:, :1])
        if block.weight != self.context.weight:
            return ones
        return flat if block.bias is None else torch.cat([flat, ones], 1)

    def forward(self, inputs: Any = None, **named: Any) -> dict[str, Tensor]:
        return answers(self.prediction(named if inputs is None else inputs))

    def prediction(self, inputs: Any) -> Prediction:
        """What the answers are read off."""
        outputs = call(self.traced, inputs)
        total, centred = torch.zeros(()), self.class_axis is not None
        for name, normal in self.normals.items():
            a = self._inputs(name).to(normal.mean)
            if name in self.sparse:
                share = self.sparse[name](a, centred)[0]
            else:
                share = unit_variance([normal], in_basis(normal, a), centred)[0]
            total = share if not total.ndim else total + share
        total = (total * self.scale**2).reshape(*outputs.shape[:-1], -1)
        if self.class_axis is not None:
            return predictive(self.likelihood, outputs, total[..., :-1], total[..., -1])
        if needs_pairs(self.likelihood):  # a Gaussian's marginals need no covariance of outputs
            total = total.flatten(1).diag_embed()
        return predictive(self.likelihood, outputs, total, noise=self._buffers["noise"])


def class_axis_of(likelihood: BuiltLikelihood) -> int | None:
    """The axis of classes, where there are some."""
    return likelihood.settings.class_axis if isinstance(likelihood, CategoricalLikelihood) else None


def closed_form(
    posterior: "LaplacePosterior", inputs: Inputs, *, num_samples: int = 32, seed: int = 0
) -> ClosedForm | None:
    """The module of a posterior of a dense last layer alone, else None.

    Several outputs of a row that are read by draws, as those of heteroscedastic noise, have none: their covariance
    would have to be decomposed in the file.

    Args:
        posterior: that predicts in closed form.
        inputs: checked rows.
        num_samples: draws of the outputs for likelihoods without a closed form.
        seed: of these.
    """
    axis = class_axis_of(posterior.likelihood)
    read = posterior.linearised(inputs)
    with read.reading() as (function, record), torch.no_grad():
        outputs = function(take(inputs, slice(2)))
        tail = record.tail(outputs)
        closed = BlockShares(read.cover, [], pairs=False, class_axis=axis).closed(tail, outputs)
    if tail is None or len(closed) < len(posterior.blocks) or outputs.shape != tail.answer.shape:
        return None
    drawn = needs_pairs(posterior.likelihood) and not isinstance(posterior.likelihood, GaussianLikelihood)
    if drawn and outputs[0].numel() > 1:
        return None
    form, weight = tail.call.form, tail.call.weight
    if not isinstance(form, Dense) or form.turned or weight is None:
        return None
    return ClosedForm(posterior, weight, inputs, num_samples=num_samples, seed=seed)
