"""CIFAR-10 as the reduced networks see it: 16×16 images, flipped and shifted in training; corrupted ones; CIFAR-100's.

Corruptions are made at 32×32 and rounded to bytes as those of CIFAR-10-C are, then pooled like all other images.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, pad
from torch.utils.data import DataLoader, Dataset

from dubito import seeds
from dubito.data import Part, load
from dubito.data.locate import obtain
from dubito.data.readers import residual_colour
from dubito.data.registry import Entry, StoredForm
from dubito.shifts.corruptions import corruptions

from ..references.bdl import PICTURES
from ..runner.experiment import Cell
from ..runner.trained import folder

#: Mean and standard deviation of the pooled training images' channels.
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2383, 0.2352, 0.2540)
#: Training images.
ALL = 50_000
SOURCE = "Krizhevsky, CIFAR-10; batches 3 to 5"
#: Images that settings were chosen by: the last so many of the training images, which no run trains on.
VALIDATION = 5_000
#: Test images that are corrupted and CIFAR-100 images that are foreign, the first so many.
CORRUPTED, FOREIGN = 500, 5_000
#: Pixels by which a training image is shifted at most.
SHIFT = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Pixels:
    """Images as bytes, [B, 3, 32, 32].

    Attributes:
        train: what is learned from, the last `VALIDATION` of which settings were chosen by.
        test: what is reported.
        foreign: images of classes that CIFAR-10 has not.
        corrupted: the first test images by corruption and severity.
    """

    train: Part
    test: Part
    foreign: Tensor
    corrupted: Mapping[tuple[str, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Standardised images, [B, 3, size, size]; parts as of `Pixels`."""

    train: Part
    validation: Part
    test: Part
    foreign: Tensor
    corrupted: Mapping[tuple[str, int], Tensor]


def load_cell(cell: Cell) -> Pixels:
    """All images, read once per process."""
    return pixels()


@cache
def pixels() -> Pixels:
    """CIFAR-10 and CIFAR-100's test images."""
    data = load("cifar10", validation=0, standardise=False)
    images, labels = as_bytes(data.train.inputs), data.train.targets
    if len(labels) < ALL:  # the archive of the first 20,000 images
        rest = last_images()
        images, labels = torch.cat([images, rest.inputs]), torch.cat([labels, rest.targets])
    test = Part(as_bytes(data.test.inputs), data.test.targets)
    foreign = load("cifar100", validation=0, standardise=False).test.inputs[:FOREIGN]
    return Pixels(
        train=Part(images, labels), test=test, foreign=as_bytes(foreign), corrupted=corrupted(test.inputs[:CORRUPTED])
    )


@lru_cache(maxsize=1)
def pictures(pixels: Pixels, size: int) -> Pictures:
    """Images as networks read them.

    Args:
        pixels: the bytes.
        size: height and width, to which they are pooled.
    """
    cut = max(len(pixels.train.targets) - VALIDATION, len(pixels.train.targets) // 2)
    inputs, labels = standardised(pixels.train.inputs, size), pixels.train.targets
    return Pictures(
        train=Part(inputs[:cut], labels[:cut]),
        validation=Part(inputs[cut:], labels[cut:]),
        test=Part(standardised(pixels.test.inputs, size), pixels.test.targets),
        foreign=standardised(pixels.foreign, size),
        corrupted={key: standardised(images, size) for key, images in pixels.corrupted.items()},
    )


def last_images() -> Part:
    """The training images that the library's own archive lacks."""
    form = StoredForm(files=(PICTURES[1],), read=residual_colour(), shapes={"test": (ALL - 20_000, 3, 32, 32)})
    entry = Entry(task="classification", licence="none stated", source=SOURCE, target_name="object", forms=(form,))
    raw = obtain("the last 30,000 images of CIFAR-10", entry, download=False)
    assert raw.test is not None
    images, labels = (torch.from_numpy(array) for array in raw.test)
    return Part(images, labels.long())


def standardised(pixels: Tensor, size: int) -> Tensor:
    """Images [B, 3, H, W] of bytes, pooled and standardised by channel."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (avg_pool2d(pixels.float() / 255, pixels.shape[-1] // size) - mean) / std


def corrupted(pixels: Tensor) -> dict[tuple[str, int], Tensor]:
    """Images of bytes under all corruptions; made once and kept in the user's cache."""
    path = folder() / f"cifar10-corrupted-{len(pixels)}.safetensors"
    if not path.exists():
        sets = corruptions(pixels.float() / 255, seed=0)
        made = {f"{name} {severity}": as_bytes(images) for name, severity, images in sets}
        beside = path.with_suffix(f".{os.getpid()}")
        save_file(made, beside)
        beside.replace(path)
    named = ((*name.rsplit(" ", 1), images) for name, images in load_file(path).items())
    return {(name, int(severity)): images for name, severity, images in named}


def as_bytes(pixels: Tensor) -> Tensor:
    """Values from 0 to 1 as CIFAR-10-C stores them."""
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()


def generate_cell(cell: Cell) -> Pixels:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up pictures")

    def made(count: int) -> Part:
        images = torch.randint(256, (count, 3, 32, 32), generator=stream, dtype=torch.uint8)
        return Part(images, torch.arange(count) % 10)

    corrupted = {("fog", severity): made(12).inputs for severity in (1, 5)}
    return Pixels(train=made(48), test=made(24), foreign=made(24).inputs, corrupted=corrupted)


class Augmented(Dataset[Any]):
    """Training images, flipped and shifted anew whenever they are read, from PyTorch's own generator.

    Args:
        part: images and labels.
    """

    def __init__(self, part: Part) -> None:
        self.part = part

    def __len__(self) -> int:
        return len(self.part.targets)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([row])
        return inputs[0], targets[0]

    def __getitems__(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(rows)
        return augmented(self.part.inputs[chosen]), self.part.targets[chosen]

    def loader(self, batch_size: int) -> DataLoader:
        """Whole batches at once."""
        return DataLoader(self, batch_size=batch_size, shuffle=True, collate_fn=as_read)


def as_read(batch: Any) -> Any:
    """A batch that is one already."""
    return batch


def augmented(images: Tensor) -> Tensor:
    """Images [B, C, H, W], half of them mirrored, all moved by up to `SHIFT` pixels with zeros from outside."""
    count, _, height, width = images.shape
    wide = pad(images, (SHIFT,) * 4)
    top, left = torch.randint(2 * SHIFT + 1, (2, count))
    mirrored = torch.rand(count) < 0.5
    columns = torch.arange(width).expand(count, -1)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns) + left[:, None]
    rows = torch.arange(height) + top[:, None]
    at = torch.arange(count)[:, None, None]
    return wide.permute(0, 2, 3, 1)[at, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)  # channels last
