"""Bytes that lie, written anew after the attacks that safetensors publishes: refused, quickly, and without memory."""

import io
import json
import resource
import struct
import time
import zipfile

import pytest
import torch

from dubito import StorageError, storage

TENSORS = {"a": torch.arange(4.0), "b": torch.arange(2.0)}
#: Bytes of a header that safetensors reads at most.
MOST_HEADER = 100_000_000


def parts(data: bytes) -> tuple[dict, bytes]:
    """Header and numbers of a file."""
    (size,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def whole(header: object, numbers: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + numbers


@pytest.fixture
def written(tmp_path) -> bytes:
    storage.write(tmp_path / "p", "posterior", TENSORS, {"x": 1})
    return (tmp_path / "p").read_bytes()


def longer(header, numbers):
    return struct.pack("<Q", 1 << 62) + json.dumps(header).encode() + numbers


def shorter(header, numbers):
    return struct.pack("<Q", 2) + json.dumps(header).encode() + numbers


def just_too_long(header, numbers):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) + len(numbers) + 1) + text + numbers


def overlapping(header, numbers):
    header["b"]["data_offsets"] = [0, 8]
    return whole(header, numbers)


def hole(header, numbers):
    header["b"]["data_offsets"] = [24, 32]
    return whole(header, numbers + bytes(8))


def beyond(header, numbers):
    header["b"]["data_offsets"] = [16, 1 << 40]
    return whole(header, numbers)


def backwards(header, numbers):
    header["b"]["data_offsets"] = [24, 16]
    return whole(header, numbers)


def negative(header, numbers):
    header["b"]["data_offsets"] = [-8, 0]
    return whole(header, numbers)


def other_shape(header, numbers):
    header["b"]["shape"] = [1 << 40]
    return whole(header, numbers)


def overflowing_shape(header, numbers):
    header["b"]["shape"] = [1 << 32, 1 << 32, 2]
    return whole(header, numbers)


def other_dtype(header, numbers):
    header["b"]["dtype"] = "O64"
    return whole(header, numbers)


def twice(header, numbers):
    text = json.dumps(header)
    return whole((text[:-1] + ', "a": ' + json.dumps(header["b"]) + "}").encode(), numbers)


def metadata_twice(header, numbers):
    text = json.dumps(header)
    other = json.dumps({"dubito": json.dumps({"format": 1})})
    return whole((text[:-1] + f', "__metadata__": {other}' + "}").encode(), numbers)


def huge_header(header, numbers):
    header["__metadata__"]["filler"] = "x" * (MOST_HEADER + 1)
    return whole(header, numbers)


def not_utf8(header, numbers):
    return whole(json.dumps(header).encode().replace(b'"a"', b'"\xff\xfe"'), numbers)


def deep(header, numbers):
    return whole(b"[" * 200_000 + b"]" * 200_000, numbers)


def deep_metadata(header, numbers):
    header["__metadata__"]["dubito"] = "[" * 200_000 + "]" * 200_000
    return whole(header, numbers)


def many_digits(header, numbers):
    header["__metadata__"]["dubito"] = '{"format": 1, "content": ' + "9" * 5_000 + "}"
    return whole(header, numbers)


def no_json(header, numbers):
    return whole(b"{'a': 1}", numbers)


def list_header(header, numbers):
    return whole([header], numbers)


def more_after_the_end(header, numbers):
    return whole(header, numbers + b"#!/bin/sh\ntrue\n")


def archive(header, numbers):
    target = io.BytesIO(whole(header, numbers))
    target.seek(0, io.SEEK_END)
    with zipfile.ZipFile(target, "a") as file:  # a file that is an archive, too
        file.writestr("data.pkl", b"cos\nsystem\n(S'true'\ntR.")
    return target.getvalue()


def pickled(header, numbers):
    target = io.BytesIO()
    torch.save(TENSORS, target)
    return target.getvalue()


ATTACKS = [
    longer, shorter, just_too_long, overlapping, hole, beyond, backwards, negative, other_shape, overflowing_shape,
    other_dtype, twice, metadata_twice, huge_header, not_utf8, deep, deep_metadata, many_digits, no_json, list_header,
    more_after_the_end, archive, pickled,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_bytes_that_lie_are_refused(tmp_path, written: bytes, attack):
    path = tmp_path / "attacked"
    path.write_bytes(attack(*parts(written)))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(StorageError):
        storage.read(path, "posterior")
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kilobytes


@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 8, b"\xff" * 8, b"\0" * 100, b"{}", b"\2" + b"\0" * 7 + b"{}"])
def test_next_to_nothing_is_refused(tmp_path, data: bytes):
    (tmp_path / "p").write_bytes(data)
    with pytest.raises(StorageError):
        storage.read(tmp_path / "p", "posterior")


def test_the_helper_rebuilds_what_was_written(tmp_path, written: bytes):
    """The attacks fail for what they change, and for nothing else."""
    (tmp_path / "p").write_bytes(whole(*parts(written)))
    tensors, content = storage.read(tmp_path / "p", "posterior")
    assert content == {"x": 1} and torch.equal(tensors["a"], TENSORS["a"])
