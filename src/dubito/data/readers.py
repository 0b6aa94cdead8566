"""Files as arrays: this project's npz archives, and the publishers' own formats."""

import gzip
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from .registry import Pair, Raw

SIDE = 32  # CIFAR's height and width
DECODED_AT_ONCE = 1000  # images whose working memory fits a processor's cache: twice as fast as all at once


def arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz archive, each unpacked once; never a pickle."""
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def npz_table(paths: Sequence[Path], *, feature_names: tuple[str, ...] = (), labels: Sequence[int] = ()) -> Raw:
    """A table `X`, `y`, with `feature_names` in the file or given; where `labels` are, their places are the targets."""
    stored = arrays(paths[0])
    targets = np.array([labels.index(label) for label in stored["y"]]) if labels else stored["y"]
    return Raw(train=(stored["X"], targets), feature_names=tuple(map(str, stored.get("feature_names", feature_names))))


def text_table(
    paths: Sequence[Path],
    *,
    columns: Sequence[int],
    feature_names: tuple[str, ...] = (),
    delimiter: str | None = None,
    skip_rows: int = 0,
    codes: dict[str, float] | None = None,
) -> Raw:
    """A table of text, of which `columns` are read, the target last; `codes` translate the target's words."""
    converters = {columns[-1]: codes.__getitem__} if codes else None
    table = np.loadtxt(
        paths[0],
        usecols=columns,
        delimiter=delimiter,
        skiprows=skip_rows,
        converters=converters,  # pyright: ignore[reportArgumentType]
        encoding="utf-8",
        ndmin=2,
    )
    return Raw(train=(table[:, :-1], table[:, -1]), feature_names=feature_names)


def _grey(images: np.ndarray) -> np.ndarray:
    return images[:, None]  # [N, H, W] -> [N, 1, H, W]


def npz_grey(paths: Sequence[Path]) -> Raw:
    """Grey images `x_train`, `y_train`, `x_test`, `y_test`, or the test part alone."""
    stored = arrays(paths[0])
    test = (_grey(stored["x_test"]), stored["y_test"])
    train = (_grey(stored["x_train"]), stored["y_train"]) if "x_train" in stored else none_of(test)
    return Raw(train=train, test=test)


def idx(path: Path) -> np.ndarray:
    """One gzipped array in MNIST's format: two zeros, the type, the number of axes, their sizes, the bytes."""
    with gzip.open(path) as file:
        content = file.read()
    kind, num_axes = content[2], content[3]
    if content[:2] != b"\0\0" or kind != 8:
        raise ValueError(f"{path.name} must begin with 0, 0, 8 (unsigned bytes), got {list(content[:3])}")
    shape = np.frombuffer(content, ">u4", num_axes, 4).astype(int)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_axes).reshape(shape)


def idx_grey(paths: Sequence[Path]) -> Raw:
    """Grey images and their classes, test part last: two files, or four with the training part first."""
    *train, images, classes = (idx(path) for path in paths)
    test = (_grey(images), classes)
    return Raw(train=(_grey(train[0]), train[1]) if train else none_of(test), test=test)


def none_of(pair: Pair) -> Pair:
    """A part of the same shapes without rows."""
    return pair[0][:0], pair[1][:0]


def decoded(residuals: np.ndarray) -> np.ndarray:
    """Colour images [N, 3, H, W] from residuals [3, H, W, N] of the median edge predictor.

    A pixel is predicted by the median of its left neighbour w, its upper one n, and w + n − nw. Pixels on one
    anti-diagonal depend on earlier ones alone, so a whole diagonal of all images is decoded at once. The
    channels are red − green + 128, green, and blue − green + 128.
    """
    channels, height, width, num_data = residuals.shape
    images = np.empty((num_data, channels, height, width), np.uint8)
    for start in range(0, num_data, DECODED_AT_ONCE):
        rows = slice(start, start + DECODED_AT_ONCE)
        images[rows] = _decoded(residuals[..., rows])
    return images


def _decoded(residuals: np.ndarray) -> np.ndarray:
    channels, height, width, num_data = residuals.shape
    padded = np.zeros((channels, height + 1, width + 1, num_data), np.int16)
    for diagonal in range(height + width - 1):
        i = np.arange(max(0, diagonal - width + 1), min(height, diagonal + 1))
        j = diagonal - i
        west, north = padded[:, i + 1, j], padded[:, i, j + 1]
        low, high = np.minimum(west, north), np.maximum(west, north)
        # median(w, n, w + n − nw) = clip(w + n − nw, min(w, n), max(w, n))
        padded[:, i + 1, j + 1] = (residuals[:, i, j] + np.clip(west + north - padded[:, i, j], low, high)) & 255
    images = padded[:, 1:, 1:]
    images[[0, 2]] += images[1] - 128
    images &= 255
    return images.transpose(3, 0, 1, 2)


def residual_colour(statistics: Pair | None = None) -> Callable[[Sequence[Path]], Raw]:
    """The reader of residual coded CIFAR archives, test part last; the training part may be missing."""

    def read(paths: Sequence[Path]) -> Raw:
        *train, test = [arrays(path) for path in paths]
        pairs = [(decoded(part["x_residual"]), part["y"]) for part in (*train, test)]
        return Raw(
            train=pairs[0] if train else none_of(pairs[-1]),
            test=pairs[-1],
            class_names=tuple(map(str, test["class_names"])),
            statistics=statistics,
        )

    return read


def binary_colour(
    train: Sequence[str], test: str, class_names: str, *, label_bytes: int, statistics: Pair | None = None
) -> Callable[[Sequence[Path]], Raw]:
    """The reader of CIFAR's own archive: records of labels, the last of which counts, and 3·32·32 pixels."""

    def read(paths: Sequence[Path]) -> Raw:
        with tarfile.open(paths[0]) as archive:
            held = {Path(member.name).name: member for member in archive.getmembers()}

            def content(name: str) -> bytes:
                file = archive.extractfile(held[name])
                assert file is not None
                return file.read()

            def part(names: Sequence[str]) -> Pair:
                records = np.frombuffer(b"".join(map(content, names)), np.uint8)
                records = records.reshape(-1, label_bytes + 3 * SIDE * SIDE)
                return records[:, label_bytes:].reshape(-1, 3, SIDE, SIDE), records[:, label_bytes - 1]

            return Raw(
                train=part(train),
                test=part([test]),
                class_names=tuple(content(class_names).decode().split()),
                statistics=statistics,
            )

    return read


def npz_reviews(paths: Sequence[Path]) -> Raw:
    """Word numbers `x_train`, `x_test` and their sentiments."""
    stored = arrays(paths[0])
    return Raw(train=(stored["x_train"], stored["y_train"]), test=(stored["x_test"], stored["y_test"]))
