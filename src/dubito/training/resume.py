"""How far a run has come, and whether a checkpoint says so in numbers that can be true."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from torch import Tensor

from ..errors import StorageError
from ..posterior import Posterior
from ..storage.schema import Count, Multiplier, Recorded, conform
from .checkpoint import check_forms, forms_of, part
from .settings import Training


@dataclass
class RunProgress:
    """How far a run has come: plain facts that a checkpoint keeps.

    Attributes:
        step: steps made.
        epoch: epochs completed.
        passes: passes made in the present epoch.
        sums: terms of the loss, times rows, of the present epoch.
        rows: rows seen in it.
        history: one record per epoch.
        best: the lowest validation loss.
        best_step: the steps made when it was seen.
        waited: epochs since then.
        judged: the steps made at the last validation; −1 before the first.
        score: the loss of the last validation.
        done: whether the run has ended.
        ended: by what: "limit", "patience" or "budget".
        spent: seconds of the whole fit so far, where somebody keeps account of them.
    """

    step: Count = 0
    epoch: Count = 0
    passes: Count = 0
    sums: list[Recorded] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    rows: Count = 0
    history: list[dict[str, Recorded]] = field(default_factory=list)
    best: Recorded | None = None
    best_step: Count = 0
    waited: Count = 0
    judged: int = -1
    score: Recorded | None = None
    done: bool = False
    ended: Literal["", "limit", "patience", "budget"] = ""
    spent: Multiplier = 0.0


#: What every version has kept of a run's progress.
NEEDED = {"step", "epoch", "passes", "sums", "rows", "history", "done"}


class CheckpointContent(TypedDict):
    """What the checkpoint of a run holds beside its tensors."""

    fingerprint: dict[str, Any]
    progress: dict[str, Any]
    stepper: dict[str, Any]


def check_checkpoint(tensors: Mapping[str, Tensor], content: Any, draft: Posterior, training: Training) -> None:
    """Refuse a checkpoint whose numbers no run can have left.

    Args:
        tensors: of the checkpoint.
        content: of it.
        draft: the posterior that takes its tensors.
        training: how it is trained.
    """
    conform(content, CheckpointContent, "its content")
    if missing := NEEDED - content["progress"].keys():
        raise StorageError(f"its progress lacks {sorted(missing)[0]!r}")
    state = RunProgress(**content["progress"])
    conform(state, RunProgress, "its progress")
    if any("step" not in entry for entry in state.history):
        raise StorageError("its history lacks steps")
    limits = {
        "steps": (state.step, training.iterations),
        "epochs": (state.epoch, training.epochs),
        "steps of the best state": (state.best_step, state.step),
        "steps of the last validation": (state.judged, state.step),
    }
    for name, (value, most) in limits.items():
        if most is not None and value > most:
            raise StorageError(f"its run cannot have made {value} {name}: there are {most}")
    whole = len(state.history) == state.epoch and len(state.sums) == 3 and state.judged >= -1
    over = state.epoch == training.epochs or (state.step == training.iterations and not state.passes)
    if not whole or (over and not state.done) or (state.rows == 0) != (state.passes == 0):
        raise StorageError("its progress contradicts itself in epochs, rows or passes")
    forms = forms_of(draft.stored())
    check_forms(part(tensors, "draft"), forms, "the posterior", draft)
    best = part(tensors, "best")
    if bool(best) != (state.best is not None):
        raise StorageError("its best state and the loss of it do not belong together")
    check_forms(best, forms if best else {}, "the best state", draft)
    losses = part(tensors, "losses")
    shapes = {tuple(tensor.shape) for tensor in losses.values() if tensor.numel()}
    known = {*losses} <= {"best", "last"} and all(t.is_floating_point() and t.ndim == 1 for t in losses.values())
    if len(shapes) > 1 or not known:
        raise StorageError("its losses of validation rows do not belong together")
    if {name.partition("/")[0] for name in tensors} - {"draft", "stepper", "best", "losses"}:
        raise StorageError("it holds tensors that belong to nothing")
