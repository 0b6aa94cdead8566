"""The active-learning loop: fit, judge, ask for the labels that would teach most, and fit again."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from .. import seeds, storage
from ..errors import DataError, StorageError, require_count
from ..fingerprints import described, modules_of, weights_of
from ..hints import Checked, checked
from ..inputs import TensorOptions, take
from ..likelihoods import Likelihood, settings_of
from ..method import Method
from ..networks import copied, frozen_modes
from ..posterior import MAX_ROWS, Posterior
from ..prediction import PredictionOptions
from ..sources import TensorSource, as_source
from ..storage.schema import conform
from ..training import RunFacts, Training, told
from ..training.checkpoint import REVISION, altered, require_same
from .acquisition import Acquisition, Selection
from .curves import Curve, CurvePoint

KIND = "active learning"


@dataclass(frozen=True, kw_only=True)
class ActiveLearning(Checked):
    """How rows are asked for, step by step.

    Args:
        method: any method; it is fitted anew at every step, from the weights it is given.
        acquisition: what a row is worth, such as `OutputVariance()` or `Random()`.
        selection: how many rows a step takes, and how.
        steps: how often labels are asked for; the curve has one point more.
        initial: rows that are labelled from the start, drawn by seed.
        training: how to train; None takes the method's default.
        num_samples: draws of predictions.
    """

    method: Method
    acquisition: Acquisition
    selection: Selection = Selection()
    steps: int = 20
    initial: int = 20
    training: Training | None = None
    num_samples: int = 32

    def __post_init__(self) -> None:
        require_count(steps=self.steps, initial=self.initial, num_samples=self.num_samples)

    @checked
    def run(
        self,
        net: nn.Module,
        pool: Any,
        test: Any,
        likelihood: Likelihood,
        *,
        seed: int = 0,
        finish: Callable[[Posterior], Posterior] | None = None,
        options: dict[str, Any] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        on_point: Callable[[CurvePoint], None] | None = None,
    ) -> Curve:
        """One run over one split; the network is not modified.

        Labels of the pool are looked at only once they are asked for.

        Args:
            net: the network every fit starts from.
            pool: rows with their labels, a pair of tensors or arrays.
            test: rows to judge every fit by.
            likelihood: as in `fit`.
            seed: of the first rows, of fits and of draws.
            finish: what is done to a posterior before it is used, such as `lambda p: p.tuned()`.
            options: what else `predict` takes when the test rows are judged, such as {"linearised": True}.
            checkpoint: a file that lets an interrupted run go on after its last step.
            progress: show a bar; None on terminals only.
            on_point: called with every point of the curve.
        """
        self.acquisition.check(settings_of(likelihood))
        settings = {"num_samples": self.num_samples, "seed": seed, "max_rows": MAX_ROWS, **(options or {})}
        fitted = getattr(self.method, "of", None) or self.method  # of an ensemble: what each member is
        fitted.posterior_type.check_form(PredictionOptions(**settings), self.method)
        network = copied(net).eval()
        like = TensorOptions.of(network)
        source = as_source(pool, like, "pool")
        if not isinstance(source, TensorSource):
            raise DataError(f"pool must be a pair of tensors or arrays, got {type(pool).__name__}")
        rows, needed = source.num_data, self.initial + self.steps * self.selection.size
        if rows < needed:
            raise DataError(
                f"{self.initial} rows and {self.steps} steps of {self.selection.size} need a pool of at least {needed} "
                f"rows, got {rows}"
            )
        judged = as_source(test, like, "test")  # what cannot be read is found before work starts
        state = _LoopState.begun(self, source, seed, checkpoint)
        if state.path is not None:
            state.resume(
                {
                    "revision": REVISION,
                    "loop": storage.encode(self),
                    "likelihood": storage.encode(likelihood),
                    "seed": int(seed),
                    "options": storage.encode(options or {}),
                    "finish": described(finish),
                    "data": source.digest(),
                    "test": judged.digest(),
                    "network": modules_of(network, frozen_modes(net)),
                    "first weights": weights_of(network),
                },
                source.num_data,
            )
        facts = RunFacts(title="active learning", total=self.steps + 1, done=len(state.points))
        with told(facts, progress) as watching:
            while len(state.points) <= self.steps:
                step_seed, began = seeds.derived(seed, "step", len(state.points)), time.process_time()
                labelled = torch.tensor(state.labelled, device=like.device)
                weights = () if source.batch.weights is None else (source.batch.weights[labelled],)
                part = (take(source.batch.inputs, labelled), source.batch.targets[labelled], *weights)
                posterior = self.method.fit(
                    net, part, likelihood, training=self.training, seed=step_seed, progress=False
                )
                posterior = finish(posterior) if finish else posterior
                fitted, last = time.process_time(), len(state.points) == self.steps
                chosen = () if last else self._chosen(posterior, source, state.labelled, step_seed)
                acquired = time.process_time()
                judged_by = {"num_samples": self.num_samples, "seed": step_seed, **(options or {})}
                values = posterior.evaluate(test, **judged_by)
                point = CurvePoint(
                    num_labelled=len(state.labelled),
                    metrics=values,
                    chosen=chosen,
                    fit_seconds=fitted - began,
                    acquisition_seconds=acquired - fitted,
                )
                state.add(point)
                watching.step(len(state.points), values)
                if on_point:
                    on_point(point)
        return Curve(points=tuple(state.points))

    def _chosen(
        self, posterior: Posterior, source: TensorSource, labelled: Sequence[int], seed: int
    ) -> tuple[int, ...]:
        """The rows whose labels are asked for next."""
        left = _others(source.num_data, labelled)
        pool = take(source.batch.inputs, left.to(source.batch.targets.device))
        scores = self.acquisition.scores(posterior, pool, num_samples=self.num_samples, seed=seed)
        return tuple(left[self.selection.choose(scores, seed=seed)].tolist())


def _others(rows: int, labelled: Sequence[int]) -> Tensor:
    """The numbers of the rows that have no label yet."""
    free = torch.ones(rows, dtype=torch.bool)
    free[list(labelled)] = False
    return free.nonzero().flatten()


class LoopContent(TypedDict):
    """What a checkpoint holds."""

    expected: dict[str, Any]
    points: list[dict[str, Any]]


@dataclass
class _LoopState:
    """How far a run has come; written after every step."""

    labelled: list[int]
    points: list[CurvePoint]
    path: Path | None
    expected: dict[str, Any]

    @classmethod
    def begun(
        cls, loop: ActiveLearning, source: TensorSource, seed: int, path: str | os.PathLike[str] | None
    ) -> "_LoopState":
        """The first state."""
        stream = seeds.generator(seed, "initial rows")
        first = torch.randperm(source.num_data, generator=stream)[: loop.initial].tolist()
        return cls(first, [], None if path is None else Path(path), {})

    def resume(self, expected: dict[str, Any], rows: int) -> None:
        """Go on from the checkpoint, if there is one, after checking that it is of the `expected` run.

        Args:
            expected: facts of the run.
            rows: of the pool.
        """
        assert self.path is not None
        self.expected = expected
        if not storage.exists(self.path):
            self.save()  # what cannot be written is found before work starts
            return
        _, content = storage.read(self.path, KIND)
        with altered(self.path):
            points = self.points_of(content, rows)
        require_same(self.path, content["expected"], expected)
        for point in points:
            self.points.append(point)
            self.labelled += point.chosen

    def points_of(self, content: Any, rows: int) -> list[CurvePoint]:
        """The points that a file holds, after checking that a run over so many rows can have left them."""
        conform(content, LoopContent, "its content")
        points = [CurvePoint(**{**point, "chosen": tuple(point["chosen"])}) for point in content["points"]]
        labelled = [*self.labelled]
        for number, point in enumerate(points):
            conform(point, CurvePoint, f"point {number}")
            if point.num_labelled != len(labelled):
                raise StorageError(f"point {number} must have {len(labelled)} labelled rows, got {point.num_labelled}")
            labelled += point.chosen
        if len({*labelled}) != len(labelled) or not all(0 <= row < rows for row in labelled):
            raise StorageError("rows were chosen twice, or are none of the pool")
        return points

    def add(self, point: CurvePoint) -> None:
        """Take in a point, and the rows it chose."""
        self.points.append(point)
        self.labelled += point.chosen
        self.save()

    def save(self) -> None:
        """Write the state, if it is to be kept."""
        if self.path is not None:
            points = [{**vars(point), "chosen": list(point.chosen)} for point in self.points]
            storage.write(self.path, KIND, {}, {"expected": self.expected, "points": points})
