"""Linearised predictions: time in the number of classes, memory, and one row beside laplace-torch."""

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import INF, KFAC, Categorical, Diagonal, DubitoWarning, Laplace
from dubito.models import resnet18

from .bars import Bar, Values, benchmark, cpu_seconds, importable, interleaved, peak_mebibytes, ratios

STRUCTURES: dict[str, Any] = {"diagonal": Diagonal(), "KFAC": KFAC(), "INF": INF()}


def dense_network(*widths: int) -> nn.Sequential:
    """Linear layers with ReLUs between them."""
    layers = [module for m, n in zip(widths[1:], widths, strict=False) for module in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def fitted(network: nn.Module, inputs: Tensor, classes: int, **settings: Any) -> Any:
    """A posterior around a network as it is; batch norms stay points."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    targets = torch.randint(classes, (len(inputs),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)  # it is no better than a constant
        return Laplace(**settings).fit(network.eval(), (inputs, targets), Categorical())


def predicting(posterior: Any, inputs: Tensor) -> Callable[[], object]:
    """One linearised prediction, of which the first has made what is made once."""
    posterior.predict(inputs, linearised=True)
    return lambda: posterior.predict(inputs, linearised=True)


@benchmark(
    {f"linearised {name}, exponent from 100 to 1,000 classes": Bar(1.2, "log10 of a ratio") for name in STRUCTURES}
)
def linearised_classes(rounds: int) -> Values:
    """128-128-128-C, 64 rows."""
    torch.manual_seed(0)
    inputs, works = torch.randn(512, 128), {}
    for name, structure in STRUCTURES.items():
        for classes in (100, 1000):
            posterior = fitted(dense_network(128, 128, 128, classes), inputs, classes, structure=structure)
            works[f"{name} {classes}"] = predicting(posterior, inputs[:64])
    seconds = interleaved(works, rounds, warm=1)
    return {
        f"linearised {name}, exponent from 100 to 1,000 classes": [
            math.log10(ratio) for ratio in ratios(seconds, f"{name} 1000", f"{name} 100")
        ]
        for name in STRUCTURES
    }


@benchmark(
    {
        "linearised KFAC of a last layer 128 to 3,100, one row": Bar(50, "ms"),
        "linearised KFAC of a last layer 128 to 3,100, memory": Bar(100, "MiB"),
    }
)
def linearised_last_layer(rounds: int) -> Values:
    """The last layer alone; laplace-torch's users report 10 s and 15 GB."""
    torch.manual_seed(0)
    inputs = torch.randn(256, 64)
    posterior = fitted(dense_network(64, 128, 3100), inputs, 3100, structure=KFAC(), subset=["2"])
    memory = peak_mebibytes(lambda: posterior.predict(inputs[:1], linearised=True))  # of the first call
    seconds = interleaved({"row": predicting(posterior, inputs[:1])}, rounds)
    return {
        "linearised KFAC of a last layer 128 to 3,100, one row": [1000 * value for value in seconds["row"]],
        "linearised KFAC of a last layer 128 to 3,100, memory": [memory],
    }


@benchmark(
    {
        "linearised KFAC of a small ResNet-18, 100 classes, 32 rows, memory": Bar(1024, "MiB"),
        "linearised KFAC of a small ResNet-18, 100 classes, 32 rows": Bar(None, "CPU-s"),
    }
)
def linearised_resnet18(rounds: int) -> Values:
    """Widths 16 to 128, 32 × 32, all convolutions."""
    torch.manual_seed(0)
    network, inputs = resnet18(base=16, small_images=True, num_classes=100), torch.randn(64, 3, 32, 32)
    posterior = fitted(network, inputs, 100, structure=KFAC())
    spent: list[float] = []

    def work() -> None:
        spent.append(cpu_seconds(lambda: posterior.predict(inputs[:32], linearised=True)))

    return {
        "linearised KFAC of a small ResNet-18, 100 classes, 32 rows, memory": [peak_mebibytes(work)],
        "linearised KFAC of a small ResNet-18, 100 classes, 32 rows": spent,
    }


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int, kernel: int, step: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(inputs, outputs, kernel, step, kernel // 2, bias=False)
            return nn.Sequential(layer, nn.BatchNorm2d(outputs))

        self.body = nn.Sequential(
            convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            convolution(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = nn.Identity() if same else convolution(channels, 4 * width, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of both, rectified."""
        return F.relu(self.body(inputs) + self.shortcut(inputs))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """He et al. (2016), for images of 224 × 224."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Bottleneck(channels, width, stride if number == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@benchmark(
    {
        "linearised ResNet-50, 1,000 classes, one row, last layer": Bar(2, "CPU-s"),
        "linearised ResNet-50, 1,000 classes, last layer, memory": Bar(6144, "MiB"),
        "linearised ResNet-50, 1,000 classes, one row, all layers": Bar(900, "CPU-s"),
        "linearised ResNet-50, 1,000 classes, all layers, memory": Bar(6144, "MiB"),
    }
)
def linearised_resnet50(rounds: int) -> Values:
    """Its last layer under KFAC, all layers under a diagonal; the second takes minutes and is run once."""
    torch.manual_seed(0)
    network, inputs = resnet50(), torch.randn(2, 3, 224, 224)
    values: dict[str, list[float]] = {}
    cases = {
        "last layer": {"structure": KFAC(), "subset": [str(len(network) - 1)]},
        "all layers": {"structure": Diagonal()},
    }
    for name, settings in cases.items():
        posterior = fitted(network, inputs, 1000, batch_size=2, **settings)
        spent: list[float] = []
        memory = peak_mebibytes(
            lambda kept=posterior, spent=spent: spent.append(
                cpu_seconds(lambda: kept.predict(inputs[:1], linearised=True))
            )
        )
        values[f"linearised ResNet-50, 1,000 classes, one row, {name}"] = spent
        values[f"linearised ResNet-50, 1,000 classes, {name}, memory"] = [memory]
    return values


NETWORKS = {"64-128-128-10": (64, 128, 128, 10), "784-400-400-10": (784, 400, 400, 10)}


@benchmark(
    {
        **{f"linearised KFAC over laplace-torch, one row, {name}": Bar(1.0, "ratio") for name in NETWORKS},
        **{f"linearised KFAC, one row, {name}": Bar(None, "bare passes") for name in NETWORKS},
    }
)
def linearised_one_row(rounds: int) -> Values:
    """Beside laplace-torch's probit approximation of the same structure, where it is installed."""
    torch.manual_seed(0)
    values: dict[str, list[float]] = {}
    for name, widths in NETWORKS.items():
        network, inputs = dense_network(*widths).eval(), torch.randn(512, widths[0])
        row = inputs[:1]
        posterior = fitted(network, inputs, 10, structure=KFAC())

        def bare(network: nn.Module = network, row: Tensor = row) -> None:
            with torch.no_grad():
                network(row)

        works: dict[str, Callable[[], object]] = {"bare": bare, "ours": predicting(posterior, row)}
        if importable("laplace"):
            works["theirs"] = _peer(network, inputs, row)
        seconds = interleaved(works, rounds)
        values[f"linearised KFAC, one row, {name}"] = ratios(seconds, "ours", "bare")
        if "theirs" in works:
            values[f"linearised KFAC over laplace-torch, one row, {name}"] = ratios(seconds, "ours", "theirs")
    return values


def _peer(network: nn.Module, inputs: Tensor, row: Tensor) -> Callable[[], object]:
    """laplace-torch's linearised prediction of a row."""
    library = importlib.import_module("laplace")
    pairs = torch.utils.data.TensorDataset(inputs, torch.randint(10, (len(inputs),)))
    theirs = library.Laplace(network, "classification", subset_of_weights="all", hessian_structure="kron")
    theirs.fit(torch.utils.data.DataLoader(pairs, 128))
    return lambda: theirs(row, pred_type="glm", link_approx="probit")
