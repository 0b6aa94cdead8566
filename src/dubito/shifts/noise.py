"""Noise on pixels: that of the corruption benchmarks, and the implicit paper's two."""

import torch
from torch import Tensor

from .. import seeds
from ..errors import require_fraction
from ..hints import checked
from .filters import normal


def gaussian_noise(images: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """Normal noise on every value."""
    return (images + std * normal(tuple(images.shape), images, generator)).clamp(0, 1)


def shot_noise(images: Tensor, photons: float, generator: torch.Generator) -> Tensor:
    """Poisson noise: as many photons as brightness allows."""
    return (torch.poisson(images.clamp(min=0) * photons, generator=generator) / photons).clamp(0, 1)


def impulse_noise(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of the values become 0 or 1, each as often."""
    draws = torch.rand(images.shape, generator=generator, dtype=images.dtype, device=images.device)
    return torch.where(draws < share / 2, 0.0, torch.where(draws < share, 1.0, images))


@checked
def gaussian_mixed(images: Tensor, share: float, *, seed: int = 0) -> Tensor:
    """x̂ = (1 − γ) x + γ ε with ε ~ N(0, I), in pixel space and not cut off  [implicit BNN, Eq. 28].

    Args:
        images: values from 0 to 1, of any shape.
        share: γ, from 0 for the images to 1 for noise alone.
        seed: of the noise.
    """
    require_fraction(one=True, share=share)
    stream = seeds.generator(seed, "shifts", "mixed", device=images.device)
    return (1 - share) * images + share * normal(tuple(images.shape), images, stream)


@checked
def salt_and_pepper(images: Tensor, share: float, *, seed: int = 0) -> Tensor:
    """Each value becomes 0 or 1 with probability p, each as often  [implicit BNN, Section 5.3].

    Args:
        images: values from 0 to 1, of any shape.
        share: p.
        seed: of the noise.
    """
    require_fraction(one=True, share=share)
    return impulse_noise(images, share, seeds.generator(seed, "shifts", "salt", device=images.device))
