"""Draws made once at one row: what a server pays for 32 of them, in bare passes; and factors drawn anew."""

from functools import partial

import torch
from torch import nn

from dubito import (
    BALI,
    KFAC,
    SWAG,
    BatchEnsemble,
    Categorical,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
)
from dubito.models import mlp
from dubito.posterior import Posterior

from .bars import Bar, Values, Work, benchmark, interleaved, ratios
from .predict import DRAWS, NETWORKS, rows

WEIGHTS = {
    "mean field": MeanField(),
    "2-tied": KTied(),
    "SWAG": SWAG(),
    "BALI": BALI(effective_data=256.0),
    "KFAC": Laplace(structure=KFAC()),
}
FACTORS = {"rank-1": Rank1(), "implicit": Implicit(), "BatchEnsemble": BatchEnsemble(), "MC dropout": MCDropout()}
#: At most so many passes of the bare network: with stacked weights, with factors, and with factors drawn anew.
LIMITS = {"small": (20.0, 10.0, 100.0), "MLP": (62.0, 13.0, 65.0)}
FRESH = ("rank-1", "implicit")


def posteriors(network: nn.Module, inputs: int) -> dict[str, Posterior]:
    """All of them, around one network."""
    short, data = Training(epochs=2, batch_size=64), rows(inputs)
    methods = {**WEIGHTS, **FACTORS}
    return {name: m.fit(network, data, Categorical(), training=short) for name, m in methods.items()}


def bars() -> dict[str, Bar]:
    """Of every method on both networks."""
    limits: dict[str, Bar] = {}
    for network, (weights, factors, fresh) in LIMITS.items():
        limits |= {f"{case}, {network}": Bar(weights, "bare passes") for case in WEIGHTS}
        limits |= {f"{case}, {network}": Bar(factors, "bare passes") for case in FACTORS}
        limits |= {f"{case} anew, {network}": Bar(fresh, "bare passes") for case in FRESH}
        limits[f"KFAC linearised, {network}"] = Bar(None, "bare passes")
    return limits


@benchmark(bars())
def sampled(rounds: int) -> Values:
    values: dict[str, list[float]] = {}
    for name, (inputs, hidden) in NETWORKS.items():
        network, row = mlp(inputs, hidden).eval(), rows(inputs)[0][:1]
        fitted = posteriors(network, inputs)
        works: dict[str, Work] = {
            case: partial(posterior.sampled(DRAWS).predict, row) for case, posterior in fitted.items()
        }
        works["KFAC linearised"] = partial(fitted["KFAC"].sampled(DRAWS, linearised=True).predict, row)
        works |= {f"{case} anew": partial(fitted[case].predict, row, DRAWS) for case in FRESH}
        works["bare"] = torch.no_grad()(partial(network, row))
        seconds = interleaved(works, rounds)
        values |= {f"{case}, {name}": ratios(seconds, case, "bare") for case in works if case != "bare"}
    return values
