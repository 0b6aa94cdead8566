"""The HMC references of the NeurIPS 2021 competition, row by row with our data, and how near a prediction comes.

Both lie in folders of DUBITO_DATA: `hmc/imdb.npz` with the reviews as the reference saw them, and
`hmc/cifar10_probs.npz` beside the three archives of CIFAR-10. Every file is known by its checksum.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dubito import metrics
from dubito.data import Part
from dubito.data.locate import obtain
from dubito.data.readers import arrays, decoded, none_of
from dubito.data.registry import Entry, File, Pair, Raw, StoredForm
from dubito.metrics import standard_error_over_examples

from ..runner.scores import packed

SOURCE = "izmailovpavel/neurips_bdl_starter_kit, with rows in the order of the data sets"
REVIEWS = File(
    path="hmc/imdb.npz", size=7021481, sha256="09542dc55eab7e8e214b6f6c7d1b86841e8335a916829f2529ae2d4470a774d8"
)
PROBS = File(
    path="hmc/cifar10_probs.npz", size=378710, sha256="6970fd1c2f4966da40174cf3b1d4ed4caec9f8db346df9d1d1ded4dcc046fa79"
)
PICTURES = tuple(
    File(path=path, size=size, sha256=sha256)
    for path, size, sha256 in (
        ("cifar10_train20k.npz", 33685150, "9d9f2e1a9f8221d9625361be2fe09fb20e6c3c39f9e7a0c6134e91402c4e84f9"),
        ("cifar10_train_last30k.npz", 50504068, "93eb77a68246e9e2fdfb602243382a982e66a794b841bc3a537502721e21a9dd"),
        ("cifar10_test.npz", 16855335, "3e27a4dafdb8731c50a247780214fded64603aa8fe4f37d62e745c4a8fce0dab"),
    )
)
#: How bnn_hmc scales pixels; that the reference was made so is inferred.
PIXEL_MEANS, PIXEL_STD = (0.49, 0.48, 0.44), 0.2


class Ground(NamedTuple):
    """What methods learn from and are judged on.

    Attributes:
        train: the reference's training rows.
        validation: rows that the reference left out, which steer the protocol.
        test: test rows.
        reference: class probabilities of HMC on the test rows, [B, C].
        build: makes the network, from `seed=`.
    """

    train: Part
    validation: Part
    test: Part
    reference: Tensor
    build: Callable[..., nn.Module]

    def cut(self, train: int, validation: int, test: int) -> "Ground":
        """At most so many rows: the first to train and to validate on, test rows evenly over all."""
        count = len(self.test.targets)
        rows = torch.arange(min(test, count)) * count // min(test, count)
        return self._replace(
            train=Part(*(tensor[:train] for tensor in self.train)),
            validation=Part(*(tensor[:validation] for tensor in self.validation)),
            test=Part(*(tensor[rows] for tensor in self.test)),
            reference=self.reference[rows],
        )


def _stored(
    name: str, files: tuple[File, ...], shapes: Mapping[str, tuple[int, ...]], read: Callable[[Sequence[Path]], Raw]
) -> Raw:
    form = StoredForm(files=files, read=read, shapes=shapes)
    entry = Entry(task="classification", licence="none stated", source=SOURCE, target_name="class", forms=(form,))
    return obtain(name, entry, download=False)


def _part(pair: Pair | None) -> Part:
    assert pair is not None
    inputs, targets = pair
    whole = inputs if inputs.dtype == np.float32 else inputs.astype(np.int64)
    return Part(torch.from_numpy(whole), torch.from_numpy(targets.astype(np.int64)))


def probabilities(file: File, entry: str, shape: tuple[int, int]) -> Tensor:
    """HMC's class probabilities, from an entry of a file."""

    def read(paths: Sequence[Path]) -> Raw:
        probs = arrays(paths[0])[entry]
        pair = probs, probs.argmax(1)
        return Raw(train=none_of(pair), test=pair)

    raw = _stored(f"predictions of {file.path}", (file,), {"test": shape}, read)
    assert raw.test is not None
    return torch.from_numpy(raw.test[0])


@cache
def reviews() -> tuple[Part, Part, Part, Tensor]:
    """IMDB as the reference saw it: the first 20,000 training rows, the other 5,000, test rows, HMC's probabilities."""

    def read(paths: Sequence[Path]) -> Raw:
        stored = arrays(paths[0])
        pairs = ((stored[f"x_{part}"], stored[f"y_{part}"]) for part in ("train", "test"))
        return Raw(**dict(zip(("train", "test"), pairs, strict=True)))

    shapes = {"train": (25_000, 100), "test": (25_000, 100)}
    raw = _stored("IMDB of the HMC reference", (REVIEWS,), shapes, read)
    train, test = _part(raw.train), _part(raw.test)
    first, rest = (Part(*(tensor[rows] for tensor in train)) for rows in (slice(20_000), slice(20_000, None)))
    return first, rest, test, probabilities(REVIEWS, "probs_test", (25_000, 2))


@cache
def pictures() -> tuple[Part, Part, Part, Tensor]:
    """CIFAR-10 scaled as bnn_hmc does: all training images, none left out, test images, HMC's probabilities."""

    def scaled(images: np.ndarray) -> np.ndarray:
        mean = np.array(PIXEL_MEANS, np.float32)[:, None, None]
        return (images.astype(np.float32) / 255 - mean) / np.float32(PIXEL_STD)

    def read(paths: Sequence[Path]) -> Raw:
        parts = [arrays(path) for path in paths]
        images, labels = ([scaled(decoded(part["x_residual"])) for part in parts], [part["y"] for part in parts])
        return Raw(train=(np.concatenate(images[:2]), np.concatenate(labels[:2])), test=(images[2], labels[2]))

    shapes = {"train": (50_000, 3, 32, 32), "test": (10_000, 3, 32, 32)}
    raw = _stored("CIFAR-10 of the HMC reference", PICTURES, shapes, read)
    train = _part(raw.train)
    return (
        train,
        Part(*(tensor[:0] for tensor in train)),
        _part(raw.test),
        probabilities(PROBS, "probs", (10_000, 10)),
    )


def scores(probs: Tensor, ground: Ground) -> tuple[dict[str, float], dict[str, object]]:
    """How near probabilities are to the reference's, how good they are by themselves, and facts over rows."""
    labels = ground.test.targets
    same = metrics.agreement_per_example(probs, ground.reference)
    distances = metrics.total_variation_per_example(probs, ground.reference)
    over = {"agreement": same.double(), "total_variation": distances.double()}
    return {
        "agreement": 100 * float(same.double().mean()),
        "total_variation": float(distances.mean()),
        "accuracy": 100 * metrics.accuracy(probs, labels),
        "nll": metrics.nll(probs, labels),
        "ece": metrics.ece(probs, labels),
    }, {
        "test_rows": len(labels),
        "standard_errors_over_rows": {
            name: standard_error_over_examples(values).standard_error for name, values in over.items()
        },
        "total_variations": packed(distances),
    }
