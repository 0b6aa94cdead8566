"""Small networks and data that the tests of the training loop share, the same at every call."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset

from dubito.posterior import Posterior


def data(count: int = 27, features: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Labels that depend on the inputs, so that there is something to learn."""
    stream = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, features, generator=stream)
    noisy = inputs[:, :classes] + 0.5 * torch.randn(count, classes, generator=stream)
    return inputs, noisy.argmax(1)


def fresh(make) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return make()


def mlp() -> nn.Module:
    return fresh(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)))


def with_statistics() -> nn.Module:
    """Batch statistics and dropout: state and noise that a resumed run must find again."""
    return fresh(lambda: nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, 3)))


class Noisy(Dataset):
    """Rows with noise from PyTorch's global state, as random crops and flips have it."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(4), self.targets[index]


def same(first: Posterior, second: Posterior) -> bool:
    """Whether two posteriors hold the same bits."""
    own, other = first.stored(), second.stored()
    return own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)


def gap(first: Posterior, second: Posterior) -> float:
    """The largest difference between two posteriors' tensors."""
    own, other = first.stored(), second.stored()
    assert own.keys() == other.keys()
    return max(float((own[name].double() - other[name].double()).abs().max()) for name in own)


def step_in(path: Path) -> int:
    """The step at which a checkpoint was written."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["dubito"])["content"]["progress"]["step"]
