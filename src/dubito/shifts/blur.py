"""Four kinds of blur."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .filters import padded, smoothed, streaked, uniform, zoomed


def defocus_blur(images: Tensor, constants: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Every point becomes a disk, whose edge is softened."""
    kernel = disk(*constants).to(images)
    reach = len(kernel) // 2
    channels = images.shape[1]
    weights = kernel.expand(channels, 1, *kernel.shape)
    return F.conv2d(padded(images, reach), weights, groups=channels).clamp(0, 1)


def disk(radius: float, soft: float) -> Tensor:
    """A disk that sums to 1, smoothed by a Gaussian of std `soft` cut off at 3 × 3, beyond radius 8 at 5 × 5."""
    cut = 1 if radius <= 8 else 2
    reach = math.floor(radius) + cut
    place = torch.arange(-reach, reach + 1, dtype=torch.float64)
    inside = (place**2 + place[:, None] ** 2 <= radius**2).double()
    side = torch.exp(-0.5 * (torch.arange(-cut, cut + 1, dtype=torch.float64) / soft) ** 2)
    side = side / side.sum()
    kernel = (inside / inside.sum())[None, None]
    return F.conv2d(kernel, (side * side[:, None])[None, None], padding=cut)[0, 0]


def glass_blur(images: Tensor, constants: tuple[float, int, int], generator: torch.Generator) -> Tensor:
    """Neighbouring pixels change places, between two light blurs.

    From the last pixel to the first, each swaps with one at most `reach` away, in each of some rounds. (The published
    code overwrites one of the two instead: its swap works on views of the same memory.)
    """
    std, reach, rounds = constants
    batch, channels, height, width = images.shape
    soft = smoothed(images, std)
    places = [
        (row, column)
        for _ in range(rounds)
        for row in range(height - reach, reach, -1)
        for column in range(width - reach, reach, -1)
    ]
    moves = torch.randint(
        -reach, reach, (2, len(places), batch), generator=generator, device=images.device
    )  # the farther end is left out, as in the published code
    down, across = moves.cpu().numpy()
    order = torch.arange(height * width)[:, None].repeat(1, batch).numpy()  # who stands at each place
    image = torch.arange(batch).numpy()
    for step, (row, column) in enumerate(places):
        other = (row + down[step]) * width + column + across[step]
        here = row * width + column
        pixel = order[here].copy()
        order[here] = order[other, image]
        order[other, image] = pixel
    index = torch.from_numpy(order).T.to(images.device)[:, None].expand(-1, channels, -1)
    return smoothed(soft.flatten(2).gather(2, index).view_as(images), std).clamp(0, 1)


def motion_blur(images: Tensor, constants: tuple[float, float], generator: torch.Generator) -> Tensor:
    """Every image is smeared in a direction of its own, within 45° of the horizontal."""
    angles = uniform((len(images),), -45, 45, images, generator)
    return streaked(images, *constants, angles)


def zoom_blur(images: Tensor, factors: tuple[float, ...], generator: torch.Generator) -> Tensor:
    """The mean of an image and of itself at several zooms."""
    total = images
    for factor in factors:
        total = total + (images if factor == 1 else zoomed(images, factor))
    return total / (len(factors) + 1)
