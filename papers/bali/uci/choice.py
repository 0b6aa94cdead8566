"""One rule for settings on all tables: a split chooses among candidates by rows kept from its training.

A tenth of a split's training rows is kept back. Every candidate is trained on the others, shorter than the run itself,
and judged by the log-likelihood of the kept rows; the best is trained anew on all training rows, and the next one where
that fails. A split's test rows do not judge its candidates, and the paper's numbers are not looked at. Splits choose by
themselves, or all together (`shared`): by the mean over splits, whose kept rows may be test rows of others.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dubito import seeds
from dubito.data import Part
from dubito.errors import TrainingError, require_count, require_fraction
from dubito.storage import encode

from ...runner.experiment import Outcome
from .baselines import BaselineRun, run_baseline
from .ivon import IvonRun, run_ivon
from .layerwise import LayerwiseRun, run_layerwise

Run = LayerwiseRun | BaselineRun | IvonRun
ENGINES: dict[type, Callable[..., list[Outcome]]] = {
    LayerwiseRun: run_layerwise,
    BaselineRun: run_baseline,
    IvonRun: run_ivon,
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Candidates of one method on one table, and how they are judged.

    Args:
        candidates: whole runs.
        trial_iterations: steps of a candidate while it is judged.
        kept_back: the fraction of a split's training rows that judges.
        shared: whether the splits side by side choose one candidate, by their mean; else each chooses its own.
    """

    candidates: tuple[Run, ...]
    trial_iterations: int
    kept_back: float = 0.1
    shared: bool = False

    def __post_init__(self) -> None:
        require_count(candidates=len(self.candidates), trial_iterations=self.trial_iterations)
        require_fraction(zero=False, kept_back=self.kept_back)


def run_choice(
    trains: Sequence[Part],
    tests: Sequence[Part],
    settings: Choice,
    *,
    seeds_of_parts: Sequence[int],
    steps: int | None = None,
) -> list[Outcome]:
    """Choose for every table, then train on all of its rows and judge its test rows.

    Args:
        trains: training rows in original units; as many in every table.
        tests: test rows likewise.
        settings: of the choice.
        seeds_of_parts: one per table.
        steps: ends every training after so many steps; then the first candidate alone is tried.
    """
    engine = ENGINES[type(settings.candidates[0])]
    candidates = settings.candidates if steps is None else settings.candidates[:1]
    pairs = [apart(part, settings.kept_back, seed) for part, seed in zip(trains, seeds_of_parts, strict=True)]
    fitting, judging = zip(*pairs, strict=True)
    own = [seeds.derived(seed, "trial") for seed in seeds_of_parts]
    scores = []
    for candidate in candidates:
        trial = replace(candidate, iterations=settings.trial_iterations)
        scores.append(scored(engine, fitting, judging, trial, seeds_of_parts=own, steps=steps))
    left = ranking(scores, shared=settings.shared)
    outcomes: dict[int, Outcome] = {}
    while waiting := [part for part in range(len(trains)) if part not in outcomes]:
        if not all(left[part] for part in waiting):
            raise TrainingError("no candidate has a likelihood of the rows kept back; lower the rates of the grid")
        number = min(left[part][0] for part in waiting)
        parts = [part for part in waiting if left[part][0] == number]
        rows, judged, streams = ([values[part] for part in parts] for values in (trains, tests, seeds_of_parts))
        try:
            ended = engine(rows, judged, candidates[number], seeds_of_parts=streams, steps=steps)
        except TrainingError:  # the whole run is longer than the trial
            for part in parts:
                left[part] = left[part][1:]
            continue
        for part, outcome in zip(parts, ended, strict=True):
            details = {"chosen": encode(candidates[number]), "kept_back": [score[part] for score in scores]}
            outcomes[part] = replace(outcome, details={**outcome.details, **finite(details)})
    return [outcomes[part] for part in range(len(trains))]


def ranking(scores: Sequence[Sequence[float]], *, shared: bool) -> list[list[int]]:
    """The candidates with a likelihood, the best first, for each table.

    Args:
        scores: log-likelihoods of kept rows by candidate and table.
        shared: whether all tables rank by the mean.
    """
    if shared:
        scores = [[sum(score) / len(score)] * len(score) for score in scores]
    tables = range(len(scores[0]))
    finite = [[c for c, score in enumerate(scores) if score[part] > -math.inf] for part in tables]
    return [sorted(numbers, key=lambda c: -scores[c][part]) for part, numbers in zip(tables, finite, strict=True)]


def apart(part: Part, fraction: float, seed: int) -> tuple[Part, Part]:
    """Rows to train on, and those kept back."""
    order = torch.randperm(len(part.targets), generator=seeds.generator(seed, "rows kept back"))
    count = round(fraction * len(order))
    return Part(part.inputs[order[count:]], part.targets[order[count:]]), Part(
        part.inputs[order[:count]], part.targets[order[:count]]
    )


def scored(engine: Callable[..., list[Outcome]], trains: Sequence[Part], *rest: Any, **options: Any) -> list[float]:
    """The log-likelihood of each table's kept rows; −∞ where training failed, which it does for all side by side."""
    try:
        values = [outcome.metrics["log_likelihood"] for outcome in engine(trains, *rest, **options)]
    except TrainingError:
        return [-math.inf] * len(trains)
    return [value if math.isfinite(value) else -math.inf for value in values]


def finite(details: dict[str, Any]) -> dict[str, Any]:
    """With None for what has no number."""
    return {**details, "kept_back": [score if math.isfinite(score) else None for score in details["kept_back"]]}
