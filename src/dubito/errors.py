"""Errors of our own: each message says what was expected, what came, and the remedy."""

import os
import sys
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from numbers import Integral, Real
from typing import Any


class DubitoError(Exception):
    """Base of every error this library raises on purpose."""


class ConfigError(DubitoError, ValueError):
    """A setting outside what it may be."""


class UnknownNameError(ConfigError, KeyError):
    """A name that no registry knows; the message lists the known ones."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class DataError(DubitoError, ValueError):
    """Data that cannot be used: empty, not finite, of the wrong type, shape or range."""


class NetworkError(DubitoError, TypeError):
    """A network that cannot be treated as asked."""


class StorageError(DubitoError, ValueError):
    """A file that is not what it should be."""


class TrainingError(DubitoError, ArithmeticError):
    """A run that cannot go on: a loss that is no longer a number."""


class ProcessError(DubitoError, ConnectionError):
    """A run whose other processes are gone."""


class Interrupted(DubitoError, KeyboardInterrupt):
    """A run ended by Ctrl-C, after its state was saved; the message says how to go on."""


class Terminated(Interrupted, SystemExit):
    """A run ended by SIGTERM, after its state was saved; a program that lets it pass ends with status 143."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.code = 128 + 15


def interruption(error: KeyboardInterrupt, message: str) -> Interrupted:
    """An interruption that says more, of the kind that came."""
    return (Terminated if isinstance(error, Terminated) else Interrupted)(message)


class DubitoWarning(UserWarning):
    """Something the user should know, though work goes on."""


def require_positive(*, zero: float = False, **values: float) -> None:
    """Refuse settings that are not finite numbers above zero; `zero` says whether it belongs."""
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and (value >= 0 if zero else value > 0) and value < float("inf")):
            raise ConfigError(f"{name} must be a finite number {'of at least' if zero else 'above'} 0, got {value!r}")


def require_count(minimum: int = 1, **values: int) -> None:
    """Refuse settings that are not whole numbers of at least `minimum`."""
    for name, value in values.items():
        whole = isinstance(value, Integral) and not isinstance(value, bool)
        if not (whole and value >= minimum):
            raise ConfigError(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def require_fraction(*, zero: bool = True, one: bool = False, **values: float) -> None:
    """Refuse settings outside 0 to 1; `zero` and `one` say whether the ends belong."""
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not (number and (value >= 0 if zero else value > 0) and (value <= 1 if one else value < 1)):
            span = f"{'[' if zero else '('}0, 1{']' if one else ')'}"
            raise ConfigError(f"{name} must be a number in {span}, got {value!r}")


def require_flag(**values: bool) -> None:
    """Refuse settings that are neither True nor False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")


def require_extra(module: str, extra: str, use: str) -> Any:
    """A module of a package that an extra installs; without it, an error says which.

    Args:
        module: its full name.
        extra: of `pyproject.toml`.
        use: what needs it, as the subject of a sentence.
    """
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        needs = f"{use} needs {package}, which is not installed: pip install 'dubito[{extra}]'"
        raise ConfigError(needs) from error


def unknown_name(kind: str, name: Any, known: Iterable[str]) -> UnknownNameError:
    """The error for a name nobody knows, with the nearest known name and the whole list."""
    known = sorted(known)
    near = get_close_matches(str(name), known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else "."
    return UnknownNameError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known)}")


def warn(message: str) -> None:
    """Warn of something at the user's line: that which called the library, through whatever lies between."""
    package, frame, level, outermost = os.path.dirname(__file__), sys._getframe(1), 2, 2
    while frame is not None:
        level += 1
        if frame.f_code.co_filename.startswith(package):
            outermost = level
        frame = frame.f_back
    warnings.warn(message, DubitoWarning, stacklevel=outermost)
