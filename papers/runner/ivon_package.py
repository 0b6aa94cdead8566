"""The package of IVON's authors, under the GPL: some tables' rows need it, and neither dubito nor its tests do."""

from importlib import import_module
from typing import Any

from dubito.errors import ConfigError


def package() -> Any:
    """The package `ivon`."""
    try:
        return import_module("ivon")
    except ImportError as error:
        raise ConfigError(
            "IVON's rows need its authors' package, which is no part of dubito: pip install ivon-opt"
        ) from error
