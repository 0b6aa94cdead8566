"""Contexts that put the noise of weights onto the outputs of the functions that use them."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..devices import on_host
from ..layers.context import name_of
from ..layers.form import Form, Product
from ..layers.kinds import Standin, plain
from ..layers.layout import Layout
from ..layers.uses import Use
from ..precision import full_precision
from .calls import OutputNoise, check_rows
from .kernels import SMALLEST
from .placement import Placement
from .scales import WeightScale
from .streams import RowStreams
from .variances import half_variance, on_channels, with_noise

#: Inputs, means and deviations of uses whose inputs are the same in every draw, by stream and call.
Moments = dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]


class LocalNoise(OutputNoise):
    """Every output is N(mean, variance) by itself, in each row anew: local reparameterisation [Kingma et al. 2015].

    For a product with independent weights N(μ, σ²) and inputs x, the mean is the product with μ, and the variance that
    of x² with σ².

    Args:
        placement: the uses whose outputs carry noise.
        scales: the standard deviations of a parameter, by its name.
        streams: of the noise.
        moments: kept from one draw to the next for uses that read what the network reads.
    """

    def __init__(
        self,
        placement: Placement,
        scales: Callable[[str], WeightScale],
        streams: RowStreams,
        moments: Moments | None = None,
    ) -> None:
        super().__init__(placement, streams)
        self.scales, self.moments = scales, moments
        if moments is None:
            for name in placement.names:  # once and before the pass, whose parts may run again
                scales(name).formed()

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        match = self.find(form, x, weight, bias)
        if match is None:
            return super().use(form, x, weight, bias)
        use, stream, number = match
        assert isinstance(form, Product) and weight is not None
        scale, bias_scale = self._scale(weight), self._scale(bias)
        if self.moments is not None and use.reads_input:
            _, mean, root = self._moments((stream, number), form, x, (plain(weight), plain(bias)), scale, bias_scale)
            return torch.addcmul(mean, root, self._noise(use, stream, number, mean, mean.dtype))
        mean = form.apply(x, plain(weight), plain(bias))
        with full_precision(x.device):
            noise = self._noise(use, stream, number, mean, weight.dtype)
            return with_noise(form, scale, bias_scale, x, mean, noise).to(mean.dtype)

    def _scale(self, parameter: Tensor | None) -> WeightScale | None:
        if not isinstance(parameter, Standin):
            return None
        return self.scales(parameter.parameter).chunk(parameter.part, parameter.parts)

    def _moments(
        self,
        key: tuple[str, int],
        form: Product,
        x: Tensor,
        means: tuple[Tensor, Tensor | None],
        scale: WeightScale | None,
        bias: WeightScale | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.moments is not None
        if key not in self.moments or not _same(self.moments[key][0], x):
            mean = form.apply(x, *means)
            root = half_variance(form, scale, bias, x, mean).mul(2).add_(SMALLEST).sqrt_()
            self.moments[key] = x, mean, root
        return self.moments[key]

    def _noise(self, use: Use, stream: str, number: int, outputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Standard Normal noise in the shape of the outputs, each row's from its stream."""
        streams, shape, path = self.streams, outputs.shape, (stream, number)
        rows = streams.rows
        like = torch.empty((), dtype=dtype, device=outputs.device)
        check_rows(use, stream, shape, rows)
        if use.layout is Layout.ROWS:
            return streams.normal(path, shape[1:], like)
        if use.layout is Layout.SECOND:
            return streams.normal(path, (shape[0], *shape[2:]), like).transpose(0, 1).contiguous()
        noise = streams.normal(path, (shape[0] // rows, *shape[1:]), like)
        return (noise if use.layout is Layout.FLAT else noise.transpose(0, 1)).reshape(shape)


class FlippedNoise(OutputNoise):
    """Row b sees the weights μ + Δ ∘ r_b s_bᵀ, with signs r and s over output and input channels [Wen et al. 2018].

    Signs go by parameter and axis: a row sees the same weights in all calls, also where one is transposed.

    Args:
        placement: the uses whose outputs carry noise.
        perturbations: Δ by parameter name.
        streams: of the signs.
    """

    def __init__(self, placement: Placement, perturbations: dict[str, Tensor], streams: RowStreams) -> None:
        super().__init__(placement, streams)
        self.perturbations = perturbations

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        match = self.find(form, x, weight, bias)
        if match is None:
            return super().use(form, x, weight, bias)
        use, stream, _ = match
        assert isinstance(form, Product) and weight is not None
        name, axis = name_of(weight) or name_of(bias) or "", form.channel_axis
        # The first axis of a weight has the signs "out", the second "in"; outputs are on the second if it is turned.
        sides = ("in", "out") if getattr(form, "turned", False) else ("out", "in")
        parameter = weight if isinstance(weight, Standin) else bias
        assert isinstance(parameter, Standin)
        part, parts = parameter.part, parameter.parts

        def signs(side: str, values: Tensor, part: int = 0, parts: int = 1) -> Tensor:
            like = torch.empty((), dtype=weight.dtype, device=values.device)
            drawn = self.streams.signs((name, side), parts * values.shape[axis], like)
            drawn = drawn if parts == 1 else drawn.chunk(parts, 1)[part]
            return self._beside(use, stream, drawn, values, axis)

        mean = form.apply(x, plain(weight), plain(bias))
        outward = signs(sides[0], mean, part, parts)
        change, bias_change = self._change(weight), self._change(bias)
        if change is None:
            assert bias_change is not None
            answer = on_channels(bias_change, mean, axis)
        else:
            answer = form.apply(x * signs(sides[1], x), change, bias_change)
        return mean.addcmul_(answer.to(mean.dtype), outward.to(mean.dtype))

    def _change(self, parameter: Tensor | None) -> Tensor | None:
        if not isinstance(parameter, Standin):
            return None
        change = self.perturbations[parameter.parameter]
        return change if parameter.parts == 1 else change.chunk(parameter.parts)[parameter.part]

    def _beside(self, use: Use, stream: str, signs: Tensor, values: Tensor, axis: int) -> Tensor:
        """Signs [rows, channels] in a shape that meets a layer's values: the same at all positions of a row."""
        rows = self.streams.rows
        check_rows(use, stream, values.shape, rows)
        shape = [1] * values.ndim
        shape[axis] = values.shape[axis]
        if use.layout is Layout.SECOND:
            shape[1] = rows
            return signs.reshape(shape)
        shape[0] = values.shape[0]
        if use.layout is Layout.FLAT:
            signs = signs.repeat_interleave(values.shape[0] // rows, 0)
        elif use.layout is Layout.FLAT_SECOND:
            signs = signs.repeat(values.shape[0] // rows, 1)
        return signs.reshape(shape)


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether two inputs are equal; the same memory needs no look, and a device is not asked."""
    alias = before.data_ptr() == now.data_ptr() and before.shape == now.shape and before.stride() == now.stride()
    return alias or (on_host(now) and torch.equal(before, now))
