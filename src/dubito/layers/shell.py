"""Private shells: a network's module tree, copied for one caller at a time, around the network's own tensors.

A pass through a shared module would have to change it: other weights, other modes. A pass through a shell
changes nothing that another caller can see. Shells wait in a pool beside their network; a lease takes one and
fills its slots (parameters and buffers at every place that holds them) with the tensors of that pass.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import seeds
from ..inputs import Inputs, TensorOptions, call
from .sharded import whole_tensors
from .tree import Shell, TreePlan

#: Graphs of one network that may wait for their backward pass, each with a shell.
MOST_KEPT = 16


class Lease:
    """A shell in the hands of one caller.

    Attributes:
        module: what to call.
    """

    def __init__(self, shell: Shell, pool: "_Pool | None", sources: list[nn.Module] | None) -> None:
        self.module: nn.Module = shell.module
        self._shell: Shell | None = shell
        self._pool, self._sources = pool, sources
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

    def replace(self, names: Iterable[str], replacement: Callable[[str, Tensor], Tensor]) -> None:
        """Put other tensors in place of those that stand in some slots, by name."""
        assert self._shell is not None, "the lease has ended"
        self._given = {**self._given, **self._shell.replace(names, replacement)}

    def write_back(self) -> None:
        """After a forward pass in training: what it assigned to `self` reaches the network; else nothing does."""
        if self._shell is not None and self._sources is not None:
            self._shell.write_back(self._sources, self._given)

    def outputs(self, inputs: Inputs) -> Tensor:
        """A last pass; with it the lease ends, once the graph of its outputs is gone."""
        outputs = call(self.module, inputs)
        if outputs.grad_fn is not None and self._shell is not None:
            self._shell.forget_graphs()
        self.write_back()
        self.keep_for(outputs)
        return outputs

    def keep_for(self, outputs: Tensor) -> None:
        """Stay until the graph of these outputs is gone: checkpointed parts run again in the backward pass."""
        if outputs.grad_fn is None:
            self.release()
        elif self._pool is not None:
            outputs.grad_fn.metadata["lease"] = self  # pyright: ignore[reportIndexIssue]
            self._pool.keep(self)

    def release(self) -> None:
        """Give the shell back, without the tensors of this pass; a second time nothing happens."""
        shell, self._shell = self._shell, None
        if self._changes is not None:
            self._changes.close()
        if shell is not None and self._pool is not None:
            if self._given or shell.detached:
                shell.fill({}, False)
            self._pool.idle.append(shell)

    def withdraw(self) -> Shell:
        """The shell itself, filled as it is, for good: it is never given to others."""
        shell = self._shell
        assert shell is not None, "the lease has ended"
        self.abandon()
        return shell

    def abandon(self) -> None:
        """Leave the shell, as it is, to those who may still hold it; it is never given to others."""
        self._shell, self._changes, self.module = None, None, nn.Identity()

    def __del__(self) -> None:
        self.release()


class _Pool:
    """What is kept beside a network: where its tensors stand, shells that wait, and what is known of its noise."""

    def __init__(self, network: nn.Module) -> None:
        self.plan = TreePlan(network)
        self.idle: list[Shell] = []
        self.latest: Callable[[], Shell | None] = lambda: None
        self.waiting_leases: list[weakref.ref[Lease]] = []
        #: Whether a pass draws from the global state, by the modes of the modules.
        self.noisy: dict[Any, bool] = {}

    def keep(self, lease: Lease) -> None:
        """Remember a lease that ends with a graph; of too many the oldest is abandoned.

        A network that keeps its outputs in places of its own keeps their graph, and the graph keeps the lease.
        """
        self.waiting_leases.append(weakref.ref(lease))
        if len(self.waiting_leases) > MOST_KEPT:
            self.waiting_leases = [waiting for waiting in self.waiting_leases if waiting() is not None]
            oldest = self.waiting_leases[0]() if len(self.waiting_leases) > MOST_KEPT else None
            if oldest is not None:
                oldest.abandon()

    def waiting(self, modules: list[nn.Module]) -> Shell | None:
        """A shell that is like the network."""
        while True:
            try:
                shell = self.idle.pop()
            except IndexError:
                return None
            if shell.follow(modules) or self.plan.spread:  # whose hooks, of FSDP, are not for shells
                return shell
            self.noisy = {}


#: By the id of a network: its pool; by the id of a shell's module: the shell.
_pools: dict[int, _Pool] = {}
_shells: "weakref.WeakValueDictionary[int, Shell]" = weakref.WeakValueDictionary()
_building = threading.RLock()


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
    shell, pool, sources = _shells.get(id(network)), None, None
    if shell is None:
        pool, modules = _pool(network)
        pool.plan.locate(network)
        shell = pool.waiting(modules)
        if shell is None:
            with _building:
                like = pool.latest() if pool.plan.spread else None  # such a network refuses to be copied
                shell = Shell(network, pool.plan, modules, like)
                pool.latest = weakref.ref(shell)
            _shells[id(shell.module)] = shell
        shell.prepare(network, modules, training)
        sources = modules if training is not None else None
    else:
        detached = detached or shell.detached
    lease = Lease(shell, pool, sources)
    if pool is not None and pool.plan.spread:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
            tensors = {**whole_tensors(network, without=tensors or ()), **(tensors or {})}
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


def seeded(
    network: nn.Module, seed: int, *path: int | str, training: Mapping[str, bool] | None = None
) -> AbstractContextManager[None]:
    """Around a pass: where it draws from the global state (own dropout), that is seeded, and put back afterwards.

    The first pass in given modes tells whether it does. If not, the global state is not touched, so that passes
    of several threads do not wait for each other.

    Args:
        network: whose pass.
        seed: of the noise.
        path: the stream's labels.
        training: the modes of a training pass, as in `take`.
    """
    return seeder(network, training)(seed, *path)


def seeder(
    network: nn.Module, training: Mapping[str, bool] | None = None
) -> Callable[..., AbstractContextManager[None]]:
    """`seeded` for several passes in a row of a network that stays as it is, `(seed, *path)` of each."""
    pool, modes = _modes(network, training)

    def around(seed: int, *path: int | str) -> AbstractContextManager[None]:
        noisy = pool.noisy.get(modes)
        if noisy is False:
            return nullcontext()
        device = TensorOptions.of(network).device
        forked = seeds.forked(seed, *path, device=device)
        return forked if noisy else _watched(pool.noisy, modes, forked, device)

    return around


def _modes(network: nn.Module, training: Mapping[str, bool] | None) -> tuple[_Pool, Any]:
    """The network's pool, and the modes of a pass as its key there."""
    pool, modules = _pool(network)
    if training is None:
        return pool, tuple(module.training for module in modules)
    return pool, ("training", *sorted(name for name, mode in training.items() if not mode))


def noise_of(network: nn.Module) -> bool | None:
    """Whether passes in the network's modes draw from the global state; None where none under `seeded` has told."""
    pool, modes = _modes(network, None)
    return pool.noisy.get(modes)


@contextmanager
def _watched(
    noisy: dict[Any, bool], modes: Any, forked: AbstractContextManager[None], device: torch.device
) -> Iterator[None]:
    with forked:
        before = seeds.state(device)
        yield
        if before != seeds.state(device):
            noisy[modes] = True
        else:  # a pass inside may have told otherwise, and put the state back
            noisy.setdefault(modes, False)


def _pool(network: nn.Module) -> tuple[_Pool, list[nn.Module]]:
    """The network's pool, anew where its module tree has changed, and its modules in the order of the plan."""
    pool = _pools.get(id(network))
    modules = pool and pool.plan.modules(network)
    if pool is None or modules is None:
        with _building:
            pool = _pools.get(id(network))
            modules = pool and pool.plan.modules(network)
            if pool is None:
                weakref.finalize(network, _pools.pop, id(network), None).atexit = False
            if pool is None or modules is None:
                pool = _pools[id(network)] = _Pool(network)
                modules = pool.plan.modules(network)
    assert modules is not None
    return pool, modules
