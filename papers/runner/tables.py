"""All tables by name; each is built when it is first asked for, and its module alone is imported."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from dubito.errors import unknown_name

from .. import index
from .experiment import Table


class Tables(Mapping[str, Table]):
    """Tables by name; asking for an unknown one lists the known.

    Args:
        modules: the module of each table.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = dict(modules)

    def __getitem__(self, name: str) -> Table:
        if name not in self._modules:
            raise unknown_name("table or figure", name, self._modules)
        module = import_module(self._modules[name])
        return next(table for table in module.TABLES if table.name == name)

    def __contains__(self, name: object) -> bool:  # without building it
        return name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


def tables() -> Tables:
    """Every table and figure under its command-line name."""
    return Tables(index.TABLES)
