"""`dubito report`."""

import argparse
from pathlib import Path

from .common import Commands, wide_console


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", parents=[everywhere], help="write the page of a comparison again")
    parser.add_argument("folder", type=Path, help="what `dubito compare` wrote")
    parser.add_argument("--out", type=Path, help="the page's file (default: report.html in the folder)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the page and say where."""
    from ..report import write_page

    page = write_page(options.folder, options.out)
    wide_console().print(f"page: {page.resolve()}", soft_wrap=True)
