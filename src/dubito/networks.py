"""A user's network is copied, never changed; this is how copies are made, run and named."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .errors import ConfigError, NetworkError, unknown_name
from .inputs import Inputs
from .layers.shell import take
from .layers.tree import deep_copy

Copied = TypeVar("Copied", bound=nn.Module)

#: Which parameters a method treats: None for all, names, or a predicate of (name, tensor).
Subset: TypeAlias = Callable[[str, Tensor], bool] | Sequence[str] | None


def copied(net: nn.Module) -> nn.Module:
    """A copy of the network, gradients left behind, after checking that it can be treated at all."""
    if not isinstance(net, nn.Module):
        raise NetworkError(f"the network must be an nn.Module, got {type(net).__name__}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in net.modules()):
        raise NetworkError(
            "the network must be a Python module, got one compiled by torch.jit, which hides how its layers use their "
            "weights; give the module it was made of"
        )
    named = dict(net.named_parameters())
    if not named:
        raise NetworkError(
            "the network must have parameters, got none; a posterior is a distribution over them"
        )
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise NetworkError(f"parameter {name!r} is not initialised; run the network on one batch first")
        if parameter.is_floating_point() and not parameter.isfinite().all():
            raise NetworkError(f"parameter {name!r} holds NaN or infinity; start from finite weights")
    for name, module in net.named_modules():
        if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()):
            raise NetworkError(
                f"the network must be copyable, but {name!r} has the old torch.nn.utils.weight_norm or "
                "spectral_norm, which cannot be copied: use those of torch.nn.utils.parametrizations instead"
            )
    network = duplicate(net)
    for parameter in network.parameters():
        parameter.grad = None
    return network


def require_full(network: nn.Module, work: str) -> None:
    """Refuse a network in half precision, for work that PyTorch does not do in it."""
    for name, parameter in network.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise NetworkError(
                f"{work} needs float32 or float64, got {name!r} in {parameter.dtype}; call net.float()"
            )


def duplicate(module: Copied) -> Copied:
    """A deep copy; tensors that a forward pass left on a module (a cache of activations) lose their graph."""
    return deep_copy(module)  # pyright: ignore[reportReturnType]


def run(network: nn.Module, weights: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """The network's outputs with `weights` in place of its own, on a private shell; tied tensors stay tied.

    Args:
        network: it is not changed.
        weights: parameters and buffers by their first names.
        inputs: what the network reads.
    """
    return take(network, weights).outputs(inputs)


def frozen_modes(net: nn.Module) -> dict[str, bool]:
    """Modes to train with: a part put in evaluation mode inside a network in training mode stays so."""
    if not net.training:
        return {}
    return {name: False for name, module in net.named_modules() if not module.training}


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that may move, by their first name; frozen ones stay as the user left them."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad and p.is_floating_point()}


def resolve(subset: Subset, network: nn.Module) -> tuple[str, ...]:
    """The names of the trainable parameters that `subset` picks; names of modules pick what they hold."""
    names = trainable(network)
    if not names:
        raise NetworkError("the network must have trainable parameters, but all have requires_grad=False")
    if subset is None:
        return tuple(names)
    if isinstance(subset, str):
        raise ConfigError(f"subset must be a list of names or a predicate, got {subset!r}; give [{subset!r}]")
    if callable(subset):
        chosen = tuple(name for name, parameter in names.items() if subset(name, parameter))
    else:
        wanted = {name: parameters_of(name, network) for name in subset}
        for want, held in wanted.items():
            if not held:
                raise unknown_name("parameter or module", want, names)
            if not held & names.keys():
                raise ConfigError(
                    f"subset names {want!r}, which is frozen; set requires_grad=True on it first"
                )
        chosen = tuple(name for name in names if any(name in held for held in wanted.values()))
    if not chosen:
        raise ConfigError(f"subset must pick at least one parameter, got none of {list(names)}")
    return chosen


def parameters_of(wanted: str, network: nn.Module) -> set[str]:
    """The parameters that a name, or a module's name, stands for, by their first name: tied ones have several."""
    first = {id(parameter): name for name, parameter in network.named_parameters()}
    return {
        first[id(parameter)]
        for name, parameter in network.named_parameters(remove_duplicate=False)
        if name == wanted or name.startswith(f"{wanted}.")
    }


def with_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the network that holds copies of `weights` (parameters and buffers) instead of its own."""
    plain = duplicate(network)
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    with torch.no_grad():
        for name, value in weights.items():
            tensors[name].copy_(value)
    return plain


def with_flags(network: nn.Module, trainable: Collection[str]) -> nn.Module:
    """The network, where just the named parameters require gradients."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trainable)
    return network


def extra_states(network: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors (`get_extra_state`), by their names."""
    return {
        name: module.get_extra_state()
        for name, module in network.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
