"""A user's network is copied, never changed; this is how copies are made, run and named."""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .errors import ConfigError, NetworkError, unknown_name
from .inputs import Inputs
from .layers.shell import take
from .layers.tree import SHARED, alias, deep_copy, is_shared

Copied = TypeVar("Copied", bound=nn.Module)

#: Which parameters a method treats: None for all, names, or a predicate of (name, tensor).
Subset: TypeAlias = Callable[[str, Tensor], bool] | Sequence[str] | None


def copied(net: nn.Module, base: Collection[str] | None = None) -> nn.Module:
    """A copy of the network, gradients left behind, after checking that it can be treated at all.

    Args:
        net: it is not changed.
        base: parameters by their first names whose memory the copy shares; None takes the frozen ones where they
            outnumber the others, and none where all are frozen, so that nothing tells a base from the rest.
    """
    if not isinstance(net, nn.Module):
        raise NetworkError(f"the network must be an nn.Module, got {type(net).__name__}")
    if any(isinstance(module, torch.jit.ScriptModule) for module in net.modules()):
        raise NetworkError(
            "the network must be a Python module, got one compiled by torch.jit, which hides how its layers use their "
            "weights; give the module it was made of"
        )
    named = dict(net.named_parameters())
    if not named:
        raise NetworkError("the network must have parameters, got none; a posterior is a distribution over them")
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise NetworkError(f"parameter {name!r} is not initialised; run the network on one batch first")
        if parameter.is_meta:
            raise NetworkError(f"parameter {name!r} is on the meta device and holds no numbers; load its weights first")
        if hasattr(parameter, "device_mesh"):
            raise NetworkError(
                f"the network must not be sharded yet, but {name!r} is a DTensor, which cannot be copied: call "
                "build(...) first, then fully_shard on the objective's own network, built.draft.network"
            )
        # A sum takes no memory; where it is none of its dtype's numbers, all are looked at.
        if parameter.is_floating_point() and not (parameter.sum().isfinite() or parameter.isfinite().all()):
            raise NetworkError(f"parameter {name!r} holds NaN or infinity; start from finite weights")
    for name, module in net.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise NetworkError(f"{name!r} has sparse gradients, which no method takes; make it with sparse=False")
        if any(isinstance(hook, WeightNorm | SpectralNorm) for hook in module._forward_pre_hooks.values()):
            raise NetworkError(
                f"the network must be copyable, but {name!r} has the old torch.nn.utils.weight_norm or "
                "spectral_norm, which cannot be copied: use those of torch.nn.utils.parametrizations instead"
            )
    if base is None:
        base = [name for name, p in named.items() if not p.requires_grad]
        frozen = sum(named[name].numel() for name in base)
        base = base if len(base) < len(named) and 2 * frozen > sum(p.numel() for p in named.values()) else ()
    whole = [named[name] for name in base if type(named[name]) is nn.Parameter]
    network = deep_copy(net, {id(p): alias(p, **{SHARED: True}) for p in whole})
    for parameter in network.parameters():
        parameter.grad = None
    return network


def require_full(network: nn.Module, work: str) -> None:
    """Refuse a network in half precision, for work that PyTorch does not do in it."""
    for name, parameter in network.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise NetworkError(f"{work} needs float32 or float64, got {name!r} in {parameter.dtype}; call net.float()")


def duplicate(module: Copied) -> Copied:
    """A deep copy but for the memory of a shared base, see `deep_copy`."""
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
                raise ConfigError(f"subset names {want!r}, which is frozen; set requires_grad=True on it first")
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
    """A copy that holds copies of `weights` (parameters and buffers) instead of its own, and shares no memory."""
    plain = unshared(duplicate(network))
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    with torch.no_grad():
        for name, value in weights.items():
            tensors[name].copy_(value)
    return plain


def unshared(network: nn.Module, names: Collection[str] | None = None) -> nn.Module:
    """The network, where the named parameters, or all, lie in memory of their own."""
    for name, parameter in network.named_parameters():
        if is_shared(parameter) and (names is None or name in names):
            parameter.data = parameter.data.clone()
            delattr(parameter, SHARED)
    return network


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


def made(start: Callable[..., Any], like: nn.Module, member: int) -> nn.Module:
    """The network that a user's function makes for a member, ready to be trained beside `like`.

    Args:
        start: takes the member's number, or nothing.
        like: whose names, shapes, dtype, device, flags and frozen values it has.
        member: its number.
    """
    asked = [p for p in inspect.signature(start).parameters.values() if p.default is p.empty]
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in asked)
    network = copied(start(member) if takes else start(), ()).eval()
    require_alike(like, network, f"start({member if takes else ''})")
    for parameter, first in zip(network.parameters(), matched(network, like).parameters(), strict=True):
        if not first.requires_grad:
            parameter.data = first.data if is_shared(first) else first.data.clone()
            vars(parameter).update(vars(first))
    return with_flags(network, set(trainable(like)))


def matched(network: nn.Module, like: nn.Module) -> nn.Module:
    """`like`, whose dtypes and devices the tensors of another network like it get."""
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        for tensor, first in zip(tensors(network), tensors(like), strict=False):
            tensor.data = tensor.data.to(first.device, first.dtype)
    return like


def require_alike(first: nn.Module, other: nn.Module, name: str) -> None:
    """Refuse a network whose parameters or buffers have other names or shapes than the first's."""
    shapes = [{key: tuple(t.shape) for key, t in net.state_dict().items()} for net in (first, other)]
    differing = sorted(key for key in shapes[0] | shapes[1] if shapes[0].get(key) != shapes[1].get(key))
    if differing:
        key = differing[0]
        raise NetworkError(
            f"members must have parameters and buffers of the same names and shapes: {name} differs in "
            f"{len(differing)}, such as {key!r}, which is {shapes[1].get(key, 'missing')} there and "
            f"{shapes[0].get(key, 'missing')} in the first network"
        )


def renewed(net: nn.Module) -> nn.Module:
    """A copy whose trainable parameters are drawn anew by rules of the modules' authors; frozen ones stay.

    Modules of Transformers follow `_init_weights` of their model, LoRA's adapters their configuration, all others
    their `reset_parameters`. The global generators are used.
    """
    network = duplicate(net)
    slots = [(part._parameters, key) for part in network.modules() for key in part._parameters]
    frozen = [(held, key, p) for held, key in slots if (p := held[key]) is not None and not p.requires_grad]
    configs = next((part.peft_config for part in network.modules() if hasattr(part, "peft_config")), {})
    with torch.no_grad():
        for tensor in trainable(network).values():
            tensor.fill_(math.nan)  # what no rule reaches is seen afterwards
            vars(tensor).pop("_is_hf_initialized", None)  # which would keep Transformers from touching it
        for held, key, tensor in frozen:  # rules draw into nothing
            held[key] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
        _reset(network, None, configs, set())
        for held, key, tensor in frozen:
            held[key] = tensor
    lacking = [name for name, tensor in trainable(network).items() if tensor.isnan().any()]
    if lacking:
        shown = ", ".join(lacking[:5]) + (", …" if len(lacking) > 5 else "")
        raise NetworkError(
            f"members after the first start from new weights, but no rule says how to draw {len(lacking)} parameters "
            f"anew: {shown}; give their modules a reset_parameters(), or pass start=, a function that returns a fresh "
            "network"
        )
    return network


def _reset(module: nn.Module, rule: Any, configs: Any, seen: set[nn.Module]) -> None:
    """Draw a module's parameters anew, and those of the modules in it.

    Args:
        module: to reset.
        rule: `_init_weights` of the model of Transformers around it; None outside of any.
        configs: of PEFT's adapters, by name.
        seen: modules that were reset.
    """
    if module in seen or not any(parameter.requires_grad for parameter in module.parameters()):
        return
    seen.add(module)
    rule = getattr(module, "_init_weights", rule) if hasattr(module, "config") else rule
    parts: Iterable[nn.Module] = module.children()
    if hasattr(module, "base_layer"):  # one of PEFT's, whose parts are not reset one by one
        for name, config in configs.items():
            if getattr(config, "init_lora_weights", None) in (True, "gaussian"):
                module.reset_lora_parameters(name, config.init_lora_weights)  # pyright: ignore
        rule, parts = None, [module.base_layer]  # pyright: ignore
    elif rule is None and any(parameter.requires_grad for parameter in module.parameters(recurse=False)):
        reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if callable(reset):
            reset()
    for part in parts:
        _reset(part, rule, configs, seen)
    if rule is not None:
        rule(module)  # after its parts, as Transformers does
