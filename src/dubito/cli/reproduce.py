"""`dubito reproduce`."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..errors import ConfigError
from .common import Commands, add_jobs, completed, method_names, numbers, split_names, wide_console
from .laboratory import runner


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reproduce", parents=[everywhere], help="run a table or figure of the papers, beside its numbers"
    )
    name = parser.add_argument("name", nargs="?", help="a name from `dubito reproduce --list`")
    completed(name, _table_names)
    parser.add_argument("--list", action="store_true", help="name all, with their estimated cost")
    parser.add_argument("--data", help="names of data sets, separated by commas (default: all)")
    methods = parser.add_argument("--methods", help="names of methods, separated by commas (default: all)")
    completed(methods, method_names)
    parser.add_argument("--splits", help="numbers of splits, such as 0-4,7 (default: all)")
    parser.add_argument("--seeds", help="seeds, such as 0-2 (default: all)")
    parser.add_argument("--scale", help="paper: the paper's own network and schedule; small: two CPU cores")
    parser.add_argument("--show", action="store_true", help="print what has been run, run nothing")
    parser.add_argument("--json", action="store_true", help="print the rows, or the list, as JSON")
    parser.add_argument(
        "--results", type=Path, help="folder of all papers' results (default: the checkout's folder papers)"
    )
    add_jobs(parser)
    parser.set_defaults(run=run)


def _table_names() -> list[str]:
    try:
        return list(runner().tables())
    except ConfigError:  # no checkout: nothing to complete
        return []


def run(options: argparse.Namespace) -> int:
    """Run a table, or list all."""
    lab = runner()
    show, tables = lab.show, lab.tables
    console = wide_console(stderr=options.json)
    results = lab.Results(folder=options.results) if options.results else lab.Results()
    if options.list:
        if options.json:
            print(json.dumps(show.listed(tables(), results), indent=1))
        else:
            console.print(show.listing(tables(), results))
        return 0
    if options.name is None:
        raise ConfigError("reproduce needs a name; `dubito reproduce --list` names all")
    table = tables()[options.name]
    scale = table.experiment.scale(options.scale)
    cells = table.experiment.scales[scale].select(
        split_names(options.data),
        split_names(options.methods),
        options.splits and numbers(options.splits),
        options.seeds and numbers(options.seeds),
    )
    failures = []
    if not options.show:
        failures = lab.run(
            table.experiment,
            scale,
            cells,
            results,
            jobs=options.jobs,
            backend=options.backend,
            scheduler=options.scheduler,
            report=lambda finished: console.print(show.line(finished)),
        )
    if options.json:
        print(json.dumps([asdict(row) for row in lab.rows(table, scale, results, cells)], indent=1))
    else:
        console.print(show.comparison(table, scale, results, cells))
        if (claims := show.claims(table, scale, results, cells)) is not None:
            console.print(claims)
    return 1 if failures else 0
