"""JPEG as every decoder shows it: the lossy half of the encoder and its inverse, for whole batches.

What JPEG loses it loses by halving the colour planes and by rounding the cosine coefficients of 8 × 8 blocks to
multiples of a table; packing the rounded numbers into bits loses nothing and is left out. Planes, tables and roundings
are those of the JFIF standard and of the common libraries (colour at half size, triangle filter on the way back).
"""

import math

import torch
from torch import Tensor

from ..errors import ConfigError
from ..hints import checked

#: Annex K of the standard, in the order of the coefficients' rows.
_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_COLOUR = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
#: From red, green, blue to brightness and two colour differences.
_PLANES = ((0.299, 0.587, 0.114), (-0.168735892, -0.331264108, 0.5), (0.5, -0.418687589, -0.081312411))


@checked
def jpeg(images: Tensor, quality: int, generator: torch.Generator | None = None) -> Tensor:
    """The images [B, C, H, W] of 0 to 1, encoded at a quality of 1 to 100 and decoded; C is 1 or 3."""
    if not 1 <= quality <= 100:
        raise ConfigError(f"quality must be from 1 to 100, got {quality}")
    levels = (images * 255).round()
    height, width = images.shape[-2:]
    if images.shape[1] == 1:
        return coded(levels, _LUMINANCE, quality) / 255
    matrix = levels.new_tensor(_PLANES)
    planes = (torch.einsum("pc,bchw->bphw", matrix, levels) + levels.new_tensor([0, 128, 128])[:, None, None]).round()
    bright = coded(planes[:, :1], _LUMINANCE, quality)
    colour = coded(halved(planes[:, 1:]), _COLOUR, quality)[..., : -(-width // 2)]
    colour = doubled(colour)[..., :height, :width] - 128
    blue, red = colour[:, :1], colour[:, 1:]
    # the inverse of the planes, with the standard's own digits
    decoded = torch.cat(
        [
            bright + (1.402 * red).round(),
            bright + (-0.344136286 * blue - 0.714136286 * red).round(),
            bright + (1.772 * blue).round(),
        ],
        1,
    )
    return decoded.clamp(0, 255) / 255


def table(base: tuple[tuple[int, ...], ...], quality: int) -> list[list[int]]:
    """The steps of all coefficients at a quality."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    return [[min(255, max(1, (value * scale + 50) // 100)) for value in row] for row in base]


def coded(plane: Tensor, base: tuple[tuple[int, ...], ...], quality: int) -> Tensor:
    """One plane of levels through cosine transform, rounding to steps, and back."""
    height, width = plane.shape[-2:]
    whole = extended(plane, -height % 8, -width % 8) - 128
    # [B, C, H/8, 8, W/8, 8] -> [B, C, H/8, W/8, 8, 8]
    blocks = whole.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)).transpose(-2, -3)
    place = torch.arange(8, dtype=torch.float64)
    cosines = torch.cos((2 * place + 1) * place[:, None] * math.pi / 16) / 2
    cosines[0] /= math.sqrt(2)
    cosines, steps = cosines.to(plane), plane.new_tensor(table(base, quality))
    # Encoders hold coefficients in eighths, and round halves away from 0.
    coefficients = (8 * (cosines @ blocks @ cosines.mT)).round() / 8
    rounded = (coefficients.abs() / steps + 0.5).floor() * coefficients.sign() * steps
    back = (cosines.mT @ rounded @ cosines).transpose(-2, -3).flatten(-4, -3).flatten(-2, -1)
    return (back + 128).round().clamp(0, 255)[..., :height, :width]


def extended(plane: Tensor, below: int, right: int) -> Tensor:
    """The plane with its last row and column repeated."""
    return torch.nn.functional.pad(plane, (0, right, 0, below), mode="replicate") if below or right else plane


def halved(planes: Tensor) -> Tensor:
    """Planes at half size: means of 2 × 2, rounded down and up in turn from column to column."""
    # Encoders fill up the last block before they halve the columns, and after they halve the rows.
    planes = extended(planes, planes.shape[-2] % 2, -planes.shape[-1] % 16)
    sums = planes.unflatten(-1, (-1, 2)).sum(-1).unflatten(-2, (-1, 2)).sum(-2)
    bias = 1 + torch.arange(sums.shape[-1], device=planes.device) % 2
    return ((sums + bias) / 4).floor()


def doubled(planes: Tensor) -> Tensor:
    """Planes at twice their size: three parts of the nearer pixel and one of the farther, along both sides."""
    near = planes.repeat_interleave(2, -2)
    far = torch.stack([_moved(planes, -2, 1), _moved(planes, -2, -1)], -2).flatten(-3, -2)
    sums = 3 * near + far  # [..., 2H, W]
    left, right = _moved(sums, -1, 1), _moved(sums, -1, -1)
    return torch.stack([((3 * sums + left + 8) / 16).floor(), ((3 * sums + right + 7) / 16).floor()], -1).flatten(-2)


def _moved(planes: Tensor, axis: int, by: int) -> Tensor:
    """Each pixel's neighbour before (1) or after (−1) it along an axis; the last is its own."""
    size = planes.shape[axis]
    index = (torch.arange(size, device=planes.device) - by).clamp(0, size - 1)
    return planes.index_select(axis, index)
