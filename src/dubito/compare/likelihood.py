"""Which likelihood fits the targets: told, or chosen by the training targets and the residuals of a quick pilot."""

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from ..data import Data, Part
from ..data.registry import TaskKind
from ..errors import ConfigError, DubitoWarning
from ..inference.map import MAP
from ..likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from ..metrics.paired import NEGLIGIBLE
from ..training.auto import AutoTraining
from .network import Network

LikelihoodName: TypeAlias = Literal[
    "gaussian", "student-t", "poisson", "negative-binomial", "heteroscedastic", "categorical"
]
LIKELIHOODS: dict[str, type[Likelihood]] = {
    "gaussian": Gaussian,
    "student-t": StudentT,
    "poisson": Poisson,
    "negative-binomial": NegativeBinomial,
    "heteroscedastic": HeteroscedasticGaussian,
    "categorical": Categorical,
}
COUNTS = ("poisson", "negative-binomial")
#: Rows below which nothing is tried, different counts that there must be, and the most that counts are on average.
LEAST_ROWS, LEAST_COUNTS, MOST_MEAN = 200, 3, 1000.0
#: Steps of a pilot, rows whose residuals are looked at, and nats that noise with tails must gain on them in all.
PILOT_STEPS, JUDGED_ROWS, EVIDENCE = 500, 4000, math.log(1000)


def task_for(name: LikelihoodName | None) -> TaskKind | None:
    """The task of a table whose likelihood is told; None where its target decides."""
    return name and ("classification" if name == "categorical" else "regression")


def chosen(
    data: Data, train: Part, validation: Part, network: Callable[[int], Network], told: LikelihoodName | None, seed: int
) -> tuple[str, str]:
    """The name of the likelihood, and a sentence that says why; no test row is looked at.

    Args:
        data: as loaded.
        train: rows to train on.
        validation: rows whose residuals decide, with a quarter of the training rows.
        network: makes the network, by the number of its outputs.
        told: a name that the user gave; None chooses.
        seed: of the pilot.
    """
    classes = data.task != "regression"
    if told is not None and (told == "categorical") != classes:
        raise ConfigError(
            f"the likelihood {told} is not for {data.task}, which the target is; leave it out, or choose another"
        )
    if classes:
        return "categorical", "categorical: the target holds classes"
    truth = original(data, train.targets)
    counts = holds_counts(truth)
    if told in COUNTS and (float(truth.min()) < 0 or not torch.equal(truth, truth.round())):
        raise ConfigError(f"the likelihood {told} is for counts, but the target holds numbers below 0, or fractions")
    if told is not None:
        return told, f"{told}, as asked for"
    simple, kind = ("poisson", "counts") if counts else ("gaussian", "reals")
    if min(len(truth), 10 * len(validation.targets)) < LEAST_ROWS:
        return simple, f"{simple}: the target holds {kind}, in too few rows to look at residuals"
    losses = pilot_losses(data, train, validation, network(train.targets.shape[1]), counts, seed)
    gains = losses[0] - losses[1]  # with tails as heavy as theirs, a standard error of their mean says little
    tailed = float(gains.sum()) > EVIDENCE and float(gains.mean()) > NEGLIGIBLE
    gain = f"a gain of {float(gains.mean()):.2g} nats a held-out row"
    if counts:
        name, other = ("negative-binomial", "more") if tailed else ("poisson", "no more")
        return (name, f"{name}: the target holds counts with {other} spread than Poisson's around a pilot ({gain})")
    name, other = ("student-t", "heavy") if tailed else ("gaussian", "no heavy")
    return name, f"{name}: the residuals of a pilot have {other} tails ({gain})"


def holds_counts(targets: Tensor) -> bool:
    """Whether targets [N, T] in their own units are counts: whole numbers from 0 on that fill the line, not codes."""
    if not torch.equal(targets, targets.round()) or float(targets.min()) < 0:
        return False
    for column in targets.unbind(1):
        distinct, mean = column.unique().long().tolist(), float(column.mean())
        # Years, prices and grades are whole numbers too: too large, never near 0, or nearer to their mean than counts.
        spread = 0 < mean <= MOST_MEAN and float(column.var()) >= mean / 2 and distinct[0] <= max(1, mean / 10)
        if len(distinct) < LEAST_COUNTS or math.gcd(*distinct) != 1 or not spread:
            return False
    return True


def original(data: Data, targets: Tensor) -> Tensor:
    """Real targets in their own units, in float64; whole numbers are whole again."""
    if data.target_scaling is None:
        return targets.double()
    shift, scale = (value.double() for value in data.target_scaling)
    parts = scale * targets.double()
    values, reach = (shift + parts, 1e-6 * (1 + shift.abs() + parts.abs()))  # what rounding to single precision leaves
    return values.round() if bool(((values - values.round()).abs() <= reach).all()) else values


def pilot_losses(
    data: Data, train: Part, validation: Part, network: Network, counts: bool, seed: int
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods [V] of rows that a pilot was not trained on: simple noise, and noise with tails.

    The noise that judges one half of the rows is fitted to the other half.
    """
    simple, tailed = (Poisson(), NegativeBinomial()) if counts else (Gaussian(), StudentT())
    aside = torch.arange(len(train.targets)) % 4 == 0  # validation rows alone are few
    inputs = torch.cat([validation.inputs, train.inputs[aside]])[:JUDGED_ROWS]
    truth = torch.cat([validation.targets, train.targets[aside]])[:JUDGED_ROWS]
    targets = train.targets[~aside]
    watched = validation.targets
    if counts:
        targets, truth, watched = (original(data, part).to(part) for part in (targets, truth, watched))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        pilot: Any = MAP().fit(
            network.build(seed),
            (train.inputs[~aside], targets),
            simple,
            training=AutoTraining(batch_size=128).training(PILOT_STEPS),
            validation=(validation.inputs, watched),  # a pilot that overfits makes any noise look wide
            seed=seed,
            progress=False,
        )
        outputs = pilot.predict(inputs).mean.double()
    outputs = outputs.log() if counts else outputs
    halves = torch.arange(len(truth)) % 2
    losses = torch.empty(2, len(truth), dtype=torch.float64)
    for half in (0, 1):
        for place, settings in enumerate((simple, tailed)):
            judged = halves == half
            losses[place, judged] = judged_losses(settings, outputs, truth.double(), judged)
    return losses[0], losses[1]


def judged_losses(settings: Likelihood, outputs: Tensor, truth: Tensor, judged: Tensor) -> Tensor:
    """The negative log-likelihood of some rows, under noise that was fitted to the others."""
    built = settings.build(outputs[~judged], truth[~judged])
    if built.learns:
        optimizer = torch.optim.LBFGS(built.parameters(), max_iter=60, line_search_fn="strong_wolfe")

        def closure() -> float:
            optimizer.zero_grad()
            loss = built.mean_nll(outputs[~judged], truth[~judged])
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)
    return -built.log_prob(outputs[judged], truth[judged]).detach()


def likelihood_of(name: str, task: TaskKind) -> Likelihood:
    """The likelihood of that name; of two classes, one logit's."""
    return Bernoulli() if task == "binary" else LIKELIHOODS[name]()
