"""What is compared on: data with some classes held out as the unknown, and a network for them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import models
from ..data import Data, Part, load
from ..errors import ConfigError, DataError
from ..likelihoods import Bernoulli, Categorical, Gaussian, Likelihood


@dataclass(frozen=True)
class Task:
    """A comparison's ground.

    Attributes:
        data: as loaded.
        train: rows to train on, without the held-out classes.
        test: rows to judge on, of the same classes.
        unknown: inputs of the held-out classes, None where nothing is held out.
        held_out: the names of those classes.
        likelihood: what fits the targets.
    """

    data: Data
    train: Part
    test: Part
    unknown: Tensor | None
    held_out: tuple[str, ...]
    likelihood: Likelihood

    def network(self, seed: int) -> nn.Module:
        """A network for this task: a perceptron with two hidden layers."""
        if not self.train.inputs.is_floating_point() or self.train.inputs.ndim != 2:
            raise ConfigError(
                f"comparisons take tables of numbers so far, and {self.data.name!r} has inputs "
                f"{tuple(self.train.inputs.shape[1:])} of {self.train.inputs.dtype}"
            )
        outputs = self.data.num_outputs
        if isinstance(self.likelihood, Categorical):
            outputs -= len(self.held_out)
        return models.mlp(self.train.inputs.shape[1], (128, 128), num_classes=outputs, seed=seed)


def make_task(name: str, held_out: int | None, split: int) -> Task:
    """Load data and hold out its last classes.

    Args:
        name: of the data, or a path.
        held_out: how many classes; None holds out a fifth where at least three remain.
        split: which of the data's splits.
    """
    data = load(name, split)
    if not len(data.train.targets):
        raise DataError(f"{name!r} has no training rows here; choose another data set")
    if data.task != "classification":
        if held_out:
            raise ConfigError(
                f"classes can be held out of a classification with several, but {name!r} is {data.task}"
            )
        likelihood = Bernoulli() if data.task == "binary" else Gaussian()
        return Task(data, data.train, data.test, None, (), likelihood)
    classes = data.num_classes or 0
    count = classes // 5 if held_out is None else held_out
    if not 0 <= count <= classes - 2:
        raise ConfigError(f"at least 2 of the {classes} classes must remain, got held_out={count}")
    kept = classes - count
    known = [Part(*(t[part.targets < kept] for t in part)) for part in (data.train, data.test)]
    parts = (data.train, data.test)
    unknown = torch.cat([part.inputs[part.targets >= kept] for part in parts]) if count else None
    names = data.class_names or tuple(map(str, range(classes)))
    return Task(data, known[0], known[1], unknown, tuple(names[kept:]), Categorical())
