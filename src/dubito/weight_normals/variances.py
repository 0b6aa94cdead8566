"""Means with noise, and variances, of the outputs of products whose weights are independent Normals."""

from torch import Tensor
from torch.nn import functional as F

from ..distributions.tied_functions import pair_factors
from ..layers.convolution import Convolution
from ..layers.form import Form, Product
from ..layers.linear import Dense
from .kernels import AddNoise, OwnLinearNoise, TiedLinearNoise
from .scales import TiedScale, WeightScale

_POINTWISE = (F.conv1d, F.conv2d, F.conv3d)


def with_noise(
    form: Product, scale: WeightScale | None, bias: WeightScale | None, x: Tensor, mean: Tensor, noise: Tensor
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


def half_variance(
    form: Product, scale: WeightScale | None, bias: WeightScale | None, x: Tensor, mean: Tensor
) -> Tensor:
    """½ (Σ_i x_i² σ_i² + σ_bias²) of each output, in the shape of its mean."""
    bias_variance = None if bias is None else 0.5 * bias.std.square()
    if scale is None:
        assert bias_variance is not None
        return on_channels(bias_variance, mean, form.channel_axis).expand_as(mean)
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


def on_channels(values: Tensor, outputs: Tensor, axis: int) -> Tensor:
    """A vector over channels, in a shape that meets the outputs."""
    shape = [1] * outputs.ndim
    shape[axis] = len(values)
    return values.view(shape)
