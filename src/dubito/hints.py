"""Arguments against their type hints: what is not of the kind a signature names is refused before work starts."""

import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, isabstract, signature
from numbers import Integral, Real
from reprlib import Repr
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from .devices import on_host
from .errors import ConfigError, DataError, DubitoError, NetworkError, unknown_name

Function = TypeVar("Function", bound=Callable[..., Any])
_short = Repr()
_short.maxstring = _short.maxother = 60


class Checked:
    """Base of settings: arguments of the constructor are checked against their hints, in every subclass.

    A class that refuses them itself says more, in its range and its remedy: its error goes first.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        # Copies are made without arguments; `validate_args=False` is PyTorch's word for distributions known to be good.
        if (args or kwargs) and kwargs.get("validate_args") is not False:
            try:
                _check(cls.__init__, (None, *args), kwargs)
            except DubitoError as refusal:
                try:
                    made.__init__(*args, **kwargs)
                except DubitoError as error:
                    raise error from None
                except Exception:
                    raise refusal from None
                raise
        return made


def checked(function: Function) -> Function:
    """The function, with its arguments checked against their hints first.

    Where tensors are given, what PyTorch says of shapes or dtypes that do not meet becomes an error of ours, and a
    tensor of NaN is none to give back.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = _check(function, args, kwargs)
        if not tensors:
            return function(*args, **kwargs)
        try:
            result = function(*args, **kwargs)
        except (DubitoError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            given = ", ".join(f"{name}: {_shown(tensor)}" for name, tensor in tensors.items())
            raise DataError(f"{function.__name__} cannot take these tensors ({given}): {error}") from error
        if isinstance(result, Tensor) and _nan(result):
            raise DataError(f"{function.__name__} of these tensors is NaN: {', '.join(tensors)} must be finite")
        return result

    return call  # pyright: ignore[reportReturnType]


def require_dense(name: str, tensor: Tensor) -> None:
    """Refuse tensors whose numbers cannot be read row by row: complex, sparse, nested, quantised, or without memory."""
    kinds = {
        "sparse": (tensor.layout not in (torch.strided, torch.jagged), "call .to_dense() first"),
        "nested": (tensor.is_nested, "pad its rows to one shape first"),
        "complex": (tensor.is_complex(), "give real and imaginary part as features of their own"),
        "quantised": (tensor.is_quantized, "call .dequantize() first"),
        "meta": (tensor.device.type == "meta", "it has a shape and no numbers: make it on a real device"),
    }
    for kind, (holds, remedy) in kinds.items():
        if holds:
            raise DataError(f"{name} must be a dense tensor of real numbers, got a {kind} one; {remedy}")


def _check(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Check arguments; those that a hint wants as tensors, or pairs of them, come back."""
    hints, positions = _hints(function)
    given = [*zip(positions, args, strict=False), *kwargs.items()]  # the call itself refuses what is too many
    tensors: dict[str, Tensor] = {}
    for name, value in given:
        hint = hints.get(name, Any)
        if hint is Any or (type(value) is hint and hint in (int, bool, str)):
            continue
        for where, tensor in _tensors(name, value):
            require_dense(where, tensor)
            if _nan(tensor):
                count = int(tensor.isnan().sum())
                raise DataError(f"{where} must be finite, got {count} of {tensor.numel()} values NaN")
            tensors[where] = tensor
        if not _fits(hint, value):
            raise _refusal(name, hint, value)
    return tensors


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an argument: itself, an array, or those of a tuple."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray) and value.dtype.kind == "f":
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif type(value) is tuple:
        for index, part in enumerate(value):
            yield from _tensors(f"{name}[{index}]", part)


def _refusal(name: str, hint: Any, value: Any) -> DubitoError:
    """The error for a value that is not what a hint names."""
    choices = [part for kind in (hint, *get_args(hint)) if get_origin(kind) is Literal for part in get_args(kind)]
    if choices and isinstance(value, str):
        return unknown_name(name, value, map(str, choices))
    kind = NetworkError if hint is nn.Module else DataError if hint is Tensor else ConfigError
    remedy = f"; use torch.as_tensor({name})" if hint is Tensor else ""
    if isinstance(value, type) and any(
        part is not Any and _tells(part) and issubclass(value, part) for part in (hint, *get_args(hint))
    ):
        remedy = "; that is the class, add () to make one"
    return kind(f"{name} must be {_words(hint)}, got {_shown(value)}{remedy}")


def _nan(tensor: Tensor) -> bool:
    """Whether a tensor of the host holds NaN; what a transformation wraps is not looked at."""
    if not on_host(tensor) or not tensor.is_floating_point() or torch.compiler.is_compiling():
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
    return not wrapped and math.isnan(tensor.detach().sum()) and bool(tensor.isnan().any())


@cache
def _hints(function: Callable[..., Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Hints by name, and the names of what may be given by position; a hint that cannot be read allows anything."""
    parameters = signature(function).parameters.values()
    try:
        hints = get_type_hints(function)
    except NameError:  # names that only type checkers import
        hints = {p.name: p.annotation for p in parameters if not isinstance(p.annotation, str)}
    variable = {p.name for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    named = {n: h for n, h in hints.items() if h not in (Parameter.empty, Self) and n not in variable}
    return named, tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value is of the kind that a hint names."""
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(hint, TypeVar):
        return hint.__bound__ is None or _fits(hint.__bound__, value)
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (Union, types.UnionType):
        return any(_fits(part, value) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool) and not math.isnan(float(value))
    if hint is np.ndarray:
        return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    if origin is None:
        return hint in (Any, object) or not _tells(hint) or isinstance(value, hint)
    if isinstance(value, np.ndarray) and origin in (tuple, Sequence, list):
        value = value.tolist()
    if origin is tuple:
        return isinstance(value, tuple | list) and _all_fit(parts, value)
    if origin in (Sequence, list, Collection, Iterable):
        readable = isinstance(value, Sequence if origin in (Sequence, list) else Iterable)
        whole = readable and not isinstance(value, str | bytes)
        return whole and (not isinstance(value, Sequence) or all(_fits(parts[0], part) for part in value))
    if issubclass(origin, Mapping):
        pairs = value.items() if isinstance(value, Mapping) else ()
        return isinstance(value, Mapping) and all(_fits(parts[0], k) and _fits(parts[1], v) for k, v in pairs)
    return callable(value) if origin is Callable else isinstance(value, origin)


_NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def _all_fit(parts: tuple[Any, ...], value: Sequence[Any]) -> bool:
    if parts[-1:] == (...,):
        return all(_fits(parts[0], part) for part in value)
    return len(parts) == len(value) and all(map(_fits, parts, value))


def _tells(hint: Any) -> bool:
    """Whether `isinstance` knows the class."""
    return isinstance(hint, type) and getattr(hint, "_is_runtime_protocol", not getattr(hint, "_is_protocol", False))


def _words(hint: Any) -> str:
    """The kind that a hint names, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    plain = {
        None: "None", types.NoneType: "None", bool: "True or False", int: "a whole number", float: "a number",
        str: "text", Tensor: "a tensor", nn.Module: "an nn.Module",
    }  # fmt: skip
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(part) for part in parts))
    if origin is Literal:
        return f"{'one of ' if len(parts) > 1 else ''}{', '.join(map(repr, parts))}"
    if origin is tuple and ... not in parts:
        return f"({', '.join(_words(part) for part in parts)})"
    if origin in (tuple, Sequence, list, Collection, Iterable):
        return f"a list whose every item is {_words(parts[0])}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping from {_words(parts[0])} to {_words(parts[1])}"
    if origin is Callable:
        return "a function"
    return plain.get(hint) or _kind(origin or hint)


def _kind(hint: Any) -> str:
    """A class in words: of settings, those there are to choose from."""
    name = getattr(hint, "__name__", str(hint))
    if not (isinstance(hint, type) and issubclass(hint, Checked)):
        return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
    *first, last = [f"{kind.__name__}()" for kind in _choices(hint)] if isabstract(hint) else [f"{name}(...)"]
    return f"{', '.join(first)} or {last}" if first else last


def _choices(kind: type) -> list[type]:
    """The first classes below an abstract one that can be made."""
    below = kind.__subclasses__()
    return [made for sub in below for made in (_choices(sub) if isabstract(sub) else [sub])]


def _shown(value: Any) -> str:
    """A value for messages, short."""
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__ if isinstance(value, nn.Module) else _short.repr(value)
