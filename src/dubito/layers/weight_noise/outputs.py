"""Layers that put the noise of their weights onto their outputs, for the length of a forward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ...distributions.tied_functions import pair_factors
from ...errors import NetworkError
from ..trace import Layout, unnested
from .estimators import NoisyLayer
from .functions import SMALLEST, AddNoise, OwnLinearNoise, TiedLinearNoise, full_precision
from .rows import RowStreams
from .spreads import Spread, TiedSpread

#: Means and deviations of layers whose inputs are the same in every draw, by name and call.
Moments = dict[tuple[str, int], tuple[Tensor, Tensor, Tensor]]


@contextmanager
def local_noise(
    network: nn.Module,
    layers: Sequence[NoisyLayer],
    spreads: Mapping[str, Spread],
    streams: RowStreams,
    moments: Moments | None = None,
) -> Iterator[None]:
    """While open, the layers answer with N(mean, variance) of each output instead of their plain outputs.

    Args:
        network: holds the means.
        layers: those that do.
        spreads: by parameter name.
        streams: the noise.
        moments: kept from one draw to the next for layers that read what the network reads.
    """

    def forward(layer: NoisyLayer, module: nn.Module, plain: Callable[[Tensor], Tensor]):
        weight = spreads[layer.weight] if layer.weight else None
        bias = spreads[layer.bias] if layer.bias else None
        calls = 0

        def noisy(input: Tensor) -> Tensor:
            nonlocal calls
            key, calls = (layer.name, calls), calls + 1
            if moments is not None and layer.reads_input:
                if key not in moments or not _same(moments[key][0], input):
                    mean = plain(input)
                    root = half_variance(module, weight, bias, input, mean).mul(2).add_(SMALLEST).sqrt_()
                    moments[key] = input, mean, root
                _, mean, root = moments[key]
                return torch.addcmul(mean, root, _row_noise(streams, key, mean, layer))
            mean = plain(input)
            with full_precision(input.device):
                noise = _row_noise(streams, key, mean, layer, dtype=_dtype(module))
                return _with_noise(module, weight, bias, input, mean, noise).to(mean.dtype)

        return noisy

    with _replaced(network, layers, forward):
        yield


@contextmanager
def flipped_noise(
    network: nn.Module, layers: Sequence[NoisyLayer], perturbations: Mapping[str, Tensor], streams: RowStreams
) -> Iterator[None]:
    """While open, row b sees the weights μ + Δ ∘ r_b s_bᵀ, with signs r and s over output and input channels.

    Args:
        network: holds the means.
        layers: those that do.
        perturbations: Δ by parameter name.
        streams: the signs.
    """

    def forward(layer: NoisyLayer, module: nn.Module, plain: Callable[[Tensor], Tensor]):
        weight = perturbations[layer.weight] if layer.weight else None
        bias = perturbations[layer.bias] if layer.bias else None
        # By parameter: a row sees the same signs in all layers and calls that share a weight.
        path = (layer.weight or layer.bias or "",)
        axis = _channel_axis(module)

        def signs(which: str, size: int, values: Tensor) -> Tensor:
            like = torch.empty((), dtype=_dtype(module), device=values.device)
            return _spread_out(streams.signs((*path, which), size, like), values, layer, streams.rows, axis)

        def noisy(input: Tensor) -> Tensor:
            mean = plain(input)
            outward = signs("out", mean.shape[axis], mean)
            if weight is None:
                assert bias is not None
                change = _on_channels(bias, mean, axis)
            else:
                change = _product(module, input * signs("in", input.shape[axis], input), weight, bias)
            return mean.addcmul_(change.to(mean.dtype), outward.to(mean.dtype))

        return noisy

    with _replaced(network, layers, forward):
        yield


@contextmanager
def _replaced(
    network: nn.Module, layers: Sequence[NoisyLayer], forward: Callable[..., Callable]
) -> Iterator[None]:
    """While open, each layer's forward pass is the one that `forward(layer, module, its own)` makes."""
    compiled = network._compiled_call_impl is not None
    # Attention blocks read the weights of their layers directly in evaluation mode, unless one has a hook.
    guarded = not network.training
    changed: list[nn.Module] = []
    handles = []
    try:
        for layer in layers:
            module = network.get_submodule(layer.name)
            noisy = forward(layer, module, module.forward)
            # Generators cannot be traced: what is compiled stops at these layers and goes on after them.
            vars(module)["forward"] = torch.compiler.disable(noisy) if compiled else noisy
            changed.append(module)
            if guarded:
                handles.append(module.register_forward_pre_hook(_heed))
        with unnested(network) if guarded else nullcontext():
            yield
    finally:
        for module in changed:
            del vars(module)["forward"]
        for handle in handles:
            handle.remove()


def _heed(*_: object) -> None:
    """A hook that does nothing."""


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether two inputs are equal; the same memory needs no look."""
    alias = (
        before.data_ptr() == now.data_ptr() and before.shape == now.shape and before.stride() == now.stride()
    )
    return alias or torch.equal(before, now)


def _with_noise(
    module: nn.Module, weight: Spread | None, bias: Spread | None, x: Tensor, mean: Tensor, noise: Tensor
) -> Tensor:
    """The sum of mean and sqrt(variance) · noise, which may overwrite both."""
    x, mean = x.to(noise.dtype), mean.to(noise.dtype)
    if weight is None or not isinstance(module, nn.Linear):
        return AddNoise.apply(mean, half_variance(module, weight, bias, x, mean), noise)  # pyright: ignore
    mean, bias_variance = mean.contiguous(), None if bias is None else bias.std.square()
    if isinstance(weight, TiedSpread):
        return TiedLinearNoise.apply(mean, x, weight.log_u, weight.log_v, bias_variance, noise)  # pyright: ignore
    return OwnLinearNoise.apply(mean, x, weight.std, bias_variance, noise)  # pyright: ignore


def half_variance(
    module: nn.Module, weight: Spread | None, bias: Spread | None, x: Tensor, mean: Tensor
) -> Tensor:
    """½ (Σ_i x_i² σ_i² + σ_bias²) of each output, in the shape of its mean."""
    bias_variance = None if bias is None else 0.5 * bias.std.square()
    if weight is None:
        assert bias_variance is not None
        return _on_channels(bias_variance, mean, _channel_axis(module)).expand_as(mean)
    squares = x.square()
    if not isinstance(weight, TiedSpread):
        return _product(module, squares, 0.5 * weight.std.square(), bias_variance)
    # (X² Qᵀ) P for σ² = Pᵀ Q: a product, or a convolution, with q = k(k+1)/2 outputs and one from these to all
    outward = 0.5 * pair_factors(weight.log_u, counted=True).mT
    inward = pair_factors(weight.log_v, counted=False)
    if isinstance(module, nn.Linear):
        return F.linear(F.linear(squares, inward), outward, bias_variance)
    assert isinstance(module, _ConvNd)
    ones = (1,) * len(module.kernel_size)
    filters = inward.view(len(inward), *weight.shape[1:]).repeat(module.groups, 1, *ones)
    sums = _product(module, squares, filters, None)
    join = (F.conv1d, F.conv2d, F.conv3d)[len(ones) - 1]
    return join(sums, outward.reshape(*outward.shape, *ones), bias_variance, groups=module.groups)


def _product(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer does to its input, with another weight and bias."""
    if isinstance(module, nn.Linear):
        return F.linear(x, weight, bias)
    return module._conv_forward(x, weight, bias)  # pyright: ignore[reportCallIssue]


# -- rows and channels ------------------------------------------------------------------------------------------


def _row_noise(
    streams: RowStreams,
    path: tuple[str, int],
    outputs: Tensor,
    layer: NoisyLayer,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Standard Normal noise in the shape of a layer's outputs, each row's from its own stream."""
    rows, shape = streams.rows, outputs.shape
    like = torch.empty((), dtype=dtype or outputs.dtype, device=outputs.device)
    _check_rows(layer, shape, rows)
    if layer.layout is Layout.ROWS:
        return streams.normal(path, shape[1:], like)
    if layer.layout is Layout.SECOND:
        return streams.normal(path, (shape[0], *shape[2:]), like).transpose(0, 1).contiguous()
    noise = streams.normal(path, (shape[0] // rows, *shape[1:]), like)
    return (noise if layer.layout is Layout.FLAT else noise.transpose(0, 1)).reshape(shape)


def _spread_out(signs: Tensor, values: Tensor, layer: NoisyLayer, rows: int, axis: int) -> Tensor:
    """Signs [rows, channels] in a shape that meets a layer's values: the same at all positions of a row."""
    _check_rows(layer, values.shape, rows)
    shape = [1] * values.ndim
    shape[axis] = values.shape[axis]
    if layer.layout is Layout.SECOND:
        shape[1] = rows
        return signs.view(shape)
    shape[0] = values.shape[0]
    if layer.layout is Layout.FLAT:
        signs = signs.repeat_interleave(values.shape[0] // rows, 0)
    elif layer.layout is Layout.FLAT_SECOND:
        signs = signs.repeat(values.shape[0] // rows, 1)
    return signs.view(shape)


def _check_rows(layer: NoisyLayer, shape: torch.Size, rows: int) -> None:
    found = {Layout.ROWS: shape[0] == rows, Layout.SECOND: shape[1:2] == (rows,)}
    if not found.get(layer.layout, shape[0] % rows == 0):
        raise NetworkError(
            f"layer {layer.name!r} sees {tuple(shape)} for {rows} rows, not {layer.layout.value} as in the first "
            "rows; use Reparameterised() for networks that arrange rows differently from batch to batch"
        )


def _channel_axis(module: nn.Module) -> int:
    return -1 if isinstance(module, nn.Linear) else 1


def _on_channels(values: Tensor, outputs: Tensor, axis: int) -> Tensor:
    """A vector over channels, in a shape that meets the outputs."""
    shape = [1] * outputs.ndim
    shape[axis] = len(values)
    return values.view(shape)


def _dtype(module: nn.Module) -> torch.dtype:
    return module.weight.dtype  # pyright: ignore[reportReturnType]
