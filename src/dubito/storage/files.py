"""One file form for everything kept: safetensors, one JSON key, and a checksum over the tensors."""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import StorageError
from ..version import __version__
from .whole import file_path, whole_file

KEY = "dubito"
FORMAT = 1


def write(path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], content: dict[str, Any]) -> None:
    """Write tensors and JSON content; the file appears whole or not at all.

    Args:
        path: where to; the folder must exist.
        kind: what the file holds, checked by `read`.
        tensors: by name; copies are made where they share memory.
        content: anything JSON can hold.
    """
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    try:
        content = json.loads(json.dumps(content))  # as a reader will find it
    except (TypeError, ValueError) as error:
        raise StorageError(f"cannot write {path}: its content is not plain JSON ({error})") from error
    header = {
        "format": FORMAT,
        "version": __version__,
        "kind": kind,
        "sha256": checksum(plain),
        "shapes": {name: list(tensor.shape) for name, tensor in plain.items()},
        "content": content,
    }
    metadata = {KEY: json.dumps({**header, "metadata_sha256": json_checksum(header)})}
    with whole_file(path) as temporary:
        save_file(plain, temporary, metadata=metadata)


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file at a path; what can be none is refused."""
    return file_path(path, "read")[1]


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and content of a file written by `write`; truncated, altered or other files are refused."""
    target, exists = file_path(path, "read")
    if not exists:
        raise StorageError(f"there is no file {path}")
    try:
        with target.open("rb"):  # says what the system has against it
            pass
        with safe_open(target, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies: the file is mapped into memory, and what happens to it later must not reach the tensors.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    except Exception as error:  # whatever safetensors says of bytes that are none of its own
        raise StorageError(f"{path} is truncated or not a safetensors file: {error}") from error
    if KEY not in metadata:
        raise StorageError(f"{path} was not written by dubito: its metadata has no key {KEY!r}")
    try:
        header = json.loads(metadata[KEY])
        if header["format"] != FORMAT:
            raise StorageError(f"{path} has format {header['format']}, this version reads {FORMAT}; upgrade dubito")
        metadata_sha256 = header.pop("metadata_sha256")
        found_kind, tensors_sha256, content = header["kind"], header["sha256"], header["content"]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is altered: its metadata cannot be read ({error})") from error
    for what, sha256, actual in (
        ("metadata", metadata_sha256, json_checksum(header)),
        ("tensors", tensors_sha256, checksum(tensors)),
    ):
        if sha256 != actual:
            raise StorageError(f"{path} is altered: its {what} have another sha256 than when it was written")
    if found_kind != kind:
        raise StorageError(f"{path} holds a {found_kind}, expected a {kind}")
    return tensors, content


def json_checksum(value: Any) -> str:
    """sha256 over a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
