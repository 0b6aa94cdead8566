"""`dubito compare`."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path

from .common import Commands, add_jobs, completed, data_names, method_names, numbers, split_names, wide_console

EXAMPLES = """examples:
  dubito compare digits
  dubito compare house-prices.csv --target price --methods map,mean-field,laplace-inf --budget 10m
  dubito compare mnist --ood notmnist --corrupt --model mypackage.nets:make_net --out runs/mnist

A factory of your own is called with those of input_shape, num_outputs and seed that it asks for."""


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "compare",
        parents=[everywhere],
        help="train methods on one data set, rank them, and write a page about it",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument(
        "data", help="a name from `dubito data list`, or a table: .csv, .tsv, .txt, .xlsx, .parquet or .npz"
    )
    completed(data, data_names)
    parser.add_argument("--target", help="of a file of your own: the column to predict")
    parser.add_argument(
        "--task",
        choices=("classification", "binary", "regression"),
        help="of a file of your own: what the target is (default: detected)",
    )
    parser.add_argument(
        "--likelihood",
        choices=("gaussian", "student-t", "poisson", "negative-binomial", "heteroscedastic", "categorical"),
        help="what fits the target (default: chosen by its numbers and a pilot's residuals)",
    )
    methods = parser.add_argument("--methods", help="names, separated by commas (default: all)")
    completed(methods, method_names)
    parser.add_argument("--out", type=Path, help="folder for everything (default: runs/<data>)")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--budget", help="time for the whole command, such as 90s, 10m or 1h, shared equally among methods"
    )
    budget.add_argument("--budget-per-method", help="CPU time for each method instead")
    parser.add_argument("--steps", type=int, help="the most steps of a fit (default: 2000, more where these are few)")
    parser.add_argument("--tune", type=int, help="trials that choose each method's settings, by Optuna")
    parser.add_argument("--lr", type=float, help="learning rate")
    parser.add_argument("--model", help="a network of your own, as package.module:factory")
    parser.add_argument(
        "--hold-out",
        type=int,
        help="classes kept from training, as out-of-distribution rows (default: a fifth of them of named data without "
        "--ood, none of a table of your own)",
    )
    ood = parser.add_argument(
        "--ood", help="out-of-distribution data: names or files separated by commas; for tables also shuffled and far"
    )
    completed(ood, data_names)
    parser.add_argument(
        "--corrupt",
        action=argparse.BooleanOptionalAction,
        help="judge under shift too (default: where inputs are a table)",
    )
    parser.add_argument("--rows", type=int, help="train on so many rows at most (default: all)")
    parser.add_argument(
        "--splits",
        default="0",
        help="random divisions into training and test rows, such as 0-4; numbers are means over them (default: 0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of starts, order of rows and draws; the splits do not depend on it (default: 0)",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch; small networks want one")
    add_jobs(parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan, compare, print the verdict and the table, write the page."""
    from ..compare import Settings, compare
    from ..compare.baselines import offered
    from ..compare.folder import MethodRow
    from ..compare.settings import DEFAULT_TRAINING, seconds_of
    from ..compare.table import table, training_words
    from ..compare.task import Task
    from ..report import write_page

    console = wide_console(stderr=options.json)
    given = {"iterations": options.steps, "lr": options.lr}
    training = replace(DEFAULT_TRAINING, **{key: value for key, value in given.items() if value is not None})
    settings = Settings(
        data=options.data,
        target=options.target,
        task=options.task,
        likelihood=options.likelihood,
        splits=tuple(numbers(options.splits)),
        rows=options.rows,
        held_out=options.hold_out,
        ood=tuple(split_names(options.ood) or ()),
        corrupt=options.corrupt,
        model=options.model,
        training=training,
        budget=options.budget and seconds_of(options.budget),
        budget_per_method=options.budget_per_method and seconds_of(options.budget_per_method),
        seed=options.seed,
        tune=options.tune,
    )
    out = options.out or Path("runs") / (Path(options.data).stem + "-tuned" * (options.tune is not None))

    def begin(task: Task, plan: tuple[str, ...]) -> None:
        rows = f"{len(task.train.targets):,} training and {len(task.test.targets):,} test rows"
        console.print(f"{settings.data}: {task.data.task} ({task.data.task_reason}); {rows}")
        console.print(f"network: {task.network.title}")
        console.print(f"likelihood: {task.likelihood_reason}", soft_wrap=True)
        if task.held_out:
            console.print(
                f"classes held out, which no posterior can answer: {', '.join(task.held_out)}", style="yellow"
            )
        left_out = offered(task)[1] if options.methods is None else None
        for note in (*task.data.notes, *filter(None, [left_out])):
            console.print(note, style="yellow")
        for line in plan:
            console.print(line, soft_wrap=True)

    def say(row: MethodRow) -> None:
        fit = row.fits[0]
        state = f"failed: {row.failure}" if row.failure else f"{row.seconds:.1f} CPU seconds"
        by = " by the budget" if fit.ended == "budget" else ""
        steps = f", steps: {training_words(row)}{by}" if fit.steps else ""
        split = f", split {fit.split}" if len(settings.splits) > 1 else ""
        console.print(f"{row.method}{split}: {state}{steps}")
        for note in row.notes:
            console.print(f"  {note}", style="yellow")

    comparison = compare(
        settings,
        split_names(options.methods),
        out=out,
        jobs=options.jobs,
        backend=options.backend,
        scheduler=options.scheduler,
        threads=options.threads,
        console=console if console.is_terminal else None,
        report=say,
        begin=begin,
        say=console.print,
    )
    page = write_page(out)
    if options.json:
        print(json.dumps({**asdict(comparison), "page": str(page)}, indent=1))
    else:
        console.print()
        for sentence in comparison.verdict:
            console.print(sentence, style="bold" if sentence.startswith("Take ") else "")
        console.print(table(comparison))
        console.print(f"\nresults and posteriors: {out}", soft_wrap=True)
        console.print(f"page: {page.resolve()}", soft_wrap=True)
    return 1 if any(row.failure for row in comparison.rows) else 0
