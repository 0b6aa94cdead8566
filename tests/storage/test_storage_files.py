"""The one file form: whole or not at all, and refused when a byte is not as it was written."""

import hashlib
import json
import math
import os
import stat

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dubito import StorageError, __version__, storage
from dubito.storage import files

TENSORS = {
    "network.0.weight": torch.arange(6.0).reshape(2, 3),
    "network.steps": torch.tensor(7),
    "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "double": torch.tensor([math.pi], dtype=torch.float64),
    "flags": torch.tensor([True, False]),
    "empty": torch.zeros(0, 3),
}
CONTENT = {
    "method": {"type": "MAP", "prior_std": 0.1},
    "history": [{"loss": 0.1 + 0.2, "bad": float("inf")}],
    "ü": None,
}


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "one.safetensors"
    storage.write(target, "posterior", TENSORS, CONTENT)
    return target


def same(tensors, content) -> bool:
    alike = set(tensors) == set(TENSORS) and content == CONTENT
    return alike and all(
        tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items()
    )


def test_what_is_written_is_read(path):
    assert same(*storage.read(path, "posterior"))
    assert same(*storage.read(str(path), "posterior"))


def test_the_metadata_are_one_json_key(path):
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert list(metadata) == ["dubito"]
    header = json.loads(metadata["dubito"])
    assert header["format"] == 1 and header["version"] == __version__ and header["kind"] == "posterior"
    assert header["shapes"] == {name: list(tensor.shape) for name, tensor in TENSORS.items()}
    assert header["content"] == CONTENT
    digest = hashlib.sha256()
    for name in sorted(TENSORS):
        tensor = TENSORS[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b"")
    assert header["sha256"] == digest.hexdigest()


def test_the_same_content_gives_the_same_bytes(path, tmp_path):
    storage.write(tmp_path / "two.safetensors", "posterior", TENSORS, CONTENT)
    assert (tmp_path / "two.safetensors").read_bytes() == path.read_bytes()


def test_shared_memory_and_strides_are_no_hindrance(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "whole": whole,
        "same": whole,
        "turned": whole.T,
        "row": whole[1],
        "grad": whole.clone().requires_grad_(),
    }
    storage.write(tmp_path / "x", "posterior", tensors, {})
    found, _ = storage.read(tmp_path / "x", "posterior")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_truncated_file_is_refused(path):
    data = path.read_bytes()
    for length in [*range(0, len(data), 37), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(StorageError, match="truncated or not a safetensors file"):
            storage.read(path, "posterior")
    path.write_bytes(data + b"\0")
    with pytest.raises(StorageError, match="truncated or not"):
        storage.read(path, "posterior")


def test_a_file_with_any_other_byte_is_refused_or_says_the_same(path):
    data = path.read_bytes()
    refused = 0
    positions = range(0, len(data), 3)
    for position in positions:
        altered = bytearray(data)
        altered[position] ^= 1 << (position // 3 % 8)
        path.write_bytes(altered)
        try:
            found = storage.read(path, "posterior")
        except StorageError as error:
            refused += 1
            assert "one.safetensors" in str(error)
        else:
            assert same(*found), position  # a space for another, or an upper-case letter in an escape
    assert refused > 0.97 * len(positions)


def rewritten(path, change) -> None:
    """The file with its header changed and all checksums made to fit again, as a forger would."""
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["dubito"])
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    header.pop("metadata_sha256")
    header = change(header) or header
    if isinstance(header, dict):
        header["metadata_sha256"] = files.json_checksum(header)
    save_file(tensors, path, metadata={"dubito": json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.update(format=2), "has format 2, this version reads 1; upgrade dubito"),
        (lambda header: header.pop("content") and None, "metadata cannot be read .*content"),
        (lambda header: header.pop("sha256") and None, "metadata cannot be read"),
        (lambda header: header.pop("format") and None, "metadata cannot be read"),
        (lambda header: [1, 2], "metadata cannot be read"),
        (lambda header: header.update(kind="checkpoint"), "holds a checkpoint, expected a posterior"),
        (lambda header: header.update(sha256="0" * 64), "its tensors have another sha256"),
    ],
)
def test_headers_that_do_not_fit_are_refused(path, change, message: str):
    rewritten(path, change)
    with pytest.raises(StorageError, match=message):
        storage.read(path, "posterior")


def test_changed_settings_are_refused(path):
    data = path.read_bytes()
    assert data.count(b"0.1,") + data.count(b"0.1}") == 1
    path.write_bytes(data.replace(b": 0.1}", b": 0.9}"))
    with pytest.raises(StorageError, match="its metadata have another sha256"):
        storage.read(path, "posterior")


def test_files_of_others_are_refused(tmp_path):
    for name, write in {
        "plain": lambda path: save_file({"a": torch.zeros(2)}, path),
        "other": lambda path: save_file({"a": torch.zeros(2)}, path, metadata={"format": "pt"}),
    }.items():
        write(tmp_path / name)
        with pytest.raises(StorageError, match="was not written by dubito"):
            storage.read(tmp_path / name, "posterior")
    save_file({"a": torch.zeros(2)}, tmp_path / "text", metadata={"dubito": "not json"})
    with pytest.raises(StorageError, match="metadata cannot be read"):
        storage.read(tmp_path / "text", "posterior")
    (tmp_path / "words").write_text("a text that is no safetensors file")
    with pytest.raises(StorageError, match="not a safetensors file"):
        storage.read(tmp_path / "words", "posterior")
    for missing, words in ((tmp_path / "nowhere", "there is no file"), (tmp_path, "it is a folder")):
        with pytest.raises(StorageError, match=words):
            storage.read(missing, "posterior")


def test_pickles_are_never_opened(tmp_path, monkeypatch):
    """A file that torch.save wrote would run code when loaded; here nothing of it is read."""

    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("code of the file ran",))

    torch.save(Trap(), tmp_path / "trap")
    with pytest.raises(StorageError, match="not a safetensors file"):
        storage.read(tmp_path / "trap", "posterior")


def test_tensors_do_not_follow_the_file(path):
    """Tensors are copies: the file is free to go or to be overwritten."""
    found = storage.read(path, "posterior")
    with open(path, "r+b") as file:
        file.write(b"\0" * os.path.getsize(path))
    assert same(*found)
    path.unlink()
    assert same(*found)


def test_a_failed_write_leaves_what_was_there(path, monkeypatch):
    before = path.read_bytes()
    with pytest.raises(StorageError, match="not plain JSON"):
        storage.write(path, "posterior", TENSORS, {"function": print})

    def broken(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(files, "save_file", broken)
    with pytest.raises(StorageError, match="no space left on device"):
        storage.write(path, "posterior", TENSORS, CONTENT)
    monkeypatch.setattr(files, "save_file", lambda *args, **kwargs: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        storage.write(path, "posterior", TENSORS, CONTENT)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]  # nothing half written stays behind


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match=r"the folder .* does not exist; create it first"):
        storage.write(tmp_path / "a" / "b", "posterior", TENSORS, {})
    with pytest.raises(StorageError, match="it is a folder"):
        storage.write(tmp_path, "posterior", TENSORS, {})


def test_a_saved_file_is_as_readable_as_others(path, tmp_path):
    (tmp_path / "other").write_text("")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_checksums_tell_names_shapes_types_and_values_apart():
    x = torch.arange(6.0)
    sums = [
        files.checksum(tensors)
        for tensors in (
            {"a": x},
            {"b": x},
            {"a": x.reshape(2, 3)},
            {"a": x.double()},
            {"a": x + 1},
            {"a": x, "b": x},
            {},
        )
    ]
    assert len(set(sums)) == len(sums)
    assert files.checksum({"a": x, "b": x + 1}) == files.checksum({"b": x + 1, "a": x})
    assert files.checksum({"a": x.clone().requires_grad_()}) == files.checksum({"a": x})
