"""Vectors that scale or shift features: norms in evaluation mode, and what networks write themselves."""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .context import Context
from .form import Form
from .kinds import NoRule, Standin, kind, plain


@dataclass(frozen=True)
class Scale(Form):
    """y = w ∘ x + b over the last axes, for inputs that were normalised before.

    Attributes:
        axes: the axes of the weight.
    """

    axes: int = 1

    @property
    def feature_axes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The axes that features take."""
        return self.axes

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = x if weight is None else x * weight
        return y if bias is None else y + bias

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        cases, axes = x.unflatten(0, (draws, -1)), x.ndim - self.axes
        vectors = (None if v is None else v.reshape(draws, *[1] * axes, *v.shape[1:]) for v in (weights, biases))
        return self.apply(cases, *vectors).flatten(0, 1)

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        return self.bias_gradients(g * x.to(g.dtype))


@dataclass(frozen=True)
class ChannelScale(Form):
    """y = w ∘ x + b over the channels of axis 1, for inputs that were normalised before."""

    trailing: ClassVar[bool] = False

    def apply(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        shape = (-1, *(1 for _ in x.shape[2:]))
        y = x if weight is None else x * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)

    def stacked(self, x: Tensor, weights: Tensor | None, biases: Tensor | None, draws: int) -> Tensor:
        shape = (draws, 1, -1, *(1 for _ in x.shape[2:]))
        vectors = (None if stack is None else stack.reshape(shape) for stack in (weights, biases))
        return Scale().apply(x.unflatten(0, (draws, -1)), *vectors).flatten(0, 1)

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        return self.bias_gradients(g * x.to(g.dtype))


# -- norms -------------------------------------------------------------------------------------------------------


@kind(F.layer_norm)
def layer_norm(
    at: Context,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Of nn.LayerNorm."""
    _require_data(input)
    axes = len(tuple(normalized_shape))
    return at.use(Scale(axes), F.layer_norm(input, normalized_shape, eps=eps), weight, bias)


@kind(F.rms_norm)
def rms_norm(
    at: Context, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Of nn.RMSNorm."""
    _require_data(input)
    return at.use(Scale(len(tuple(normalized_shape))), F.rms_norm(input, normalized_shape, eps=eps), weight)


@kind(F.group_norm)
def group_norm(
    at: Context,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Of nn.GroupNorm."""
    _require_data(input)
    return at.use(ChannelScale(), F.group_norm(input, num_groups, eps=eps), weight, bias)


@kind(F.batch_norm)
def batch_norm(
    at: Context,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Of batch norm in evaluation mode, where rows do not touch."""
    _require_data(input)
    if training:
        raise NoRule("its batch norm normalises by the batch, so that rows touch each other")
    if at.keep_graph and running_mean is not None and running_var is not None:
        return at.use(ChannelScale(), standardised(input, running_mean, running_var, eps), weight, bias)
    return at.use(ChannelScale(), F.batch_norm(input, running_mean, running_var, eps=eps), weight, bias)


def standardised(x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """(x − mean) / √(variance + eps) by channels: PyTorch's own has second derivatives of as many rows as it saw."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    return (x - mean.view(shape)) * (variance + eps).rsqrt().view(shape)


@kind(F.instance_norm)
def instance_norm(
    at: Context,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Of instance norm: statistics of each row by itself, or running ones."""
    _require_data(input)
    normalised = F.instance_norm(
        input, running_mean, running_var, use_input_stats=use_input_stats, momentum=momentum, eps=eps
    )
    return at.use(ChannelScale(), normalised, weight, bias)


# -- what networks write themselves ------------------------------------------------------------------------------


@kind(torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__, operator.mul)
def mul(at: Context, input: Any, other: Any) -> Any:
    """W ∘ x with a vector w over the last axis, as the RMS norms of Transformers write it."""
    weight, x = (input, other) if isinstance(input, Standin) else (other, input)
    if not _meets(weight, x):
        return NotImplemented
    return at.use(Scale(), x, weight)


@kind(torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, operator.add)
def add(at: Context, input: Any, other: Any, *, alpha: float = 1, out: Any = None) -> Any:
    """X + b with a vector b over the last axis."""
    bias, x = (input, other) if isinstance(input, Standin) else (other, input)
    if alpha != 1 or out is not None or not _meets(bias, x):
        return NotImplemented
    return at.use(Scale(), x, None, bias)


@dataclass(frozen=True)
class Slope(Form):
    """y = max(x, 0) + w min(x, 0), with one slope for all channels or one for each.

    Attributes:
        count: the number of slopes.
    """

    count: int

    trailing: ClassVar[bool] = False

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.prelu(x, weight)

    def gradients(self, x: Tensor, g: Tensor) -> Tensor:
        slopes = g * x.clamp(max=0).to(g.dtype)
        return slopes.reshape(len(x), 1, -1).sum(2) if self.count == 1 else self.bias_gradients(slopes)


@kind(torch.prelu, Tensor.prelu)
def prelu(at: Context, input: Tensor, weight: Tensor) -> Tensor:
    """Of nn.PReLU."""
    _require_data(input)
    return at.use(Slope(len(plain(weight))), input, weight)


def _require_data(input: Any) -> None:
    if isinstance(input, Standin):
        raise NoRule("another parameter is its input")


def _meets(vector: Any, x: Any) -> bool:
    """Whether a parameter with one axis meets the features of activations."""
    return (
        isinstance(vector, Standin)
        and vector.ndim == 1
        and isinstance(x, Tensor)
        and not isinstance(x, Standin)
        and x.ndim > 1
        and x.shape[-1] == len(vector.value)
        and x.is_floating_point()
    )
