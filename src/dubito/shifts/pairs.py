"""Out-of-distribution rows: other data sets by name, held-out classes, tables with shuffled or far columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import seeds
from ..data import Data, Part, load
from ..errors import ConfigError, DataError, require_positive, unknown_name
from ..hints import checked
from .svhn import svhn_test


@dataclass(frozen=True, kw_only=True, eq=False)
class OODPair:
    """A data set and out-of-distribution rows, scaled alike.

    Attributes:
        name: of the pair.
        inside: the data set to train on, whose test part is compared with the out-of-distribution rows.
        outside: out-of-distribution inputs.
    """

    name: str
    inside: Data
    outside: Tensor


def _named(inside: str, outside: str) -> Callable[..., OODPair]:
    def build(**options: Any) -> OODPair:
        data = load(inside, **options)
        other = load(outside, input_scaling=data.input_scaling, validation=0)
        return OODPair(name=f"{inside}/{outside}", inside=data, outside=other.test.inputs)

    return build


def _svhn(**options: Any) -> OODPair:
    pixels = svhn_test()  # first: it says at once what is missing
    data = load("cifar10", **options)
    assert data.input_scaling is not None
    return OODPair(name="cifar10/svhn", inside=data, outside=data.input_scaling.apply(pixels))


def _rotated(**options: Any) -> OODPair:
    data = load("digits", **options)
    assert data.input_scaling is not None
    pixels = data.input_scaling.undo(data.test.inputs).unflatten(1, (8, 8))
    turned = data.input_scaling.apply(pixels.rot90(1, (1, 2)).flatten(1))
    return OODPair(name="digits/rotated", inside=data, outside=turned)


PAIRS: dict[str, Callable[..., OODPair]] = {
    "mnist/notmnist": _named("mnist", "notmnist"),
    "mnist/fashion-mnist": _named("mnist", "fashion-mnist"),
    "fashion-mnist/mnist": _named("fashion-mnist", "mnist"),
    "cifar10/cifar100": _named("cifar10", "cifar100"),
    "cifar10/svhn": _svhn,
    "digits/rotated": _rotated,
}


@checked
def ood_pair(name: str, **options: Any) -> OODPair:
    """A data set and out-of-distribution rows for it, by name.

    Args:
        name: one of `PAIRS`: the set that is trained on, and the other one; "digits/rotated" turns the digits by
            a right angle.
        options: what `dubito.data.load` takes for the first set.
    """
    if name not in PAIRS:
        raise unknown_name("pair", name, PAIRS)
    return PAIRS[name](**options)


@checked
def held_out(data: Data, classes: Sequence[int]) -> OODPair:
    """The data set without some of its classes, and the test rows of these as out-of-distribution rows.

    The classes that are left get new numbers from 0 on, in their order; inputs stay scaled as they are.

    Args:
        data: with at least two classes beside those held out.
        classes: their numbers.
    """
    if data.num_classes is None:
        raise DataError(f"held-out classes need a data set with classes, got {data.name!r}, a regression")
    known, out = range(data.num_classes), set(classes)
    if not out or len(out) != len(tuple(classes)) or not out <= set(known) or len(out) > len(known) - 2:
        raise ConfigError(
            f"classes must be some of 0 to {data.num_classes - 1}, each once, leaving at least two, got {list(classes)}"
        )
    left = [label for label in known if label not in out]
    numbers = torch.full((len(known),), -1)
    numbers[left] = torch.arange(len(left))

    def remaining(part: Part) -> Part:
        rows = numbers[part.targets] >= 0
        return Part(part.inputs[rows], numbers[part.targets[rows]])

    inside = replace(
        data,
        train=remaining(data.train),
        validation=None if data.validation is None else remaining(data.validation),
        test=remaining(data.test),
        task="classification",
        num_outputs=len(left),
        num_classes=len(left),
        class_names=tuple(data.class_names[label] for label in left),
    )
    outside = data.test.inputs[numbers[data.test.targets] < 0]
    if not len(outside):
        raise DataError(f"no test row of {data.name!r} belongs to the classes {sorted(out)}")
    return OODPair(name=f"{data.name} without {sorted(out)}", inside=inside, outside=outside)


@checked
def feature_shuffled(inputs: Tensor, *, seed: int = 0) -> Tensor:
    """Rows whose columns were shuffled apart: every column keeps its values, what held them together is gone.

    Args:
        inputs: a table [B, D].
        seed: of the permutations.
    """
    _check_table(inputs, 2)
    stream = seeds.generator(seed, "shifts", "shuffled", device=inputs.device)
    orders = torch.rand(inputs.shape, generator=stream, device=inputs.device).argsort(0)
    return inputs.gather(0, orders)


@checked
def far_range(inputs: Tensor, distance: float = 3.0, *, seed: int = 0) -> Tensor:
    """As many rows far outside the table: every column beyond its range, on either side.

    A value lies between one and `distance` times the column's own range beyond its smallest or largest value; a
    constant column counts as having a range of 1.

    Args:
        inputs: a table [B, D].
        distance: above 1, in ranges.
        seed: of the draws.
    """
    _check_table(inputs, 1)
    require_positive(distance=distance)
    if distance <= 1:
        raise ConfigError(f"distance must be above 1, got {distance:g}")
    stream = seeds.generator(seed, "shifts", "far", device=inputs.device)
    low, high = inputs.aminmax(dim=0)
    span = torch.where(high > low, high - low, torch.ones_like(low))
    draws = torch.rand((2, *inputs.shape), generator=stream, dtype=inputs.dtype, device=inputs.device)
    beyond = span * (1 + (distance - 1) * draws[0])
    return torch.where(draws[1] < 0.5, low - beyond, high + beyond)


def _check_table(inputs: Tensor, rows: int) -> None:
    if inputs.ndim != 2 or len(inputs) < rows or not inputs.is_floating_point():
        raise DataError(
            f"inputs must be a table [B, D] of real numbers with at least {rows} rows, got {inputs.dtype}, "
            f"{list(inputs.shape)}"
        )
