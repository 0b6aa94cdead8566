"""What is compared on: data, some of it held out of training as out of distribution, and a network for it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..data import Data, Part, load
from ..data.loading import is_table
from ..errors import ConfigError, DataError, UnknownNameError
from ..likelihoods import Likelihood
from ..shifts import far_range, feature_shuffled
from ..shifts.corruptions import chosen_rows
from ..shifts.svhn import svhn_test
from .likelihood import COUNTS, chosen, likelihood_of, original, task_for
from .network import Network, suited
from .new_rows import RowReader
from .settings import Settings

#: Rows of an out-of-distribution set that are judged, and of the validation part that watch over training.
MOST_OOD, MOST_WATCHED = 2000, 1000


@dataclass(frozen=True)
class Task:
    """A comparison's ground.

    Attributes:
        data: as loaded.
        train: rows to train on, without the held-out classes.
        validation: rows that watch over training and say what uncertainty is usual.
        test: rows to judge on, of the same classes.
        ood: out-of-distribution inputs, by name.
        held_out: the names of the classes kept from training.
        class_names: of the classes that are left.
        likelihood: what fits the targets.
        likelihood_reason: its name, and why it does.
        network: how the network is made.
    """

    data: Data
    train: Part
    validation: Part
    test: Part
    ood: Mapping[str, Tensor]
    held_out: tuple[str, ...]
    class_names: tuple[str, ...]
    likelihood: Likelihood
    likelihood_reason: str
    network: Network


def make_task(settings: Settings) -> Task:
    """Load data, hold out classes, choose the network and try it on a few rows."""
    data = loaded(settings)
    if not len(data.train.targets):
        raise DataError(f"{data.name!r} has no training rows here; choose another data set")
    if data.task != "classification" and settings.held_out:
        raise ConfigError(f"classes can be held out of a classification with several, but {data.name!r} is {data.task}")
    names = data.class_names or tuple(map(str, range(data.num_classes or 0)))
    parts = [part for part in (data.train, data.validation, data.test) if part is not None]
    ood: dict[str, Tensor] = {}
    outputs, classes, held_out = data.num_outputs, names, ()
    if data.task == "classification":
        outputs -= _count_held_out(data, settings)
        classes, held_out = names[:outputs], names[outputs:]
    if held_out:
        parts, ood[f"held-out {', '.join(held_out)}"] = _without_classes(parts, outputs)
    train, validation, test = parts
    if settings.rows is not None:
        rows = chosen_rows(len(train.targets), settings.rows, settings.seed)
        train = Part(*(tensor[rows] for tensor in train))
    for name in settings.ood or (() if ood else usual_ood(test.inputs)):
        ood[name] = ood_rows(name, data, test.inputs, settings.seed)[:MOST_OOD]
    name, reason = chosen(
        data, train, validation, lambda count: suited(data, count, settings.model), settings.likelihood, settings.seed
    )
    if name in COUNTS:  # in their own units, which are whole numbers
        train, validation, test = (
            Part(part.inputs, original(data, part.targets).to(part.targets)) for part in (train, validation, test)
        )
        data = replace(data, target_scaling=None)
    network = suited(data, outputs * (1 + (name == "heteroscedastic")), settings.model)
    likelihood = likelihood_of(name, data.task)
    return Task(data, train, validation, test, ood, held_out, classes, likelihood, reason, network)


def _without_classes(parts: list[Part], num_classes: int) -> tuple[list[Part], Tensor]:
    """The rows of the first `num_classes` classes, and inputs of the others."""
    others = torch.cat([part.inputs[part.targets >= num_classes] for part in parts])
    known = [Part(*(tensor[part.targets < num_classes] for tensor in part)) for part in parts]
    return known, others[:MOST_OOD]


def loaded(settings: Settings) -> Data:
    """The data with a validation part: the customary one, else a tenth of the training rows."""
    options: dict[str, Any] = {}
    if is_table(settings.data):
        options = {"target": settings.target, "task": settings.task or task_for(settings.likelihood)}
    elif settings.target is not None or settings.task is not None:
        raise ConfigError(f"target and task are for tables of your own; {settings.data!r} has its own")
    split = settings.splits[0]
    data = load(settings.data, split, **options)
    if data.validation is None and len(data.train.targets) > 1:
        fraction = max(0.1, 1 / len(data.train.targets))
        data = load(settings.data, split, validation=fraction, **options)
    return data


def _count_held_out(data: Data, settings: Settings) -> int:
    """How many classes are held out: as the user says, else of named data without `ood` a fifth of them."""
    classes = data.num_classes or 0
    usual = 0 if settings.ood or is_table(settings.data) else classes // 5
    count = usual if settings.held_out is None else settings.held_out
    if not 0 <= count <= classes - 2:
        raise ConfigError(f"at least 2 of the {classes} classes must remain, got held_out={count}")
    return count


def usual_ood(inputs: Tensor) -> tuple[str, ...]:
    """What is out of a table's distribution where nobody says: columns shuffled apart, rows far outside its range."""
    if inputs.ndim != 2 or not inputs.is_floating_point() or len(inputs) < 2:
        return ()
    return ("shuffled", "far") if inputs.shape[1] > 1 else ("far",)


def ood_rows(name: str, data: Data, inputs: Tensor, seed: int) -> Tensor:
    """Inputs that do not belong, scaled as the network's own are.

    Args:
        name: of a data set, a table's path, or "shuffled" or "far" for a table taken apart.
        data: what is trained on.
        inputs: its test rows.
        seed: of the draws.
    """
    if name == "shuffled":
        return feature_shuffled(inputs, seed=seed)
    if name == "far":
        return far_range(inputs, seed=seed)
    if is_table(name):
        return RowReader.of(data).read(name)[0]
    if name == "svhn" and data.input_scaling is not None:
        rows = data.input_scaling.apply(svhn_test())
    else:
        try:
            rows = load(name, input_scaling=data.input_scaling, validation=0).test.inputs
        except UnknownNameError:
            raise
        except ConfigError as error:
            raise DataError(
                f"out-of-distribution rows must look like those of {data.name!r}, of shape {list(inputs.shape[1:])}; "
                f"{name!r} does not: {error}"
            ) from error
    if rows.shape[1:] != inputs.shape[1:]:
        raise DataError(
            f"out-of-distribution rows must look like those of {data.name!r}, of shape {list(inputs.shape[1:])}; "
            f"{name!r} has {list(rows.shape[1:])}"
        )
    return rows
