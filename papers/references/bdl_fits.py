"""One method on a data set with an HMC reference: fitted to the reference's own posterior, or as the library ships it.

"As the reference's posterior": its prior on every weight, temperature 1, the whole divergence, no search of a
precision, no scale, no early stopping. Methods that start from a MAP fit share it. "As shipped": the registry's method
by the protocol, whose MAP fit is shared likewise.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from dubito import Categorical, DeepEnsemble, methods
from dubito.inference.map import MAP
from dubito.method import Method
from dubito.posterior import Posterior
from dubito.prediction import CategoricalPrediction
from dubito.protocol import Recipe, pilot_of, recipe
from dubito.protocol import fit as protocol_fit
from dubito.training import AutoTraining, Training
from dubito.training.account import Account, accounted

from ..runner import provenance
from ..runner.experiment import Cell, Outcome
from ..runner.trained import checkpoint
from ..settings import explicit
from .bdl import Ground, scores
from .ivon import Ivon, IvonPosterior

Fitted = TypeVar("Fitted")
#: The two rows of every method: names of "data sets" in the results.
REFERENCE, SHIPPED = "reference-posterior", "as-shipped"
#: Raised when a change of the code changes what a MAP fit gives.
POINT_REVISION = 1


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All that decides the numbers.

    Args:
        method: with every setting spelled out.
        training: of the method; None where it stands around the MAP fit.
        point: the training of the MAP fit that it starts from; None where it starts from the network.
        point_std: the prior's standard deviation in the MAP fit.
        train_rows: at most so many training rows.
        validation_rows: likewise, where the protocol is steered.
        test_rows: likewise, evenly over all.
        num_samples: draws per prediction.
        recipe: what the protocol makes of the method under a prior as an example, so that a change of it makes results
            stale; None without the protocol.
    """

    method: Method | Ivon
    training: Training | AutoTraining | None
    point: Training | None
    point_std: float
    train_rows: int
    validation_rows: int
    test_rows: int
    num_samples: int = 32
    recipe: Recipe | None = None


def shared_by(cell: Cell) -> tuple[str, int]:
    """Methods of a row and seed share their MAP fit."""
    return cell.data, cell.split


def run_cells(cells: Sequence[Cell], data: Sequence[Ground], settings: Fit, steps: int | None) -> list[Outcome]:
    """A method with seeds."""
    return [run_cell(cell, ground, settings, steps) for cell, ground in zip(cells, data, strict=True)]


def run_cell(cell: Cell, ground: Ground, settings: Fit, steps: int | None) -> Outcome:
    """A method with one seed, which is the number of the cell's split."""
    ground = ground.cut(settings.train_rows, settings.validation_rows, settings.test_rows)
    if steps is not None:
        point = settings.point and _ended(settings.point, steps)
        training = settings.training and _ended(settings.training, steps)
        settings = replace(settings, point=point, training=training, num_samples=steps)
    posterior, seconds = fitted(cell, ground, settings, resumable=steps is None)
    started = time.process_time()
    probs = predicted(posterior, ground.test.inputs, settings.num_samples, cell.split)
    metrics, facts = scores(probs, ground)
    metrics |= {
        "bytes": float(file_bytes(posterior)),
        "seconds": seconds,
        "predict_seconds": time.process_time() - started,
    }
    if isinstance(posterior, Posterior):
        facts |= {"protocol": posterior.details.get("protocol"), "points": sorted(posterior.details.get("points", ()))}
    return Outcome(metrics=metrics, details=facts)


def _ended(training: Any, steps: int) -> Any:
    """A training of so many steps."""
    if isinstance(training, AutoTraining):
        return replace(training, iterations=steps)
    return replace(training, epochs=None, iterations=steps)


_points: dict[Any, tuple[tuple[Posterior, float], list[dict[str, Any]]]] = {}


def timed(make: Callable[[], Fitted]) -> tuple[Fitted, float]:
    """What is made, and its CPU-seconds, those before an interruption among them."""
    with accounted(Account()) as account:
        return make(), account.spent()


def point_of(cell: Cell, settings: Fit, make: Callable[[], Posterior]) -> tuple[Posterior, float]:
    """The MAP fit of a row and seed, made once for the methods that a process runs, and its CPU-seconds."""
    run = settings.point or settings.training, settings.point_std, settings.train_rows
    key = cell.data, cell.split, *run
    for old in [old for old in _points if old[:2] != key[:2]]:
        del _points[old]
    return provenance.shared(_points, key, lambda: timed(make))


def fitted(cell: Cell, ground: Ground, settings: Fit, *, resumable: bool) -> tuple[Posterior | IvonPosterior, float]:
    """The posterior, and the CPU-seconds of its fit, those of the MAP fit it stands on among them.

    Args:
        cell: which.
        ground: its rows.
        settings: its settings.
        resumable: whether a checkpoint lets an interrupted training go on.
    """
    if isinstance(settings.training, AutoTraining):
        return _shipped(cell, ground, settings, settings.training)
    network, before = ground.build(seed=cell.split), 0.0
    if settings.point is not None:
        point, before = point_of(cell, settings, lambda: _trained(cell, ground, settings, resumable))
        if isinstance(settings.method, MAP):
            return point, before
        network = point.fold(0)
    posterior, seconds = timed(lambda: _from(cell, network, ground, settings, resumable))
    return posterior, before + seconds


def _trained(cell: Cell, ground: Ground, settings: Fit, resumable: bool) -> Posterior:
    point = replace(settings, method=explicit(MAP, prior_std=settings.point_std), training=settings.point)
    fit = _from(cell, ground.build(seed=cell.split), ground, point, resumable)
    assert isinstance(fit, Posterior)
    return fit


def _from(cell: Cell, network: nn.Module, ground: Ground, settings: Fit, resumable: bool) -> Posterior | IvonPosterior:
    training = settings.training
    assert not isinstance(training, AutoTraining)
    if isinstance(settings.method, Ivon):
        assert training is not None and training.batch_size is not None
        record = {"training": training, "seed": cell.split}
        provenance.record(settings.method, network, ground.train, explicit(Categorical), **record)
        steps = training.iterations or (training.epochs or 0) * -(-len(ground.train.targets) // training.batch_size)
        return settings.method.descended(network, ground.train, steps, training.batch_size, cell.split)
    options: dict[str, Any] = {"training": training, "seed": cell.split, "progress": False}
    if isinstance(settings.method, DeepEnsemble):
        options["start"] = members_of(cell, ground)
    path = None
    if resumable and training is not None:
        # Without the draws at test time, which change no training.
        path = checkpoint(f"bdl/{cell.data}", POINT_REVISION, replace(settings, num_samples=1), cell.split)
        options["checkpoint"] = path
    posterior = provenance.fit(settings.method, network, ground.train, explicit(Categorical), **options)
    if path is not None:
        for file in path.parent.glob(f"{path.name}*"):
            file.unlink()
    return posterior


def _shipped(cell: Cell, ground: Ground, settings: Fit, auto: AutoTraining) -> tuple[Posterior, float]:
    common = ground.build(seed=cell.split), ground.train, explicit(Categorical)
    options: dict[str, Any] = {"validation": ground.validation, "seed": cell.split, "progress": False}
    point, before = point_of(
        cell, settings, lambda: provenance.fit(methods()["map"], *common, training=auto, **options)
    )
    method = settings.method
    assert isinstance(method, Method)
    if isinstance(method, MAP):
        return point, before
    steps = recipe(method, pilot_of(point), auto)
    provenance.record(steps.method, *common, training=steps.training, warm=steps.warm, seed=cell.split)
    start = members_of(cell, ground) if isinstance(method, DeepEnsemble) else None
    posterior, seconds = timed(lambda: protocol_fit(method, *common, auto, point=point, start=start, **options))
    return posterior, before + seconds


def members_of(cell: Cell, ground: Ground) -> Callable[[int], nn.Module]:
    """What members of an ensemble start from: the network with seeds that no cell has."""
    return lambda member: ground.build(seed=1000 * (cell.split + 1) + member)


def predicted(posterior: Posterior | IvonPosterior, inputs: Tensor, num_samples: int, seed: int) -> Tensor:
    """Class probabilities [B, C] in double precision."""
    if isinstance(posterior, IvonPosterior):
        return posterior.probs(inputs, num_samples, seed)
    prediction = posterior.predict(inputs, num_samples, seed=seed)
    assert isinstance(prediction, CategoricalPrediction)
    return prediction.probs.double()


def file_bytes(posterior: Posterior | IvonPosterior) -> int:
    """The size of the posterior's file."""
    if isinstance(posterior, IvonPosterior):
        return posterior.file_bytes
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior.safetensors"
        posterior.save(path)
        return path.stat().st_size
