"""Checkpoints: the whole state of a run in one file, refused where it belongs to another run."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .. import storage
from ..errors import StorageError
from ..fingerprints import first_difference, modules_of, weights_of
from ..storage.schema import conform
from ..storage.whole import remove_given_up
from .contract import ObjectiveLike
from .settings import Training

KIND = "checkpoint"
#: Of fingerprints: the first one told neither first weights nor all rows.
REVISION = 2
#: Shapes and dtypes of tensors by name.
Forms: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


def fingerprint(
    objective: ObjectiveLike, training: Training, seed: int, data: str, validation: str | None
) -> dict[str, Any]:
    """What makes two runs the same run; the number of processes does not.

    Args:
        objective: what is trained.
        training: how.
        seed: of order and noise.
        data: fingerprint of the training rows.
        validation: fingerprint of the validation rows, if any.
    """
    draft = objective.draft
    settings = storage.encode(training)
    for name in ("timeout", "checkpoint_minutes"):  # they change nothing in the result
        settings.pop(name)
    return {
        "revision": REVISION,
        "method": storage.encode(draft.method),
        "likelihood": storage.encode(draft.likelihood.settings),
        "training": settings,
        "seed": int(seed),
        "num_data": int(objective.num_data),
        "data": data,
        "validation": validation,
        "network": modules_of(draft.network, objective.modes),
        "tensors": {name: _form(tensor) for name, tensor in draft.stored().items()},
        "first weights": weights_of(draft.network),
    }


def of_fit(method: Any, prepared: Any) -> dict[str, Any]:
    """The same of a fit that descends no gradient: chains, or a filter."""
    return {
        "revision": REVISION,
        "method": storage.encode(method),
        "likelihood": storage.encode(prepared.likelihood.settings),
        "seed": int(prepared.run.seed),
        "data": prepared.source.digest(),
        "network": modules_of(prepared.network, {}),
        "first weights": weights_of(prepared.network),
    }


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}{' trained' if tensor.requires_grad else ''}"


def save(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], content: dict[str, Any]) -> None:
    """Write a checkpoint in one piece."""
    storage.write(path, KIND, tensors, content)


def load(path: str | os.PathLike[str], expected: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The checkpoint at `path`, None where there is none yet, an error where it belongs to another run."""
    if not storage.exists(path):
        return None
    remove_given_up(Path(path))  # a run that is nearly done may write no more
    tensors, content = storage.read(path, KIND)
    with altered(path):
        conform(content, dict[str, Any], "its content")
        conform(content.get("fingerprint"), dict[str, Any], "its fingerprint")
    require_same(path, content["fingerprint"], expected)
    return tensors, content


def require_same(path: str | os.PathLike[str], was: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse the fingerprint of another run."""
    if was.get("revision") != REVISION:
        raise StorageError(
            f"the checkpoint {path} was written by another version of dubito, whose checkpoints tell other facts of "
            "their run: whether it is this one cannot be known; give another path to start anew"
        )
    with altered(path):
        conform(was.get("network"), dict[str, dict[str, Any]], "its fingerprint's network")
        # settings that the version which wrote it had not: off, they change nothing
        then = was.get("likelihood")
        added = {
            key
            for key, value in now.get("likelihood", {}).items()
            if (value is None or value is False) and isinstance(then, dict) and key not in then
        }
        here = now if not added else {**now, "likelihood": _without(now["likelihood"], added)}
        difference = first_difference(_read_by_both(was, here), _read_by_both(here, was))
    if difference is not None:
        name, there, here = difference
        raise StorageError(
            f"the checkpoint {path} belongs to another run: {name} was {there!r} there and is {here!r} here; "
            "give the same settings, data and network, built with the same weights (torch.manual_seed before it), "
            "to go on, or another path to start anew"
        )


def _without(settings: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in names}


def _read_by_both(fingerprint: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Without the attributes of PyTorch's modules that another version of PyTorch does not have."""
    modules, others = fingerprint.get("network", {}), other.get("network", {})
    shared = {
        name: {key: value for key, value in module.items() if key in others.get(name, module)}
        if module["class"].startswith("nn.")
        else module
        for name, module in modules.items()
    }
    return {**fingerprint, "network": shared}


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
            raise StorageError(f"{where} has {name!r} as {tuple(tensor.shape)} of {tensor.dtype}, not {forms[name]}")
        if name.endswith("running_var") and (tensor < 0).any():
            raise StorageError(f"{where} has a negative variance in {name!r}")
        if not tensor.is_floating_point():
            continue
        finite = tensor.isfinite()
        if not (finite == present[name].isfinite().cpu() if buffer else finite).all():
            raise StorageError(f"{where} has NaN or infinity in {name!r}")


def part(tensors: Mapping[str, Tensor], key: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `key/`, without it."""
    return {name[len(key) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{key}/")}


@torch.no_grad()
def put(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors of the same names."""
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
