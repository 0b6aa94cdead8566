"""Private shells: a network's module tree, copied for one caller at a time, around the network's own tensors.

A pass through a shared module would have to change it: other weights, other modes. A pass through a shell
changes nothing that another caller can see. Shells wait in a pool beside their network; a lease takes one and
fills its slots (parameters and buffers at every place that holds them) with the tensors of that pass.
"""

import copy
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from ..errors import NetworkError
from .recurrent import note_order

Slots: TypeAlias = MutableMapping[str, Tensor | None]


def deep_copy(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy; tensors that a forward pass left on a module (a cache of activations) lose their graph."""
    left = (value for part in module.modules() for value in vars(part).values() if isinstance(value, Tensor))
    memo = {id(value): value.detach() for value in left if value.grad_fn is not None} | (memo or {})
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
        self.edges: list[tuple[int, str, int]] = []
        self.facts: list[tuple[int, Slots, Slots]] = []
        modules = [network]
        index = {id(network): 0}
        for parent, module in enumerate(modules):  # grows on the way
            self.facts.append((len(module._modules), module._parameters, module._buffers))
            for key, child in module._modules.items():
                if child is not None:
                    if id(child) not in index:
                        index[id(child)] = len(modules)
                        modules.append(child)
                    self.edges.append((parent, key, index[id(child)]))
        self.sources = [slots for _, *both in self.facts for slots in both]
        self.tensors: list[int] = []
        self.places: dict[str, list[tuple[int, str]]] = {}

    def modules(self, network: nn.Module) -> list[nn.Module] | None:
        """The network's modules in the plan's order; None where its tree is another one by now."""
        modules: list[nn.Module] = [network]
        try:
            for parent, key, number in self.edges:
                child = modules[parent]._modules[key]
                if number == len(modules):
                    modules.append(child)  # pyright: ignore[reportArgumentType]
                elif child is not modules[number]:
                    return None
            for module, (children, parameters, buffers) in zip(modules, self.facts, strict=True):
                same = module._parameters is parameters and module._buffers is buffers
                if not same or len(module._modules) != children:
                    return None
        except (KeyError, AttributeError):
            return None
        return modules

    def update(self, network: nn.Module) -> None:
        """Find every place of each tensor by its first name, where tensors were replaced; tied ones have several."""
        tensors = [id(tensor) for slots in self.sources for tensor in slots.values()]
        if tensors != self.tensors:
            named = (*network.named_parameters(), *network.named_buffers())
            first = {id(tensor): name for name, tensor in named}
            places: dict[str, list[tuple[int, str]]] = {}
            for number, slots in enumerate(self.sources):
                for key, tensor in slots.items():
                    if tensor is not None:
                        places.setdefault(first[id(tensor)], []).append((number, key))
            self.places, self.tensors = places, tensors


class _Shell:
    """A copy of the module tree whose slots can be filled."""

    def __init__(self, network: nn.Module, plan: _Plan) -> None:
        memo = {
            id(tensor): tensor for slots in plan.sources for tensor in slots.values() if tensor is not None
        }
        whole = deep_copy(network, memo)
        self.plan = plan
        modules = plan.modules(network)
        self.modules: list[nn.Module] = [whole]
        for parent, key, number in plan.edges:
            if number == len(self.modules):
                self.modules.append(self.modules[parent]._modules[key])  # pyright: ignore
        assert modules is not None
        for own, source in zip(self.modules, modules, strict=True):
            if own is source:
                raise NetworkError(
                    f"the network must be copyable, but a copy of {type(source).__name__} is itself"
                )
        self.slots: list[Slots] = [slots for m in self.modules for slots in (m._parameters, m._buffers)]
        for module in self.modules:  # compiled parts hold on to the weights they were compiled with
            for key, child in module._modules.items():
                if child is not None and hasattr(child, "_orig_mod"):
                    module._modules[key] = child._orig_mod  # pyright: ignore[reportArgumentType]
        for module in self.modules:
            if isinstance(module, nn.RNNBase):
                module.register_forward_pre_hook(note_order)
        self.module = original(whole)
        self.training: dict[str, bool] | None = None
        self.detached = False
        self.compiled: Any = None

    def fill(self, given: Mapping[str, Tensor], detached: bool) -> None:
        """Put the given tensors into their slots, and the network's current ones into all others."""
        slots, sources, places = self.slots, self.plan.sources, self.plan.places
        for own, source in zip(slots, sources, strict=True):
            if isinstance(own, dict):
                own.update(source)
            else:  # of a scripted module
                for key, tensor in source.items():
                    own[key] = tensor
        self.detached = detached
        if detached:
            given = {name: _detached(sources[n][key]) for name, ((n, key), *_) in places.items()} | dict(
                given
            )
        for name, tensor in given.items():
            if name not in places:
                raise NetworkError(
                    f"the network must have a parameter or buffer {name!r}, but has none so named"
                )
            for number, key in places[name]:
                slots[number][key] = tensor

    def set_modes(
        self, network: nn.Module, modules: list[nn.Module], training: Mapping[str, bool] | None
    ) -> None:
        """The modes of the network's modules, or those of a training pass."""
        if training is not None:
            if self.training != training:
                self.module.train()
                index = {id(module): number for number, module in enumerate(modules)}
                for name, module in network.named_modules():
                    if not training.get(name, True):
                        self.modules[index[id(module)]].training = False
                self.training = dict(training)
            return
        if self.training is not None:  # by the modules' own methods, which may do more than set the flag
            self.module.train(network.training)
            self.training = None
        for own, source in zip(self.modules, modules, strict=True):
            if own.training is not source.training:
                own.training = source.training


class Lease:
    """A shell in the hands of one caller.

    Attributes:
        module: what to call.
    """

    def __init__(
        self, shell: _Shell, pool: "list[_Shell] | None", given: Mapping[str, Any], write: bool
    ) -> None:
        self.module = shell.module
        self._shell, self._pool, self._given, self._write = shell, pool, given, write

    def write_back(self) -> None:
        """After a training pass: buffers that the forward pass reassigned become the network's own."""
        shell = self._shell
        if shell is None or not self._write:
            return
        given = {place for name in self._given for place in shell.plan.places[name]}
        for number in range(1, len(shell.slots), 2):
            source = shell.plan.sources[number]
            for key, tensor in shell.slots[number].items():
                if tensor is not source[key] and (number, key) not in given:
                    source[key] = tensor

    def keep_for(self, outputs: Tensor) -> None:
        """Leave the shell with the graph of its outputs: checkpointed parts run again in the backward pass."""
        if outputs.grad_fn is None:
            self.release()
        else:
            outputs.grad_fn.metadata["lease"] = self

    def release(self) -> None:
        """Give the shell back, without the tensors of this pass; what is called again does nothing."""
        shell, self._shell = self._shell, None
        if shell is not None and self._pool is not None:
            shell.fill({}, False)
            self._pool.append(shell)

    def __del__(self) -> None:
        self.release()


#: By the network's id: its plan and the shells that wait; by a shell's own module: the shell.
_pools: dict[int, tuple[_Plan, list[_Shell]]] = {}
_shells: "weakref.WeakValueDictionary[int, _Shell]" = weakref.WeakValueDictionary()
_building = threading.RLock()


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
    given = tensors or {}
    held = _shells.get(id(network))
    if held is not None:
        held.fill(given, detached or held.detached)
        return Lease(held, None, given, False)
    plan, modules, idle = _pool(network)
    plan.update(network)
    try:
        shell = idle.pop()
    except IndexError:
        with _building:
            shell = _Shell(network, plan)
        _shells[id(shell.module)] = shell
    shell.fill(given, detached)
    shell.set_modes(network, modules, training)
    return Lease(shell, idle, given, training is not None)


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


def _detached(tensor: Tensor | None) -> Any:
    return tensor.detach() if tensor is not None and tensor.requires_grad else tensor
