"""Private shells: a network's module tree, copied for one caller at a time, around the network's own tensors.

A pass through a shared module would have to change it: other weights, other modes. A pass through a shell
changes nothing that another caller can see. Shells wait in a pool beside their network; a lease takes one and
fills its slots (parameters and buffers at every place that holds them) with the tensors of that pass.
"""

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NetworkError
from ..inputs import Inputs, call
from .recurrent import note_order

#: Attributes of every module; what else stands on one is its author's.
BASE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
#: Values that a shell takes over where they change on the network, and hands back after a training pass.
VALUES = (Tensor, bool, int, float, str, type(None))


def deep_copy(module: nn.Module, shared: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A deep copy; tensors that a forward pass left on a module (a cache of activations) lose their graph.

    Args:
        module: to copy.
        shared: tensors by id that the copy holds too instead of copies.
    """
    left = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    memo = {id(value): value.detach() for value in left if value.grad_fn is not None} | dict(shared or {})
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NetworkError(
            f"the network must be copyable, but copy.deepcopy failed: {error}; keep nothing on it that cannot be "
            "copied, such as lists of activations, open files or locks"
        ) from error


class _Plan:
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
        self.places, self.tensors = places, tensors


class _Shell:
    """A copy of the module tree whose slots can be filled."""

    def __init__(self, network: nn.Module, plan: _Plan, modules: list[nn.Module]) -> None:
        whole = deep_copy(
            network, {id(t): t for slots in plan.sources for t in slots.values() if t is not None}
        )
        self.plan = plan
        self.modules: list[Any] = [whole]
        for parent, key, number in plan.edges:
            if number == len(self.modules):
                self.modules.append(self.modules[parent]._modules[key])
        for copied, source in zip(self.modules, modules, strict=True):
            if copied is source:
                raise NetworkError(
                    f"the network must be copyable, but {type(source).__name__} copies as itself"
                )
        self.slots: list[Any] = [slots for m in self.modules for slots in (m._parameters, m._buffers)]
        self.module = whole
        for module in self.modules:
            if "_orig_mod" in module._modules:  # compiled for other modules than these: hand the call on
                vars(module)["forward"] = module._modules["_orig_mod"].__call__
        for module in self.modules:
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(note_order)
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
            if len(there) != size or _hooks(source) != hooks:
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
        for filled, source in zip(slots, sources, strict=True):
            if type(filled) is dict:
                filled.update(source)
            else:  # of a scripted module
                for key, tensor in source.items():
                    filled[key] = tensor
        self.detached = detached
        if detached:
            others = {name: sources[n][key] for name, ((n, key), *_) in places.items() if name not in given}
            given = {**given, **{name: t.detach() for name, t in others.items() if t.requires_grad}}
        for name, tensor in given.items():
            if name not in places:
                raise NetworkError(
                    f"the network must have a parameter or buffer {name!r}, but has none so named"
                )
            for number, key in places[name]:
                slots[number][key] = tensor

    def prepare(
        self, network: nn.Module, modules: list[nn.Module], training: Mapping[str, bool] | None
    ) -> None:
        """Take the modes of the network's modules, or those of a training pass, and compile where it is."""
        compiled = network._compiled_call_impl is not None
        if compiled and self.compiled is None:
            module = self.module
            # A function of ours around the call: PyTorch does not look into forward passes that are its own, such
            # as that of nn.Sequential, when `module.compile()` asks for it.
            self.compiled = torch.compile(lambda *args, **kwargs: module._call_impl(*args, **kwargs))
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

    def write_back(self, modules: list[nn.Module], given: Mapping[str, Tensor]) -> None:
        """Hand the network the buffers and plain values that a forward pass assigned to its modules."""
        places = {place for name in given for place in self.plan.places[name]}
        for number in range(1, len(self.slots), 2):
            source = self.plan.sources[number]
            for key, tensor in self.slots[number].items():
                if tensor is not source[key] and (number, key) not in places:
                    source[key] = tensor
        for number in self.assigning:
            there, (_, hooks, values) = vars(modules[number]), self.facts[number]
            for key, value in vars(self.modules[number]).items():
                if key not in BASE and isinstance(value, VALUES) and values.get(key, self) is not value:
                    there[key] = values[key] = value
            self.facts[number] = len(there), hooks, values


class Lease:
    """A shell in the hands of one caller.

    Attributes:
        module: what to call.
    """

    def __init__(self, shell: _Shell, idle: list[_Shell] | None, sources: list[nn.Module] | None) -> None:
        self.module = shell.module
        self._shell: _Shell | None = shell
        self._idle, self._sources = idle, sources
        self._given: Mapping[str, Tensor] = {}
        self._changes: ExitStack | None = None

    def enter(self, change: AbstractContextManager[Any]) -> None:
        """Keep a context open, which changes the shell alone, until the lease ends."""
        self._changes = self._changes or ExitStack()
        self._changes.enter_context(change)

    def fill(self, tensors: Mapping[str, Tensor], *, detached: bool = False) -> None:
        """Put other tensors into the slots, and the network's current ones into all others."""
        assert self._shell is not None, "the lease has ended"
        self._given = tensors
        self._shell.fill(tensors, detached)

    def write_back(self) -> None:
        """After a forward pass in training: what it assigned to `self` reaches the network; else nothing does."""
        if self._shell is not None and self._sources is not None:
            self._shell.write_back(self._sources, self._given)

    def outputs(self, inputs: Inputs) -> Tensor:
        """A last pass; with it the lease ends, once the graph of its outputs is gone."""
        outputs = call(self.module, inputs)
        self.write_back()
        self.keep_for(outputs)
        return outputs

    def keep_for(self, outputs: Tensor) -> None:
        """Stay until the graph of these outputs is gone: checkpointed parts run again in the backward pass."""
        if outputs.grad_fn is None:
            self.release()
        else:
            outputs.grad_fn.metadata["lease"] = self  # pyright: ignore[reportIndexIssue]

    def release(self) -> None:
        """Give the shell back, without the tensors of this pass; a second time nothing happens."""
        shell, self._shell = self._shell, None
        if self._changes is not None:
            self._changes.close()
        if shell is not None and self._idle is not None:
            shell.fill({}, False)
            self._idle.append(shell)

    def __del__(self) -> None:
        self.release()


#: By the network's id: its plan and the shells that wait; by the id of a shell's module: the shell.
_pools: dict[int, tuple[_Plan, list[_Shell]]] = {}
_shells: "weakref.WeakValueDictionary[int, _Shell]" = weakref.WeakValueDictionary()
_building = threading.RLock()


def original(network: nn.Module) -> nn.Module:
    """The module inside a compiled one, or the network itself."""
    return getattr(network, "_orig_mod", network)


def take(
    network: nn.Module,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    detached: bool = False,
    training: Mapping[str, bool] | None = None,
) -> Lease:
    """A lease on a private shell of the network, until it is released or forgotten.

    Args:
        network: whose shell; nothing of it is changed. The module of another lease is filled anew instead, and
            stays so until that lease ends.
        tensors: what to put in the slots, by the first names of parameters and buffers; the network's current
            tensors stand in all others.
        detached: whether the other parameters are put in detached, so that no gradient is computed for them.
        training: a training pass: all modules are in training mode but those that are False here, by name. None
            takes the network's modes.
    """
    shell, idle, sources = _shells.get(id(network)), None, None
    if shell is None:
        plan, modules, idle = _pool(network)
        plan.locate(network)
        shell = _waiting(idle, modules)
        if shell is None:
            with _building:
                shell = _Shell(network, plan, modules)
            _shells[id(shell.module)] = shell
        shell.prepare(network, modules, training)
        sources = modules if training is not None else None
    else:
        detached = detached or shell.detached
    lease = Lease(shell, idle, sources)
    lease.fill(tensors or {}, detached=detached)
    return lease


@contextmanager
def leased(
    network: nn.Module,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    detached: bool = False,
    training: Mapping[str, bool] | None = None,
) -> Iterator[nn.Module]:
    """A private shell of the network for one caller, while open; the arguments are those of `take`."""
    lease = take(network, tensors, detached=detached, training=training)
    try:
        yield lease.module
        lease.write_back()
    finally:
        lease.release()


def _pool(network: nn.Module) -> tuple[_Plan, list[nn.Module], list[_Shell]]:
    """The plan, the modules in its order and the waiting shells; all anew where the module tree has changed."""
    pool = _pools.get(id(network))
    modules = pool and pool[0].modules(network)
    if pool is None or modules is None:
        with _building:
            pool = _pools.get(id(network))
            modules = pool and pool[0].modules(network)
            if pool is None:
                weakref.finalize(network, _pools.pop, id(network), None).atexit = False
            if pool is None or modules is None:
                pool = _pools[id(network)] = _Plan(network), []
                modules = pool[0].modules(network)
    assert modules is not None
    return pool[0], modules, pool[1]


def _waiting(idle: list[_Shell], modules: list[nn.Module]) -> _Shell | None:
    while True:
        try:
            shell = idle.pop()
        except IndexError:
            return None
        if shell.follow(modules):
            return shell


def _facts(module: nn.Module) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """How many attributes a module has, which hooks, and its plain values."""
    values = {k: v for k, v in vars(module).items() if k not in BASE and isinstance(v, VALUES)}
    return len(vars(module)), _hooks(module), values


def _hooks(module: nn.Module) -> tuple[int, ...]:
    before, after = module._forward_pre_hooks, module._forward_hooks
    return (*before, *after) if before or after else ()
