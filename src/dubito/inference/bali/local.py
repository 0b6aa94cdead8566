"""Local reparameterisation: a draw of a layer's outputs for each case, instead of one of its weights (BALI-L)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import Batch, rows_of
from ...layers.taps import Tap
from ...layers.uses import Product
from .layer import Layer


class LocalNoise:
    """The noise on one plain layer's outputs, ε ~ N(0, xᵀR x · Σ) for each case (Eq. 68).

    Args:
        tap: of the layer.
        layer: what is known of it.
    """

    def __init__(self, tap: Tap, layer: Layer) -> None:
        self.layer, self.link, self.biased = layer, tap.links[0], tap.bias is not None
        assert isinstance(self.link.use, Product)
        self.use = self.link.use
        self.order = None if self.use.order is None else self.use.order.argsort()
        self._added: list[Tensor] = []

    def taken(self) -> Tensor:
        """The noise of the last forward pass, [B, K, T, m], forgotten here."""
        added, self._added = self._added, []
        return torch.cat(added, 2)

    def on(self, inputs: Tensor, outputs: Tensor, unit: Tensor) -> Tensor:
        """Outputs with noise, from unit noise [B, K, T, m]."""
        layer = self.layer
        a = self.use.inputs(inputs)  # [B, K, T, n]
        if self.order is not None:
            a = a[..., self.order.to(a.device)]
        if self.biased:
            a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)
        rows, groups, positions, width = a.shape
        flat = a.transpose(0, 1).reshape(groups, -1, width)
        white = torch.linalg.solve_triangular(layer.input_tril, flat.mT, upper=False)  # xᵀR x = |L⁻¹x|²
        spread = white.square().sum(1).reshape(groups, rows, positions).transpose(0, 1)
        noise = spread.sqrt().unsqueeze(-1) * (unit @ layer.output_tril.mT)
        self._added.append(noise.detach())
        # `Product.outputs` in reverse: features last where it meets the last axis, else channels second
        shaped = noise if self.use.trailing else noise.mT
        return outputs + shaped.reshape(outputs.shape)

    @staticmethod
    @contextmanager
    def added(
        network: nn.Module,
        layers: Sequence["LocalNoise"],
        batch: Batch,
        stream: torch.Generator,
        *,
        silent: bool,
    ) -> Iterator[None]:
        """While open, a forward pass adds noise to the layers' outputs; `silent` noise is 0.

        Noise is drawn for the whole batch that the rows belong to, and sliced.
        """
        rows = rows_of(batch.inputs)
        handles = []

        def hook(own: "LocalNoise"):
            def add(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
                inputs = args[0] if args else kwargs["input"]
                use = own.use
                shape = (
                    batch.total or rows,
                    use.groups,
                    output[0].numel() // (use.groups * use.rows),
                    use.rows,
                )
                unit = torch.randn(shape, generator=stream, dtype=output.dtype, device=output.device)
                unit = unit[batch.first : batch.first + rows]
                return own.on(inputs, output, unit * 0 if silent else unit)

            return add

        try:
            for own in layers:
                module = network.get_submodule(own.link.port.path)
                handles.append(module.register_forward_hook(hook(own), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
