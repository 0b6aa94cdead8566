"""The command line: thin, each command calls what the library offers.

Exit codes: 0 done, 1 an error of ours (one line), 2 a wrong call, 130 interrupted.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import allocator
from .errors import ConfigError, DubitoError, Interrupted, require_count
from .version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    allocator.keep_large_blocks()
    try:
        return options.run(options) or 0
    except Interrupted as error:
        Console(stderr=True).print(str(error), style="yellow")
        return 130
    except DubitoError as error:
        if options.debug:
            raise
        Console(stderr=True).print(f"dubito: {error}", style="red", highlight=False)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(prog="dubito", description="Compact Bayesian neural networks.")
    parser.add_argument("--version", action="version", version=f"dubito {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="command")

    compare = commands.add_parser("compare", help="train methods on one data set and rank them")
    compare.add_argument("data", help="a name from `dubito data list`, or a path")
    compare.add_argument("--methods", help="names from `dubito methods`, separated by commas (default: all)")
    compare.add_argument("--out", type=Path, help="folder for results and posteriors (default: runs/<data>)")
    compare.add_argument("--epochs", type=int, help="passes over the data, the same for every method")
    compare.add_argument(
        "--hold-out", type=int, help="classes kept from training, to be told apart as unknown"
    )
    compare.add_argument("--split", type=int, default=0)
    compare.add_argument("--seed", type=int, default=0)
    compare.add_argument("--threads", type=int, default=1, help="threads of PyTorch; small networks want one")
    compare.add_argument("--json", action="store_true", help="print the results as JSON")
    compare.set_defaults(run=run_compare)

    methods = commands.add_parser("methods", help="list the methods with their settings")
    methods.set_defaults(run=run_methods)

    data = commands.add_parser("data", help="named data sets").add_subparsers(required=True, metavar="what")
    listing = data.add_parser("list", help="name, task, rows, licence, present or not")
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    listing.set_defaults(run=run_data_list)

    reproduce = commands.add_parser(
        "reproduce", help="run a table or figure of the papers, beside its numbers"
    )
    reproduce.add_argument("name", nargs="?", help="a name from `dubito reproduce --list`")
    reproduce.add_argument("--list", action="store_true", help="name all, with their estimated cost")
    reproduce.add_argument("--data", help="names of data sets, separated by commas (default: all)")
    reproduce.add_argument("--methods", help="names of methods, separated by commas (default: all)")
    reproduce.add_argument("--splits", help="numbers of splits, such as 0-4,7 (default: all)")
    reproduce.add_argument("--seeds", help="seeds, such as 0-2 (default: all)")
    reproduce.add_argument(
        "--scale", help="paper: the paper's own network and schedule; small: two CPU cores"
    )
    reproduce.add_argument("--show", action="store_true", help="print what has been run, run nothing")
    reproduce.add_argument("--json", action="store_true", help="print the rows as JSON")
    reproduce.add_argument(
        "--results", type=Path, help="folder of results (default: results/ here, else in the user's cache)"
    )
    reproduce.add_argument(
        "--jobs", type=int, help="jobs at a time (default: 1, on a cluster all; -1 for all)"
    )
    reproduce.add_argument("--backend", default="local", help="local, or joblib's dask or ray for a cluster")
    reproduce.add_argument("--scheduler", help="the cluster's address, such as tcp://host:8786")
    reproduce.set_defaults(run=run_reproduce)
    return parser


def run_compare(options: argparse.Namespace) -> None:
    """`dubito compare`."""
    import torch

    from .compare.run import DEFAULT_TRAINING, Row, compare
    from .compare.table import table

    require_count(threads=options.threads)
    torch.set_num_threads(options.threads)
    console = wide_console(stderr=options.json)
    training = DEFAULT_TRAINING
    if options.epochs is not None:
        training = replace(DEFAULT_TRAINING, epochs=options.epochs, iterations=None)
    out = options.out or Path("runs") / Path(options.data).stem

    def say(row: Row) -> None:
        state = f"failed: {row.failure}" if row.failure else f"done in {row.seconds:.1f} s"
        console.print(f"{row.method}: {state}", highlight=False)
        for note in row.notes:
            console.print(f"  {note}", style="yellow", highlight=False)

    result = compare(
        options.data,
        options.methods.split(",") if options.methods else None,
        out=out,
        training=training,
        held_out=options.hold_out,
        split=options.split,
        seed=options.seed,
        report=say,
    )
    if options.json:
        print(json.dumps(asdict(result), indent=1))
    else:
        console.print(table(result))
        console.print(f"results and posteriors: {out}", highlight=False)


def run_methods(options: argparse.Namespace) -> None:
    """`dubito methods`."""
    from .registry import methods

    shown = Table("name", "settings")
    for name, method in methods().items():
        shown.add_row(name, repr(method))
    wide_console().print(shown)


def run_data_list(options: argparse.Namespace) -> None:
    """`dubito data list`."""
    from .data import listing

    listed = listing()
    if options.json:
        print(json.dumps([asdict(row) for row in listed], indent=1))
        return
    shown = Table("name", "task", "rows", "licence", "present")
    for row in listed:
        rows = f"{row.rows:,}" if row.rows else ""
        shown.add_row(row.name, row.task, rows, row.licence, "yes" if row.present else "no")
    wide_console().print(shown)


def run_reproduce(options: argparse.Namespace) -> int:
    """`dubito reproduce`."""
    from .reproduce import Results, rows, run, show, tables
    from .reproduce.store import default_folder

    console = wide_console(stderr=options.json)
    results = Results(folder=options.results or default_folder())
    if options.list:
        console.print(show.listing(tables(), results))
        return 0
    if options.name is None:
        raise ConfigError("reproduce needs a name; `dubito reproduce --list` names all")
    table = tables()[options.name]
    scale = table.experiment.scale(options.scale)
    cells = table.experiment.scales[scale].select(
        options.data and options.data.split(","),
        options.methods and options.methods.split(","),
        options.splits and show.numbers(options.splits),
        options.seeds and show.numbers(options.seeds),
    )
    failures = []
    if not options.show:
        failures = run(
            table.experiment,
            scale,
            cells,
            results,
            jobs=options.jobs,
            backend=options.backend,
            scheduler=options.scheduler,
            report=lambda finished: console.print(show.line(finished), highlight=False),
        )
    if options.json:
        print(json.dumps([asdict(row) for row in rows(table, scale, results, cells)], indent=1))
    else:
        console.print(show.comparison(table, scale, results, cells))
        if (claims := show.claims(table, scale, results, cells)) is not None:
            console.print(claims)
    return 1 if failures else 0


def wide_console(*, stderr: bool = False) -> Console:
    """A console whose tables stay whole where the output goes to a file or a pipe."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=130)


if __name__ == "__main__":
    sys.exit(main())
