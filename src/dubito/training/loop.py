"""The one training loop: order, progress, validation, checkpoints and processes around a method's steps."""

import math
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .. import seeds
from ..devices import HostCopy
from ..errors import ConfigError, DataError, Interrupted, NetworkError, TrainingError, warn
from ..fitting import Run
from ..inputs import Batch, TensorOptions
from ..layers.shell import seeded
from ..layers.tree import is_shared
from ..metrics.paired import NEGLIGIBLE, wins
from ..processes import current
from ..sources import OrderedSource, Source, reading, split
from . import checkpoint
from .account import account
from .callbacks import RunFacts
from .contract import ObjectiveLike, StepArguments, StepRecord
from .interruption import LOST_WORKER, interruptible
from .plan import Plan, plan_run
from .progress import told
from .resume import RunProgress, check_checkpoint
from .settings import Training

#: A gradient norm this many times the usual one is reported.
EXPLOSION = 1e3


def train(objective: ObjectiveLike, source: Source, training: Training, run: Run) -> list[dict[str, float]]:
    """Train an objective in place; returns one record per epoch.

    The same seed, data and settings give the same result, also when the run was interrupted and started again
    with its checkpoint.
    """
    return Loop(objective, source, training, run).run_to_end()


class Loop:
    """One run; see `train`."""

    def __init__(self, objective: ObjectiveLike, source: Source, training: Training, run: Run) -> None:
        if training.early_stopping is not None and run.validation is None:
            raise ConfigError("early_stopping needs validation data: pass validation= to fit")
        self.objective, self.source, self.training, self.run = objective, source, training, run
        self.device = TensorOptions.of(objective.draft).device
        self.processes = run.processes or current(training.timeout, self.device)
        self.plan = self._planned()
        self.stepper = objective.stepper(training, self.plan, self.processes, run.seed)
        self.progress = RunProgress()
        self.best_state: dict[str, Tensor] = {}
        #: Losses of the validation rows at the best state and at the last one judged; kept by the first process.
        self.row_losses: dict[str, Tensor] = {}
        self.pending: tuple[StepRecord, HostCopy, HostCopy | None] | None = None
        self.norms: list[float] = []
        self.warned = self.interrupted = False
        self.saved_at = time.monotonic()
        self.expected: dict[str, Any] = {}
        self.account = account()
        if self.processes.count > 1 and self.account and self.account.limit is not None:
            raise ConfigError("a limit of time is for runs in one process; leave it out, or give epochs")

    def run_to_end(self) -> list[dict[str, float]]:
        """Go on from the checkpoint, if there is one, to the end."""
        with interruptible(self), closing(self.course()) as course:
            try:
                arguments = next(course)
                while True:
                    arguments = course.send(self._step(arguments))
            except StopIteration as end:
                return end.value

    def _step(self, arguments: StepArguments) -> StepRecord:
        network, modes = self.objective.draft.network, self.objective.modes
        try:
            with seeded(network, self.run.seed, "network", arguments[0], training=modes):
                return self.stepper.step(*arguments)
        except Exception:
            self.read_terms()  # a loss that was no number explains what came of it
            raise

    def course(self) -> Generator[StepArguments, StepRecord, list[dict[str, float]]]:
        """The run as a generator that gives the arguments of its steps and is sent their records.

        Whoever drives it makes the steps: its stepper alone, or one that makes those of several runs at once.
        """
        network, title = self.objective.draft.network, type(self.objective.draft.method).__name__
        if self.training.compile and self.objective.asks:
            warn(
                f"compile=True has no effect on {title} with these settings, since its noise meets layers in Python; "
                "leave it out"
            )
        with prepared(network, self.training, compiled=self.training.compile and not self.objective.asks):
            if self.run.checkpoint is not None:
                self._resume()
            first, validates = self.processes.first, self.run.validation is not None
            facts = RunFacts(
                title=title, total=self.plan.total, done=self.progress.step, member=self.run.member, validates=validates
            )
            watching = (self.run.progress, self.run.callbacks) if first else (False, ())
            with told(facts, *watching) as self.told:
                if self._due(start=True):
                    self._judge()
                while not self.progress.done:
                    yield from self._epoch()
                self.told.ended = self.progress.ended
            if self.account:
                self.account.endings.append(self.progress.ended)
        if self.best_state and not self._last_is_preferred():
            checkpoint.put(self.objective.draft.stored(), self.best_state)
        self.processes.broadcast(list(self.objective.draft.stored().values()))
        return self.progress.history

    # -- one epoch -----------------------------------------------------------------------------------------

    def _epoch(self) -> Generator[StepArguments, StepRecord, None]:
        state = self.progress
        for passes, rows in self._steps():
            record = yield state.step, passes, rows, self.interrupted
            self.read_terms()
            self._expect(record, len(passes))
            if record.stop or (self.interrupted and self.processes.count == 1):
                self._save()
                raise Interrupted(self._farewell())
            if self._due():
                self.read_terms()
                self.stepper.settle(self.progress.step)
                self._judge()
                if self._patience_is_over():
                    break
            self._save_if_due()
        self.read_terms()
        self._close_epoch()

    def _steps(self) -> Iterator[tuple[list[Batch | None], int]]:
        """The passes of each step that is left in this epoch, with the rows all processes see in it."""
        passes = self._passes()
        while self.progress.step != self.training.iterations and not (self.progress.rows and self._overspent()):
            # Samplers and datasets that draw from the global state find the same one in every process and after
            # every interruption.
            with reading(self.source, self.run.seed, "data", self.progress.step, device=self.device):
                try:
                    chunk = list(islice(passes, self.training.accumulate))
                except LOST_WORKER as error:
                    if not self.interrupted or self.processes.count > 1:
                        raise
                    self._save()  # the signal has ended the loader's workers too
                    raise Interrupted(self._farewell()) from error
            if not chunk:
                return
            yield [batch for batch, _ in chunk], sum(rows for _, rows in chunk)

    def _passes(self) -> Iterator[tuple[Batch | None, int]]:
        done = self.progress.passes
        if not isinstance(self.source, OrderedSource):
            for batch in islice(self.source.batches(self.plan.batch_size), done, None):
                yield self._part(batch), len(batch.targets)
            return
        stream = seeds.generator(self.run.seed, "order", self.progress.epoch)
        order = torch.randperm(self.source.num_data, generator=stream)
        slices = self._slices()[done:]
        shares = [self.processes.share(rows.stop - rows.start) for rows in slices]
        groups = [order[rows.start + a : rows.start + b] for rows, (a, b) in zip(slices, shares, strict=True)]
        for batch, rows, (first, _) in zip(self.source.read(groups), slices, shares, strict=True):
            total = rows.stop - rows.start
            yield batch and batch._replace(first=first, total=total), total

    def _part(self, batch: Batch) -> Batch | None:
        """This process's rows of a batch that every process has read."""
        first, end = self.processes.share(len(batch.targets))
        if first == end:
            return None
        return batch.rows(slice(first, end))._replace(first=first, total=len(batch.targets))

    def _slices(self) -> Sequence[slice]:
        assert self.source.num_data is not None
        slices = split(self.source.num_data, self.plan.batch_size)
        whole = slices[-1].stop - slices[-1].start >= self.plan.batch_size
        return slices if whole or not self.source.drop_last or len(slices) == 1 else slices[:-1]

    def _expect(self, record: StepRecord, passes: int) -> None:
        """Count a step; the terms of its loss are read after the next, so that no step waits for its device."""
        state = self.progress
        norm = record.norm if self.training.clip_norm is None else None
        self.pending = record, HostCopy(record.terms), None if norm is None else HostCopy((norm,))
        state.rows += record.rows
        state.passes += passes
        state.step += 1

    def read_terms(self) -> None:
        """Read the terms of the last step counted, if they were not: before its state is kept, at the latest."""
        if self.pending is None:
            return
        (record, terms, norm), self.pending, state = self.pending, None, self.progress
        total, nll, kl = values = terms.read()
        if not all(map(math.isfinite, values)):
            self.stepper.settle(record.step)  # it may know better
            name, value = next(
                (name, value) for name, value in (("nll", nll), ("kl", kl), ("loss", total)) if not math.isfinite(value)
            )
            self.stepper.settle(record.step)  # it may know better
            raise TrainingError(self._diagnosis(name, value, record.step, record.lr))
        if norm is not None:
            self._watch(norm.read()[0], record.step)
        state.sums = [old + record.rows * new for old, new in zip(state.sums, values, strict=True)]
        self.told.step(record.step + 1, {"loss": total, "nll": nll, "kl": kl, "lr": record.lr})

    def _close_epoch(self) -> None:
        state, stopping = self.progress, self.training.early_stopping
        state.epoch += 1
        over = state.epoch == self.training.epochs or state.step == self.training.iterations
        if over or self._overspent():
            over, state.ended = True, "limit" if over else "budget"
        self.stepper.close_epoch(state.step, over)
        loss, nll, kl = (value / state.rows for value in state.sums)
        entry: dict[str, float] = {"epoch": state.epoch, "step": state.step, "loss": loss, "nll": nll, "kl": kl}
        if self.run.validation is not None:
            if state.judged < state.step and (over or stopping is None or stopping.every is None):
                self._judge()
            if state.score is not None:
                entry["validation_nll"] = state.score
            if stopping and state.best is not None:
                entry |= {"best_nll": state.best, "best_step": state.best_step}
                before = state.history[-1]["step"] if state.history else 0
                state.waited = 0 if state.best_step > before else state.waited + 1
        state.history.append(entry)
        self.told.epoch(entry)
        state.passes, state.sums, state.rows = 0, [0.0, 0.0, 0.0], 0
        state.done = over or self._patience_is_over()
        if state.done and not over:
            state.ended = "patience"
        if state.done and not self.best_state and (name := self._unsound()):
            raise TrainingError(self._diagnosis(name, "NaN or infinite", state.step))
        self._save() if state.done else self._save_if_due()

    def _overspent(self) -> bool:
        return self.account is not None and self.account.over()

    def _due(self, start: bool = False) -> bool:
        """Whether a validation is due between the ends of epochs, or before the first step."""
        state, stopping = self.progress, self.training.early_stopping
        if stopping is None or self.run.validation is None:
            return False
        if start:
            return stopping.start and state.judged < 0
        return stopping.every is not None and state.step - max(state.judged, 0) >= stopping.every

    def _judge(self) -> None:
        """Validate the present state, and keep it where it is the best."""
        state, stopping = self.progress, self.training.early_stopping
        state.score = score = self._validate(stopping.num_samples if stopping else 8)
        state.judged = state.step
        if math.isnan(score):
            raise TrainingError(self._diagnosis("validation_nll", score, state.step))
        if stopping and (state.best is None or score < state.best - stopping.margin):
            state.best, state.best_step = score, state.step
            self.row_losses["best"] = self.row_losses.get("last", torch.empty(0))
            stored = self.objective.draft.stored()
            self.best_state = {name: tensor.detach().clone() for name, tensor in stored.items()}
        self.told.validation(state.step, score)

    def _last_is_preferred(self) -> bool:
        """Whether the last state stays, since the best one is not better by more than chance."""
        state, stopping = self.progress, self.training.early_stopping
        if not (stopping and stopping.last and state.judged == state.step):
            return False
        best, last = (self.row_losses.get(name, torch.empty(0)) for name in ("best", "last"))
        # the best of many states is favoured by chance: two standard errors
        lost = self.processes.first and wins(best, last, NEGLIGIBLE, errors=2.0)
        return not self.processes.broadcast_json(lost, self.device)

    def _patience_is_over(self) -> bool:
        state, stopping = self.progress, self.training.early_stopping
        if stopping is None:
            return False
        if stopping.steps is None:
            return state.waited >= stopping.patience
        return state.judged >= 0 and state.step - state.best_step >= stopping.steps

    @torch.no_grad()
    def _validate(self, num_samples: int) -> float:
        """Mean negative log-likelihood of the mixture over draws on the validation rows.

        The first process decides for all: batch statistics differ, and with them the scores.
        """
        assert self.run.validation is not None
        draft, rows = self.objective.draft, 0
        losses: list[Tensor] = []
        with reading(self.run.validation, self.run.seed, "validation", self.progress.epoch, device=self.device):
            for batch in self.run.validation.batches(1024) if self.processes.first else ():
                try:
                    prediction = draft.predict(batch.inputs, num_samples, seed=self.run.seed)
                    losses.append(-batch.weighted(prediction.log_prob(batch.targets)))
                except (NetworkError, DataError):  # no numbers: all processes hear of it by the score
                    losses.append(batch.targets.new_full((1,), math.nan, dtype=torch.float32))
                rows += len(batch.targets)
        total = sum(torch.stack([part.sum() for part in losses]).tolist()) if losses else 0.0
        if losses:
            self.row_losses["last"] = torch.cat(losses)
        return self.processes.broadcast_json(total / max(rows, 1), self.device)

    # -- what may go wrong ---------------------------------------------------------------------------------

    def _watch(self, norm: float, step: int) -> None:
        """One warning where gradient norms explode without ever turning into a NaN."""
        if not math.isfinite(norm):
            return  # half precision is finding its scale, or the next loss is no number
        usual = statistics.median(self.norms) if len(self.norms) >= 5 else None
        if usual and norm > EXPLOSION * usual and not self.warned and self.processes.first:
            self.warned = True
            warn(
                f"the gradient's norm at step {step} is {norm:.3g}, usually {usual:.3g}: noise with heavy tails "
                "trains to chance without a NaN; clip it with Training(clip_norm=...) or bound the noise"
            )
        self.norms = [*self.norms[-63:], norm]

    def _unsound(self) -> str | None:
        """The name of a parameter that is no longer finite, if there is one."""
        named = ((name, t) for name, t in self.objective.draft.named_parameters() if not is_shared(t))
        return next((name for name, tensor in named if not tensor.isfinite().all()), None)

    def _diagnosis(self, term: str, value: float | str, step: int, lr: float | None = None) -> str:
        note = ""
        if self.run.checkpoint is not None:
            note = f"; the last good checkpoint is kept at {self.run.checkpoint}"
        rate = f" (learning rate {lr:g})" if lr is not None else ""
        return (
            f"the {term} became {value} at step {step}{rate}; lower lr, add "
            f"warmup or clip_norm, or standardise the data{note}"
        )

    def interrupt(self) -> None:
        """Ask the run to save itself and end at its next step."""
        self.interrupted = True

    def save_soon(self) -> None:
        """Ask the run to save itself at its next step."""
        self.saved_at = -math.inf

    def _farewell(self) -> str:
        where = f"step {self.progress.step} of {self.plan.total or 'an open number'}"
        if self.run.checkpoint is None:
            return f"interrupted after {where}; nothing was saved, give checkpoint= to be able to go on"
        return f"interrupted after {where}; make the same call with checkpoint={str(self.run.checkpoint)!r} to go on"

    # -- checkpoints ---------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        if time.monotonic() - self.saved_at >= 60 * self.training.checkpoint_minutes:
            self._save()

    def _save(self) -> None:
        self.read_terms()
        self.saved_at = time.monotonic()
        if self.run.checkpoint is None or not self.processes.first:
            return
        self.stepper.settle(self.progress.step)
        if self._unsound():
            return  # a state whose next loss is no number must not replace a good one
        if self.account:
            self.progress.spent = self.account.spent()
        tensors, facts = self.stepper.state()
        everything = {
            **{f"draft/{name}": tensor for name, tensor in self.objective.draft.stored().items()},
            **{f"stepper/{name}": tensor for name, tensor in tensors.items()},
            **{f"best/{name}": tensor for name, tensor in self.best_state.items()},
            **{f"losses/{name}": tensor for name, tensor in self.row_losses.items()},
        }
        content = {"fingerprint": self.expected, "progress": vars(self.progress), "stepper": facts}
        checkpoint.save(self.run.checkpoint, everything, content)

    def _resume(self) -> None:
        """Process 0 reads the checkpoint and the others receive it, so that only one needs the file.

        Where there is none yet one is written at once: what cannot be saved is found before work starts.
        """
        assert self.run.checkpoint is not None
        stored = None
        if self.processes.first:
            validation = self.run.validation and self.run.validation.digest()
            self.expected = checkpoint.fingerprint(
                self.objective, self.training, self.run.seed, self.source.digest(), validation
            )
            stored = checkpoint.load(self.run.checkpoint, self.expected)
        if stored is not None:
            with checkpoint.altered(self.run.checkpoint):
                check_checkpoint(*stored, self.objective.draft, self.training)
        tensors, content = stored or ({}, None)
        content = self.processes.broadcast_json(content, self.device)
        if content is None:
            self._save()
            return
        shapes = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
        for name, (dtype, shape) in self.processes.broadcast_json(shapes, self.device).items():
            value = tensors.get(name, torch.empty(shape, dtype=getattr(torch, dtype))).to(self.device)
            self.processes.broadcast([value])
            tensors[name] = value
        self.progress = RunProgress(**content["progress"])
        if self.account:
            self.account.resumed(self.progress.spent)
        checkpoint.put(self.objective.draft.stored(), checkpoint.part(tensors, "draft"))
        with checkpoint.altered(self.run.checkpoint):
            self.stepper.restore(checkpoint.part(tensors, "stepper"), content["stepper"])
        self.best_state = checkpoint.part(tensors, "best")
        self.row_losses = checkpoint.part(tensors, "losses")

    def _planned(self) -> Plan:
        source, training = self.source, self.training
        if isinstance(source, OrderedSource):
            batch_size = training.batch_size or source.batch_size or 128
            self.plan = plan_run(training, source.num_data, None, batch_size)
            return plan_run(training, source.num_data, len(self._slices()), batch_size)
        if training.batch_size is not None and training.batch_size != source.batch_size:
            raise ConfigError(
                f"this loader's order is its own, so its batch size {source.batch_size} cannot become "
                f"{training.batch_size}; leave batch_size out, or give the dataset instead of the loader"
            )
        # A loader of batches that are what they are has no size of its own: the first one tells.
        batch_size = source.batch_size or len(next(source.batches(0)).targets)
        try:
            passes = len(source.loader)  # pyright: ignore[reportAttributeAccessIssue]
        except TypeError:  # a stream: schedules go by the number of rows it was said to have
            passes = math.ceil(self.objective.num_data / source.mean_weight / batch_size)
        return plan_run(training, source.num_data, passes, batch_size)


@contextmanager
def prepared(network: nn.Module, training: Training, *, compiled: bool) -> Iterator[None]:
    """The network in the memory format and compiled as asked, and as it was afterwards."""
    if training.channels_last:
        network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if compiled:
        network.compile()  # each of its shells is compiled by itself
    try:
        yield
    finally:
        network._compiled_call_impl = None
        if training.channels_last:
            network.to(memory_format=torch.contiguous_format)  # pyright: ignore[reportCallIssue]
