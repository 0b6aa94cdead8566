"""What loading gives: parts of inputs and targets, the statistics that scaled them, and their names."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..hints import checked
from .columns import Column
from .registry import TaskKind


class Part(NamedTuple):
    """One part of a data set: a pair, to be given to `fit` and unpacked as it is."""

    inputs: Tensor
    targets: Tensor


class Scaling(NamedTuple):
    """The affine map between original units and what a network sees.

    It unpacks to (shift, scale): `prediction.rescaled(*data.target_scaling)` speaks in original units. Of tables both
    are in double precision, where large numbers keep their small differences.
    """

    shift: Tensor
    scale: Tensor

    @checked
    def apply(self, values: Tensor) -> Tensor:
        """From original units to standardised ones, in the values' precision: (values − shift) / scale."""
        return self._like(values, (values - self.shift) / self.scale)

    @checked
    def undo(self, values: Tensor) -> Tensor:
        """From standardised values back to original units, in the values' precision: shift + scale · values."""
        return self._like(values, self.shift + self.scale * values)

    @staticmethod
    def _like(values: Tensor, scaled: Tensor) -> Tensor:
        return scaled.to(values.dtype) if values.is_floating_point() else scaled


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Data:
    """A data set, divided and scaled.

    Class numbers are int64 [N] for "classification" and "binary" alike. Real targets are [N, 1], or [N, T] where a
    table of one's own has several, scaled alike in every part: `data.target_scaling.undo(data.test.targets)` are in
    original units.

    Attributes:
        name: the name or path it was loaded by.
        task: what the targets are.
        train: the training part; without rows where only the publisher's test part is at hand.
        validation: the validation part, if there is one.
        test: the test part.
        split: the number of the split, or of the draw of a synthetic set.
        num_splits: how many splits there are.
        num_outputs: outputs a network needs: the classes, 1 for "binary", the real targets.
        num_classes: 2 for "binary"; None for "regression".
        feature_names: names of the columns or channels, as far as there are any.
        class_names: names of the classes in the order of their numbers.
        target_name: what the targets are called.
        input_scaling: maps inputs (images: from 0 to 1) to what the parts hold; None for word numbers.
        target_scaling: the same for real targets; None for classes.
        licence: what is known of the data's licence.
        source: where the data comes from.
        task_reason: why the task is what it is.
        columns: of a table of one's own, how each became inputs.
        fill: what takes the place of missing values, in original units, [F]; the training rows' medians.
        notes: what was filled, flagged or left out of a table of one's own.
    """

    name: str
    task: TaskKind
    train: Part
    validation: Part | None
    test: Part
    split: int
    num_splits: int
    num_outputs: int
    num_classes: int | None
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]
    target_name: str
    input_scaling: Scaling | None
    target_scaling: Scaling | None
    licence: str
    source: str
    task_reason: str
    columns: tuple[Column, ...] = ()
    fill: Tensor | None = None
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        rows = ", ".join(f"{len(part.targets)} {name}" for name, part in parts.items() if part is not None)
        shape = list(self.test.inputs.shape[1:])
        return (
            f"Data({self.name!r}, {self.task}, split {self.split} of {self.num_splits}: "
            f"{rows} rows, inputs {shape}, outputs {self.num_outputs})"
        )
