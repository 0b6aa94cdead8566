"""Test rows as a reader can see them: small pictures, or the values of a table's columns."""

import base64
import re
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from ..data.columns import date_of
from .task import Task
from .words import readable

#: Columns that are shown of a row.
MOST_COLUMNS = 6


def shown(task: Task, row: int) -> dict[str, Any]:
    """A test row as `{"image": a data address}` or `{"values": {column: text}}`."""
    values, scaling = task.test.inputs[row], task.data.input_scaling
    if scaling is None or values.ndim not in (1, 3):
        return {}
    original = scaling.undo(values)
    if values.ndim == 3:
        low, high = original.min().clamp(max=0), original.max().clamp(min=1)
        return {"image": png((original - low) / (high - low))} if len(original) in (1, 3) else {}
    places = [re.fullmatch(r"pixel_(\d+)_(\d+)", name) for name in task.data.feature_names]
    if len(places) == len(values) and all(places):
        grid = original.reshape(1 + int(places[-1][1]), -1)  # pyright: ignore[reportOptionalSubscript]
        return {"image": png((grid / grid.max().clamp(min=1e-9))[None])}
    cells = _cells(task, values, original)
    # The columns farthest from their mean say most about what is unusual.
    cells.sort(key=lambda cell: -cell[2])
    return {"values": {name: text for name, text, _ in cells[:MOST_COLUMNS]}}


def _cells(task: Task, values: Tensor, original: Tensor) -> list[tuple[str, str, float]]:
    """Name, value as text, and distance from the mean of each column as the user's table has it."""
    columns = task.data.columns
    if not columns:
        names = task.data.feature_names or [f"x{number}" for number in range(len(values))]
        return [
            (name, readable(float(value)), abs(float(far)))
            for name, value, far in zip(names, original, values, strict=True)
        ]
    cells, start = [], 0
    for column in (column for column in columns if column.features):
        features = slice(start, start + len(column.features))
        start = features.stop
        far = float(values[features].abs().max())
        if column.flagged and float(original[features][-1]) > 0.5:
            text = "missing"
        elif column.kind == "number":
            text = readable(float(original[features][0]))
        elif column.kind == "date":
            text = date_of(float(original[features][0]))
        else:
            text = (*column.levels, "(other)")[int(original[features][: len(column.levels) + column.other].argmax())]
        cells.append((column.name, text, far))
    return cells


def png(image: Tensor) -> str:
    """An image [1 or 3, H, W] of values from 0 to 1 as a PNG in a data address."""
    levels = (image.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).contiguous()
    height, width, channels = levels.shape
    lines = b"".join(b"\0" + levels[line].numpy().tobytes() for line in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
    return "data:image/png;base64," + base64.b64encode(content).decode()
