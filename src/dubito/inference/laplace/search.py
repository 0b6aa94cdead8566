"""The pair of prior precision and data scale whose predictions of validation rows are likeliest: INF's search.

P = N_s · curvature + τ depends on the ratio N_s/τ alone but for a factor τ: all pairs of one ratio share its
factorisation, and their covariances, and the deviations of their draws, are multiples of each other.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ... import seeds
from ...draws.base import repeated
from ...errors import DataError
from ...fitting import checked_rows
from ...inputs import Batch, TensorOptions
from ...sources import OrderedSource, as_source
from .covariance import CHUNK, slices
from .data_fit import wide
from .facts import Search
from .linearised import predictive as predicted
from .validation import Rescaled, linearised_outputs

if TYPE_CHECKING:
    from .posterior import LaplacePosterior

#: By what the predictions are made that judge a pair.
Predictive = Literal["draws", "linearised"]
#: Ratios that are tried first, and then around the best of them, in decades; so many are factorised, whatever `trials`.
COARSE, FINE = (0.0, 2.0, -2.0, 4.0, -4.0), (0.0, 1.0, -1.0)
#: Decades of the prior precision around the present one, and then around the best.
WIDE, NARROW = (-3.0, 6.0), (-1.25, 1.25)
#: Rows that judge draws at most, and draws after which the worse half of the pairs is dropped first.
MOST_ROWS, FIRST_DRAWS = 2000, 2


class ScalePair(NamedTuple):
    """Decades of N_s/τ and of τ from the present ones."""

    ratio: float = 0.0
    precision: float = 0.0


#: From pairs to the mean negative log-likelihoods of a row, and the number of the best pair.
Judge = Callable[[Sequence[ScalePair]], tuple[list[float], int]]


def searched(
    posterior: "LaplacePosterior",
    validation: Any,
    predictive: Predictive,
    *,
    trials: int,
    num_samples: int,
    seed: int,
    max_rows: int,
) -> dict[str, Any]:
    """The details of a posterior with the best of some pairs; the first trial is the present pair.

    Half of the trials are spread over all pairs, half around the best of these.

    Args:
        posterior: to begin from.
        validation: rows with targets.
        predictive: what judges a pair: predictions by draws, or linearised.
        trials: pairs that are tried.
        num_samples: draws that judge a pair, unless it is dropped before.
        seed: of the pairs, of draws and of the rows that judge these.
        max_rows: rows that go through the network at once.
    """
    source = as_source(validation, TensorOptions.of(posterior.network), "validation")
    if predictive == "draws" and isinstance(source, OrderedSource) and source.num_data > MOST_ROWS:
        order = torch.randperm(source.num_data, generator=seeds.generator(seed, "search", "rows"))
        source = source.only(order[:MOST_ROWS].sort().values)
    judged = posterior.network, posterior.likelihood, source
    rows = partial(checked_rows, *judged, seed=seed, max_rows=max_rows, whole=False, name="validation")
    judge: Judge = partial(by_linearised, posterior, rows, max_rows)
    if predictive == "draws":
        judge = partial(by_draws, posterior, first_rows(rows()), num_samples, seed)
    stream, best = seeds.generator(seed, "search", "pairs"), ScalePair()
    pairs, losses, place = [], [], 0
    for ratios, decades, count in ((COARSE, WIDE, trials - trials // 2), (FINE, NARROW, trials // 2)):
        tried = [best, *spread(best, ratios, decades, count - 1, stream)][:count]
        if tried:
            values, taken = judge(tried)
            best, place = tried[taken], len(pairs) + taken
            pairs, losses = pairs + tried, losses + values
    if not math.isfinite(losses[place]):
        raise DataError(
            f"validation rows have no finite likelihood under any of {trials} pairs of prior precision and data scale; "
            "look at their targets, or give more draws by num_samples="
        )
    record: Search = {
        "predictive": predictive,
        "trials": trials,
        "num_samples": num_samples if predictive == "draws" else 0,
        "seed": seed,
        "precision_factors": [10**pair.precision for pair in pairs],
        "scale_factors": [10 ** (pair.ratio + pair.precision) for pair in pairs],
        "losses": losses,
        "present_loss": losses[0],
        "loss": losses[place],
    }
    factor, prior = record["precision_factors"][place], posterior.prior_precision
    return {
        "prior_precision": {name: factor * value for name, value in prior.items()}
        if isinstance(prior, dict)
        else factor * prior,
        "data_scale": posterior.data_scale * record["scale_factors"][place],
        "precision_choice": None,
        "search": record,
    }


def described(search: Search) -> str:
    """A line on the search, for `summary`."""
    judge = f"{search['num_samples']} draws" if search["num_samples"] else "linearised predictions"
    return (
        f"prior precision and data scale: best of {search['trials']} pairs by {judge} of validation rows, whose "
        f"negative log-likelihood is {search['loss']:.4g} a row and was {search['present_loss']:.4g}"
    )


def spread(
    centre: ScalePair, ratios: Sequence[float], decades: tuple[float, float], count: int, stream: torch.Generator
) -> list[ScalePair]:
    """Pairs around a centre, in turn at every ratio, each in its own part of the decades, at random inside it."""
    (low, high), parts = decades, math.ceil(count / len(ratios))
    shifts = torch.rand(max(0, count), generator=stream, dtype=torch.float64).tolist()
    return [
        ScalePair(
            centre.ratio + ratios[number % len(ratios)],
            centre.precision + low + (high - low) * (number // len(ratios) + shift) / parts,
        )
        for number, shift in enumerate(shifts)
    ]


def first_rows(batches: Any) -> list[Batch]:
    """The first `MOST_ROWS` rows."""
    taken, left = [], MOST_ROWS
    for batch in batches:
        taken.append(batch.rows(slice(left)))
        left -= len(taken[-1].targets)
        if not left:
            break
    return taken


def by_linearised(
    posterior: "LaplacePosterior", rows: Callable[[], Any], max_rows: int, pairs: Sequence[ScalePair]
) -> tuple[list[float], int]:
    """Losses under linearised predictions: one pass over the rows for all pairs."""
    numbers: dict[float, list[int]] = {}
    for number, pair in enumerate(pairs):
        numbers.setdefault(pair.ratio, []).append(number)
    candidates = [Rescaled(posterior, data_scale=posterior.data_scale * 10**ratio) for ratio in numbers]
    sums: list[Any] = [0.0] * len(pairs)
    weight = 0.0
    for batch, outputs, covariances in linearised_outputs(posterior, rows(), candidates, max_rows):
        weight += batch.total_weight()
        for some, covariance in zip(numbers.values(), covariances, strict=True):
            for part in slices(len(some), CHUNK // covariance.numel()):
                factors = [posterior.scale**2 * 10 ** -pairs[number].precision for number in some[part]]
                count = len(factors)
                spreads = torch.cat([factor * covariance for factor in factors])
                prediction = predicted(posterior.likelihood, repeated(outputs, count), spreads)
                values = prediction.log_prob(repeated(batch.targets, count)).view(count, -1)
                for number, likelihoods in zip(some[part], values, strict=True):
                    sums[number] = sums[number] - wide(batch.weighted(likelihoods)).sum()
    losses = (torch.stack(sums) / weight).nan_to_num(math.inf, posinf=math.inf)
    return losses.tolist(), int(losses.argmin())


@torch.no_grad()
def by_draws(
    posterior: "LaplacePosterior", batches: Sequence[Batch], num_samples: int, seed: int, pairs: Sequence[ScalePair]
) -> tuple[list[float], int]:
    """Losses under draws, which all pairs share: after every doubling of their number the worse half is dropped.

    The first pair is judged by all draws, the others by as many as they had.
    """
    ratios = {pair.ratio: posterior.data_scale * 10**pair.ratio for pair in pairs}
    bases = {ratio: posterior._with(data_scale=scale) for ratio, scale in ratios.items()}
    views = [bases[pair.ratio]._view(10 ** (-pair.precision / 2)) for pair in pairs]
    likelihoods: dict[tuple[int, int], Tensor] = {}
    losses, running = torch.full((len(pairs),), math.inf, dtype=torch.float64), list(range(len(pairs)))
    weight, seen, best = sum(batch.total_weight() for batch in batches), 0, 0
    while seen < num_samples:
        upto = min(num_samples, max(FIRST_DRAWS, 2 * seen))
        for number in running:
            for index in range(seen, upto):
                function = views[number].function(index, seed, linearised=False)
                for place, batch in enumerate(batches):
                    value = posterior.likelihood.log_prob(function(batch.inputs), batch.targets)
                    before = likelihoods.get((number, place))
                    likelihoods[number, place] = value if before is None else torch.logaddexp(before, value)
            sums = [
                wide(batch.weighted(likelihoods[number, place] - math.log(upto))).sum()
                for place, batch in enumerate(batches)
            ]
            losses[number] = -torch.stack(sums).sum() / weight
        losses = losses.nan_to_num(math.inf, posinf=math.inf)
        running.sort(key=losses.tolist().__getitem__)
        best, seen = running[0], upto
        running = sorted({0, *running[: math.ceil(len(running) / 2)]})
    return losses.tolist(), best
