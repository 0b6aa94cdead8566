"""What several corruptions share: borders, smoothing, zooming, streaks and fractal clouds, for whole batches.

Images are [B, C, H, W] with values from 0 to 1. Linear maps along one side are small matrices, so that borders of
any width are exact and a batch is one product.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def uniform(shape: tuple[int, ...], low: float, high: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform draws in the dtype and on the device of `like`."""
    return torch.rand(shape, generator=generator, dtype=like.dtype, device=like.device) * (high - low) + low


def normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard Normal draws in the dtype and on the device of `like`."""
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def mirrored(index: Tensor, size: int, *, repeat_edge: bool) -> Tensor:
    """Indices beyond a side of `size` pixels, folded back as in a mirror at the edge or at the last pixel."""
    if size == 1:
        return torch.zeros_like(index)
    period = 2 * size if repeat_edge else 2 * size - 2
    index = index % period
    return torch.where(index < size, index, period - (1 if repeat_edge else 0) - index)


def padded(images: Tensor, width: int) -> Tensor:
    """The images with a border of `width` pixels, mirrored at the last pixel."""
    height, breadth = images.shape[-2:]
    rows, columns = (
        mirrored(torch.arange(-width, size + width), size, repeat_edge=False).to(images.device)
        for size in (height, breadth)
    )
    return images[..., rows, :][..., columns]


@lru_cache(maxsize=64)
def _smoothing(size: int, std: float, truncate: float, repeat_edge: bool) -> Tensor:
    """The matrix [size, size] of a Gaussian filter along one side, cut off at `truncate` deviations."""
    radius = int(truncate * std + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / std) ** 2)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    columns = mirrored(torch.arange(size)[:, None] + offsets, size, repeat_edge=repeat_edge)
    matrix.scatter_add_(1, columns, (weights / weights.sum()).expand(size, -1))
    return matrix


def smoothed(images: Tensor, std: float, *, truncate: float = 4.0) -> Tensor:
    """A Gaussian filter over both sides, mirrored at the edges, whose mean is that of the images."""
    if std <= 0:
        return images
    rows, columns = (_smoothing(n, std, truncate, True).to(images) for n in images.shape[-2:])
    return rows @ images @ columns.mT


@lru_cache(maxsize=64)
def _boxes(size: int, new: int) -> Tensor:
    """The matrix [new, size] of a box filter: each new pixel is the mean of the pixels whose centres it covers."""
    scale = size / new
    support = 0.5 * max(scale, 1.0)
    matrix = torch.zeros(new, size, dtype=torch.float64)
    for pixel in range(new):
        centre = (pixel + 0.5) * scale
        first, end = max(0, int(centre - support + 0.5)), min(size, int(centre + support + 0.5))
        matrix[pixel, first : max(end, first + 1)] = 1 / max(end - first, 1)
    return matrix


def box_resized(images: Tensor, height: int, width: int) -> Tensor:
    """The images at another size, by box filters."""
    rows = _boxes(images.shape[-2], height).to(images)
    return rows @ images @ _boxes(images.shape[-1], width).to(images).mT


def zoomed(images: Tensor, factor: float) -> Tensor:
    """The middle of the images, enlarged to their size by linear interpolation between its corner pixels."""
    height, width = images.shape[-2:]
    parts = [math.ceil(round(size / factor, 9)) for size in (height, width)]
    top, left = ((size - part) // 2 for size, part in zip((height, width), parts, strict=True))
    middle = images[..., top : top + parts[0], left : left + parts[1]]
    sizes = [max(size, round(part * factor)) for size, part in zip((height, width), parts, strict=True)]  # cut to size
    large = F.interpolate(middle, size=sizes, mode="bilinear", align_corners=True)
    top, left = (large.shape[-2] - height) // 2, (large.shape[-1] - width) // 2
    return large[..., top : top + height, left : left + width]


def streaked(images: Tensor, radius: float, std: float, angles: Tensor) -> Tensor:
    """Each image smeared in a direction of its own, by half a Gaussian from every pixel on; edges are repeated.

    Args:
        images: the images.
        radius: the streak has 2 ⌈radius⌉ + 1 pixels.
        std: of the Gaussian, in pixels.
        angles: one for each image, in degrees, [B].
    """
    batch, channels, height, width = images.shape
    steps = torch.arange(2 * math.ceil(radius) + 1, device=images.device, dtype=images.dtype)
    weights = torch.exp(-0.5 * (steps / std) ** 2)
    weights = weights / weights.sum()
    radians = torch.deg2rad(angles)
    across, down = (
        torch.ceil(steps * side[:, None] - 0.5).long() for side in (radians.cos(), radians.sin())
    )  # [B, steps]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    flat, total = images.flatten(2), torch.zeros_like(images)
    for step, weight in enumerate(weights.tolist()):
        y = (rows + down[:, step, None]).clamp(0, height - 1)  # [B, H]
        x = (columns + across[:, step, None]).clamp(0, width - 1)  # [B, W]
        index = (y[:, :, None] * width + x[:, None, :]).reshape(batch, 1, -1).expand(-1, channels, -1)
        total += weight * flat.gather(2, index).view_as(images)
    return total


def clouds(count: int, height: int, width: int, decay: float, like: Tensor, generator: torch.Generator) -> Tensor:
    """Fractal clouds from 0 to 1, [count, 1, height, width], by midpoint displacement on a torus.

    Every round fills the middles of squares, then of diamonds, with the mean of their corners and a displacement;
    displacements shrink by `decay` from round to round.
    """
    size = 1 << max(1, (max(height, width) - 1).bit_length())
    field = torch.zeros(count, size, size, dtype=like.dtype, device=like.device)
    step, wobble = size, 100.0

    def middles(corners: Tensor) -> Tensor:
        return corners / 4 + wobble * uniform(tuple(corners.shape), -wobble, wobble, like, generator)

    while step >= 2:
        half = step // 2
        corner = field[:, ::step, ::step]
        pairs = corner + corner.roll(-1, 1)
        centre = middles(pairs + pairs.roll(-1, 2))
        field[:, half::step, half::step] = centre
        above, beside = centre + centre.roll(1, 1), centre + centre.roll(1, 2)
        field[:, ::step, half::step] = middles(above + corner + corner.roll(-1, 2))
        field[:, half::step, ::step] = middles(beside + corner + corner.roll(-1, 1))
        step, wobble = half, wobble / decay
    field = field - field.amin((1, 2), keepdim=True)
    field = field / field.amax((1, 2), keepdim=True).clamp(min=torch.finfo(field.dtype).tiny)
    return field[:, None, :height, :width]


def sampled(images: Tensor, x: Tensor, y: Tensor, *, repeat_edge: bool) -> Tensor:
    """The images read at other places by linear interpolation, mirrored at the edges.

    Args:
        images: the images.
        x: columns to read, in pixels, [B, H, W].
        y: rows to read, likewise.
        repeat_edge: mirror at the edge, not at the last pixel.
    """
    height, width = images.shape[-2:]
    if repeat_edge:
        grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1)
    else:
        grid = torch.stack([2 * x / max(width - 1, 1) - 1, 2 * y / max(height - 1, 1) - 1], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=not repeat_edge)
