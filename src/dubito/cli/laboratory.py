"""Where the papers' experiments are: beside the source in a checkout, not in the installed package."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ConfigError

VARIABLE = "DUBITO_PAPERS"
#: What tells the folder from others of its name.
MARK = Path("runner", "experiment.py")


def papers_folder() -> Path:
    """The folder `papers`: where the variable says, beside the source, or under the current folder or one above."""
    named = os.environ.get(VARIABLE)
    if named:
        for folder in (Path(named), Path(named) / "papers"):
            if (folder / MARK).is_file():
                return folder.resolve()
        raise ConfigError(
            f"{VARIABLE} must name the folder papers of a checkout of dubito, or the checkout; got {named!r}"
        )
    here = Path.cwd()
    for checkout in (Path(__file__).parents[3], here, *here.parents):
        if (checkout / "papers" / MARK).is_file():
            return (checkout / "papers").resolve()
    raise ConfigError(
        "the papers' experiments are no part of the installed package; clone dubito's repository and run this "
        f"command inside it, or set {VARIABLE} to its folder papers"
    )


def runner() -> Any:
    """The module `papers.runner`; its checkout is put on the path, which local jobs inherit."""
    checkout = str(papers_folder().parent)
    if checkout not in sys.path:
        sys.path.insert(0, checkout)
    return import_module("papers.runner")
