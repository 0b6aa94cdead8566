"""Content against types: after the checksum of a file, and before anything is built from it."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from math import inf, isfinite
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from ..errors import StorageError

#: No whole number of a file is larger, nor could PyTorch take it.
MOST = 2**63 - 1
#: No number that scales tensors is larger: single precision holds its square.
LARGEST = 1e18


class Within(NamedTuple):
    """Bounds of a number, both included."""

    low: float
    high: float


Count = Annotated[int, Within(0, 2**40)]
Size = Annotated[int, Within(1, 2**40)]
#: A factor that may be 0, and one that may not.
Multiplier = Annotated[float, Within(0, LARGEST)]
Positive = Annotated[float, Within(1 / LARGEST, LARGEST)]
#: A number that is recorded and never computed with.
Recorded = Annotated[float, Within(-inf, inf)]
#: Names by name.
Names = dict[str, str]


def conform(value: Any, hint: Any, where: str) -> None:
    """Refuse a value that is not of a type; dataclasses are looked at field by field, whole numbers are bounded.

    Args:
        value: plain values from JSON, or settings built from them.
        hint: a type as annotations have them; a `TypedDict` tells which keys there are.
        where: the value stands, for messages.
    """
    if not _fits(value, hint, where):
        raise StorageError(f"{where} must be {_described(hint)}, got {_shown(value)}")


def _fits(value: Any, hint: Any, where: str) -> bool:
    """Whether a value is of a type; parts of a value that are not raise with a better name of the place."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        bounds = arguments[1]
        if bounds.low == -inf and isinstance(value, float):
            return True
        return _fits(value, arguments[0], where) and bounds.low <= value <= bounds.high
    if origin is NotRequired:
        return _fits(value, arguments[0], where)
    if origin in (Union, types.UnionType):
        return any(_alternative(value, part, where) for part in arguments)
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in arguments)
    if hint in (None, type(None)):
        return value is None
    if is_typeddict(hint):
        return _has_keys(value, hint, where)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            _all_fit([(key, arguments[0], f"a key of {where}"), (item, arguments[1], f"{where}[{key!r}]")])
            for key, item in value.items()
        )
    if origin in (list, Sequence):
        return _is_list(value) and _all_fit(
            [(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value)]
        )
    if origin is tuple:
        if not _is_list(value) or (arguments[-1:] != (Ellipsis,) and len(value) != len(arguments)):
            return False
        hints = [arguments[0]] * len(value) if arguments[-1:] == (Ellipsis,) else arguments
        return _all_fit(
            [(item, part, f"{where}[{n}]") for n, (item, part) in enumerate(zip(value, hints, strict=True))]
        )
    if origin is Callable or hint is Callable or (callable(hint) and origin is not None):
        return False  # no file holds code
    return _is_instance(value, hint, where)


def _alternative(value: Any, hint: Any, where: str) -> bool:
    try:
        return _fits(value, hint, where)
    except StorageError:
        return False


def _all_fit(parts: list[tuple[Any, Any, str]]) -> bool:
    for part in parts:
        conform(*part)
    return True


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _has_keys(value: Any, hint: Any, where: str) -> bool:
    if not isinstance(value, Mapping):
        return False
    hints = settings_hints(hint)
    missing, other = hint.__required_keys__ - value.keys(), value.keys() - hints.keys()
    if missing or other:
        words = f"lacks {sorted(missing)[0]!r}" if missing else f"has the unknown {sorted(map(str, other))[0]!r}"
        raise StorageError(f"{where} {words}")
    return _all_fit([(item, hints[key], f"{where}[{key!r}]") for key, item in value.items()])


def _is_instance(value: Any, hint: Any, where: str) -> bool:
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and abs(value) <= MOST
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= MOST**16 and isfinite(value)
    if not isinstance(value, hint):
        return False
    if is_dataclass(value) and not isinstance(value, Enum):
        hints = settings_hints(type(value))
        names = (item.name for item in fields(value) if item.init and item.name in hints)
        return _all_fit([(getattr(value, name), hints[name], f"{where}.{name}") for name in names])
    return True


def settings_hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields; none where it names what is imported for types alone."""
    try:
        return get_type_hints(kind, include_extras=True)
    except NameError:
        return {}


def _described(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)[:2]
        return f"{_described(kind)} from {bounds.low:g} to {bounds.high:g}"
    plain = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    return plain.get(hint) or str(getattr(hint, "__name__", hint)).replace("dubito.", "")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
