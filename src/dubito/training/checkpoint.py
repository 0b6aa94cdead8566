"""Checkpoints: the whole state of a run in one file, refused where it belongs to another run."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import storage
from ..errors import StorageError
from ..storage.schema import conform
from .contract import ObjectiveLike
from .settings import Training

KIND = "checkpoint"
#: Shapes and dtypes of tensors by name.
Forms: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


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
    if not storage.exists(path):
        return None
    tensors, content = storage.read(path, KIND)
    with altered(path):
        conform(content, dict[str, Any], "its content")
        conform(content.get("fingerprint"), dict[str, Any], "its fingerprint")
    difference = first_difference(content["fingerprint"], expected)
    if difference is not None:
        name, was, now = difference
        raise StorageError(
            f"the checkpoint {path} belongs to another run: {name} was {was!r} there and is {now!r} here; "
            "give the same settings, data and network to go on, or another path to start anew"
        )
    return tensors, content


@contextmanager
def altered(path: Any) -> Iterator[None]:
    """Whatever fails inside, where a checkpoint's content is looked at and taken over, is the file's fault."""
    try:
        yield
    except Exception as error:
        raise StorageError(f"the checkpoint {path} is altered: {error}; remove it to start anew") from error


def forms_of(tensors: Mapping[str, Tensor]) -> Forms:
    """Shapes and dtypes by name."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def check_forms(tensors: Mapping[str, Tensor], forms: Forms, where: str, like: Any = None) -> None:
    """Refuse tensors of other names, shapes or dtypes than `forms` says, and what is not finite.

    Args:
        tensors: of a checkpoint.
        forms: what they must be.
        where: they belong, for messages.
        like: a posterior whose buffers may hold infinities (a mask's).
    """
    present = {} if like is None else like.stored()
    for name in [*forms, *tensors]:
        if name not in tensors or name not in forms:
            raise StorageError(f"{where} {'has' if name in tensors else 'lacks'} a tensor {name!r}")
        tensor, buffer = tensors[name], name in present and not isinstance(present[name], nn.Parameter)
        if (tuple(tensor.shape), tensor.dtype) != forms[name]:
            raise StorageError(
                f"{where} has {name!r} as {tuple(tensor.shape)} of {tensor.dtype}, not {forms[name]}"
            )
        if name.endswith("running_var") and (tensor < 0).any():
            raise StorageError(f"{where} has a negative variance in {name!r}")
        if not tensor.is_floating_point():
            continue
        finite = tensor.isfinite()
        if not (finite == present[name].isfinite().cpu() if buffer else finite).all():
            raise StorageError(f"{where} has NaN or infinity in {name!r}")


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
