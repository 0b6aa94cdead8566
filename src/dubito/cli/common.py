"""What several commands share."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from ..errors import ConfigError

#: What `add_subparsers` returns.
Commands = Any


def wide_console(*, stderr: bool = False) -> Console:
    """A console whose tables stay whole where the output goes to a file or a pipe.

    It takes `[words]` and `:words:` for what they are: names of columns, classes and files hold them.
    """
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = 150
    return console


def split_names(text: str | None) -> list[str] | None:
    """Names separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()] if text else None


def numbers(text: str) -> list[int]:
    """The numbers behind `0-4,7`."""
    told: dict[int, None] = {}
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"numbers must be given like 0-4,7, got {text!r}")
        if dash and int(last) < int(first):
            raise ConfigError(f"a range must go up, got {piece!r} in {text!r}")
        told |= dict.fromkeys(range(int(first), int(last if dash else first) + 1))
    return list(told)


def completed(argument: argparse.Action, names: Callable[[], Iterable[str]]) -> None:
    """Let shells complete an argument, also after a comma; `names` is only called when one asks."""

    def complete(prefix: str, **_: Any) -> list[str]:
        before, comma, _last = prefix.rpartition(",")
        return [f"{before}{comma}{name}" for name in names()]

    argument.completer = complete  # pyright: ignore[reportAttributeAccessIssue]


def method_names() -> list[str]:
    """Names of all methods."""
    from ..registry import MAKERS

    return list(MAKERS)


def data_names() -> list[str]:
    """Names of all data sets."""
    from ..data.catalogue import ENTRIES

    return list(ENTRIES)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The options of what runs jobs."""
    parser.add_argument("--jobs", type=int, help="jobs at a time (default: 1, on a cluster all; -1 for all)")
    parser.add_argument("--backend", default="local", help="local, or joblib's dask or ray for a cluster")
    parser.add_argument("--scheduler", help="the cluster's address, such as tcp://host:8786")
