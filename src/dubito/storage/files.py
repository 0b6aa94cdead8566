"""One file form for everything kept: safetensors, one JSON key, and a checksum over the tensors."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import StorageError
from ..version import __version__

KEY = "dubito"
FORMAT = 1


def write(
    path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], content: dict[str, Any]
) -> None:
    """Write tensors and JSON content; the file appears whole or not at all.

    Args:
        path: where to; the folder must exist.
        kind: what the file holds, checked by `read`.
        tensors: by name; copies are made where they share memory.
        content: anything JSON can hold.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise StorageError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    header = {
        "format": FORMAT,
        "version": __version__,
        "kind": kind,
        "sha256": checksum(plain),
        "shapes": {name: list(tensor.shape) for name, tensor in plain.items()},
        "content": content,
    }
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(plain, temporary, metadata={KEY: json.dumps(header, allow_nan=True)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(
            temporary, 0o666 & ~umask
        )  # mkstemp gives 0600; a saved file should be as readable as others
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and content of a file written by `write`; truncated, altered or foreign files are refused."""
    path = Path(path)
    if not path.is_file():
        raise StorageError(f"there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(f"{path} is truncated or not a safetensors file: {error}") from error
    if KEY not in metadata:
        raise StorageError(f"{path} was not written by dubito: its metadata has no key {KEY!r}")
    try:
        header = json.loads(metadata[KEY])
        found = {name: header[name] for name in ("format", "kind", "sha256", "content")}
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{path} is altered: its metadata cannot be read ({error})") from error
    if found["format"] != FORMAT:
        raise StorageError(
            f"{path} has format {found['format']}, this version reads {FORMAT}; upgrade dubito"
        )
    if found["kind"] != kind:
        raise StorageError(f"{path} holds a {found['kind']}, expected a {kind}")
    if found["sha256"] != checksum(tensors):
        raise StorageError(f"{path} is altered: the sha256 of its tensors is not the one it was written with")
    return tensors, found["content"]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, dtypes, shapes and bytes of all tensors, in the order of their names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
