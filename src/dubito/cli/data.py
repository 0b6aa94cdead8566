"""`dubito data`."""

import argparse
import json
from dataclasses import asdict

from rich.table import Table

from .common import Commands, wide_console


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("data", help="named data sets")
    listing = parser.add_subparsers(required=True, metavar="what").add_parser(
        "list", parents=[everywhere], help="name, task, rows, licence, present or not"
    )
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    listing.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """List the data sets."""
    from ..data import listing
    from ..data.locate import absent_folders

    listed = listing()
    if options.json:
        print(json.dumps([asdict(row) for row in listed], indent=1))
        return
    shown = Table("name", "task", "rows", "licence", "present")
    for row in listed:
        rows = f"{row.rows:,}" if row.rows else ""
        shown.add_row(row.name, row.task, rows, row.licence, "yes" if row.present else "no")
    console = wide_console()
    console.print(shown)
    for folder in absent_folders():
        console.print(f"DUBITO_DATA names {folder}, which is no folder", style="yellow")
