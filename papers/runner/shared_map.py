"""Fits by the library's protocol: one MAP fit of a split, and every method from it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from dubito.data import Part
from dubito.inference.map import MAP
from dubito.likelihoods import Likelihood
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.protocol import Pilot, Recipe, pilot_of, recipe
from dubito.protocol import fit as protocol_fit
from dubito.training import AutoTraining

from . import provenance


class Rows(NamedTuple):
    """What a fit sees.

    Attributes:
        train: training rows.
        validation: rows that steer it.
        network: as it starts.
        likelihood: of the targets.
    """

    train: Part
    validation: Part
    network: nn.Module
    likelihood: Likelihood


def recipes_of(method: Method, auto: AutoTraining) -> tuple[Recipe, ...]:
    """What the protocol makes of a method for classes and for reals, under a prior as an example."""
    examples = [Pilot(prior_std=0.3, best_step=400, rows=1000, real=real) for real in (False, True)]
    return tuple(recipe(method, pilot, auto) for pilot in examples)


def cut_short(facts: Mapping[str, Any], auto: AutoTraining, validation_rows: int) -> bool:
    """Whether a MAP fit was made before longer ones came in, and would have one today.

    Args:
        facts: of the protocol, as stored.
        auto: the protocol.
        validation_rows: those that watched.
    """
    limits = auto.limits(facts["rows"], validation_rows, classes=False)
    return "limit" not in facts and len(limits) > 1 and facts["steps"] >= limits[0]


def to_run_again(counts: Mapping[str, int]) -> str:
    """Says how many splits of which tables were cut short; nothing where none were."""
    named = ", ".join(f"{count} of {data}" for data, count in counts.items() if count)
    return named and (
        "**To be run again**: since these figures were made, a MAP fit of reals that its limit of steps ended, and not "
        f"its patience, is made again with more steps. That would change splits of these tables: {named}. There MAP "
        "and all our others had too few steps alike."
    )


def map_fit(rows: Rows, auto: AutoTraining, seed: int) -> Posterior:
    """The MAP fit of a split."""
    return provenance.fit(
        MAP(prior_std=None, prior=None), rows.network, rows.train, rows.likelihood,
        training=auto, validation=rows.validation, seed=seed, progress=False,
    )  # fmt: skip


def fit_from(point: Posterior, method: Method, rows: Rows, auto: AutoTraining, seed: int) -> Posterior:
    """A method by the protocol, from the MAP fit of the same rows."""
    steps = recipe(method, pilot_of(point), auto)
    common = rows.network, rows.train, rows.likelihood
    provenance.record(steps.method, *common, training=steps.training, warm=steps.warm, seed=seed)
    return protocol_fit(method, *common, auto, validation=rows.validation, seed=seed, progress=False, point=point)
