"""Several runs side by side: each with its own order, history and checkpoint, their steps made as one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch.utils.data import default_collate

from ..errors import Interrupted
from ..fitting import Run
from ..inputs import Batch
from ..sources import OrderedSource, Source
from .account import part
from .contract import ObjectiveLike, Stepper, StepRecord
from .interruption import interruptible
from .loop import Loop
from .settings import Training


class JointStepper(ABC):
    """Makes the steps of several runs at once, on tensors that stand side by side."""

    @abstractmethod
    def step(
        self, number: int, passes: Sequence[Sequence[Batch | None]], rows: int, stop: bool
    ) -> Sequence[StepRecord]:
        """Make step `number` of every run; the arguments are those of `Stepper.step`, with the passes of each run."""

    @abstractmethod
    def part(self) -> None:
        """Give every run tensors of its own, as they stand now."""


#: From the steppers of some runs at the same step to what makes their steps as one.
Join: TypeAlias = Callable[[Sequence[Stepper]], JointStepper]


def train_many(
    objectives: Sequence[ObjectiveLike],
    sources: Sequence[Source],
    training: Training,
    runs: Sequence[Run],
    join: Callable[[int], Join | None],
) -> list[list[dict[str, float]]]:
    """Train several objectives in place, to rounding as `train` would one after the other; the history of each.

    Args:
        objectives: of one form.
        sources: the rows of each.
        training: how, alike for all.
        runs: what surrounds each.
        join: asked with the rows of a pass where nothing else speaks against one pass for all; None says that the
            objectives do.
    """
    triples = zip(objectives, sources, runs, strict=True)
    loops = [Loop(objective, source, training, run) for objective, source, run in triples]
    joined = join(loops[0].plan.batch_size) if len(loops) > 1 and _joinable(sources, training) else None
    if joined is None:
        histories = []
        while loops:
            with part(1 / len(loops)):  # each run has the same time
                histories.append(loops.pop(0).run_to_end())
        return histories
    for loop in loops[1:]:  # a terminal shows one bar
        loop.run = replace(loop.run, progress=False)
    return _Beside(loops, joined).run_to_end()


def _joinable(sources: Sequence[Source], training: Training) -> bool:
    """Whether runs can go in step: loaders of the user's have one order for all, and workers would multiply.

    A collator of the user's may pad rows to the longest of their batch, and batches of two lengths are not one.
    """
    ordered = all(isinstance(source, OrderedSource) for source in sources)
    options = [getattr(source, "options", {}) for source in sources]
    workers = any(given.get("num_workers") for given in options)
    padded = any(given.get("collate_fn", default_collate) is not default_collate for given in options)
    plain = not training.compile and not training.channels_last and training.precision != "fp16"
    return ordered and plain and not workers and not padded and len({source.num_data for source in sources}) == 1


class _Beside:
    """Runs in step: those that are behind go first, and those that have ended leave."""

    def __init__(self, loops: Sequence[Loop], join: Join) -> None:
        self.loops, self.join = loops, join
        self.courses = [loop.course() for loop in loops]
        self.histories: dict[int, list[dict[str, float]]] = {}
        self.waiting = {}
        self.cohort: list[int] = []
        self.joint: JointStepper | None = None
        self.interrupted = False

    def run_to_end(self) -> list[list[dict[str, float]]]:
        """Go on from the checkpoints, if there are any, to the end of the last run."""
        try:
            with interruptible(self):
                for number in range(len(self.loops)):
                    self._advance(number, None)
                while self.waiting:
                    self._step()
        finally:
            for course in self.courses:
                course.close()
            if self.joint is not None:
                self.joint.part()
        return [self.histories[number] for number in range(len(self.loops))]

    def _step(self) -> None:
        """One step of the runs that have made the fewest."""
        number = min(arguments[0] for arguments in self.waiting.values())
        cohort = sorted(n for n, arguments in self.waiting.items() if arguments[0] == number)
        if cohort != self.cohort or self.joint is None:
            if self.joint is not None:
                self.joint.part()
            self.cohort, self.joint = cohort, self.join([self.loops[n].stepper for n in cohort])
        if self.interrupted:  # all at the same step
            for loop in self.loops:
                loop.interrupt()
        passes = [self.waiting[n][1] for n in cohort]
        try:
            records = self.joint.step(number, passes, self.waiting[cohort[0]][2], self.interrupted)
        except Exception:
            for member in cohort:
                self.loops[member].read_terms()  # a loss that was no number explains what came of it
            raise
        ends = []
        for member, record in zip(cohort, records, strict=True):
            try:
                self._advance(member, record)
            except Interrupted as end:
                ends.append(end)
        if ends:
            raise ends[0]

    def _advance(self, number: int, record: StepRecord | None) -> None:
        try:
            self.waiting[number] = self.courses[number].send(record)  # pyright: ignore[reportArgumentType]
        except StopIteration as end:
            self.waiting.pop(number, None)
            self.histories[number] = end.value

    def interrupt(self) -> None:
        """See `Interruptible`."""
        self.interrupted = True

    def save_soon(self) -> None:
        """See `Interruptible`."""
        for loop in self.loops:
            loop.save_soon()
