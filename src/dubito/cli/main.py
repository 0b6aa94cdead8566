"""The parser, and what becomes of errors."""

import argparse
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .. import allocator
from ..errors import DubitoError, Interrupted, Terminated
from ..version import __version__
from . import compare, completion, data, export, methods, predict, report, reproduce, selfcheck
from .common import wide_console

CODES = (
    "exit codes: 0 done; 1 an error, in one line, or a job that failed; 2 a wrong call; 130 interrupted "
    "by Ctrl-C, 143 by SIGTERM, with what was finished kept"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = make_parser()
    completion.answer(parser)
    options = parser.parse_args(negatives(sys.argv[1:] if arguments is None else arguments))
    allocator.keep_large_blocks()
    try:
        with warnings.catch_warnings(), _terminable():
            if not options.debug:
                warnings.showwarning = _warn
            return options.run(options) or 0
    except KeyboardInterrupt as error:
        _tell(str(error) if isinstance(error, Interrupted) else "interrupted", "yellow")
        return 143 if isinstance(error, Terminated) else 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, DubitoError):
            _tell(f"dubito: {error}", "red")
        else:
            told = " ".join(f"{type(error).__name__}: {error}".split())
            _tell(f"dubito: this should not happen: {told}; --debug shows where", "red")
        return 1


@contextmanager
def _terminable() -> Iterator[None]:
    """While open, SIGTERM ends the command as Ctrl-C does, once its workers have saved what they train."""
    usual = threading.current_thread() is threading.main_thread()
    if not usual or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminated(*_: Any) -> None:
        if "dubito.jobs" in sys.modules:
            sys.modules["dubito.jobs"].dismiss()
        raise Terminated("terminated")

    signal.signal(signal.SIGTERM, terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell(text: str, style: str) -> None:
    wide_console(stderr=True).print(text, style=style, soft_wrap=True)


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as one line, without the place in the code that it comes from."""
    _tell(f"dubito: {' '.join(str(message).split())}", "yellow")


def negatives(arguments: Sequence[str]) -> list[str]:
    """Arguments in which a value such as `-5m` belongs to its option, so that the option can say what it wants."""
    joined: list[str] = []
    for argument in arguments:
        if joined and re.fullmatch(r"--[a-z-]+", joined[-1]) and re.match(r"-\.?\d", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(prog="dubito", description="Compact Bayesian neural networks.", epilog=CODES)
    parser.add_argument("--version", action="version", version=f"dubito {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # Also behind the command, where it must not overwrite what stood before it.
    everywhere = argparse.ArgumentParser(add_help=False)
    everywhere.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (compare, predict, export, report, methods, data, reproduce, selfcheck, completion):
        command.add(commands, everywhere)
    return parser
