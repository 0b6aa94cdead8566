"""Packages that open their rooms when they are asked for: `import dubito` reads no module but a few of its own."""

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def attach(
    package: str, names: Mapping[str, Sequence[str]], rooms: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names lie in its modules.

    Modules of the package open by their names too, as `dubito.data`.

    Args:
        package: its `__name__`.
        names: by module, relative to the package, what it offers.
        rooms: modules that are shown among its names.
    """
    modules = {name: f"{package}.{module}" for module, offered in names.items() for name in offered}

    def get(name: str) -> Any:
        if name in modules:
            with _uncollected():
                value = getattr(import_module(modules[name]), name)
        elif not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            with _uncollected():
                value = import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *modules, *rooms}), sorted(modules)


def rich_console() -> Any:
    """The `Console` of rich, whose first import draws from Python's global generator: its state is put back."""
    state = random.getstate()
    try:
        return import_module("rich.console").Console
    finally:
        random.setstate(state)


def open_all(package: str) -> None:
    """Open the modules of all names of a package, so that all subclasses of theirs are known."""
    for name in sys.modules[package].__all__:
        getattr(sys.modules[package], name)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make much and free nothing: a collection among them walks all of PyTorch's objects, for 0.08 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
