"""The protocol: rows kept back, pilots for the prior, one MAP fit, the method from its start, choices afterwards."""

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import seeds
from ..errors import ConfigError, DataError, warn
from ..fitting import Prepared, prepare, require_agreement, undisturbed
from ..hints import checked
from ..inference.map import MAP
from ..likelihoods import BernoulliLikelihood, BuiltLikelihood, CategoricalLikelihood, Likelihood
from ..method import Method, check_answers, single_rows, with_inputs
from ..networks import duplicate, with_flags
from ..posterior import Posterior
from ..sources import OrderedSource, RowsSource
from ..training import AutoTraining, Training
from ..training.account import part
from .choices import settled
from .recipes import Pilot, recipe

#: Fewer rows than these cannot be parted into training and validation.
LEAST_ROWS = 10


def fit(
    method: Method,
    net: nn.Module,
    data: Any,
    likelihood: Likelihood,
    auto: AutoTraining,
    *,
    validation: Any = None,
    num_data: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    callbacks: tuple[Any, ...] = (),
    start: Callable[..., nn.Module] | None = None,
    point: Posterior | None = None,
) -> Posterior:
    """Fit a method by the protocol; what `method.fit(training="auto")` does.

    Args:
        method: what to fit.
        net: as in `Method.fit`.
        data: as in `Method.fit`.
        likelihood: as in `Method.fit`.
        auto: the protocol's settings.
        validation: rows that steer it; None keeps some of the data back.
        num_data: as in `Method.fit`.
        checkpoint: as in `Method.fit`; each run has a file of its own beside it.
        seed: of everything random.
        progress: as in `Method.fit`.
        callbacks: as in `Method.fit`; pilots are runs too.
        start: as in `DeepEnsemble.fit`.
        point: the MAP fit of this protocol on the same rows, where it was made before; None makes it.
    """
    if getattr(method, "evidence", None) is not None:
        raise ConfigError(
            "evidence= chooses the prior in a training of its own, without pilots; give training=Training(...) in "
            'place of "auto"'
        )
    with torch.inference_mode(False):
        given: dict[str, Any] = {"validation": validation, "num_data": num_data, "checkpoint": checkpoint}
        given |= {"seed": seed, "progress": progress, "callbacks": callbacks, "start": start}
        prepared = _parted(prepare(net, data, _standardised(likelihood), **given), auto)
        with undisturbed(prepared, "fit"), single_rows():
            require_agreement(prepared, auto.training(1).timeout)
            if point is None:
                around = MAP(prior=getattr(method, "prior", None))
                point = _map_fit(method if isinstance(method, MAP) else around, prepared, auto)
            posterior = point if isinstance(method, MAP) else _fitted(method, prepared, point, auto)
        check_answers(posterior.network, prepared.example.inputs)
        return with_inputs(posterior, prepared)


@checked
def pilot_of(point: Posterior) -> Pilot:
    """What a MAP fit of the protocol tells other methods."""
    facts = point.details.get("protocol")
    if facts is None or not isinstance(point.method, MAP):
        raise ConfigError('point must be a MAP fit of the protocol: MAP().fit(..., training="auto")')
    return Pilot(
        prior_std=point.method.prior_std,
        best_step=facts["best_step"],
        limit=facts.get("limit"),
        rows=facts["rows"],
        real=not _of_classes(point.likelihood),
    )


def _of_classes(likelihood: BuiltLikelihood) -> bool:
    return isinstance(likelihood, CategoricalLikelihood | BernoulliLikelihood)


def _standardised(likelihood: Likelihood) -> Likelihood:
    """Real targets are standardised inside of the likelihood, and predictions come back in their units."""
    return replace(likelihood, standardise=True) if hasattr(likelihood, "standardise") else likelihood  # pyright: ignore


def _parted(prepared: Prepared, auto: AutoTraining) -> Prepared:
    """The rows with some kept back for validation, where none were given."""
    if prepared.run.validation is not None:
        return prepared
    source = prepared.source
    if not isinstance(source, OrderedSource):
        raise ConfigError(
            'training="auto" is steered by validation rows, and cannot keep rows back from a stream or a loader with '
            "an order of its own: pass validation="
        )
    rows = source.num_data
    if rows < LEAST_ROWS:
        raise DataError(
            f'training="auto" needs at least {LEAST_ROWS} rows to keep some back, got {rows}; pass validation=, or a '
            "Training(...)"
        )
    count = max(2, round(auto.held_out * rows))
    order = torch.randperm(rows, generator=seeds.generator(prepared.seed, "validation rows"))
    held, rest = order[:count].sort().values, order[count:].sort().values
    warn(
        f"no validation rows were given: {count:,} of {rows:,} training rows are kept back to steer the fit; pass "
        "validation= to choose them"
    )
    trained = RowsSource(source, rest)
    share = prepared.num_data * len(rest) * trained.mean_weight / (rows * source.mean_weight)
    return replace(
        prepared,
        source=trained,
        num_data=share if trained.total_weight is not None else max(1, round(share)),
        run=replace(prepared.run, validation=RowsSource(source, held)),
    )


def _map_fit(method: MAP, prepared: Prepared, auto: AutoTraining) -> Posterior:
    """The MAP fit that others stand on, under the prior that its pilots chose, or the user's."""
    priors = list(auto.priors) if method == MAP() else [method.prior_std]
    losses = {}
    if len(priors) > 1:
        for number, prior in enumerate(priors):
            start = _from(prepared, auto, f"pilot-{number}")
            with part(auto.pilot / (1 + auto.pilot * (len(priors) - number))):  # of a limited time
                trained = _run(MAP(prior_std=prior), start, auto.pilot_training(prepared.rows))
            losses[prior] = trained.history[-1]["best_nll"]
    method = replace(method, prior_std=min(losses, key=lambda prior: losses[prior]) if losses else priors[0])
    point, limit, runs = _long_enough(method, prepared, auto)
    pilots = [[prior, loss] for prior, loss in losses.items()]
    return settled(point, prepared, {"pilots": pilots, "rows": prepared.rows, "limit": limit, "runs": runs})


def _long_enough(method: MAP, prepared: Prepared, auto: AutoTraining) -> tuple[Posterior, int, list[list[float]]]:
    """The best of fits that are longer and longer, until patience ends one; its limit; limit and loss of each.

    The rate falls towards the limit, so that a run which its limit ended was still improving, or had no rate left.
    """
    fits, runs = {}, []
    assert prepared.run.validation is not None
    judges = prepared.run.validation.num_data
    watching = None if judges is None else min(judges, auto.watched)
    for limit in auto.limits(prepared.rows, watching, classes=_of_classes(prepared.likelihood)):
        name = f"map-{limit}" if fits else "map"
        fits[limit] = _run(method, _from(prepared, auto, name), auto.training(limit))
        last = fits[limit].history[-1]
        runs.append([limit, last["best_nll"]])
        if last["step"] < limit:
            break
    limit = min(runs, key=lambda run: run[1])[0]
    return fits[limit], limit, runs


def _fitted(method: Method, prepared: Prepared, point: Posterior, auto: AutoTraining) -> Posterior:
    steps = recipe(method, pilot_of(point), auto)
    start = _from(prepared, auto, "method", point if steps.warm else None)
    if steps.training is None:
        start = replace(start, run=replace(start.run, validation=prepared.run.validation))
    posterior = _run(steps.method, start, steps.training)
    facts = {"rows": prepared.rows, "prior_std": point.method.prior_std, "warm": steps.warm}
    return settled(posterior, prepared, facts)


def _run(method: Method, prepared: Prepared, training: Training | None) -> Posterior:
    """One of the protocol's runs; a loader with an order of its own keeps its batches too."""
    if training is not None and not isinstance(prepared.source, OrderedSource):
        training = replace(training, batch_size=None)
    return method.fit_prepared(prepared, training)


def _from(prepared: Prepared, auto: AutoTraining, name: str, point: Posterior | None = None) -> Prepared:
    """The ingredients of one of the protocol's runs: copies of the user's network and likelihood, or the MAP fit's.

    At most `auto.watched` of the validation rows watch over it.
    """
    path = prepared.run.checkpoint
    if path is not None:
        path = Path(path).with_name(f"{Path(path).name}.{name}")
    network, likelihood = duplicate(prepared.network), copy.deepcopy(prepared.likelihood)
    if point is not None:
        network = with_flags(duplicate(point.network), point.trainable)
        likelihood = duplicate(point.likelihood)
    rows = prepared.run.validation
    if isinstance(rows, OrderedSource) and rows.num_data > auto.watched:
        stream = seeds.generator(prepared.seed, "watched rows")
        rows = RowsSource(rows, torch.randperm(rows.num_data, generator=stream)[: auto.watched].sort().values)
    run = replace(prepared.run, checkpoint=path, validation=rows)
    return replace(prepared, network=network, likelihood=likelihood, run=run)
