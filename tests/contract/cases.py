"""The networks and methods that the contract runs every method through."""

import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

import dubito
from dubito import EFB, INF, KFAC, Categorical, Diagonal, DubitoWarning, Laplace, MCDropout, MeanField, Rank1, Training
from dubito.posterior import Posterior


def is_beside(name: str, parameter: Tensor) -> bool:
    """Weights of first layers, and all vectors: those that are Normal beside factors on the others."""
    return parameter.ndim == 1 or name.split(".")[0] in ("0", "stem", "first", "embedding", "embed", "body", "left")


METHODS = {
    **dubito.methods(),
    "rank1-beside": Rank1(components=2, beside=MeanField(subset=is_beside)),
    # At the default rate most masks of so few nodes drop nothing, and draws would rightly coincide.
    "mc-dropout": MCDropout(rate=0.5),
    # The contract is about draws; linearised predictions, the default, are compared with dense Jacobians elsewhere.
    "laplace-diag": Laplace(structure=Diagonal(), linearised=False),
    # Eigenvectors turn with rounding and draws turn with them: the same batches for every form of data.
    "laplace-kfac": Laplace(structure=KFAC(), batch_size=8, linearised=False),
    "laplace-efb": Laplace(structure=EFB(), batch_size=8, linearised=False),
    # Not all of layers this small
    "laplace-inf": Laplace(structure=INF(rank=0.1), batch_size=8, linearised=False),
}
QUICK = Training(epochs=2, batch_size=8, lr=1e-2)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.stem = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
        self.inner = nn.ModuleDict({"a": nn.Sequential(block, nn.Sequential(nn.Linear(6, 5), nn.ReLU()))})
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner["a"](self.stem(x)))


class Shared(nn.Module):
    """One layer called twice, and two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.twice = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = torch.tanh(self.twice(h))
        return self.head(torch.tanh(self.tied(torch.tanh(self.twice(h)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)).mean(1))


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 17)
        self.head = nn.Linear(17, 3)

    def forward(self, *, features: Tensor, scale: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(features * scale)))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 17), nn.Linear(2, 17), nn.Linear(17, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.relu(self.left(a) + self.right(b)))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=2, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, padding=1, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 3),
    )


@dataclass(frozen=True)
class Case:
    net: nn.Module
    inputs: object
    targets: Tensor


def rows(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,), generator=torch.Generator().manual_seed(1))


def make(name: str, count: int = 12) -> Case:
    """A network with inputs and labels of three classes, the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ids = torch.randint(11, (count, 7), generator=torch.Generator().manual_seed(2))
        table = {
            "mlp": lambda: (nn.Sequential(nn.Linear(4, 17), nn.ReLU(), nn.Linear(17, 3)), rows((count, 4))),
            "one feature": lambda: (nn.Sequential(nn.Linear(1, 17), nn.Tanh(), nn.Linear(17, 3)), rows((count, 1))),
            "nested": lambda: (Nested(), rows((count, 4))),
            "shared": lambda: (Shared(), rows((count, 4))),
            "convolutional": lambda: (convolutional(), rows((count, 2, 7, 7))),
            "lstm": lambda: (Recurrent(), ids),
            "attention": lambda: (Attending(), rows((count, 5, 4))),
            "dict": lambda: (Dictionary(), {"features": rows((count, 4)), "scale": rows((count, 1), 5)}),
            "tuple": lambda: (Pair(), (rows((count, 4)), rows((count, 2), 6))),
        }
        net, inputs = table[name]()
    return Case(net, inputs, labels(count))


NETWORKS = ("mlp", "one feature", "nested", "shared", "convolutional", "lstm", "attention", "dict", "tuple")


def fresh(method: str, network: str = "mlp", count: int = 12, seed: int = 0) -> tuple[Posterior, Case]:
    """A posterior of the method on the network, fitted now, with the case it was fitted to."""
    case = make(network, count)
    training = replace(QUICK, batch_size=max(QUICK.batch_size or 0, count // 8))  # few steps for many rows
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)  # layers a method leaves as points are named, rightly
        posterior = METHODS[method].fit(
            case.net, (case.inputs, case.targets), Categorical(), training=training, seed=seed
        )
    return posterior, case


@cache
def fitted(method: str, network: str = "mlp", count: int = 12, seed: int = 0) -> tuple[Posterior, Case]:
    """The same, fitted once for all tests of a process: whoever changes the posterior takes a copy."""
    return fresh(method, network, count, seed)
