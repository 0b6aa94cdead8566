"""Laplace at prediction: linearised predictions and draws of an MLP 784-400-400-10, and the bytes of a ResNet-18.

CPU time, one thread, medians of interleaved rounds. The unit is a plain forward and backward pass over the
(input, class) pairs of the prediction, 1,000 inputs × 10 classes: a backward pass per class is the least that any
linearised prediction takes. The ratio to a pass over the 1,000 inputs alone stands beside it.

Bars: linearised diagonal 0.8, KFAC and EFB 1.7, INF 8; 30 draws of INF 2; INF at rank 100 takes at most 1.10 times
the bytes of the diagonal on a ResNet-18.
"""

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from dubito import EFB, INF, KFAC, Categorical, Diagonal, DubitoWarning, Laplace, Training
from dubito.models import mlp, resnet18

STRUCTURES = {"diagonal": Diagonal(), "kfac": KFAC(), "efb": EFB(), "inf": INF(rank=100, max_rank=1000)}
INPUTS, CLASSES = 1000, 10


def images(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smooth images of ten classes, so that activations have the decaying spectra of real ones."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.randn(CLASSES, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    coarse = shapes[labels] + 0.7 * torch.randn(rows, 1, 7, 7, generator=generator)
    smooth = F.interpolate(coarse, (28, 28), mode="bilinear")
    return (smooth + 0.1 * torch.randn(smooth.shape, generator=generator)).flatten(1), labels


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def one_pass(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()


def predictions(rounds: int) -> None:
    x, y = images(6000, 1)
    new, labels = images(INPUTS, 2)
    pairs, pair_labels = new.repeat(CLASSES, 1), labels.repeat(CLASSES)
    training = Training(epochs=2, batch_size=128)
    posteriors = {}
    for name, structure in STRUCTURES.items():
        posteriors[name] = Laplace(structure=structure).fit(
            mlp(784), (x, y), Categorical(), training=training
        )
    net = posteriors["inf"].fold()
    work: dict[str, Callable[[], object]] = {
        f"linearised {name}": lambda posterior=posterior: posterior.predict(new, linearised=True)
        for name, posterior in posteriors.items()
    }

    def draws(posterior) -> None:
        for index in range(30):
            posterior.draw(index, posterior.generator(0, index))

    work |= {
        f"30 draws {name}": lambda posterior=posterior: draws(posterior)
        for name, posterior in posteriors.items()
    }
    work |= {
        "pass, pairs": lambda: one_pass(net, pairs, pair_labels),
        "pass, inputs": lambda: one_pass(net, new, labels),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for own in work.values():
        own()  # warm up, and build what is built once
    for _ in range(rounds):
        for name, own in work.items():
            times[name].append(seconds(own))
    median = {name: statistics.median(own) for name, own in times.items()}
    for name, own in median.items():
        print(json.dumps({
            "what": name,
            "ms": round(1e3 * own, 1),
            "passes": round(own / median["pass, pairs"], 2),
            "passes over the inputs alone": round(own / median["pass, inputs"], 2),
        }))  # fmt: skip
    print(posteriors["inf"].summary())


def sizes() -> None:
    """Bytes of whole posteriors, weights included, and of what stands beside the weights."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32, generator=generator), torch.arange(16) % 10
    network = sum(tensor.nbytes for tensor in resnet18().state_dict().values())
    found = {}
    for name in ("diagonal", "inf"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DubitoWarning)
            found[name] = Laplace(structure=STRUCTURES[name]).fit(resnet18(), (x, y), Categorical()).nbytes
    whole = found["inf"] / found["diagonal"]
    beside = (found["inf"] - network) / (found["diagonal"] - network)
    print(
        json.dumps({"what": "bytes of INF over the diagonal's, ResNet-18", "whole": whole, "beside": beside})
    )


def main() -> None:
    torch.set_num_threads(1)
    predictions(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    sizes()


if __name__ == "__main__":
    main()
