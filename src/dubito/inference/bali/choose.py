"""Settings that choose themselves: effective data and the last layer's floor, by rows kept from training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import seeds
from ...inputs import Batch
from ...sources import OrderedSource, Source
from .layer import Layer, Prior
from .objective import BALIObjective

if TYPE_CHECKING:
    from .method import BALI

#: What is tried: shares of the data, and floors in units of the targets' variance.
SHARES = (1.0, 0.5, 0.25, 0.1, 0.05, 0.025, 0.01)
FLOORS = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
#: Where a run that chooses starts from, and what is taken where there is nothing to choose by.
START_DATA, START_FLOOR = 2000.0, 1e-4
#: Fewer rows than this are not split: what they would say about settings is noise.
LEAST_ROWS = 100
#: The part of the rows that judges, and how many it has at most.
PART, MOST_ROWS = 0.1, 2000
NUM_SAMPLES = 32
#: How many times more or fewer data than those of the run that chooses are tried.
REACH = 4.0


class SomeRows(OrderedSource):
    """Some of the rows of a source, by number.

    Args:
        source: whose rows.
        index: which.
    """

    def __init__(self, source: OrderedSource, index: Tensor) -> None:
        self.source, self.index = source, index
        self.num_data, self.batch_size, self.drop_last = len(index), source.batch_size, source.drop_last

    def batches(self, batch_size: int) -> Iterator[Batch]:
        for batch in self.source.read(self.index.split(batch_size)):
            assert batch is not None
            yield batch

    def read(self, groups: Sequence[Tensor]) -> Iterator[Batch | None]:
        return self.source.read([self.index[group] for group in groups])

    def digest(self) -> str:
        return f"{self.num_data} rows of {self.source.digest()}"


@dataclass(frozen=True)
class Split:
    """Rows to train on and rows to judge by."""

    train: SomeRows
    judge: SomeRows


def split_rows(source: Source, seed: int) -> Split | None:
    """A split of the rows, or None where they are too few or cannot be read by number."""
    if not isinstance(source, OrderedSource) or source.num_data < LEAST_ROWS:
        return None
    order = torch.randperm(source.num_data, generator=seeds.generator(seed, "judging rows"))
    held_out = min(MOST_ROWS, math.ceil(PART * source.num_data))
    return Split(
        SomeRows(source, order[held_out:].sort().values), SomeRows(source, order[:held_out].sort().values)
    )


def started(method: "BALI", num_data: int) -> "BALI":
    """The method with numbers to start from where it has none."""
    return replace(
        method,
        effective_data=method.effective_data or min(float(num_data), START_DATA),
        output_floor=START_FLOOR if method.output_floor is None else method.output_floor,
    )


@torch.no_grad()
def chosen(
    method: "BALI",
    objective: BALIObjective,
    layers: Mapping[str, Layer],
    correction: float,
    judge: Source,
    num_data: int,
    seed: int,
) -> "BALI":
    """The method with the settings that serve the judging rows best.

    One run judges all: a layer's posterior under other settings follows from its averages. Those hold the noise of
    weights that were drawn under the run's own effective data, so that no others are tried than near these. What the
    run started from stays, unless other settings are better by more than a standard error: a single row far off asks
    for a floor that all the others pay for. First the effective data are chosen, then the floor.

    Args:
        method: as asked for, with None where to choose.
        objective: of a finished run with the settings of `started`.
        layers: what the run learned.
        correction: of the averages' bias.
        judge: rows the run did not see.
        num_data: of the whole data.
        seed: of the draws.
    """
    best = started(method, num_data)
    run_data = best.effective_data
    assert run_data is not None

    def scores(candidate: "BALI") -> Tensor:
        return _scores(candidate, objective, layers, correction, judge, seed)

    if method.effective_data is None:
        counts = [count for count in (share * num_data for share in SHARES) if near(count, run_data)]
        tried = [replace(best, effective_data=count) for count in counts]
        best = [best, *tried][preferred(scores(best), [scores(settings) for settings in tried])]
    if method.output_floor is None and objective.last is not None:
        tried = [replace(best, output_floor=floor) for floor in FLOORS if floor != best.output_floor]
        best = [best, *tried][preferred(scores(best), [scores(settings) for settings in tried])]
    return best


def near(count: float, run_data: float) -> bool:
    """Whether averages of a run with `run_data` can speak for others than its own."""
    return count != run_data and run_data / REACH <= count <= run_data * REACH


def preferred(present: Tensor, others: Sequence[Tensor]) -> int:
    """0 for the run's own scores by row, or the number of the best others, from 1, that are surely lower.

    Args:
        present: negative log-likelihoods of the judging rows under the run's own settings.
        others: under those that are tried, of the same rows.
    """
    best, lowest = 0, float(present.mean())
    for number, scores in enumerate(others, 1):
        gain = present - scores
        error = float(gain.std()) / math.sqrt(len(gain))
        unsure = float(gain.mean()) <= error  # never so where rows are infinite
        if not unsure and float(scores.mean()) < lowest:
            best, lowest = number, float(scores.mean())
    return best


def _scores(
    candidate: "BALI",
    objective: BALIObjective,
    layers: Mapping[str, Layer],
    correction: float,
    judge: Source,
    seed: int,
) -> Tensor:
    """Negative log-likelihoods of the judging rows under other settings; infinite where they are not numbers."""
    for name, layer in layers.items():
        floor = layer.prior.floor
        if name == objective.last:
            assert objective.target_std is not None and candidate.output_floor is not None
            floor = (candidate.output_floor * objective.target_std.square()).to(floor).expand_as(floor)
        assert candidate.effective_data is not None
        data = torch.full_like(layer.prior.data, candidate.effective_data)
        layer.prior = Prior(precision=layer.prior.precision, floor=floor, data=data)
        layer.infer(correction)
        layer.settle()
    objective.commit(layers)
    losses = [
        -objective.draft.predict(batch.inputs, NUM_SAMPLES, seed=seed).log_prob(batch.targets)
        for batch in judge.batches(1024)
    ]
    return (
        torch.cat([values.reshape(-1) for values in losses]).cpu().nan_to_num(nan=math.inf, posinf=math.inf)
    )
