"""Where a result comes from: every setting of every fit behind it, and the commit of the code that ran it.

An experiment fits by `fit(method, net, data, likelihood, …)`, or says by `record(…)` what it trains in a loop of its
own; while the runner listens (`recording`), the settings are written down in full as they are, not as they were meant.
"""

import subprocess
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from dubito.method import Method
from dubito.posterior import Posterior
from dubito.storage import encode

ROOT = Path(__file__).parents[2]
#: What decides numbers; results and pages may change while a queue runs.
CODE = ("src", "papers/*.py", "pyproject.toml", "constraints.txt")

Value = TypeVar("Value")
_records: ContextVar[list[dict[str, Any]] | None] = ContextVar("records", default=None)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The state of the code.

    Attributes:
        sha: of the last commit.
        dirty: whether files of the code differed from it.
    """

    sha: str
    dirty: bool


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What made a result.

    Attributes:
        fits: one entry per fit with all of its settings.
        commit: None where the code lay in no repository.
    """

    fits: Sequence[Mapping[str, Any]]
    commit: Commit | None


@cache
def commit(root: Path = ROOT) -> Commit | None:
    """The commit of the code, looked up once per process: what a process imported does not change."""
    try:
        sha = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", *CODE)
    except (OSError, subprocess.CalledProcessError):
        return None
    return Commit(sha=sha.strip(), dirty=bool(changed.strip()))


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@contextmanager
def recording() -> Iterator[list[dict[str, Any]]]:
    """While open, what `record` and `fit` are told is written to the list."""
    records: list[dict[str, Any]] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def record(method: Any, net: nn.Module | None, data: Any, likelihood: Any, **settings: Any) -> None:
    """Write down a fit, once where several are alike.

    Args:
        method: its settings.
        net: the network it starts from.
        data: tensors, or pairs of them.
        likelihood: its settings.
        settings: of the training, and seeds.
    """
    records = _records.get()
    if records is None:
        return
    entry = {
        "method": spelled(method),
        "likelihood": spelled(likelihood),
        "network": None if net is None else str(net).splitlines(),
        "data": _shapes(data),
        **{name: spelled(value) for name, value in settings.items()},
    }
    if entry not in records:
        records.append(entry)


def fit(method: Method, net: nn.Module, data: Any, likelihood: Any, *, rows: Any = None, **options: Any) -> Posterior:
    """`method.fit`, written down.

    Args:
        method: with every setting spelled out.
        net: the network.
        data: training rows.
        likelihood: of the targets.
        rows: the tensors behind a loader that augments them, to be written down in its place.
        options: of `method.fit`.
    """
    run = {name: options.get(name) for name in ("training", "seed")}
    if rows is not None:
        run["augmented"] = True
    seen = data if rows is None else rows
    record(method, net, seen, likelihood, validation=_shapes(options.get("validation")), **run)
    return method.fit(net, data, likelihood, **options)


def shared(
    store: MutableMapping[Any, tuple[Value, list[dict[str, Any]]]], key: Hashable, make: Callable[[], Value]
) -> Value:
    """What `make` gives, made once per key; whoever takes it from the store has its fits written down too.

    Args:
        store: values with the fits behind them.
        key: of the value.
        make: called where it is not there yet.
    """
    if key not in store:
        with recording() as records:
            store[key] = make(), records
    value, before = store[key]
    records = _records.get()
    if records is not None:
        records.extend(entry for entry in before if entry not in records)
    return value


def spelled(value: Any) -> Any:
    """Settings as plain JSON with every field; a function by its name."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "type": type(value).__name__,
            **{field.name: spelled(getattr(value, field.name)) for field in fields(value)},
        }
    if isinstance(value, Mapping):
        return {str(key): spelled(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [spelled(item) for item in value]
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return encode(value)


def _shapes(data: Any) -> Any:
    if isinstance(data, Tensor):
        return {"shape": list(data.shape), "dtype": str(data.dtype)}
    if isinstance(data, tuple | list):
        return [_shapes(item) for item in data]
    return None
