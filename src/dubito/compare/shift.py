"""Test rows that drift away from training: the same rows at five severities."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import seeds
from ..shifts import corruptions
from .new_rows import unit_images
from .settings import Settings
from .task import Task

#: Test rows of a table and images that are shifted, and the standard deviations of noise on standardised columns.
MOST_ROWS, MOST_IMAGES, NOISE = 1000, 256, (0.1, 0.2, 0.4, 0.8, 1.6)


def wanted(task: Task, settings: Settings) -> bool:
    """Whether methods are judged under shift: if asked for, else where inputs are a table."""
    if not task.test.inputs.is_floating_point():
        return False
    return task.test.inputs.ndim == 2 if settings.corrupt is None else settings.corrupt


def shifted(task: Task, settings: Settings) -> Iterator[tuple[str, int, Tensor]]:
    """Each shift's name, its severity from 1 to 5, and the first test rows under it.

    Images of values from 0 to 1 suffer the 15 common corruptions, everything else noise.
    """
    scaling = task.data.input_scaling
    if unit_images(task.data) and task.test.inputs.shape[1] in (1, 3) and scaling is not None:
        images = scaling.undo(task.test.inputs[:MOST_IMAGES]).clamp(0, 1)
        for name, severity, corrupted in corruptions(images, seed=settings.seed):
            yield name, severity, scaling.apply(corrupted)
        return
    rows = task.test.inputs[:MOST_ROWS]
    for severity, std in enumerate(NOISE, 1):
        stream = seeds.generator(settings.seed, "compare", "noise", severity)
        noise = torch.randn(rows.shape, generator=stream, dtype=rows.dtype)
        yield "noise", severity, rows + std * noise
