"""Which layers can be tapped, and how each uses its parameters."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from .convolutions import Convolution, TransposedConvolution
from .uses import Lookup, Product, Scale, Shift, Use

_PLAIN = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    _BatchNorm,
    _InstanceNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.Embedding,
)
_OPENED = (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)


@dataclass(frozen=True, eq=False)
class Role:
    """A parameter of a layer and how it is used there.

    Attributes:
        tensor: the parameter.
        use: how.
        part: which of `parts` equal parts along its first axis.
        parts: how many there are.
    """

    tensor: Tensor
    use: Use
    part: int = 0
    parts: int = 1


@dataclass(frozen=True, eq=False)
class Spec:
    """One place of a layer to be tapped: its weight and its bias, where it has them.

    Attributes:
        key: which of the layer's products; empty for the layer as a whole.
        weight: what multiplies.
        bias: what is added.
    """

    key: str
    weight: Role | None
    bias: Role | None


def tappable(module: nn.Module) -> bool:
    """Whether the module is a layer with rules, run by PyTorch's own forward."""
    own = "forward" in module.__dict__  # replaced on the object itself
    known = (kind for kind in (*_PLAIN, *_OPENED) if isinstance(module, kind))
    return not own and any(type(module).forward is kind.forward for kind in known)


def is_opened(module: nn.Module) -> bool:
    """Whether the module's own forward is replaced while it is tapped."""
    return isinstance(module, _OPENED)


def specs(module: nn.Module) -> list[Spec] | str:
    """The places of a tappable layer, or the reason why it has none."""
    if isinstance(module, nn.MultiheadAttention):
        return _of_attention(module)
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _of_recurrent(module)
    if isinstance(module, _BatchNorm) and module.running_mean is None:
        return "its batch norm keeps no running statistics, so that rows touch each other"
    weight, bias = module.weight, getattr(module, "bias", None)
    use = _use(module)
    trailing = use.trailing
    return [
        Spec(
            "",
            Role(weight, use) if isinstance(weight, Tensor) else None,
            Role(bias, Shift(tuple(bias.shape), trailing)) if isinstance(bias, Tensor) else None,
        )
    ]


def _use(module: nn.Module) -> Use:
    """How a plain layer uses its weight."""
    if isinstance(module, nn.Linear):
        return Product(module.out_features, module.in_features)
    if isinstance(module, _ConvTransposeNd):
        return TransposedConvolution(module)
    if isinstance(module, _ConvNd):
        return Convolution(module)
    if isinstance(module, nn.Embedding):
        return Lookup(module.num_embeddings, module.padding_idx)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return Scale(tuple(module.normalized_shape), True, _normalised(module))
    channels = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    return Scale((channels,), False, _normalised(module))  # pyright: ignore[reportArgumentType]


def _normalised(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a norm in evaluation mode gives before its own factors."""
    if isinstance(module, nn.LayerNorm):
        return lambda x: F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return lambda x: F.rms_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return lambda x: F.group_norm(x, module.num_groups, eps=module.eps)
    if isinstance(module, _InstanceNorm):
        mean, variance = module.running_mean, module.running_var
        return lambda x: F.instance_norm(x, mean, variance, use_input_stats=mean is None, eps=module.eps)
    assert isinstance(module, _BatchNorm)
    return lambda x: F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def _of_attention(module: nn.MultiheadAttention) -> list[Spec]:
    size = module.embed_dim
    found = []
    for number, name in enumerate("qkv"):
        if module.in_proj_weight is not None:
            weight = Role(module.in_proj_weight, Product(size, size), number, 3)
        else:
            own: Tensor = getattr(module, f"{name}_proj_weight")
            weight = Role(own, Product(*own.shape))
        bias = None
        if module.in_proj_bias is not None:
            bias = Role(module.in_proj_bias, Shift((size,), True), number, 3)
        found.append(Spec(name, weight, bias))
    last = module.out_proj
    bias = None if last.bias is None else Role(last.bias, Shift((size,), True))
    return [*found, Spec("out_proj", Role(last.weight, Product(size, size)), bias)]


def _of_recurrent(module: nn.RNNBase | nn.RNNCellBase) -> list[Spec]:
    found = []
    for name, weight in [*module._parameters.items()]:
        if weight is not None and name.startswith("weight_"):
            bias = module._parameters.get(name.replace("weight_", "bias_"))
            added = None if bias is None else Role(bias, Shift(tuple(bias.shape), True))
            found.append(Spec(name, Role(weight, Product(*weight.shape)), added))
    return found
