"""Contexts that put the noise of weights onto the outputs of the functions that use them."""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor
from torch.nn import functional as F

from ..distributions.tied_functions import pair_factors
from ..errors import NetworkError
from ..layers.context import Context, name_of
from ..layers.convolution import Convolution
from ..layers.form import Form, Product
from ..layers.kinds import NoRule, Standin, plain
from ..layers.layout import Layout
from ..layers.linear import Dense
from ..layers.uses import Use
from .kernels import SMALLEST, AddNoise, OwnLinearNoise, TiedLinearNoise, full_precision
from .placement import Key, Placement
from .scales import Scale, TiedScale
from .streams import RowStreams

#: Inputs, means and deviations of uses whose inputs are the same in every draw, by stream and call.
Moments = dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]

#: Numbers of an input that tell its call again in a recomputation.
SAMPLE = 64

_POINTWISE = (F.conv1d, F.conv2d, F.conv3d)


class OutputNoise(Context):
    """Finds, for every use of a parameter, where its rows lie and which of its calls this is.

    Parts of a network that are checkpointed run again in the backward pass: such a call is the same call as before,
    and sees the same noise.

    Args:
        placement: the uses whose outputs carry noise.
        streams: of the noise.
    """

    def __init__(self, placement: Placement, streams: RowStreams) -> None:
        self.placement, self.streams = placement, streams
        self._task = torch._C._current_graph_task_id()  # of the backward pass that runs now; -1 for none
        self._counts: dict[str, int] = {}
        self._calls: dict[Key, list[tuple[int, Tensor | None]]] = {}

    def find(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Use, str, int] | None:
        """The use, the name of its stream of noise, and the number of the call there; None without noise."""
        name, part = (weight.parameter, weight.part) if isinstance(weight, Standin) else (None, 0)
        bias_name, bias_part = (bias.parameter, bias.part) if isinstance(bias, Standin) else (None, 0)
        if name is None and bias_name is None:
            return None
        if isinstance(x, Standin):
            raise NoRule("another parameter is its input")
        key = (name, bias_name, part, bias_part)
        calls = self.placement.by_key.get(key)
        if calls is None:
            raise _changed(key, form)
        before = self._calls.get(key)
        if before is None:
            before = self._calls[key] = []
        if before and torch._C._current_graph_task_id() != self._task:
            index = _same_call(before, x, calls.stream)
        else:
            index, number = len(before), self._counts.get(calls.stream, 0)
            self._counts[calls.stream] = number + 1
            before.append((number, _sample(x) if calls.several else None))
        use = (
            calls.uses[0] if len(calls.uses) == 1 else calls.uses[index] if index < len(calls.uses) else None
        )
        if use is None or (use.form is not form and use.form.signature != form.signature):
            raise _changed(key, form)
        return use, calls.stream, before[index][0]


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
        scales: Callable[[str], Scale],
        streams: RowStreams,
        moments: Moments | None = None,
    ) -> None:
        super().__init__(placement, streams)
        self.scales, self.moments = scales, moments
        if moments is None:
            for name in placement.names:  # once and before the pass, whose parts may run again
                scales(name).formed()

    def use(
        self,
        form: Form,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        active: Tensor | None = None,
    ) -> Tensor:
        place = self.find(form, x, weight, bias)
        if place is None:
            return super().use(form, x, weight, bias)
        use, stream, number = place
        assert isinstance(form, Product) and weight is not None
        scale, bias_scale = self._scale(weight), self._scale(bias)
        if self.moments is not None and use.reads_input:
            _, mean, root = self._moments(
                (stream, number), form, x, (plain(weight), plain(bias)), scale, bias_scale
            )
            return torch.addcmul(mean, root, self._noise(use, stream, number, mean, mean.dtype))
        mean = form.apply(x, plain(weight), plain(bias))
        with full_precision(x.device):
            noise = self._noise(use, stream, number, mean, weight.dtype)
            return with_noise(form, scale, bias_scale, x, mean, noise).to(mean.dtype)

    def _scale(self, parameter: Tensor | None) -> Scale | None:
        if not isinstance(parameter, Standin):
            return None
        return self.scales(parameter.parameter).chunk(parameter.part, parameter.parts)

    def _moments(
        self,
        key: tuple[str, int],
        form: Product,
        x: Tensor,
        means: tuple[Tensor, Tensor | None],
        scale: Scale | None,
        bias: Scale | None,
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
        _check_rows(use, stream, shape, rows)
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
        self,
        form: Form,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        active: Tensor | None = None,
    ) -> Tensor:
        place = self.find(form, x, weight, bias)
        if place is None:
            return super().use(form, x, weight, bias)
        use, stream, _ = place
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
            return self._beside(use, stream, drawn.chunk(parts, 1)[part], values, axis)

        mean = form.apply(x, plain(weight), plain(bias))
        outward = signs(sides[0], mean, part, parts)
        change, bias_change = self._change(weight), self._change(bias)
        if change is None:
            assert bias_change is not None
            answer = _on_channels(bias_change, mean, axis)
        else:
            answer = form.apply(x * signs(sides[1], x), change, bias_change)
        return mean.addcmul_(answer.to(mean.dtype), outward.to(mean.dtype))

    def _change(self, parameter: Tensor | None) -> Tensor | None:
        if not isinstance(parameter, Standin):
            return None
        return self.perturbations[parameter.parameter].chunk(parameter.parts)[parameter.part]

    def _beside(self, use: Use, stream: str, signs: Tensor, values: Tensor, axis: int) -> Tensor:
        """Signs [rows, channels] in a shape that meets a layer's values: the same at all positions of a row."""
        rows = self.streams.rows
        _check_rows(use, stream, values.shape, rows)
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


# -- means and variances -----------------------------------------------------------------------------------------


def with_noise(
    form: Product, scale: Scale | None, bias: Scale | None, x: Tensor, mean: Tensor, noise: Tensor
) -> Tensor:
    """The sum of mean and sqrt(variance) · noise, which may overwrite both."""
    x, mean = x.to(noise.dtype), mean.to(noise.dtype)
    if scale is None or not isinstance(form, Dense):
        return AddNoise.apply(mean, half_variance(form, scale, bias, x, mean), noise)  # pyright: ignore
    mean, bias_variance = mean.contiguous(), None if bias is None else bias.std.square()
    if isinstance(scale, TiedScale):
        outward, inward = _sides(form, scale)
        return TiedLinearNoise.apply(mean, x, outward, inward, bias_variance, noise)  # pyright: ignore
    std = scale.std.mT if form.turned else scale.std
    return OwnLinearNoise.apply(mean, x, std, bias_variance, noise)  # pyright: ignore


def half_variance(form: Product, scale: Scale | None, bias: Scale | None, x: Tensor, mean: Tensor) -> Tensor:
    """½ (Σ_i x_i² σ_i² + σ_bias²) of each output, in the shape of its mean."""
    bias_variance = None if bias is None else 0.5 * bias.std.square()
    if scale is None:
        assert bias_variance is not None
        return _on_channels(bias_variance, mean, form.channel_axis).expand_as(mean)
    squares = x.square()
    if not isinstance(scale, TiedScale) or not isinstance(form, Dense | Convolution):
        return form.variance(squares, 0.5 * scale.std.square(), bias_variance)
    # (X² Qᵀ) P for σ² = Pᵀ Q: a product, or a convolution, with q = k(k+1)/2 outputs and one from these to all
    log_out, log_in = _sides(form, scale)
    outward = 0.5 * pair_factors(log_out, counted=True).mT
    inward = pair_factors(log_in, counted=False)
    if isinstance(form, Dense):
        return F.linear(F.linear(squares, inward), outward, bias_variance)
    ones = (1,) * len(form.kernel)
    filters = inward.view(len(inward), *scale.shape[1:]).repeat(form.groups, 1, *ones)
    join = _POINTWISE[len(ones) - 1]
    sums = form.apply(squares, filters, None)
    return join(sums, outward.reshape(*outward.shape, *ones), bias_variance, groups=form.groups)


def _sides(form: Form, scale: TiedScale) -> tuple[Tensor, Tensor]:
    """The log factors over outputs and over inputs."""
    turned = isinstance(form, Dense) and form.turned
    return (scale.log_v, scale.log_u) if turned else (scale.log_u, scale.log_v)


def _on_channels(values: Tensor, outputs: Tensor, axis: int) -> Tensor:
    """A vector over channels, in a shape that meets the outputs."""
    shape = [1] * outputs.ndim
    shape[axis] = len(values)
    return values.view(shape)


# -- calls and rows ----------------------------------------------------------------------------------------------


def _sample(x: Tensor) -> Tensor:
    """A few of an input's numbers."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLE)].clone()


def _same_call(calls: list[tuple[int, Tensor | None]], x: Tensor, stream: str) -> int:
    """Which of the calls of a pass runs again: that whose input is nearest."""
    if len(calls) == 1:
        return 0
    sample, nearest = _sample(x), []
    for _, before in calls:
        same = before is not None and before.shape == sample.shape
        nearest.append(float((before - sample).abs().sum()) if same else inf)  # pyright: ignore
    least = min(nearest)
    if nearest.count(least) > 1:
        raise NetworkError(
            f"which of several calls of {stream!r} a checkpointed part runs again cannot be told from its inputs; use "
            "Reparameterised(), or leave the layer out of `layers`"
        )
    return nearest.index(least)


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether two inputs are equal; the same memory needs no look."""
    alias = (
        before.data_ptr() == now.data_ptr() and before.shape == now.shape and before.stride() == now.stride()
    )
    return alias or torch.equal(before, now)


def _changed(key: Key, form: Form) -> NetworkError:
    return NetworkError(
        f"the network must use {key[0] or key[1]!r} as it did on the rows it was surveyed with, but "
        f"{type(form).__name__} now uses it in another way; use Reparameterised()"
    )


def _check_rows(use: Use, stream: str, shape: torch.Size, rows: int) -> None:
    fits = {Layout.ROWS: shape[0] == rows, Layout.SECOND: shape[1:2] == (rows,)}
    if not fits.get(use.layout, shape[0] % rows == 0):
        raise NetworkError(
            f"layer {stream!r} sees {tuple(shape)} for {rows} rows, not {use.layout.value} as in the first rows; use "
            "Reparameterised() for networks that arrange rows differently from batch to batch"
        )
