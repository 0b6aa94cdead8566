"""Each method in one plain sentence: what it is good at here, and what it costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .. import metrics
from .folder import MethodRow, StoredResult


@dataclass(frozen=True)
class Virtue:
    """Something a method can be best at.

    Attributes:
        metric: its name.
        text: with a place for the value.
        size: smaller is better.
    """

    metric: str
    text: str
    size: Callable[[float], float]


VIRTUES = (
    Virtue("nll", "the best likelihood (NLL {:.3f})", lambda value: value),
    Virtue("accuracy", "the most right answers ({:.1%})", lambda value: -value),
    Virtue("rmse", "the smallest error (RMSE {:.3g})", lambda value: value),
    Virtue("ece", "the best calibration (ECE {:.3f})", lambda value: value),
    Virtue(
        "coverage", "95 % intervals closest to their word ({:.0%} covered)", lambda value: abs(value - 0.95)
    ),
    Virtue("ood_auroc", "the best at telling the unknown (AUROC {:.3f})", lambda value: -value),
    Virtue("shift_nll", "the sturdiest under shift (NLL {:.3f})", lambda value: value),
)


def sentences(rows: Sequence[MethodRow], level: Mapping[str, bool]) -> dict[str, str]:
    """One sentence per method, in the order of the rows.

    Args:
        rows: all results.
        level: whether a method's likelihood is as good as the best one's, to chance.
    """
    there = [row for row in rows if row.failure is None]
    return {row.method: _sentence(row, there, level) for row in rows}


def _sentence(row: MethodRow, there: Sequence[MethodRow], level: Mapping[str, bool]) -> str:
    if row.failure is not None:
        return f"{row.method} failed: {row.failure}"
    best, places = [], {}
    for virtue in VIRTUES:
        if virtue.metric not in row.metrics:
            continue
        values = [virtue.size(other.metrics[virtue.metric]) for other in there]
        place = sum(value < virtue.size(row.metrics[virtue.metric]) for value in values) + 1
        places[virtue.metric] = place
        shared = sum(value == virtue.size(row.metrics[virtue.metric]) for value in values)
        if place == 1 and (shared == 1 or 2 * shared < len(there)):  # what half of them share is no virtue
            best.append(virtue.text.format(row.metrics[virtue.metric]))
    if len(there) == 1:
        good = f"NLL {row.metrics['nll']:.3f}"
    elif best:
        good = " and ".join([", ".join(best[:-1]), best[-1]] if len(best) > 1 else best)
    elif level.get(row.method):
        good = "a likelihood as good as the best"
    else:
        metric = min(places, key=lambda name: places[name])
        good = f"at its best in {NAMES[metric]}, place {places[metric]} of {len(there)}"
        if 2 * places[metric] > len(there):
            good = "behind most others here in everything"
    return f"{row.method}: {good}; {_cost(row, there)}."


#: Metrics as a sentence calls them.
NAMES = {
    "nll": "likelihood",
    "accuracy": "accuracy",
    "rmse": "error",
    "ece": "calibration",
    "coverage": "the coverage of its intervals",
    "ood_auroc": "telling the unknown",
    "shift_nll": "likelihood under shift",
}


def _cost(row: MethodRow, there: Sequence[MethodRow]) -> str:
    base = next((other for other in there if other.method == "map"), None)
    if base is None or row is base:
        return f"{size(row.nbytes)}, trained in {row.seconds:.3g} s"
    memory = f"{_times(row.nbytes / base.nbytes)} the memory" if base.nbytes else size(row.nbytes)
    return f"{memory} and {_times(row.seconds / max(base.seconds, 1e-9))} the training time of map"


def _times(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def size(nbytes: float) -> str:
    """Bytes in words."""
    for unit, step in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= step:
            return f"{nbytes / step:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


#: A difference in NLL that nobody would act on, in nats, however sure it is.
NEGLIGIBLE = 1e-3
#: What the sign says in tables.
EQUAL = f"≈: no worse than the best in NLL, to chance (95 %, paired over test rows) or to {NEGLIGIBLE:g}"


def as_good(results: Sequence[StoredResult], seed: int = 0) -> dict[str, bool]:
    """Whether a method's likelihood is as good as the best one's: the 95 % interval of their difference holds 0.

    The interval is a paired bootstrap's over the test rows. Methods that are nearly the same differ by next to
    nothing on every row, which chance cannot explain and nobody minds: that counts as good too.
    """
    losses = {result.row.method: result.evidence.get("losses") for result in results}
    usable = {name: torch.tensor(values) for name, values in losses.items() if values and None not in values}
    if not usable:
        return {}
    best = min(usable, key=lambda name: float(usable[name].mean()))
    good = {best: True}
    for name, values in usable.items():
        if name != best and len(values) == len(usable[best]):
            difference = metrics.paired_bootstrap(values, usable[best], over=metrics.Over.EXAMPLES, seed=seed)
            chance = difference.lower <= 0 <= difference.upper
            good[name] = chance or difference.difference < NEGLIGIBLE
    return good
