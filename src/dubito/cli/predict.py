"""`dubito predict`."""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError, require_extra
from .common import Commands, split_names, wide_console


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "predict", parents=[everywhere], help="apply a saved posterior to new rows, with its uncertainty"
    )
    parser.add_argument("posterior", type=Path, help="a .safetensors file that `dubito compare` saved")
    parser.add_argument("rows", type=Path, help="a table or .npz file with the columns of training")
    parser.add_argument("--out", type=Path, help="a .csv or .parquet file (default: CSV to the terminal)")
    parser.add_argument(
        "--keep", help="columns of the rows to copy to the left: names separated by commas, or all (default: none)"
    )
    parser.add_argument("--level", type=float, default=0.95, help="of intervals and sets (default: 0.95)")
    parser.add_argument("--model", help="the network, as package.module:factory, where it was your own")
    parser.add_argument("--samples", type=int, help="draws (default: as in the comparison)")
    parser.add_argument("--seed", type=int, help="of the posterior's draws (default: as in the comparison)")
    parser.add_argument("--json", action="store_true", help="print the predictions as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Predict and write one line per row."""
    from ..compare.predict import predict

    if options.out is not None and options.out.suffix.lower() not in (".csv", ".parquet"):
        raise ConfigError(f"predictions are written to a .csv or .parquet file, got {options.out}")
    if options.out is not None and options.out.suffix.lower() == ".parquet":
        require_extra("pandas", "tabular", f"writing {options.out}")
        require_extra("pyarrow", "tabular", f"writing {options.out}")
    predictions = predict(
        options.posterior,
        options.rows,
        model=options.model,
        level=options.level,
        num_samples=options.samples,
        seed=options.seed,
        keep=split_names(options.keep) or (),
    )
    console = wide_console(stderr=True)
    for difference in predictions.differences:
        console.print(difference, style="yellow")
    rows = len(predictions.columns["unlike_training"])
    if options.json:
        print(
            json.dumps(
                {"columns": predictions.columns, "differences": predictions.differences, "note": predictions.note}
            )
        )
    if options.out is not None:
        _write(predictions.columns, options.out)
        console.print(f"{rows:,} rows: {options.out}", soft_wrap=True)
    elif not options.json:
        _write_csv(predictions.columns, sys.stdout)
    if predictions.note:
        console.print(predictions.note, style="yellow")
    elif predictions.num_unlike:
        told = f"{predictions.num_unlike:,} of {rows:,} rows are unlike training: see the column unlike_training"
        console.print(told, style="yellow")


def _write(columns: dict[str, list[Any]], path: Path) -> None:
    from ..storage.whole import whole_file

    with whole_file(path) as temporary:
        if path.suffix.lower() == ".csv":
            with temporary.open("w", newline="", encoding="utf-8") as file:
                _write_csv(columns, file)
        else:
            import pandas

            pandas.DataFrame(columns).to_parquet(temporary)


def _write_csv(columns: dict[str, list[Any]], file: Any) -> None:
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
