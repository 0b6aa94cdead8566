"""`dubito completion`: what a shell needs to complete commands, options, methods and data sets."""

import argparse
import os
from importlib import import_module

from ..errors import require_extra
from .common import Commands


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "completion", parents=[everywhere], help='print what a shell needs: eval "$(dubito completion bash)"'
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish", "powershell"), help="whose completion to print")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the shell's code."""
    argcomplete = require_extra("argcomplete", "cli", "completion")
    print(argcomplete.shellcode(["dubito"], shell=options.shell))


def answer(parser: argparse.ArgumentParser) -> None:
    """Complete the present line, if it is a shell that called; does not return then."""
    if "_ARGCOMPLETE" in os.environ:
        import_module("argcomplete").autocomplete(parser)
