"""Settings that choose themselves: effective data and the last layer's floor, by rows that join a run late."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import seeds
from ...inputs import Batch
from ...sources import OrderedSource, RowsSource
from .layer import Layer

if TYPE_CHECKING:
    from .method import BALI
    from .objective import BALIObjective

#: What is tried: shares of the data, and floors in units of the targets' variance, from the least to the most.
SHARES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
FLOORS = (1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
#: What a run starts with, and goes on with where there is nothing to choose by.
START_DATA, START_FLOOR = 2000.0, 1e-4
#: How much of a run lies before the choice, which waits for the end of an epoch.
BEFORE = 0.7
#: Fewer rows than this are not split: what they would say about settings is noise.
LEAST_ROWS = 100
#: The part of the rows that judges, and how many it has at most.
PART, MOST_ROWS = 0.1, 2000
NUM_SAMPLES = 8
#: How many times more or fewer data than those of the run are tried.
REACH = 4.0


class WithheldRows(RowsSource):
    """All rows of a source, some of which do not train until they are released: others are read in their place.

    Args:
        source: whose rows.
        seed: of which are withheld.
    """

    def __init__(self, source: OrderedSource, seed: int) -> None:
        super().__init__(source, torch.arange(source.num_data))
        order = torch.randperm(self.num_data, generator=seeds.generator(seed, "judging rows"))
        count = min(MOST_ROWS, math.ceil(PART * self.num_data))
        self.judging = order[:count].sort().values
        self.rows[order[:count]] = order[count : 2 * count]

    def release(self) -> None:
        """From the next epoch on every row is read."""
        self.rows = torch.arange(self.num_data)

    def judges(self, batch_size: int) -> Iterator[Batch]:
        """The rows that are, or were, withheld."""
        return RowsSource(self.source, self.judging).batches(batch_size)

    def _rows_digest(self) -> str:
        return f"{len(self.judging)} rows late of {self.source.digest()}"


def started(method: "BALI", num_data: float) -> "BALI":
    """The method with numbers to start from where it has none."""
    return replace(
        method,
        effective_data=method.effective_data or min(float(num_data), START_DATA),
        output_floor=START_FLOOR if method.output_floor is None else method.output_floor,
    )


@dataclass(eq=False)
class Choice:
    """The settings of a run that are still to be chosen.

    Attributes:
        method: as asked for, with None where to choose.
        objective: of the run, with the settings of `started`.
        source: of the run.
        seed: of the draws.
        made: whether the choice was made.
    """

    method: "BALI"
    objective: "BALIObjective"
    source: WithheldRows
    seed: int
    made: bool = False

    def due(self, progress: float, last: bool) -> bool:
        """Whether it is to be made at the end of an epoch, after so much of the run."""
        return not self.made and (last or progress >= BEFORE)

    @torch.no_grad()
    def best(self, layers: Mapping[str, Layer], correction: float) -> "BALI":
        """The method with the settings that serve the judging rows best.

        One run judges all: a layer's posterior under other settings follows from its averages. Those hold the noise
        of weights that were drawn under the run's own effective data, so that no others are tried than near these.
        What the run started from stays, unless other settings are better by more than a standard error: a single row
        far off asks for a floor that all the others pay for. First the effective data are chosen, then the floor.

        Args:
            layers: what the run has learned; they are left with the last settings that were tried.
            correction: of the averages' bias.
        """
        best = self.objective.draft.method
        run_data, least = best.effective_data, 0.0
        assert run_data is not None
        if best.covariance == "sampled":  # Σ has no distribution with fewer
            least = max(layer.mean.shape[1] for layer in layers.values()) - 1.0

        def scores(settings: "BALI") -> Tensor:
            return self._scores(settings, layers, correction)

        if self.method.effective_data is None:
            counts = [share * self.source.num_data for share in SHARES]
            counts = [count for count in counts if count > least and near(count, run_data)]
            best = climbed(best, "effective_data", counts, scores)
        if self.method.output_floor is None and self.objective.last is not None:
            best = climbed(best, "output_floor", FLOORS, scores)
        return best

    def _scores(self, settings: "BALI", layers: Mapping[str, Layer], correction: float) -> Tensor:
        """Negative log-likelihoods of the judging rows under settings; infinite where they are not numbers."""
        self.objective.set_priors(settings, layers)
        for layer in layers.values():
            layer.infer(correction)
            layer.settle()
        self.objective.commit(layers)
        losses = [
            -self.objective.draft.predict(batch.inputs, NUM_SAMPLES, seed=self.seed).log_prob(batch.targets)
            for batch in self.source.judges(1024)
        ]
        flat = torch.cat([values.reshape(-1) for values in losses]).cpu()
        return flat.nan_to_num(nan=math.inf, posinf=math.inf)


def climbed(start: "BALI", name: str, values: Sequence[float], scores: Callable[["BALI"], Tensor]) -> "BALI":
    """The best settings on the way from the start's value of one setting, down and up, until it leads uphill.

    Args:
        start: the settings of the run.
        name: of the setting.
        values: what may be tried, from the least to the most.
        scores: negative log-likelihoods of the judging rows.
    """
    present, first = scores(start), getattr(start, name)
    tried, others = [start], []
    for side in ([v for v in reversed(values) if v < first], [v for v in values if v > first]):
        lowest = float(present.mean())
        for value in side:
            tried.append(replace(start, **{name: value}))
            others.append(scores(tried[-1]))
            if not float(others[-1].mean()) < lowest:
                break
            lowest = float(others[-1].mean())
    return tried[preferred(present, others)]


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
