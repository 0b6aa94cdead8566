"""Frozen settings as plain JSON and back, for known classes only, so that loading runs no code of the file."""

import dataclasses
import json
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from ..errors import StorageError, warn

#: The metadata of settings of a later version, which are told where they are not None: files stay as they were.
LATER = {"later": True}


def encode(value: Any) -> Any:
    """A dataclass as `{"type": its name, field: value, …}`, nested; plain values stay as they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {item: encode(getattr(value, item.name)) for item in dataclasses.fields(value)}
        told = {i.name: v for i, v in fields.items() if v is not None or LATER.items() - i.metadata.items()}
        return {"type": type(value).__name__, **told}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):  # NumPy's numbers pass as settings too
        return int(value)
    if isinstance(value, Real):
        return float(value)
    raise StorageError(f"cannot store a setting of type {type(value).__name__}: {value!r}")


def decode(value: Any, known: Mapping[str, type]) -> Any:
    """The value behind `encode`; a class that is not in `known` is refused."""
    if isinstance(value, dict) and "type" in value:
        name = str(value["type"])
        if name not in known:
            raise StorageError(f"the file names unknown settings {name!r}; known: {sorted(known)}")
        fields = {key: decode(item, known) for key, item in value.items() if key != "type"}
        try:
            return known[name](**fields)
        except Exception as error:  # settings check themselves, and a file may hold anything
            raise StorageError(f"the file's settings of {name} do not fit: {error}") from error
    if isinstance(value, dict):
        return {key: decode(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(decode(item, known) for item in value)
    return value


def plain(states: Mapping[str, Any]) -> dict[str, Any]:
    """The extra states of modules that JSON gives back as they are; a warning names the others."""
    plain_states, others = {}, []
    for name, state in states.items():
        try:
            same = bool(json.loads(json.dumps(state)) == state)
        except (TypeError, ValueError):
            same = False
        if same:
            plain_states[name] = state
        else:
            others.append(f"{name or 'the network'} ({type(state).__name__})")
    if others:
        warn(
            f"not stored: the extra state of {', '.join(others)}, which is not plain JSON; the network given to "
            "dubito.load must bring it"
        )
    return plain_states
