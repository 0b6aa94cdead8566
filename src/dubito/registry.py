"""All methods by their command-line names; none of their modules is opened before one is asked for."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import dubito

from .errors import unknown_name

if TYPE_CHECKING:
    from .method import Method


class Methods(dict[str, "Method"]):
    """Methods by name; asking for an unknown one lists the known."""

    def __missing__(self, name: object) -> Any:
        raise unknown_name("method", name, self)


#: What makes the default instance of each.
MAKERS: dict[str, Callable[[], "Method"]] = {
    "map": lambda: dubito.MAP(),
    "mc-dropout": lambda: dubito.MCDropout(),
    "deep-ensemble": lambda: dubito.DeepEnsemble(),
    "swa": lambda: dubito.SWA(),
    "swag": lambda: dubito.SWAG(),
    "mean-field": lambda: dubito.MeanField(),
    "k-tied": lambda: dubito.KTied(),
    "batch-ensemble": lambda: dubito.BatchEnsemble(),
    "rank1": lambda: dubito.Rank1(),
    "implicit": lambda: dubito.Implicit(),
    "bali": lambda: dubito.BALI(),
    "noisy-adam": lambda: dubito.NoisyAdam(),
    "vadam": lambda: dubito.Vadam(),
    "vogn": lambda: dubito.VOGN(),
    "noisy-kfac": lambda: dubito.NoisyKFAC(),
    "laplace-diag": lambda: dubito.Laplace(structure=dubito.Diagonal()),
    "laplace-kfac": lambda: dubito.Laplace(structure=dubito.KFAC()),
    "laplace-efb": lambda: dubito.Laplace(structure=dubito.EFB()),
    "laplace-inf": lambda: dubito.Laplace(structure=dubito.INF()),
}


def methods() -> Methods:
    """Every method under its command-line name, as a frozen default instance (vary with `dataclasses.replace`)."""
    return Methods({name: make() for name, make in MAKERS.items()})
