"""Draws of what layers give, without their weights: for each case (BALI-L), or of one weight for few cases."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...inputs import Batch, rows_of
from ...layers import Context, Form, Product
from ...layers.context import name_of
from ...layers.kinds import plain
from .layer import Layer


class LayerNoise(Context):
    """Adds noise ε ~ N(0, xᵀR x · Σ) to the outputs of layers, drawn for each case (Eq. 68).

    Noise is drawn for the whole batch that the rows belong to, and sliced.

    Args:
        layers: those that get it, by the names of their weights, and whether a bias is their last column.
        batch: the rows.
        stream: of the noise.
        silent: whether the noise is 0.
    """

    def __init__(
        self, layers: Mapping[str, tuple[Layer, bool]], batch: Batch, stream: torch.Generator, *, silent: bool
    ) -> None:
        self.layers, self.stream, self.silent = layers, stream, silent
        rows = rows_of(batch.inputs)
        self.total, self.rows = batch.total or rows, slice(batch.first, batch.first + rows)
        self._added: dict[str, list[Tensor]] = {}

    def added(self, weight: str) -> Tensor:
        """The noise that a layer got, [B, K, T, m]."""
        return torch.cat(self._added[weight], 2)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        outputs = super().use(form, x, weight, bias, active=active)
        name = name_of(weight)
        if name is None or name not in self.layers:
            return outputs
        assert isinstance(form, Product)
        shape = (self.total, form.groups, outputs[0].numel() // (form.groups * form.rows), form.rows)
        unit = torch.randn(shape, generator=self.stream, dtype=outputs.dtype, device=outputs.device)
        noise = noise_on(form, x, *self.layers[name], unit[self.rows] * (0 if self.silent else 1))
        self._added.setdefault(name, []).append(noise.detach())
        # `Product.outputs` in reverse: features last where it meets the last axis, else channels second
        shaped = noise if form.trailing else noise.mT
        return outputs + shaped.reshape(outputs.shape)


class FewCases(Context):
    """Outputs of wide dense layers under weights W that are drawn but never written out.

    For few cases X Wᵀ = V (L₂₁ + C A)ᵀ with V = X L₁₁⁻ᵀ takes fewer products than W = (L₂₁ + C A) L₁₁⁻¹ does.

    Args:
        layers: with unit noise A and a root C, by the names of their weights, and whether a bias is their last column.
    """

    def __init__(self, layers: Mapping[str, tuple[Layer, Tensor, Tensor, bool]]) -> None:
        self.layers = layers
        #: V and X Wᵀ, by the names of weights.
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        name = name_of(weight)
        if name is None or name not in self.layers:
            return super().use(form, x, weight, bias, active=active)
        layer, unit, root, biased = self.layers[name]
        cases = x.reshape(1, -1, x.shape[-1])
        if biased:
            cases = torch.cat([cases, cases.new_ones(1, cases.shape[1], 1)], -1)
        white = layer.whitened(cases)
        outputs = torch.baddbmm(white @ layer.below.mT, white @ unit.mT, root.mT)
        self.seen[name] = white.detach(), outputs.detach().clone()
        outputs = outputs.reshape(*x.shape[:-1], -1)
        return outputs if biased or bias is None else outputs + plain(bias)


def noise_on(form: Product, inputs: Tensor, layer: Layer, biased: bool, unit: Tensor) -> Tensor:
    """√(xᵀR x) Σ^½ ε from unit noise ε [B, K, T, m]."""
    a = form.inputs(inputs)  # [B, K, T, n]
    if form.order is not None:
        a = a[..., form.order.argsort().to(a.device)]
    if biased:
        a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
    rows, groups, positions, width = a.shape
    flat = a.transpose(0, 1).reshape(groups, -1, width)
    white = torch.linalg.solve_triangular(layer.input_tril, flat.mT, upper=False)  # xᵀR x = |L⁻¹x|²
    variance = white.square().sum(1).reshape(groups, rows, positions).transpose(0, 1)
    return variance.sqrt().unsqueeze(-1) * (unit @ layer.output_tril.mT)
