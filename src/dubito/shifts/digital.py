"""What happens to images on computers: contrast, warping, large pixels; JPEG has a module of its own."""

import torch
from torch import Tensor

from .filters import box_resized, sampled, smoothed, uniform


def contrast(images: Tensor, factor: float, generator: torch.Generator) -> Tensor:
    """Differences from each channel's mean, made smaller."""
    mean = images.mean((2, 3), keepdim=True)
    return ((images - mean) * factor + mean).clamp(0, 1)


def elastic(images: Tensor, constants: tuple[float, float, float], generator: torch.Generator) -> Tensor:
    """A random affine map, then a smooth random warp.

    Constants are the warp's strength, its smoothness and the reach of the affine map, as shares of the smaller side.
    """
    strength, smoothness, reach = (min(images.shape[-2:]) * share for share in constants)
    moved = affine(images, reach, generator)
    if strength == 0:
        return moved.clamp(0, 1)
    batch, _, height, width = images.shape
    fields = uniform((2, batch, height, width), -1, 1, images, generator)
    across, down = strength * smoothed(fields, smoothness, truncate=3.0)
    rows, columns = pixels(images)
    return sampled(moved, columns + across, rows + down, repeat_edge=True).clamp(0, 1)


def affine(images: Tensor, reach: float, generator: torch.Generator) -> Tensor:
    """Three points of each image, a third of it from the middle, moved by up to `reach` pixels along both sides."""
    batch, _, height, width = images.shape
    middle = images.new_tensor([width // 2, height // 2])
    third = min(height, width) // 3
    corners = middle + third * images.new_tensor([[1, 1], [1, -1], [-1, -1]])  # (x, y) of three points
    target = corners + uniform((batch, 3, 2), -reach, reach, images, generator)
    # Where a pixel comes from: the map that takes the moved points back, (x', y', 1) A = (x, y).
    ones = torch.ones_like(target[..., :1])
    back = torch.linalg.solve(torch.cat([target, ones], -1), corners.expand(batch, 3, 2))  # [B, 3, 2]
    rows, columns = pixels(images)
    places = torch.stack([columns, rows, torch.ones_like(rows)], -1).reshape(-1, 3) @ back  # [B, HW, 2]
    x, y = places.unflatten(1, (height, width)).unbind(-1)
    return sampled(images, x, y, repeat_edge=False)


def pixels(images: Tensor) -> tuple[Tensor, Tensor]:
    """Row and column of every pixel, [H, W] each."""
    sides = (torch.arange(size, dtype=images.dtype, device=images.device) for size in images.shape[-2:])
    rows, columns = torch.meshgrid(*sides, indexing="ij")
    return rows, columns


def pixelate(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """At a share of the size and back, by boxes."""
    height, width = images.shape[-2:]
    small = box_resized(images, max(1, int(height * share)), max(1, int(width * share)))
    return box_resized(small, height, width).clamp(0, 1)
