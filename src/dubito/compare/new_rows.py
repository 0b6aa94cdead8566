"""New rows, read and scaled as those were that a network was trained on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Data, Scaling, tabular
from ..data.columns import Column, differences, encoded, filled, from_json
from ..errors import DataError
from .settings import is_table


@dataclass(frozen=True, kw_only=True)
class Reader:
    """How rows are read.

    Attributes:
        columns: of a table, those trained on; none for inputs that are no table.
        fill: what takes the place of missing numbers, in original units.
        scaling: from original units (images: from 0 to 1) to what the network reads; None for word numbers.
        shape: of one row.
    """

    columns: tuple[Column, ...]
    fill: tuple[float, ...]
    scaling: Scaling | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, data: Data) -> "Reader":
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
        )

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        scaling = self.scaling and {name: value.tolist() for name, value in self.scaling._asdict().items()}
        columns = [asdict(column) for column in self.columns]
        return {"columns": columns, "fill": self.fill, "scaling": scaling, "shape": self.shape}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Reader":
        """The reader behind `to_json`."""
        scaling = content["scaling"]
        return cls(
            columns=from_json(content["columns"]),
            fill=tuple(content["fill"]),
            scaling=scaling and Scaling(*(torch.tensor(scaling[name]) for name in ("shift", "scale"))),
            shape=tuple(content["shape"]),
        )

    def read(self, name: str | Path) -> tuple[Tensor, list[str]]:
        """The rows of a file as inputs, and what they have otherwise than those trained on.

        Args:
            name: a .csv or .parquet file, or an .npz file of columns or of one array of inputs.
        """
        path = Path(name)
        if not path.is_file() or not is_table(str(path)):
            raise DataError(f"new rows must be a {', '.join(tabular.SUFFIXES)} file, got {path}")
        if path.suffix.lower() != ".npz":
            return self._from_frame(tabular.frame(path), path)
        found = tabular.archive(path)
        whole = [array for array in found.values() if array.shape[1:] == self.shape]
        if len(found) == 1 and whole:
            return self._scaled(whole[0], path), []
        if self.columns and all(array.ndim in (1, 2) for array in found.values()):
            return self._from_frame(tabular.archive_frame(found), path)
        shapes = {key: list(array.shape) for key, array in found.items()}
        raise DataError(f"{path} must hold one array of inputs [N, {_list(self.shape)}], got {shapes}")

    def _from_frame(self, frame: Any, path: Path) -> tuple[Tensor, list[str]]:
        if not self.columns:
            raise DataError(
                f"{path} is a table, but the network reads inputs of shape [{_list(self.shape)}]; give an .npz file "
                "with one array of them"
            )
        if not len(frame):
            raise DataError(f"{path} must hold at least one row, got none")
        found = differences(frame, self.columns, str(path))
        inputs = filled(encoded(frame, self.columns, str(path)), np.array(self.fill))
        return self._scaled(inputs, path), found

    def _scaled(self, inputs: np.ndarray, path: Path) -> Tensor:
        if self.scaling is None:
            return torch.as_tensor(inputs.astype(np.int64))
        values = torch.as_tensor(inputs.astype(np.float64))
        if len(self.shape) == 3 and inputs.dtype.kind in "iu":
            values = values / 255  # whole numbers are an image's bytes
        if not values.isfinite().all():
            raise DataError(f"{path} must hold finite numbers, got NaN or infinity")
        return self.scaling.apply(values).to(torch.get_default_dtype())


def _list(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))
