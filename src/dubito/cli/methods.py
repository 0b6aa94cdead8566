"""`dubito methods`."""

import argparse
import json

from rich.table import Table

from .common import Commands, wide_console


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("methods", parents=[everywhere], help="list the methods with their settings")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """List the methods."""
    from ..registry import methods
    from ..storage import encode

    if options.json:
        listed = [{"name": name, "settings": encode(method)} for name, method in methods().items()]
        print(json.dumps(listed, indent=1))
        return
    shown = Table("name", "settings")
    for name, method in methods().items():
        shown.add_row(name, repr(method))
    wide_console().print(shown)
