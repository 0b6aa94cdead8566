"""Laplace fits in plain passes: CPU time of whole fits against forward and backward passes over the same data.

One thread; rounds are interleaved (a plain pass, then each fit), ratios are taken within a round, and their median
and smallest are shown. Memory is the peak of a process of its own that fits, over one that only does the plain pass.

Bars, MLP 784-400-400-10, 5,000 inputs: diagonal 1.3, KFAC 2.0, EFB 4.2, INF (rank 100) 5.0. ResNet-18 with widths
16 to 128 at 32×32, 512 inputs, batches of 64, batch norm frozen: diagonal 3.2, KFAC 2.8, EFB 7.5, INF 9; peak memory
of a fit at most 200 MiB over the plain pass.
"""

import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import EFB, INF, KFAC, Categorical, Diagonal, DubitoWarning, Laplace
from dubito.models import mlp, resnet18

STRUCTURES = {"diagonal": Diagonal(), "kfac": KFAC(), "efb": EFB(), "inf": INF(rank=100)}
BARS = {
    "mlp": {"diagonal": 1.3, "kfac": 2.0, "efb": 4.2, "inf": 5.0},
    "resnet": {"diagonal": 3.2, "kfac": 2.8, "efb": 7.5, "inf": 9.0},
}


def images(rows: int, channels: int, size: int) -> tuple[Tensor, Tensor]:
    """Smooth images of ten classes, so that activations have the decaying spectra of real ones."""
    generator = torch.Generator().manual_seed(1)
    coarse = size // 4
    shapes = torch.randn(10, channels, coarse, coarse, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (rows,), generator=generator)
    mixed = shapes[labels] + 0.7 * torch.randn(rows, channels, coarse, coarse, generator=generator)
    smooth = F.interpolate(mixed, (size, size), mode="bilinear")
    return smooth + 0.1 * torch.randn(smooth.shape, generator=generator), labels


def task(name: str, steps: int) -> tuple[nn.Module, Tensor, Tensor, int]:
    """Network, inputs, labels and batch size."""
    torch.manual_seed(0)
    if name == "mlp":
        x, y = images(5000, 1, 28)
        return trained(mlp(784), x.flatten(1), y, 128, steps), x.flatten(1), y, 128
    x, y = images(512, 3, 32)
    net = trained(resnet18(base=16, small_images=True, num_classes=10), x, y, 64, steps)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    return net, x, y, 64


def trained(net: nn.Module, x: Tensor, y: Tensor, batch: int, steps: int) -> nn.Module:
    """A few steps, so that labels drawn from the model mean something."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for start in range(0, min(len(x), steps * batch), batch):
        loss = F.cross_entropy(net(x[start : start + batch]), y[start : start + batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net.eval()


def plain(net: nn.Module, x: Tensor, y: Tensor, batch: int) -> None:
    for start in range(0, len(x), batch):
        net.zero_grad()
        F.cross_entropy(net(x[start : start + batch]), y[start : start + batch]).backward()


def fit(net: nn.Module, x: Tensor, y: Tensor, batch: int, structure: str) -> None:
    Laplace(structure=STRUCTURES[structure], batch_size=batch).fit(net, (x, y), Categorical())


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def speed(name: str, rounds: int) -> None:
    net, x, y, batch = task(name, steps=10)
    ratios: dict[str, list[float]] = {structure: [] for structure in STRUCTURES}
    units = []
    plain(net, x, y, batch)
    for _ in range(rounds):
        for structure in STRUCTURES:
            unit = seconds(lambda: plain(net, x, y, batch))
            units.append(unit)
            ratios[structure].append(seconds(lambda own=structure: fit(net, x, y, batch, own)) / unit)
    for structure, each in ratios.items():
        median = statistics.median(each)
        print(
            json.dumps(
                {
                    "network": name,
                    "structure": structure,
                    "median": round(median, 2),
                    "smallest": round(min(each), 2),
                    "bar": BARS[name][structure],
                    "met": median <= BARS[name][structure],
                    "plain_s": round(statistics.median(units), 3),
                }
            )
        )


def peak(name: str, structure: str) -> None:
    """In a process of its own: its peak memory in MiB."""
    net, x, y, batch = task(name, steps=0)  # training would have a peak of its own
    plain(net, x, y, batch)
    if structure != "plain":
        fit(net, x, y, batch, structure)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def memory(name: str) -> None:
    def measured(structure: str) -> float:
        command = [sys.executable, __file__, "peak", name, structure]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    base = measured("plain")
    over = {structure: round(measured(structure) - base, 1) for structure in STRUCTURES}
    print(json.dumps({"network": name, "plain_MiB": round(base), "over_plain_MiB": over, "bar": 200}))


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DubitoWarning)
    if sys.argv[1:2] == ["peak"]:
        peak(*sys.argv[2:])
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    for name in BARS:
        speed(name, rounds)
        memory(name)


if __name__ == "__main__":
    main()
