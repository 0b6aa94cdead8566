"""`python -m papers runs`: the unfinished cells of all tables, those that close most rows per CPU-hour first.

`python -m papers pictures` draws the papers' figures from what was run.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from dubito.errors import DubitoError, require_count

from . import index, pictures
from .runner.queue import Queue, ranked, workers
from .runner.queue.line import Line, listing, summary
from .runner.queue.loop import FOLDER
from .runner.show import duration
from .runner.store import PAPERS, Results
from .runner.tables import tables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        return options.command(options)
    except DubitoError as error:
        Console(stderr=True).print(f"error: {escape(str(error))}", highlight=False)
        return 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m papers", description="The papers' tables and figures.")
    commands = made.add_subparsers(required=True, metavar="command")
    runs = commands.add_parser("runs", help="run what was not run yet; stop and start it at any time")
    runs.set_defaults(command=run_missing)
    runs.add_argument("--only", metavar="PATTERN", help="part of 'table scale data method', with * and ?")
    runs.add_argument("--jobs", type=int, help="workers (default: one a core)")
    runs.add_argument("--list", action="store_true", help="print what would be run, in order, and run nothing")
    runs.add_argument("--scale", help="small, paper or all (default: the one each table is run at)")
    runs.add_argument("--retry", action="store_true", help="try cells again that failed twice")
    drawn = commands.add_parser("pictures", help="draw the papers' figures from what was run")
    drawn.set_defaults(command=draw)
    for command in (runs, drawn):
        command.add_argument("--results", type=Path, default=PAPERS, help="folder of all papers' results")
    return made


def run_missing(options: argparse.Namespace) -> int:
    """The queue, or its list."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    jobs = options.jobs if options.jobs is not None else cores()
    require_count(jobs=jobs)
    results = Results(folder=options.results)
    groups = ranked(tables(), results, scale=options.scale, only=options.only)
    if options.list:
        console.print(listing(groups))
        total = sum(group.cpu_seconds for group in groups)
        console.print(f"{sum(len(group.waiting) for group in groups)} cells, {duration(total)} of CPU time")
        return 0
    if options.retry:
        shutil.rmtree(results.folder / FOLDER / "failed", ignore_errors=True)
    os.nice(workers.NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"  # for the workers, one of which has a core
    with Line(console) as line:
        queue = Queue(groups, index.TABLES, results, jobs=jobs, report=line.report, tick=line.tick)
        ended = queue.run()
    console.print(escape(summary(ended)), highlight=False, soft_wrap=True)
    return 1 if ended.failed else 0


def draw(options: argparse.Namespace) -> int:
    """The pictures of what was run; their number is printed."""
    written = pictures.write_pictures(Results(folder=options.results))
    Console().print(f"{len(written)} pictures drawn")
    return 0


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
