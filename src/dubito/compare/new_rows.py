"""New rows, read and scaled as those were that a network was trained on."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Data, Scaling, archives, tabular
from ..data.columns import Column, differences, encoded, filled, from_json
from ..errors import DataError


@dataclass(frozen=True, kw_only=True)
class RowReader:
    """How rows are read.

    Attributes:
        columns: of a table, those trained on; none for inputs that are no table.
        fill: what takes the place of missing numbers, in original units.
        scaling: from original units (images: from 0 to 1) to what the network reads; None for word numbers.
        shape: of one row.
        unit: whether rows are images of values from 0 to 1, for which bytes stand too.
        target: what is predicted; a column of that name is no input.
    """

    columns: tuple[Column, ...]
    fill: tuple[float, ...]
    scaling: Scaling | None
    shape: tuple[int, ...]
    unit: bool
    target: str

    @classmethod
    def of(cls, data: Data) -> "RowReader":
        """The reader of rows like those of `data`."""
        shape = tuple(data.train.inputs.shape[1:])
        columns, fill = data.columns, data.fill
        if len(shape) == 1 and not columns:
            names = data.feature_names or tuple(f"x{number}" for number in range(shape[0]))
            columns = tuple(Column(name=name, kind="number") for name in names)
        if fill is None and columns and data.input_scaling is not None:
            fill = data.input_scaling.shift.expand(shape)
        return cls(
            columns=columns,
            fill=() if fill is None else tuple(fill.tolist()),
            scaling=data.input_scaling,
            shape=shape,
            unit=unit_images(data),
            target=data.target_name,
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        scaling = self.scaling and {name: value.tolist() for name, value in self.scaling._asdict().items()}
        columns = [{**asdict(column), "features": len(column.features)} for column in self.columns]
        plain = {"fill": self.fill, "shape": self.shape, "unit": self.unit, "target": self.target}
        return {"columns": columns, "scaling": scaling, **plain}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RowReader":
        """The reader behind `to_json`."""
        scaling = content["scaling"]
        return cls(
            columns=from_json(content["columns"]),
            fill=tuple(content["fill"]),
            scaling=scaling
            and Scaling(*(torch.tensor(scaling[name], dtype=torch.float64) for name in ("shift", "scale"))),
            shape=tuple(content["shape"]),
            unit=content.get("unit", len(content["shape"]) == 3),  # folders of earlier versions do not say
            target=content.get("target", ""),
        )

    def read(self, name: str | Path) -> tuple[Tensor, list[str]]:
        """The rows of a file as inputs, and what they have otherwise than those trained on.

        Args:
            name: a table's file, or an .npz file of columns or of one array of inputs.
        """
        path = Path(name)
        if not path.is_file():
            raise DataError(f"there is no file {path}; give new rows as a {', '.join(tabular.SUFFIXES)} file")
        if tabular.form_of(path) != "npz":
            return self._from_frame(self.frame(path), path)
        arrays, told = archives.archive(path), []
        if not self.columns and len(arrays) == 2 and self.target in arrays:
            del arrays[self.target]
            told = [f"not used, for it is what is predicted: {self.target}"]
        whole = [array for array in arrays.values() if array.shape[1:] == self.shape]
        if len(arrays) == 1 and whole:
            return self._scaled(whole[0], path), told
        if self.columns and all(array.ndim in (1, 2) for array in arrays.values()):
            return self._from_frame(archives.archive_frame(arrays), path)
        shapes = {key: list(array.shape) for key, array in arrays.items()}
        raise DataError(f"{path} must hold one array of inputs [N, {_list(self.shape)}], got {shapes}")

    def frame(self, path: Path) -> Any:
        """The table in a file, read as training's was where it could be read in two ways."""
        used = {column.name for column in self.columns if column.kind != "ignored"} or None
        return tabular.frame(path, {column.name: column.form for column in self.columns if column.form}, used)

    def _from_frame(self, frame: Any, path: Path) -> tuple[Tensor, list[str]]:
        if not len(frame):
            raise DataError(f"{path} must hold at least one row, got none")
        known = {self.target, *(name.strip() for name in self.target.split(","))}
        known -= {column.name for column in self.columns}
        there = [name for name in frame.columns if name in known or name.startswith(f"{self.target}[")]
        frame = frame.drop(columns=there)
        told = [f"not used, for it is what is predicted: {name}" for name in there]
        if not self.columns:
            inputs = self._unfolded(frame, path)
            return self._scaled(inputs, path), [*told, f"each row read as [{_list(self.shape)}], last axis fastest"]
        told += differences(frame, self.columns, str(path))
        inputs = filled(encoded(frame, self.columns, str(path)), np.array(self.fill))
        return self._scaled(inputs, path), told

    def _unfolded(self, frame: Any, path: Path) -> np.ndarray:
        """The rows of a table, one column for every number of an image, a series or a text."""
        inputs, needed = frame.to_numpy(), math.prod(self.shape)
        if inputs.shape[1] != needed or inputs.dtype.kind not in "iuf":
            kind = "numbers" if inputs.dtype.kind in "iuf" else "not all of numbers"
            raise DataError(
                f"the network reads inputs of shape [{_list(self.shape)}]: {path} must have {needed} columns of "
                f"numbers, one for each, or be an .npz file with one array of them; got {inputs.shape[1]} columns, "
                f"{kind}"
            )
        return inputs.reshape(-1, *self.shape)

    def _scaled(self, inputs: np.ndarray, path: Path) -> Tensor:
        if self.scaling is None:
            if inputs.dtype.kind not in "iuf" or (inputs < 0).any() or (inputs != np.floor(inputs)).any():
                raise DataError(f"{path} must hold the numbers of words, whole and from 0 on; got others")
            return torch.as_tensor(inputs.astype(np.int64))
        values = torch.as_tensor(inputs.astype(np.float64))
        if not values.isfinite().all():
            raise DataError(f"{path} must hold finite numbers, got NaN or infinity")
        if self.unit and inputs.dtype.kind in "iu":
            values = values / 255
        elif self.unit and float(values.abs().max()) > 2:
            raise DataError(
                f"images in {path} must be whole numbers from 0 to 255 or fractions from 0 to 1, got fractions up to "
                f"{float(values.max()):g}; divide them by 255, or save them as whole numbers"
            )
        return self.scaling.apply(values).to(torch.get_default_dtype())


def unit_images(data: Data) -> bool:
    """Whether inputs are images of values from 0 to 1."""
    inputs, scaling = data.train.inputs, data.input_scaling
    if inputs.ndim != 4 or scaling is None:
        return False
    low, high = scaling.undo(inputs[:1000]).aminmax()
    return bool(low > -0.01 and high < 1.01)


def _list(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
