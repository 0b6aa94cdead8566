"""From arrays in original units to a divided, scaled `Data`."""

import numpy as np
import torch
from torch import Tensor

from dubito.errors import ConfigError, StorageError

from .columns import filled, medians
from .parts import Data, Part, Scaling
from .registry import Entry, Pair, Raw
from .splits import split_rows, validation_rows


def divided(raw: Raw, entry: Entry, name: str, split: int, validation: float | None) -> tuple[Pair, Pair | None, Pair]:
    """Training, validation and test rows: the publisher's parts, or by the split rule.

    Args:
        raw: what was read.
        entry: whose rules hold.
        name: what the validation rows' stream is called by.
        split: the number of the split.
        validation: the fraction of the training rows to set aside; None does what is customary for the set.
    """
    train, aside, test = raw.train, raw.validation, raw.test
    if test is None:
        rows, test_rows = split_rows(len(train[0]), split, entry.train_fraction)
        train, test = _rows(train, rows), _rows(train, test_rows)
    num_data = len(train[0])
    if validation is None:
        if aside is None and num_data and entry.tail:
            return _rows(train, slice(-entry.tail)), _rows(train, slice(-entry.tail, None)), test
        return train, aside, test
    if validation == 0:
        return train, None, test
    if aside is not None:
        raise ConfigError(
            f"{name!r} has a validation part of its own: validation must be left out or 0, got {validation:g}"
        )
    if not num_data:
        raise ConfigError(
            f"only the test part of {name!r} is here: validation must be left out or 0, got {validation:g}"
        )
    rows, aside_rows = validation_rows(num_data, validation, name=name, split=split)
    return _rows(train, rows), _rows(train, aside_rows), test


def _rows(pair: Pair, rows: np.ndarray | slice) -> Pair:
    return pair[0][rows], pair[1][rows]


def column_statistics(values: np.ndarray) -> Pair:
    """Mean and standard deviation of each column, along the rows; a constant column is only shifted, to 0."""
    values = values.astype(np.float64, copy=False)
    constant = values.min(0) == values.max(0)
    # A constant's mean and deviation are not exact in floating point: 1e-14 would be taken for a scale.
    return np.where(constant, values[0], values.mean(0)), np.where(constant, 1.0, values.std(0))


def channel_statistics(images: np.ndarray) -> Pair:
    """Mean and standard deviation of each channel of images of 0 to 255, as [C, 1, 1] in units of 255."""
    levels = np.arange(256) / 255
    counts = np.stack([np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(images.shape[1])])
    weights = counts / counts.sum(1, keepdims=True)
    mean = weights @ levels
    std = np.sqrt((weights * (levels - mean[:, None]) ** 2).sum(1))
    return mean[:, None, None], np.where(std > 0, std, 1.0)[:, None, None]


def _input_statistics(raw: Raw, entry: Entry, inputs: np.ndarray, standardise: bool) -> Pair:
    if standardise and raw.statistics is not None:
        return raw.statistics
    if standardise and len(inputs):
        if entry.kind == "table" and inputs.ndim == 4:
            # Images of one's own, channel by channel: one pixel may be the same in all.
            values = inputs.swapaxes(0, 1).reshape(inputs.shape[1], -1).T
            return tuple(value[:, None, None] for value in column_statistics(values))  # pyright: ignore
        return channel_statistics(inputs) if entry.kind == "image" else column_statistics(inputs)
    shape = (inputs.shape[1], 1, 1) if entry.kind == "image" or inputs.ndim == 4 else inputs.shape[-1:]
    return np.zeros(shape), np.ones(shape)


def assembled(
    raw: Raw,
    entry: Entry,
    *,
    name: str,
    split: int,
    standardise: bool | None,
    validation: float | None,
    input_scaling: Scaling | None,
    dtype: torch.dtype,
    task_reason: str,
) -> Data:
    """The data set that `load` returns."""
    train, aside, test = divided(raw, entry, name, split, validation)
    fill = None
    if raw.columns:
        fill = medians(train[0])
        train, test = (filled(train[0], fill), train[1]), (filled(test[0], fill), test[1])
        aside = aside and (filled(aside[0], fill), aside[1])
    standardise = entry.standardise if standardise is None else standardise
    shift, scale = _input_statistics(raw, entry, train[0], standardise)
    scaling = Scaling(torch.as_tensor(shift), torch.as_tensor(scale)) if input_scaling is None else input_scaling
    _check_scaling(scaling, test[0].shape[1:])

    class_names = raw.class_names or entry.class_names
    target_scaling, num_targets = None, 1
    if entry.task == "regression":
        values = train[1].reshape(len(train[1]), -1)
        num_targets = values.shape[1]
        pair = column_statistics(values) if standardise else (np.zeros(num_targets), np.ones(num_targets))
        target_scaling = Scaling(*map(torch.as_tensor, pair))

    def part(pair: Pair) -> Part:
        inputs = _inputs(pair[0], entry, scaling, dtype)
        if target_scaling is None:
            return Part(inputs, _classes(pair[1], len(class_names), name))
        values = torch.as_tensor(pair[1].reshape(len(pair[1]), -1).astype(np.float64))
        return Part(inputs, target_scaling.apply(values).to(dtype))

    num_classes = len(class_names) or None
    return Data(
        name=name,
        task=entry.task,
        train=part(train),
        validation=None if aside is None else part(aside),
        test=part(test),
        split=split,
        num_splits=entry.splits,
        num_outputs=len(class_names) if entry.task == "classification" else num_targets,
        num_classes=num_classes,
        feature_names=raw.feature_names,
        class_names=class_names,
        target_name=entry.target_name,
        input_scaling=None
        if entry.kind == "tokens"
        else Scaling(*(value.to(_work(entry, dtype)) for value in scaling)),
        target_scaling=target_scaling and Scaling(*(value.double() for value in target_scaling)),
        licence=entry.licence,
        source=entry.source,
        task_reason=task_reason,
        columns=raw.columns,
        fill=None if fill is None else torch.as_tensor(fill),
        notes=raw.notes,
    )


def _work(entry: Entry, dtype: torch.dtype) -> torch.dtype:
    """Tables are scaled in double precision, where columns of large numbers keep their small differences.

    Images and series are large and hold few digits.
    """
    return torch.float64 if entry.kind == "table" else dtype


def _inputs(values: np.ndarray, entry: Entry, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    if entry.kind == "tokens":
        return torch.as_tensor(values.astype(np.int64))
    work = _work(entry, dtype)
    inputs = torch.tensor(values, dtype=work)
    if entry.kind == "image":
        inputs /= 255
    shift, scale = (value.to(work) for value in scaling)
    return inputs.sub_(shift).div_(scale).to(dtype)


def _classes(values: np.ndarray, num_classes: int, name: str) -> Tensor:
    classes = torch.as_tensor(values.astype(np.int64))
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        span = f"{int(classes.min())} to {int(classes.max())}"
        raise StorageError(f"classes of {name!r} must be 0 to {num_classes - 1}, got {span}")
    return classes


def _check_scaling(scaling: Scaling, shape: tuple[int, ...]) -> None:
    for label, value in scaling._asdict().items():
        try:
            fits = torch.broadcast_shapes(value.shape, shape) == torch.Size(shape)
        except RuntimeError:
            fits = False
        if not fits:
            raise ConfigError(
                f"input_scaling.{label} must fit inputs of shape {list(shape)}, got {list(value.shape)}; "
                "take the input_scaling of a data set with the same inputs"
            )
    if not (scaling.scale > 0).all():
        raise ConfigError("input_scaling.scale must be above 0 everywhere")
