"""The 15 common corruptions at 5 severities, by name."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import seeds
from ..errors import ConfigError, DataError, require_count, unknown_name
from ..hints import checked
from .blur import defocus_blur, glass_blur, motion_blur, zoom_blur
from .constants import CONSTANTS, CORRUPTIONS, SEVERITIES
from .digital import contrast, elastic, pixelate
from .jpeg import jpeg
from .noise import gaussian_noise, impulse_noise, shot_noise
from .weather import brightness, fog, frost, snow

#: Images that are corrupted at once, each block with a random stream of its own.
BLOCK = 128

_BY_NAME: dict[str, Callable[[Tensor, Any, torch.Generator], Tensor]] = dict(
    zip(
        CORRUPTIONS,
        (
            gaussian_noise,
            shot_noise,
            impulse_noise,
            defocus_blur,
            glass_blur,
            motion_blur,
            zoom_blur,
            snow,
            frost,
            fog,
            brightness,
            contrast,
            elastic,
            pixelate,
            jpeg,
        ),
        strict=True,
    )
)


@checked
@torch.no_grad()
def corrupt(images: Tensor, name: str, severity: int, *, constants: str = "cifar-c", seed: int = 0) -> Tensor:
    """Corrupted copies of images, with values from 0 to 1.

    The same images, name, severity, constants and seed give the same result.

    Args:
        images: [B, C, H, W] with values from 0 to 1, grey (C = 1) or colour (C = 3), of any size.
        name: one of `CORRUPTIONS`.
        severity: from 1 to 5.
        constants: "cifar-c", chosen for 32 × 32 pixels, or "imagenet-c", chosen for 224 × 224.
        seed: of everything random.
    """
    check_images(images)
    strength = constants_of(name, severity, constants)
    apply = _BY_NAME[name]
    pieces = []
    for block, part in enumerate(images.split(BLOCK)):
        stream = seeds.generator(seed, "shifts", name, severity, constants, block, device=images.device)
        pieces.append(apply(part, strength, stream))
    return torch.cat(pieces)


@checked
def corruptions(
    images: Tensor,
    *,
    names: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    constants: str = "cifar-c",
    seed: int = 0,
) -> Iterator[tuple[str, int, Tensor]]:
    """Every corruption at every severity, one after the other: name, severity, corrupted copies.

    Args:
        images: as in `corrupt`.
        names: of `CORRUPTIONS`.
        severities: from 1 to 5.
        constants: as in `corrupt`.
        seed: as in `corrupt`.
    """
    check_images(images)
    for name in names:
        for severity in severities:
            constants_of(name, severity, constants)  # bad names are found before work starts
    return (
        (name, severity, corrupt(images, name, severity, constants=constants, seed=seed))
        for name in names
        for severity in severities
    )


def constants_of(name: str, severity: int, constants: str) -> Any:
    """The constants of a corruption at a severity."""
    if constants not in CONSTANTS:
        raise unknown_name("set of constants", constants, CONSTANTS)
    if name not in _BY_NAME:
        raise unknown_name("corruption", name, CORRUPTIONS)
    if severity not in SEVERITIES or isinstance(severity, bool):
        raise ConfigError(f"severity must be a whole number from 1 to 5, got {severity!r}")
    return CONSTANTS[constants][name][severity - 1]


def check_images(images: Tensor) -> None:
    """Refuse what is no batch of images with values from 0 to 1."""
    shape = list(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise DataError(f"images must be a tensor [B, C, H, W] with C of 1 or 3, got {shape}")
    if not images.is_floating_point():
        raise DataError(f"images must have values from 0 to 1, got {images.dtype}; divide them by 255")
    low, high = (float(value) for value in torch.aminmax(images))
    slack = 1e-4  # of images that were standardised and turned back
    if not (-slack <= low and high <= 1 + slack):
        raise DataError(
            f"images must have values from 0 to 1, got {low:.4g} to {high:.4g}; undo their scaling first, as in "
            "data.input_scaling.undo(data.test.inputs)"
        )


def chosen_rows(rows: int, subset: int | None, seed: int) -> Tensor:
    """Numbers of `subset` rows drawn by seed, in rising order; None takes all."""
    if subset is None or subset >= rows:
        return torch.arange(rows)
    require_count(subset=subset)
    return torch.randperm(rows, generator=seeds.generator(seed, "shifts", "subset"))[:subset].sort().values
