"""Checkpoints: the whole state of a run in one file, refused where it belongs to another run."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import storage
from ..errors import StorageError
from .contract import ObjectiveLike
from .settings import Training

KIND = "checkpoint"


def fingerprint(
    objective: ObjectiveLike, training: Training, seed: int, data: str, validation: str | None
) -> dict[str, Any]:
    """What makes two runs the same run; the number of processes and the first weights do not.

    Args:
        objective: what is trained.
        training: how.
        seed: of order and noise.
        data: fingerprint of the training rows.
        validation: fingerprint of the validation rows, if any.
    """
    draft = objective.draft
    modules = {name or "(itself)": _described(module) for name, module in draft.network.named_modules()}
    for name in objective.modes:
        modules[name] += " in evaluation mode"
    settings = storage.encode(training)
    for name in ("timeout", "checkpoint_minutes"):  # they change nothing in the result
        settings.pop(name)
    return {
        "method": storage.encode(draft.method),
        "likelihood": storage.encode(draft.likelihood.settings),
        "training": settings,
        "seed": int(seed),
        "num_data": int(objective.num_data),
        "data": data,
        "validation": validation,
        "network": modules,
        "tensors": {name: _form(tensor) for name, tensor in draft.stored().items()},
    }


def _described(module: nn.Module) -> str:
    """A module's class, with its settings where they are sure to read the same in every run."""
    kind = type(module)
    settings = f"({module.extra_repr()})" if kind.__module__.startswith("torch.nn.") else ""
    return kind.__name__ + settings


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{' trained' if tensor.requires_grad else ''}"


def save(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], content: dict[str, Any]) -> None:
    """Write a checkpoint in one piece."""
    storage.write(path, KIND, tensors, content)


def load(
    path: str | os.PathLike[str], expected: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The checkpoint at `path`, None where there is none yet, an error where it belongs to another run."""
    if not Path(path).exists():
        return None
    if Path(path).is_dir():
        raise StorageError(f"checkpoint must be a file, got the folder {path}; give the name of a file in it")
    tensors, content = storage.read(path, KIND)
    difference = first_difference(content["fingerprint"], expected)
    if difference is not None:
        name, was, now = difference
        raise StorageError(
            f"the checkpoint {path} belongs to another run: {name} was {was!r} there and is {now!r} here; "
            "give the same settings, data and network to go on, or another path to start anew"
        )
    return tensors, content


def first_difference(was: Any, now: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first entry in which two nested plain values differ, with both values."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in [*was, *(key for key in now if key not in was)]:
            inner = f"{name}.{key}" if name else key
            difference = first_difference(was.get(key, "absent"), now.get(key, "absent"), inner)
            if difference:
                return difference
        return None
    return None if was == now else (name, was, now)


def part(tensors: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `key/`, without it."""
    return {name[len(key) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors of the same names."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
