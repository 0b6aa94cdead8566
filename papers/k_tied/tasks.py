"""The k-tied paper's four networks and what they learn from, at its sizes or at smaller ones [appendix D.1]."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from dubito import Bernoulli, Categorical, models, seeds
from dubito.data import Part, load
from dubito.likelihoods import Likelihood

from ..runner.experiment import Cell
from ..settings import explicit

#: Names of parameters, or a predicate of name and weight; None for all.
Chosen = Callable[[str, Tensor], bool] | list[str] | None
MLP_DATA, LENET_DATA, LSTM_DATA, RESNET_DATA = "mnist-mlp", "cifar10-lenet", "imdb-lstm", "cifar10-resnet"


class Rows(NamedTuple):
    """Rows of one data set.

    Attributes:
        train: training rows.
        validation: None where the data set names none.
        test: test rows.
    """

    train: Part
    validation: Part | None
    test: Part


@dataclass(frozen=True, kw_only=True)
class Task:
    """A network and its rows.

    Args:
        held_out: of data without validation rows, the last training rows, at most a quarter, that validate.
        validation_rows: the first so many are looked at; None for all.
        test_rows: likewise.
    """

    held_out: int = 0
    validation_rows: int | None = None
    test_rows: int | None = None

    #: Weights whose standard deviations are looked at, by what the paper calls them; the one whose gradients are.
    layers: ClassVar[Mapping[str, str]] = {}
    shown: ClassVar[str] = ""
    #: Weights with a distribution, and which of them are tied.
    subset: ClassVar[Chosen] = None
    tied: ClassVar[Chosen] = None

    def network(self, seed: int) -> nn.Module:
        """The network as it starts."""
        raise NotImplementedError

    def prepared(self, inputs: Tensor) -> Tensor:
        """Inputs as the network sees them."""
        return inputs

    def labels(self, targets: Tensor) -> Tensor:
        """Targets as the likelihood sees them."""
        return targets

    def likelihood(self) -> Likelihood:
        """Of the targets."""
        return explicit(Categorical)

    def rows(self, loaded: Rows) -> Rows:
        """The rows of a training, as the network sees them."""
        train, validation, test = loaded
        count = len(train.targets)
        if validation is None and self.held_out:
            count -= min(self.held_out, count // 4)
            validation = Part(train.inputs[count:], train.targets[count:])
        return Rows(
            self._cut(train, count),
            validation and self._cut(validation, self.validation_rows),
            self._cut(test, self.test_rows),
        )

    def _cut(self, part: Part, count: int | None) -> Part:
        return Part(self.prepared(part.inputs[:count]), self.labels(part.targets[:count]))


@dataclass(frozen=True, kw_only=True)
class MLP(Task):
    """784-400-400-10 on MNIST, pixels from −1 to 1, the last 10,000 training images for validation."""

    layers: ClassVar[Mapping[str, str]] = {"dense-1": "fc1.weight", "dense-2": "fc2.weight", "dense-3": "fc.weight"}
    shown = "fc2.weight"

    def network(self, seed: int) -> nn.Module:
        return models.mlp(784, (400, 400), seed=seed)

    def prepared(self, inputs: Tensor) -> Tensor:
        return 2 * inputs - 1


def matrices(name: str, weight: Tensor) -> bool:
    """Dense layers: LeNet's convolutions are not tied."""
    return weight.ndim == 2


def kernels(name: str, weight: Tensor) -> bool:
    """Biases and batch norm are points in the paper's ResNet."""
    return weight.ndim > 1


@dataclass(frozen=True, kw_only=True)
class LeNet(Task):
    """Two convolutions and two dense layers on CIFAR-10, pixels from 0 to 1.

    Args:
        side: of the images, whose neighbouring pixels are averaged.
    """

    side: int = 32

    layers: ClassVar[Mapping[str, str]] = {"dense-1": "fc1.weight", "dense-2": "fc.weight"}
    shown = "fc1.weight"
    tied = staticmethod(matrices)

    def network(self, seed: int) -> nn.Module:
        return models.lenet(in_channels=3, image_size=self.side, seed=seed)

    def prepared(self, inputs: Tensor) -> Tensor:
        return avg_pool2d(inputs, 32 // self.side)


@dataclass(frozen=True, kw_only=True)
class LSTM(Task):
    """Embedding, LSTM and one logit on IMDB; embedding and the LSTM's bias are points.

    Args:
        words: the last so many of a review.
        vocabulary: words known; rarer ones become the sign of an unknown word.
    """

    words: int = 80
    vocabulary: int = 20_000

    layers: ClassVar[Mapping[str, str]] = {"kernel": "lstm.weight_ih_l0", "recurrent": "lstm.weight_hh_l0"}
    shown = "lstm.weight_hh_l0"
    subset: ClassVar[Chosen] = ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "fc"]

    def network(self, seed: int) -> nn.Module:
        return models.imdb_lstm(vocabulary=self.vocabulary, seed=seed)

    def prepared(self, inputs: Tensor) -> Tensor:
        unknown = 2
        return inputs[:, -self.words :].where(inputs[:, -self.words :] < self.vocabulary, unknown)

    def likelihood(self) -> Likelihood:
        return explicit(Bernoulli)

    def labels(self, targets: Tensor) -> Tensor:
        return targets.float()[:, None]


@dataclass(frozen=True, kw_only=True)
class ResNet(Task):
    """TensorFlow Probability's ResNet-18 on CIFAR-10, its kernels starting from N(0, 0.1²).

    Args:
        side: of the images, whose neighbouring pixels are averaged.
        base: width of the first stage.
    """

    side: int = 32
    base: int = 64

    layers: ClassVar[Mapping[str, str]] = {
        "stem": "conv1.weight",
        "stage-2": "layer2.0.conv2.weight",
        "stage-3": "layer3.0.conv2.weight",
        "stage-4": "layer4.0.conv2.weight",
        "dense": "fc.weight",
    }
    shown = "layer4.0.conv2.weight"
    subset = tied = staticmethod(kernels)

    def network(self, seed: int) -> nn.Module:
        network = models.tfp_resnet18(base=self.base, seed=seed)
        for name, weight in network.named_parameters():
            if kernels(name, weight):
                nn.init.normal_(weight, std=0.1, generator=seeds.generator(seed, "kernel", name))
        return network

    def prepared(self, inputs: Tensor) -> Tensor:
        return avg_pool2d(inputs, 32 // self.side)


def load_cell(cell: Cell) -> Rows:
    """The data set that a cell's name begins with."""
    return loaded(cell.data.partition("-")[0])


@lru_cache(maxsize=1)
def loaded(name: str) -> Rows:
    """A data set, read once for cells that follow each other."""
    data = load(name, standardise=False)
    return Rows(data.train, data.validation, data.test)


def generate_cell(cell: Cell) -> Rows:
    """Made-up rows of the same form."""
    name = cell.data.partition("-")[0]
    stream = seeds.generator(cell.seed, "made-up rows")

    def part(rows: int) -> Part:
        if name == "imdb":
            return Part(torch.randint(20_000, (rows, 80), generator=stream), torch.arange(rows) % 2)
        shape = (1, 28, 28) if name == "mnist" else (3, 32, 32)
        return Part(torch.rand(rows, *shape, generator=stream), torch.randint(10, (rows,), generator=stream))

    return Rows(part(8), None, part(4)) if name == "cifar10" else Rows(part(64), part(16), part(16))
