"""`dubito export`."""

import argparse
from pathlib import Path

from .common import Commands, wide_console


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "export", parents=[everywhere], help="write a saved posterior to one file that runs without dubito"
    )
    parser.add_argument("posterior", type=Path, help="a .safetensors file that `dubito compare` saved")
    parser.add_argument("file", type=Path, help="an .onnx or .pt2 file; a .json beside it names the columns")
    parser.add_argument("--model", help="the network, as package.module:factory, where it was your own")
    parser.add_argument("--samples", type=int, help="draws (default: as in the comparison)")
    parser.add_argument("--seed", type=int, help="of the draws (default: as in the comparison)")
    parser.add_argument("--fresh", action="store_true", help="let the graph draw at every call")
    parser.add_argument("--weights", action="store_true", help="for Laplace: draws of weights, not linearised")
    parser.add_argument("--max-bytes", type=int, default=1 << 29, help="the largest file (default: 512 MB)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Export, and say what was written."""
    from ..compare.export import export

    beside = export(
        options.posterior,
        options.file,
        model=options.model,
        num_samples=options.samples,
        seed=options.seed,
        sampling="fresh" if options.fresh else "fixed",
        linearised=False if options.weights else None,
        max_bytes=options.max_bytes,
    )
    size = options.file.stat().st_size
    wide_console(stderr=True).print(f"{size:,} bytes: {options.file}, {beside}", highlight=False)
