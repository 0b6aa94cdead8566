import gzip
import io
import struct
import tarfile
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from dubito.data import readers

STREAM = np.random.default_rng(0)


def residuals(images: np.ndarray) -> np.ndarray:
    """The code of images [N, 3, H, W], pixel by pixel as the format's description says."""
    num_data, _, height, width = images.shape
    red, green, blue = (images[:, channel].astype(int) for channel in range(3))
    planes = [(red - green + 128) % 256, green, (blue - green + 128) % 256]
    code = np.empty((3, height, width, num_data), np.uint8)
    for channel, plane in enumerate(planes):
        for n in range(num_data):
            for i in range(height):
                for j in range(width):
                    west = plane[n, i, j - 1] if j else 0
                    north = plane[n, i - 1, j] if i else 0
                    corner = plane[n, i - 1, j - 1] if i and j else 0
                    code[channel, i, j, n] = (plane[n, i, j] - median([west, north, west + north - corner])) % 256
    return code


@pytest.mark.parametrize("shape", [(3, 3, 5, 7), (2, 3, 6, 4), (1, 3, 1, 1), (0, 3, 4, 4)])
def test_residuals_are_decoded_without_loss(shape):
    images = STREAM.integers(0, 256, shape, dtype=np.uint8)
    assert (readers.decoded(residuals(images)) == images).all()


def test_decoding_in_chunks_changes_nothing(monkeypatch):
    images = STREAM.integers(0, 256, (5, 3, 4, 4), dtype=np.uint8)
    monkeypatch.setattr(readers, "DECODED_AT_ONCE", 2)
    assert (readers.decoded(residuals(images)) == images).all()


def idx_file(path: Path, array: np.ndarray) -> Path:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))
    return path


def test_idx_files(tmp_path):
    parts = [STREAM.integers(0, 256, shape, dtype=np.uint8) for shape in [(6, 4, 3), (6,), (2, 4, 3), (2,)]]
    paths = [idx_file(tmp_path / f"{number}.gz", part) for number, part in enumerate(parts)]
    raw = readers.idx_grey(paths)
    assert raw.test is not None
    assert (raw.train[0] == parts[0][:, None]).all()
    assert (raw.train[1] == parts[1]).all()
    assert (raw.test[0] == parts[2][:, None]).all()
    alone = readers.idx_grey(paths[2:])
    assert alone.test is not None
    assert alone.train[0].shape == (0, 1, 4, 3)
    assert (alone.test[1] == parts[3]).all()


def test_idx_of_another_type_is_refused(tmp_path):
    path = tmp_path / "floats.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBBI", 0, 0, 13, 1, 1) + b"\0\0\0\0"))
    with pytest.raises(ValueError, match="must begin with 0, 0, 8"):
        readers.idx(path)


@pytest.mark.parametrize("label_bytes", [1, 2])
def test_cifar_archives(tmp_path, label_bytes):
    images = STREAM.integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    labels = STREAM.integers(0, 2, (5, label_bytes), dtype=np.uint8)
    records = np.concatenate([labels, images.reshape(5, -1)], axis=1)
    members = {"a.bin": records[:2], "b.bin": records[2:4], "test.bin": records[4:]}
    path = tmp_path / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        contents = {name: part.tobytes() for name, part in members.items()} | {"names.txt": b"cat\ndog\n\n"}
        for name, content in contents.items():
            info = tarfile.TarInfo(f"inner/{name}")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    raw = readers.binary_colour(["a.bin", "b.bin"], "test.bin", "names.txt", label_bytes=label_bytes)([path])
    assert raw.test is not None
    assert (raw.train[0] == images[:4]).all()
    assert (raw.train[1] == labels[:4, -1]).all()
    assert (raw.test[0] == images[4:]).all()
    assert raw.class_names == ("cat", "dog")


def test_text_tables(tmp_path):
    path = tmp_path / "table.data"
    path.write_text("y,a,b\ng,1.5,2\nh,-3,4e1\n")
    raw = readers.text_table([path], columns=(1, 2, 0), delimiter=",", skip_rows=1, codes={"g": 1.0, "h": 0.0})
    assert raw.train[0].tolist() == [[1.5, 2.0], [-3.0, 40.0]]
    assert raw.train[1].tolist() == [1.0, 0.0]


def test_pickles_are_never_opened(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez(path, X=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        readers.arrays(path)
