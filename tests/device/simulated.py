"""A made-up accelerator on a CPU: every tensor lies on it but those made on the host, and reads of it are listed.

Two modes together: a function mode answers `tensor.device`, follows which tensors lie on the host, and sees what never
reaches the dispatcher (`tolist`, `numpy`); a dispatch mode sees what functions of PyTorch read on their way. Numbers
are real, so that a fit runs as ever.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dubito
from dubito import seeds

CUDA = torch.device("cuda", 0)
TORCH, PACKAGE = (str(Path(file).parent) for file in (torch.__file__, dubito.__file__))

#: Functions that bring numbers of a tensor to the host, or whose outputs' shapes depend on them.
READS = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__",
    "__contains__", "__repr__", "__format__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere",
    "masked_select", "unique", "unique_consecutive", "bincount",
}  # fmt: skip
#: Operators that do, wherever they are called; the decompositions look at LAPACK's answer before they return.
OPERATORS = {
    "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "_linalg_check_errors", "_linalg_eigh", "_linalg_svd", "linalg_eig",
    "_linalg_eigvals", "linalg_qr.check", "linalg_lstsq",
}  # fmt: skip
#: They look at their arguments on CPUs alone.
CPU_CHECKS = {"one_hot", "quantile", "nanquantile", "multinomial", "bernoulli", "normal", "embedding"}
#: Arguments may lie elsewhere: what they do with those is looked at here.
MOVES = {"to", "cpu", "copy_", "__getitem__", "__setitem__", "index_select", "type", "set_data", "backward"}


class Reads(Counter[str]):
    """How often a device was read, by kind and place; what the library itself did begins with a slash."""

    def note(self, kind: str) -> None:
        """Enter a read: the place is the last line of neither PyTorch nor this file."""
        frame = sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename.startswith((TORCH, __file__)):
            frame = frame.f_back
        path = frame.f_code.co_filename
        place = path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else Path(path).name
        self[f"{place}:{frame.f_lineno} {frame.f_code.co_name}: {kind}"] += 1

    def ours(self) -> "Reads":
        """Those of the library itself."""
        return Reads({read: count for read, count in self.items() if read.startswith("/")})


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor lies on the host."""
    return tensor.__dict__.get("_on_host", False)


def hosted(value: Any) -> Any:
    """Say that all tensors in a value lie on the host."""
    for tensor in tree_leaves(value):
        if isinstance(tensor, Tensor):
            tensor.__dict__["_on_host"] = True
    return value


def elsewhere(device: Any) -> bool:
    """Whether a device is the made-up one."""
    return device is not None and torch.device(device).type != "cpu"


class Operators(TorchDispatchMode):
    """Notes operators that read, where the function mode has not looked already."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self.reads, self.paused = reads, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused and self.reading(func, args):
            self.reads.note(func.overloadpacket.__name__)
        with torch._C.DisableTorchFunction():  # the function mode has seen it, or it is autograd's own work
            return func(*args, **(kwargs or {}))

    def reading(self, func: Any, args: Any) -> bool:
        name = func.overloadpacket.__name__
        if name in OPERATORS:
            return not all(on_host(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        if name not in ("index", "index_put", "index_put_"):
            return False
        masks = any(leaf is not None and leaf.dtype in (torch.bool, torch.uint8) for leaf in args[1])
        return masks and not (name != "index" and args[2].numel() == 1)  # a mask filled with one number is none


class Device(TorchFunctionMode):
    """Answers as if all tensors lay on the made-up device but those made on the host."""

    def __init__(self, reads: Reads, operators: Operators) -> None:
        super().__init__()
        self.reads, self.operators = reads, operators

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return self._attribute(func, args)
        special = next((kind for kind in types if kind.__torch_function__ is not Tensor.__torch_function__), None)
        if special is not None and torch._C._is_torch_function_enabled():
            with self:  # a tensor that answers for itself: what it does is looked at as well
                return special.__torch_function__(func, types, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        host = all(on_host(tensor) for tensor in tensors)
        if name in ("to", "cpu"):
            return self._moved(func, name, args, kwargs)
        if name in READS and not host:
            self.reads.note(name)
            return hosted(self._quietly(func, args, kwargs))
        device = kwargs.pop("device", None)
        self._look(name, args, kwargs, tensors, device)
        if host and not elsewhere(device):
            if not tensors and device is not None:
                kwargs["device"] = device
            return self._quietly(func, args, kwargs, on_host=bool(tensors) or not elsewhere(device))
        outputs = self._quietly(func, args, kwargs) if name in CPU_CHECKS else func(*args, **kwargs)
        if device is not None and not elsewhere(device):
            hosted(outputs)
        return outputs

    def _attribute(self, func: Any, args: Any) -> Any:
        """The attributes that tell where a tensor lies; views of host tensors lie there too."""
        (tensor, *_), name = args, func.__self__.__name__
        if name == "device" and not on_host(tensor):
            return CUDA
        if name in ("is_cuda", "is_cpu"):
            return on_host(tensor) == (name == "is_cpu")
        value = func(*args)
        return hosted(value) if isinstance(value, Tensor) and on_host(tensor) else value

    def _moved(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        to_host, rest, kwargs = _target(tensor, name, rest, kwargs)
        moved = func(tensor, *rest, **kwargs) if name == "to" and (rest or kwargs) else tensor
        if to_host == on_host(tensor):
            return hosted(moved) if to_host else moved
        if not kwargs.get("non_blocking", False):
            self.reads.note("copy to the host" if to_host else "copy from the host")
        moved = moved.clone() if moved is tensor else moved
        moved.__dict__["_on_host"] = to_host
        return moved

    def _look(self, name: str, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], device: Any) -> None:
        """Note copies from the host, and tensors of both places that meet."""
        from_numbers = name in ("tensor", "as_tensor", "asarray") and elsewhere(device)
        if (from_numbers and all(map(on_host, tensors))) or (name == "new_tensor" and not on_host(args[0])):
            self.reads.note("copy from the host")
        apart = [tensor for tensor in tensors if on_host(tensor)]
        if len(apart) in (0, len(tensors)):
            return
        if name in MOVES:
            if not kwargs.get("non_blocking", False) and (name == "copy_" or any(t.ndim for t in apart)):
                self.reads.note(f"copy from the host by {name}")
        elif any(tensor.ndim for tensor in apart):
            self.reads.note(f"tensors of two devices in {name}")

    def _quietly(self, func: Any, args: Any, kwargs: dict[str, Any], on_host: bool = False) -> Any:
        before, self.operators.paused = self.operators.paused, True
        try:
            outputs = func(*args, **kwargs)
        finally:
            self.operators.paused = before
        return hosted(outputs) if on_host else outputs


def _target(tensor: Tensor, name: str, rest: list[Any], kwargs: dict[str, Any]) -> tuple[bool, list[Any], dict]:
    """Whether a tensor is to lie on the host, and the arguments of its move without the device."""
    if name == "cpu":
        return True, rest, {}
    to_host, kept = on_host(tensor), []
    kwargs = dict(kwargs)
    for value in [*rest, *(kwargs.pop(key) for key in ("device", "other") if key in kwargs)]:
        if isinstance(value, Tensor):
            to_host = on_host(value)
            kept.append(value.dtype)
        elif isinstance(value, bool):
            kwargs.setdefault("non_blocking", value)
        elif isinstance(value, str | torch.device | int):
            to_host = not elsewhere(value)
        elif value is not None:
            kept.append(value)
    return to_host, kept, kwargs


class PlacedGenerator(torch.Generator):
    """A generator of the host's that says where it was asked to be."""

    def __new__(cls, device: Any = "cpu") -> "PlacedGenerator":
        generator = super().__new__(cls)
        generator.place = torch.device(device)
        return generator

    @property
    def device(self) -> torch.device:
        """Where it was asked to be."""
        return self.place if self.place.type == "cpu" else CUDA

    def get_offset(self) -> int:
        """How much was drawn, which generators of devices know on the host."""
        return getattr(self, "offset", 0)

    def set_offset(self, offset: int) -> None:
        """Go on from there."""
        self.offset = offset


class FinishedEvent:
    """In the place of a device's event: what it waits for has happened."""

    def __init__(self, device: Any = None) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Nothing to record."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@contextmanager
def simulated() -> Iterator[Reads]:
    """While open, tensors lie on a made-up device; yields the list of its reads.

    A CPU build has no generators, events and memory of such a device: the host's stand in.
    """
    reads = Reads()
    operators = Operators(reads)

    def plain(function: Any) -> Any:
        def called(*args: Any, device: Any = "cpu", **kwargs: Any) -> Any:
            return function(*args, device="cpu", **kwargs)

        return called

    def backward(*args: Any, **kwargs: Any) -> Any:
        # PyTorch leaves a function mode for `tensor.backward`; functions of ours that it calls are looked at too.
        inside = _get_current_function_mode() is device_mode
        with nullcontext() if inside else device_mode:
            return engine(*args, **kwargs)

    def grouped(*args: Any, **kwargs: Any) -> Any:
        return {(CUDA, dtype): group for (_, dtype), group in grouping(*args, **kwargs).items()}

    device_mode = Device(reads, operators)
    engine, grouping = torch.autograd._engine_run_backward, clip_grad._group_tensors_by_device_and_dtype
    cpu = torch.device("cpu")
    state, reseed, from_numpy = seeds.state, seeds.reseed, torch.from_numpy
    memory = SimpleNamespace(mem_get_info=lambda device: (2**33, 2**34))
    patches = [
        mock.patch.object(torch, "Generator", PlacedGenerator),
        mock.patch.object(seeds, "forked", plain(seeds.forked)),
        mock.patch.object(seeds, "state", lambda device: state(cpu)),
        mock.patch.object(seeds, "reseed", lambda seed, device: reseed(seed, cpu)),
        mock.patch.object(torch, "from_numpy", lambda array: hosted(from_numpy(array))),
        mock.patch.object(torch, "get_device_module", lambda device=None: memory),
        mock.patch.object(torch, "Event", FinishedEvent),
        mock.patch.object(torch.autograd, "_engine_run_backward", backward),
        mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", grouped),
    ]
    for patch in patches:
        patch.start()
    try:
        with warnings.catch_warnings(), operators, device_mode:
            for words in ("User provided device_type of 'cuda'", "PyTorch was compiled without cuDNN"):
                warnings.filterwarnings("ignore", words)
            yield reads
    finally:
        for patch in reversed(patches):
            patch.stop()
