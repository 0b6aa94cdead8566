"""`dubito selfcheck`: does every method work on this device?"""

import argparse
import json
import platform

from rich.table import Table
from rich.text import Text

from ..version import __version__
from .common import Commands, completed, method_names, split_names, wide_console


def add(commands: Commands, everywhere: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "selfcheck", parents=[everywhere], help="check within two minutes that every method works on a device"
    )
    parser.add_argument("--device", help="cuda, cuda:1, mps or cpu (default: the accelerator that is here)")
    completed(parser.add_argument("--methods", help="names separated by commas (default: all)"), method_names)
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the checks; 1 where one failed."""
    import torch

    from ..registry import methods
    from ..selfcheck import selfcheck, usable

    device, known = usable(options.device), methods()
    facts = {
        "dubito": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "dtype": "float32",
    }
    chosen = {name: known[name] for name in split_names(options.methods) or known}
    results = list(selfcheck(device, chosen))
    failed = sum(not result.passed for result in results)
    if options.json:
        print(json.dumps({**facts, "checks": [result._asdict() for result in results]}, indent=1))
        return 1 if failed else 0
    table = Table(*results[0]._fields, title="  ".join(f"{key} {value}" for key, value in facts.items()))
    for method, check, passed, detail, seconds in results:
        table.add_row(method, check, "right" if passed else Text("WRONG", "red"), detail, f"{seconds:.2f}")
    wide_console().print(table)
    print(f"{len(results) - failed} of {len(results)} checks are right")
    return 1 if failed else 0
