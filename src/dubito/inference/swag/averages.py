"""Moments of the weights along the end of a run, and the update rule that gathers them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError, StorageError, require_count, require_fraction, require_positive
from ...inputs import Batch
from ...networks import duplicate
from ...posterior import Posterior
from ...storage.schema import Within, conform
from ...training import GradientStepper, Plan, Processes, StepRecord, Training
from ...training.checkpoint import Forms, check_forms, forms_of
from ..map import MAPObjective


@dataclass(frozen=True, kw_only=True)
class Gathering:
    """Which moments to gather, and when.

    Attributes:
        start: the share of the run after which weights are gathered.
        snapshots: how many times, evenly spaced, the last one at the end of the run.
        variance: whether to gather variances too.
        rank: the number of last deviations to keep.
    """

    start: float
    snapshots: int
    variance: bool = False
    rank: int = 0

    def due(self, made: int, total: int) -> bool:
        """Whether weights are gathered after `made` of `total` steps."""
        first = min(int(self.start * total), total - 1)
        count = min(self.snapshots, total - first)
        past, left = made - first, total - first
        return past > 0 and past * count // left > (past - 1) * count // left


def check_gathering(prior_std: float | None, start: float, snapshots: int) -> None:
    """Refuse settings that SWA and SWAG share where they are out of range."""
    if prior_std is not None:
        require_positive(prior_std=prior_std)
    require_fraction(start=start)
    require_count(snapshots=snapshots)


class Averages:
    """Running moments of tensors by name.

    Attributes:
        count: how many times tensors were gathered.
        mean: their means.
        squares: sums of squared deviations from the mean, n · variance.
        deviations: the last differences from the running mean, [rank, ...]; the newest in row (count − 1) mod rank.
    """

    def __init__(self, gathering: Gathering) -> None:
        self.gathering = gathering
        self.count = 0
        self.mean: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        self.deviations: dict[str, Tensor] = {}

    @torch.no_grad()
    def collect(self, tensors: Mapping[str, Tensor]) -> None:
        """Take in the tensors as they are now."""
        self.count += 1
        for name, value in tensors.items():
            if name not in self.mean:
                self.mean[name] = torch.zeros_like(value)
                if self.gathering.variance:
                    self.squares[name] = torch.zeros_like(value)
                if self.gathering.rank:
                    self.deviations[name] = value.new_zeros(self.gathering.rank, *value.shape)
            before = value - self.mean[name]
            self.mean[name] += before / self.count
            after = value - self.mean[name]
            if self.gathering.variance:
                # Welford's update: as exact as two passes, where E[w²] − E[w]² would cancel
                self.squares[name] += before * after
            if self.gathering.rank:
                self.deviations[name][(self.count - 1) % self.gathering.rank] = after

    def state(self) -> dict[str, Tensor]:
        """All tensors, by kind and name."""
        kinds = {"mean": self.mean, "squares": self.squares, "deviations": self.deviations}
        return {f"{kind}/{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}

    def restore(self, count: int, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self.count = count
        for key, tensor in tensors.items():
            kind, _, name = key.partition("/")
            getattr(self, kind)[name] = tensor


class AveragedObjective(MAPObjective):
    """The point estimate's loss; what is kept of it are moments of the weights on the way.

    In a loop of your own, call `collect` where weights should be gathered.
    """

    def __init__(
        self,
        draft: Posterior,
        prior_std: float | None,
        gathering: Gathering,
        *,
        num_data: float,
        modes: Mapping[str, bool],
    ) -> None:
        super().__init__(draft, prior_std, num_data=num_data, modes=modes)
        self.averages = Averages(gathering)

    def gathered(self) -> dict[str, Tensor]:
        """What is averaged: the weights that are trained, and the learned noise."""
        parts = {"network": self.draft.network, "likelihood": self.draft.likelihood}
        return {
            f"{key}.{name}": parameter.detach()
            for key, part in parts.items()
            for name, parameter in part.named_parameters()
            if parameter.requires_grad and not isinstance(parameter, nn.UninitializedParameter)
        }

    def forms(self, count: int) -> Forms:
        """Shapes and dtypes of what has been gathered after `count` times."""
        conform(count, Annotated[int, Within(0, self.averages.gathering.snapshots)], "the number of averages")
        gathering, forms = self.averages.gathering, {}
        for name, tensor in forms_of(self.gathered()).items() if count else ():
            forms[f"mean/{name}"] = tensor
            forms |= {f"squares/{name}": tensor} if gathering.variance else {}
            if gathering.rank:
                forms[f"deviations/{name}"] = (gathering.rank, *tensor[0]), tensor[1]
        return forms

    def collect(self) -> None:
        """Gather the weights as they are now."""
        self.averages.collect(self.gathered())

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> "AveragingStepper":
        return AveragingStepper(self, training, plan, processes, seed)

    def posterior(self) -> Posterior:
        averages = self.averages
        if not averages.count:
            raise ConfigError(
                "no weights were gathered: call collect() at the points of your loop that are to be averaged"
            )
        draft = duplicate(self.draft)
        with torch.no_grad():
            for key, part in (("network", draft.network), ("likelihood", draft.likelihood)):
                for name, parameter in part.named_parameters():
                    if f"{key}.{name}" in averages.mean:
                        parameter.copy_(averages.mean[f"{key}.{name}"])
        return self.around(draft)

    def around(self, draft: Posterior) -> Posterior:
        """The posterior whose centre `draft` holds."""
        return draft.finished()


class AveragingStepper(GradientStepper):
    """Gradient descent that gathers the weights along the end of the run."""

    objective: AveragedObjective

    def __init__(
        self, objective: AveragedObjective, training: Training, plan: Plan, processes: Processes, seed: int
    ) -> None:
        if training.early_stopping is not None:
            raise ConfigError(
                "weights are averaged over the end of a run, which early_stopping would cut off; leave it out, and "
                "choose the number of epochs instead"
            )
        super().__init__(objective, training, plan, processes, seed)

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        record = super().step(number, passes, rows, stop)
        total = self.plan.total
        # A stream that never told its length is gathered at every step, one that is longer than it told up to there.
        place = 1 if total is None else number + 1
        if place <= (total or 1) and self.objective.averages.gathering.due(place, total or 1):
            self.objective.collect()
        return record

    def close_epoch(self, step: int, last: bool) -> None:
        if last and not self.objective.averages.count:  # stopped before the part of the run that is averaged
            self.objective.collect()
        super().close_epoch(step, last)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, facts = super().state()
        averages = self.objective.averages
        averaged = {f"averages/{name}": tensor for name, tensor in averages.state().items()}
        return {**tensors, **averaged}, {**facts, "snapshots": averages.count}

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        key = "averages/"
        averaged = {name[len(key) :]: tensor for name, tensor in tensors.items() if name.startswith(key)}
        forms = self.objective.forms(facts["snapshots"])
        check_forms(averaged, forms, "the averages")
        if any((tensor < 0).any() for name, tensor in averaged.items() if name.startswith("squares/")):
            raise StorageError("squares of deviations must not be negative")
        self.objective.averages.restore(facts["snapshots"], averaged)
        super().restore({n: tensor for n, tensor in tensors.items() if not n.startswith(key)}, facts)
