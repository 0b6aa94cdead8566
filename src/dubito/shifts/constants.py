"""The constants of Hendrycks & Dietterich (2019): each corruption at severities 1 to 5, for two sizes of images.

Lengths are in pixels: CIFAR-C's were chosen for images of 32 × 32, ImageNet-C's for 224 × 224. Those of the elastic
transform are shares of the image's smaller side.
"""

from typing import Any

#: The corruptions in the order of the paper: noise, blur, weather, digital.
CORRUPTIONS = (
    "gaussian-noise",
    "shot-noise",
    "impulse-noise",
    "defocus-blur",
    "glass-blur",
    "motion-blur",
    "zoom-blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic",
    "pixelate",
    "jpeg",
)
SEVERITIES = (1, 2, 3, 4, 5)


def _zooms(last: int, step: int) -> tuple[float, ...]:
    """Zoom factors from 1 to the last, in hundredths."""
    return tuple(percent / 100 for percent in range(100, last + 1, step))


_CIFAR_C: dict[str, tuple[Any, ...]] = {
    "gaussian-noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # std
    "shot-noise": (500, 250, 100, 75, 50),  # photons per pixel of brightness 1
    "impulse-noise": (0.01, 0.02, 0.03, 0.05, 0.07),  # share of values
    "defocus-blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),  # radius, std of its edge
    "glass-blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),  # std, reach, rounds
    "motion-blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),  # radius, std
    "zoom-blur": (_zooms(106, 1), _zooms(111, 1), _zooms(115, 1), _zooms(120, 1), _zooms(125, 1)),
    "snow": (  # mean, std, zoom and threshold of flakes, radius and std of their fall, weight of the image
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),  # weights of image and frost
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),  # weight, smoothness
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # kept
    "elastic": ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # share of the side
    "jpeg": (80, 65, 58, 50, 40),  # quality
}
_IMAGENET_C: dict[str, tuple[Any, ...]] = {
    "gaussian-noise": (0.08, 0.12, 0.18, 0.26, 0.38),
    "shot-noise": (60, 25, 12, 5, 3),
    "impulse-noise": (0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus-blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass-blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion-blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom-blur": (_zooms(111, 1), _zooms(115, 1), _zooms(120, 2), _zooms(124, 2), _zooms(130, 3)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": (0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic": ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
    "pixelate": (0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg": (25, 18, 15, 10, 7),
}
CONSTANTS = {"cifar-c": _CIFAR_C, "imagenet-c": _IMAGENET_C}
