"""Modules, samplers and functions as plain values, so that two runs can be compared without opening either."""

import functools
import hashlib
import math
import sys
from collections.abc import Mapping, Sequence, Set
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from . import storage

#: Attributes of every module; what else stands on one is its author's.
BASE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
#: How deep settings are followed, and how long they are written out before a checksum stands for them.
DEPTH, LENGTH = 5, 200
#: What stands where something cannot be known.
UNKNOWN = "not compared"


def modules_of(network: nn.Module, modes: Mapping[str, bool]) -> dict[str, dict[str, Any]]:
    """Class and attributes of every module by name.

    Args:
        network: whose modules.
        modes: those that stay in evaluation mode while training.
    """
    return {
        name or "(itself)": {
            "class": class_of(module),
            "evaluation mode": name in modes,
            **{key: described(value) for key, value in vars(module).items() if key not in BASE},
        }
        for name, module in network.named_modules()
    }


def weights_of(network: nn.Module) -> dict[str, str]:
    """A checksum of every parameter and buffer by name."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: storage.checksum({"": tensor})[:16] for name, tensor in tensors.items()}


def first_difference(was: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first entry in which two nested plain values differ, with both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            inner = f"{name}.{key}" if name else key
            difference = first_difference(was.get(key, "absent"), now.get(key, "absent"), inner)
            if difference:
                return difference
        return None
    return None if was == now else (name, was, now)


def class_of(value: object) -> str:
    """The name of a value's class; those of `torch.nn` begin with `nn.`."""
    kind = type(value)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def described(value: Any, above: tuple[int, ...] = ()) -> Any:
    """A value as JSON holds it: settings as they are, arrays and long ones as checksums, the rest as their class.

    Args:
        value: to describe; it is not called.
        above: ids of what holds it.
    """
    plain = _plain(value, above)
    if isinstance(plain, str | list | dict) and len(str(plain)) > LENGTH:
        return f"{class_of(value)} {storage.json_checksum(plain)[:16]}"
    return plain


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, nn.Parameter):
        return "parameter"  # among the weights
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, np.generic | complex | bytes | range | torch.dtype):
        return repr(value)
    if isinstance(value, nn.Module):
        return class_of(value)  # described under its own name
    if isinstance(value, type):
        return value.__qualname__
    if id(value) in above or len(above) >= DEPTH:
        return class_of(value)
    inside = functools.partial(described, above=(*above, id(value)))
    if isinstance(value, Mapping):
        return {str(key): inside(item) for key, item in value.items()}
    if isinstance(value, Set):
        return sorted(str(inside(item)) for item in value)
    if isinstance(value, Sequence):
        return [inside(item) for item in value]
    if isinstance(value, functools.partial):
        return [inside(value.func), inside(value.args), inside(value.keywords)]
    if isinstance(value, MethodType):
        return [value.__qualname__, inside(value.__self__)]
    if isinstance(value, FunctionType):
        return _function(value, inside)
    if callable(value) and hasattr(value, "__name__"):  # builtin
        return value.__name__
    attributes = getattr(value, "__dict__", {})
    return {"class": class_of(value), **{name: inside(item) for name, item in attributes.items()}}


def _array(value: Tensor | np.ndarray) -> str:
    if isinstance(value, np.ndarray):
        form, raw = f"{value.dtype} {value.shape}", value.tobytes() if value.dtype != object else b""
        return f"{form} {hashlib.sha256(raw).hexdigest()[:16]}"
    form = f"{value.dtype} {tuple(value.shape)}"
    if value.is_meta or value.layout != torch.strided:
        return form
    return f"{form} {storage.checksum({'': value})[:16]}"


def _function(value: FunctionType, inside: Any) -> Any:
    """By name where that finds it, else by its code and by what it closes over."""
    where = value.__module__ or ""
    try:
        if functools.reduce(getattr, value.__qualname__.split("."), sys.modules.get(where)) is value:
            return f"{where}.{value.__qualname__}".removeprefix("__main__.")
    except AttributeError:  # a lambda, or local to another function
        pass
    cells = [cell.cell_contents for cell in value.__closure__ or ()]
    return [value.__name__, _code(value.__code__), inside(cells), inside(value.__defaults__)]


def _code(code: CodeType) -> str:
    constants = [_code(item) if isinstance(item, CodeType) else repr(item) for item in code.co_consts]
    return hashlib.sha256(f"{code.co_code!r} {constants} {code.co_names}".encode()).hexdigest()[:16]
