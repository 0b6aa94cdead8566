"""Weather: snow, frost, fog, brightness."""

from functools import lru_cache

import torch
from torch import Tensor

from .. import seeds
from .filters import clouds, normal, streaked, uniform, zoomed

#: How brightness is made of red, green and blue.
GREY = (0.299, 0.587, 0.114)
#: Frost textures to choose from.
TEXTURES = 5


def snow(images: Tensor, constants: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """Streaks of flakes over a paler image."""
    mean, std, zoom, threshold, radius, fall, weight = constants
    batch, _, height, width = images.shape
    flakes = mean + std * normal((batch, 1, height, width), images, generator)
    if zoom != 1:
        flakes = zoomed(flakes, zoom)
    flakes = torch.where(flakes < threshold, 0.0, flakes).clamp(0, 1)
    flakes = streaked(flakes, radius, fall, uniform((batch,), -135, -45, images, generator))
    pale = torch.maximum(images, 1.5 * grey(images) + 0.5)
    return (weight * images + (1 - weight) * pale + flakes + flakes.rot90(2, (-2, -1))).clamp(0, 1)


def grey(images: Tensor) -> Tensor:
    """Brightness, [B, 1, H, W]."""
    if images.shape[1] == 1:
        return images
    return torch.einsum("c,bchw->bhw", images.new_tensor(GREY), images).unsqueeze(1)


def frost(images: Tensor, constants: tuple[float, float], generator: torch.Generator) -> Tensor:
    """A piece of a frost texture over each image.

    The textures are generated, always the same five: the benchmarks use photographs, which are not ours to
    ship, so results on frost are like theirs, not equal.
    """
    weight, over = constants
    batch, channels, height, width = images.shape
    textures = frost_textures(4 * max(height, width)).to(images)
    which, top, left = (
        torch.randint(limit, (batch,), generator=generator, device=images.device)
        for limit in (TEXTURES, textures.shape[-2] - height, textures.shape[-1] - width)
    )
    rows = (top[:, None] + torch.arange(height, device=images.device))[:, :, None]
    columns = (left[:, None] + torch.arange(width, device=images.device))[:, None, :]
    pieces = textures[which[:, None, None], :, rows, columns].movedim(-1, 1)
    return (weight * images + over * (pieces if channels == 3 else grey(pieces))).clamp(0, 1)


@lru_cache(maxsize=4)
def frost_textures(size: int) -> Tensor:
    """Pale blue textures [5, 3, size, size] of sharp ridges, as crystals have, on a smooth ground."""
    stream = seeds.generator(0, "frost textures", size)
    like = torch.empty(0)
    sharp, ground = (clouds(TEXTURES, size, size, decay, like, stream) for decay in (1.6, 2.2))
    ridges = (1 - (2 * sharp - 1).abs()) ** 4
    bright = (0.3 + 0.3 * ground + 0.55 * ridges).clamp(0, 1)
    return bright * torch.tensor([0.88, 0.96, 1.0])[:, None, None]


def fog(images: Tensor, constants: tuple[float, float], generator: torch.Generator) -> Tensor:
    """A fractal cloud over each image, at most as bright as the image was."""
    weight, decay = constants
    batch, _, height, width = images.shape
    most = images.amax((1, 2, 3), keepdim=True)
    cloud = clouds(batch, height, width, decay, images, generator)
    return ((images + weight * cloud) * most / (most + weight)).clamp(0, 1)


def brightness(images: Tensor, added: float, generator: torch.Generator) -> Tensor:
    """The value of hue, saturation and value raised: colours keep their ratios, up to white."""
    value = images.amax(1, keepdim=True)
    raised = (value + added).clamp(0, 1)
    # v' (r, g, b)/v has the hue and saturation of (r, g, b); black becomes grey
    return torch.where(value > 0, images * raised / value.clamp(min=torch.finfo(images.dtype).tiny), raised)
