"""Copies of a module tree that share its tensors, and how they follow the tree they were copied from."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NetworkError
from ..fingerprints import BASE
from .recurrent import note_order
from .sharded import is_sharded

#: Values that a shell takes over where they change on the network, and hands back after a training pass.
VALUES = (Tensor, bool, int, float, str, type(None))
#: The mark of parameters whose numbers lie in the memory of the user's frozen ones; copies have the same memory.
SHARED = "_dubito_shared"


def is_shared(tensor: Tensor) -> bool:
    """Whether a tensor's numbers are those of a base that networks share: nothing may write into it."""
    return hasattr(tensor, SHARED)


def alias(parameter: Tensor, **marks: bool) -> nn.Parameter:
    """A parameter of its own, to be moved and flagged, around the same memory."""
    other = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter) | marks)
    return other


def deep_copy(module: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy; tensors that a forward pass left on a module (a cache of activations) lose their graph.

    The memory of a base that networks share is not copied.

    Args:
        module: to copy.
        shared: what the copy holds instead of copies, by the id of what it stands for.
    """
    left = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    memo = {id(value): value.detach() for value in left if value.grad_fn is not None}
    memo |= {id(p): alias(p) for p in module.parameters() if is_shared(p)} | dict(shared or {})
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NetworkError(
            f"the network must be copyable, but copy.deepcopy failed: {error}; keep nothing on it that cannot be "
            "copied, such as lists of activations, open files or locks"
        ) from error


class TreePlan:
    """Where a network's modules and tensors stand; it holds no module, so that a network can be forgotten."""

    def __init__(self, network: nn.Module) -> None:
        self.edges: list[tuple[int, str, int]] = []  # parent, key, child
        self.facts: list[tuple[int, Any, Any]] = []  # number of children, parameters, buffers
        modules, index = [network], {id(network): 0}
        for parent, module in enumerate(modules):  # grows on the way
            self.facts.append((len(module._modules), module._parameters, module._buffers))
            for key, child in module._modules.items():
                if child is not None:
                    if id(child) not in index:
                        index[id(child)] = len(modules)
                        modules.append(child)
                    self.edges.append((parent, key, index[id(child)]))
        self.sources: list[Any] = [slots for _, *both in self.facts for slots in both]
        self.tensors: list[int] = []
        self.spread = False  # over processes
        self.filled: list[int] = []  # slots that hold something
        self.buffered: list[int] = []  # those of them that hold buffers
        self.places: dict[str, list[tuple[int, str]]] = {}  # by a tensor's first name: slots, key

    def modules(self, network: nn.Module) -> list[nn.Module] | None:
        """The network's modules in the plan's order; None where its tree is another one by now."""
        modules: list[Any] = [network]
        try:
            for parent, key, number in self.edges:
                child = modules[parent]._modules[key]
                if number == len(modules):
                    modules.append(child)
                elif child is not modules[number]:
                    return None
            for module, (children, parameters, buffers) in zip(modules, self.facts, strict=True):
                same = module._parameters is parameters and module._buffers is buffers
                if not same or len(module._modules) != children:
                    return None
        except (KeyError, AttributeError):
            return None
        return modules

    def locate(self, network: nn.Module) -> None:
        """Find every place of each tensor, where tensors were replaced since; tied ones have several."""
        tensors = [id(tensor) for slots in self.sources for tensor in slots.values()]
        if tensors == self.tensors:
            return
        first = {id(tensor): name for name, tensor in (*network.named_parameters(), *network.named_buffers())}
        places: dict[str, list[tuple[int, str]]] = {}
        for number, slots in enumerate(self.sources):
            for key, tensor in slots.items():
                if tensor is not None:
                    places.setdefault(first[id(tensor)], []).append((number, key))
        self.filled = [number for number, slots in enumerate(self.sources) if slots]
        self.buffered = [number for number in self.filled if number % 2]
        self.places, self.tensors = places, tensors
        self.spread = any(is_sharded(tensor) for slots in self.sources for tensor in slots.values())


class Shell:
    """A copy of the module tree whose slots can be filled."""

    def __init__(
        self, network: nn.Module, plan: TreePlan, modules: list[nn.Module], like: "Shell | None" = None
    ) -> None:
        places = plan.sources if like is None else like.slots
        held = {id(t): t for slots in places for t in slots.values() if t is not None}
        whole = deep_copy(network if like is None else like.module, held)
        self.plan = plan
        self.modules: list[Any] = [whole]
        for parent, key, number in plan.edges:
            if number == len(self.modules):
                self.modules.append(self.modules[parent]._modules[key])
        for copied, source in zip(self.modules, modules, strict=True):
            if copied is source:
                raise NetworkError(f"the network must be copyable, but {type(source).__name__} copies as itself")
        self.slots: list[Any] = [slots for m in self.modules for slots in (m._parameters, m._buffers)]
        self.module = whole
        for module in self.modules:
            if isinstance(module, nn.RNNBase) and like is None:
                module.register_forward_pre_hook(note_order)
            if "_orig_mod" in module._modules:  # compiled for other modules than these: hand the call on
                vars(module)["forward"] = module._modules["_orig_mod"].__call__  # pyright: ignore
        self.facts = [_facts(module) for module in modules]
        #: Modules whose forward pass is not PyTorch's and may assign to `self`.
        self.assigning = [n for n, m in enumerate(modules) if not type(m).__module__.startswith("torch.")]
        self.modes: dict[str, bool] | None = None
        self.detached = False
        self.compiled: Any = None

    def follow(self, modules: list[nn.Module]) -> bool:
        """Take over plain values that were changed on the network; False where more than that was changed."""
        for copied, source, (size, hooks, values) in zip(self.modules, modules, self.facts, strict=True):
            there = source.__dict__
            if len(there) != size:
                return False
            if (hooks or there["_forward_hooks"] or there["_forward_pre_hooks"]) and _hooks(source) != hooks:
                return False
            for key, value in values.items():
                if there.get(key, self) is not value:
                    if not isinstance(there.get(key, self), VALUES):
                        return False
                    vars(copied)[key] = values[key] = there[key]
        return True

    def fill(self, given: Mapping[str, Tensor], detached: bool) -> None:
        """Put the given tensors into their slots, and the network's current ones into all others."""
        slots, sources, places = self.slots, self.plan.sources, self.plan.places
        for number in self.plan.filled:
            if type(slots[number]) is dict:
                slots[number].update(sources[number])
            else:  # of a scripted module
                for key, tensor in sources[number].items():
                    slots[number][key] = tensor
        self.detached = detached
        if detached:
            others = {name: sources[n][key] for name, ((n, key), *_) in places.items() if name not in given}
            given = {**given, **{name: t.detach() for name, t in others.items() if t.requires_grad}}
        for name, tensor in given.items():
            for number, key in _known(places, name):
                slots[number][key] = tensor

    def replace(self, names: Iterable[str], replacement: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
        """Put other tensors in place of those that stand in some slots; returns them by name."""
        slots, places, replaced = self.slots, self.plan.places, {}
        for name in names:
            (first, first_key), *others = _known(places, name)
            tensor = replaced[name] = replacement(name, slots[first][first_key])
            slots[first][first_key] = tensor
            for number, key in others:
                slots[number][key] = tensor
        return replaced

    def prepare(self, network: nn.Module, modules: list[nn.Module], training: Mapping[str, bool] | None) -> None:
        """Take the modes of the network's modules, or those of a training pass, and compile where it is."""
        compiled = network._compiled_call_impl is not None
        if compiled and self.compiled is None:
            whole = self.module
            # A function of ours around the call: PyTorch does not look into forward passes that are its own, such
            # as that of nn.Sequential, when `module.compile()` asks for it.
            self.compiled = torch.compile(lambda *args, **kwargs: whole._call_impl(*args, **kwargs))
        self.module.__dict__["_compiled_call_impl"] = self.compiled if compiled else None
        if training is not None:
            if self.modes != training:
                self.module.train()
                index = {id(module): number for number, module in enumerate(modules)}
                for name, module in network.named_modules():
                    if not training.get(name, True):
                        self.modules[index[id(module)]].training = False
                self.modes = dict(training)
            return
        if self.modes is not None:  # by the modules' own methods, which may do more than set the flag
            self.module.train(network.training)
            self.modes = None
        for copied, source in zip(self.modules, modules, strict=True):
            if copied.training is not source.training:
                copied.training = source.training

    def forget_graphs(self) -> None:
        """Detach what a forward pass left on its modules: a shell must not keep alive the graph it waits for."""
        for number in self.assigning:
            for values in (vars(self.modules[number]), *_containers(self.modules[number])):
                for key, value in values.items() if isinstance(values, dict) else enumerate(values):
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        values[key] = value.detach()

    def write_back(self, modules: list[nn.Module], given: Mapping[str, Tensor]) -> None:
        """Hand the network the buffers and plain values that a forward pass assigned to its modules."""
        places = {place for name in given for place in self.plan.places[name]}
        for number in self.plan.buffered:
            source = self.plan.sources[number]
            for key, tensor in self.slots[number].items():
                if tensor is not source[key] and (number, key) not in places:
                    source[key] = tensor if tensor is None else tensor.detach()
        for number in self.assigning:
            there, (_, hooks, values) = vars(modules[number]), self.facts[number]
            for key, value in vars(self.modules[number]).items():
                if key not in BASE and isinstance(value, VALUES) and values.get(key, self) is not value:
                    there[key] = values[key] = value
            self.facts[number] = len(there), hooks, values


def _known(places: Mapping[str, list[tuple[int, str]]], name: str) -> list[tuple[int, str]]:
    if name not in places:
        raise NetworkError(f"the network must have a parameter or buffer {name!r}, but has none so named")
    return places[name]


def _facts(module: nn.Module) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """How many attributes a module has, which hooks, and its plain values."""
    return len(vars(module)), _hooks(module), plain_values(module)


def plain_values(module: nn.Module) -> dict[str, Any]:
    """What a forward pass may have assigned to a module beside its parameters and buffers."""
    return {k: v for k, v in vars(module).items() if k not in BASE and isinstance(v, VALUES)}


def _containers(module: nn.Module) -> list[Any]:
    """The lists and dicts that stand on a module."""
    return [v for k, v in vars(module).items() if k not in BASE and isinstance(v, list | dict)]


def _hooks(module: nn.Module) -> tuple[int, ...]:
    return (*module._forward_pre_hooks, *module._forward_hooks)
