"""Laplace in plain passes: fits, linearised predictions and draws against passes over the fit's data; memory.

Each case is preceded by a plain forward and backward pass over all inputs of the fit, and its ratio is taken to that
pass.

Networks: MLP 784-400-400-10 with 5,000 inputs in batches of 128; LeNet-5 with 1,000 inputs in batches of 128;
ResNet-18 of widths 16 to 128 at 32×32 with 512 inputs in batches of 64, its batch norm frozen. Predictions are of
1,000 inputs (the ResNet's of 100) × 10 classes.

laplace-torch stands in the same rounds where it is installed. Its linearised predictions are timed on few inputs at a
time and scaled to all, because they grow with the number of inputs, and its memory with it (1.4 GB for every 50 inputs
of the ResNet). What one input costs grows too: 4 at a time take a seventh of what 16 at a time take on the ResNet.
Memory is the peak of a fit over that of a plain pass, in a process of its own (Linux).
"""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import EFB, INF, KFAC, Categorical, Diagonal, Laplace
from dubito.models import lenet, mlp, resnet18

from .bars import ROOT, Bar, Values, benchmark, cpu_seconds, highest_mebibytes, importable

STRUCTURES = {"diagonal": Diagonal(), "kfac": KFAC(), "efb": EFB(), "inf": INF(rank=100, max_rank=1000)}
#: The most a case may cost, in plain passes.
BARS = {
    "mlp": {
        "fit diagonal": 1.3,
        "fit kfac": 2.0,
        "fit efb": 4.2,
        "fit inf": 5.0,
        "linearised diagonal": 0.8,
        "linearised kfac": 1.7,
        "linearised efb": 1.7,
        "linearised inf": 8.0,
        "30 draws inf": 2.0,
    },
    "lenet": {},
    "resnet": {"fit diagonal": 3.2, "fit kfac": 2.8, "fit efb": 7.5, "fit inf": 9.0},
}
#: The most that a linearised prediction may take of laplace-torch's of the same structure.
PEER = {"lenet": 1 / 20, "resnet": 1 / 20}
#: The most memory of a fit beyond a plain pass, in MiB.
MEMORY = 200.0

#: A piece of work, and by how much its time is to be multiplied.
Case = tuple[Callable[[], object], float]


@dataclass(frozen=True, eq=False)
class Task:
    """A network with the data of its fit, and inputs to predict."""

    network: nn.Module
    inputs: Tensor
    targets: Tensor
    batch: int
    new: Tensor
    few: int  # inputs that the peer predicts

    def plain(self) -> None:
        """A forward and backward pass over all data."""
        for x, y in zip(self.inputs.split(self.batch), self.targets.split(self.batch), strict=True):
            self.network.zero_grad()
            F.cross_entropy(self.network(x), y).backward()


def images(rows: int, channels: int, size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Smooth images of ten classes, so that activations have the decaying spectra of real ones."""
    generator = torch.Generator().manual_seed(seed)
    coarse = size // 4
    shapes = torch.randn(10, channels, coarse, coarse, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(10, (rows,), generator=generator)
    mixed = shapes[labels] + 0.7 * torch.randn(rows, channels, coarse, coarse, generator=generator)
    smooth = F.interpolate(mixed, (size, size), mode="bilinear")
    return smooth + 0.1 * torch.randn(smooth.shape, generator=generator), labels


def task(name: str, steps: int = 40) -> Task:
    """A network after a few steps, so that labels drawn from the model mean something."""
    if name == "mlp":
        (x, y), (new, _) = images(5000, 1, 28), images(1000, 1, 28, seed=2)
        found = Task(mlp(784), x.flatten(1), y, 128, new.flatten(1), 5)
    elif name == "lenet":
        net = lenet(image_size=32, channels=(6, 16), dense=(120, 84), same_padding=False)
        found = Task(net, *images(1000, 1, 32), 128, images(1000, 1, 32, seed=2)[0], 50)
    else:
        net = resnet18(base=16, small_images=True, num_classes=10)
        found = Task(net, *images(512, 3, 32), 64, images(100, 3, 32, seed=2)[0], 16)
    optimizer = torch.optim.Adam(found.network.parameters(), lr=1e-3)
    for step in range(steps):
        rows = torch.arange(step * found.batch, (step + 1) * found.batch) % len(found.inputs)
        optimizer.zero_grad()
        F.cross_entropy(found.network(found.inputs[rows]), found.targets[rows]).backward()
        optimizer.step()
    for module in found.network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    found.network.eval()
    return found


def ours(own: Task) -> dict[str, Case]:
    """All cases of a network."""

    def fit(structure: str):
        return Laplace(structure=STRUCTURES[structure], batch_size=own.batch).fit(
            own.network, (own.inputs, own.targets), Categorical()
        )

    def draws(posterior) -> None:
        for index in range(30):
            posterior.draw(index, posterior.generator(0, index))

    cases: dict[str, Case] = {}
    for name in STRUCTURES:
        posterior = fit(name)
        cases[f"fit {name}"] = (lambda name=name: fit(name)), 1.0
        cases[f"linearised {name}"] = (lambda kept=posterior: kept.predict(own.new, linearised=True)), 1.0
        if name in ("kfac", "inf"):
            cases[f"30 draws {name}"] = (lambda kept=posterior: draws(kept)), 1.0
    return cases


def theirs(own: Task) -> dict[str, Case]:
    """laplace-torch's, named as ours."""
    from laplace import Laplace as Theirs  # pyright: ignore[reportMissingImports]
    from laplace.curvature import BackPackGGN, CurvlinopsGGN  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader, TensorDataset

    def fitted(structure: str, backend: Any, drawn: bool, rows: int):
        loader = DataLoader(TensorDataset(own.inputs[:rows], own.targets[:rows]), batch_size=own.batch)
        made = Theirs(
            copy.deepcopy(own.network),  # some of its backends leave hooks behind
            "classification",
            subset_of_weights="all",
            hessian_structure=structure,
            backend=backend,
            backend_kwargs={"stochastic": drawn},
        )
        made.fit(loader)
        return made

    def predict(kept: Any) -> None:
        kept(own.new[: own.few], pred_type="glm", link_approx="probit")

    rows, scale = len(own.inputs), len(own.new) / own.few
    cases: dict[str, Case] = {
        "fit kfac": ((lambda: fitted("kron", CurvlinopsGGN, True, rows)), 1.0),
        "fit kfac, exact": ((lambda: fitted("kron", CurvlinopsGGN, False, rows)), 1.0),
    }
    if isinstance(own.network, nn.Sequential):  # BackPACK cannot extend residual networks as they are
        cases["fit diagonal"] = (lambda: fitted("diag", BackPackGGN, True, rows)), 1.0
    kfac = fitted("kron", CurvlinopsGGN, True, own.batch)
    diagonal = fitted("diag", CurvlinopsGGN, False, 2)  # what it costs to predict does not depend on the fit
    cases["linearised kfac"] = (lambda: predict(kfac)), scale
    cases["linearised diagonal"] = (lambda: predict(diagonal)), scale
    cases["30 draws kfac"] = (lambda: kfac.sample(30)), 1.0
    return cases


def measured(own: Task, case: Case) -> float:
    """How many plain passes the case takes."""
    unit = cpu_seconds(own.plain)
    return case[1] * cpu_seconds(case[0]) / unit


def speed(network: str, rounds: int) -> Values:
    """Plain passes of every case of a network, and of laplace-torch's ("peer: ...")."""
    own = task(network)
    cases = ours(own)
    if importable("laplace"):
        cases |= {f"peer: {name}": case for name, case in theirs(own).items()}
    values: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):  # the first round warms up
        for name, case in cases.items():
            passes = measured(own, case)
            if number:
                values[name].append(passes)
    for name in list(values):
        if name.startswith("linearised") and f"peer: {name}" in values:
            pairs = zip(values[name], values[f"peer: {name}"], strict=True)
            values[f"{name} to the peer's"] = [passes / other for passes, other in pairs]
    return values


def memory(network: str, rounds: int) -> Values:
    """MiB by which the peak of a fit exceeds that of a plain pass, per structure, in processes of their own."""
    values = {}
    for structure in STRUCTURES:
        code = f"from benchmarks.laplace import peak; print(peak({network!r}, {structure!r}))"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        values[f"fit {structure}"] = [json.loads(done.stdout)]
    return values


def peak(network: str, structure: str) -> float:
    """The same in this process."""
    torch.set_num_threads(1)
    own = task(network, steps=0)  # training would have a peak of its own
    data = (own.inputs, own.targets)
    laplace = Laplace(structure=STRUCTURES[structure], batch_size=own.batch)
    before = highest_mebibytes(own.plain)
    return highest_mebibytes(lambda: laplace.fit(own.network, data, Categorical())) - before


for name, limits in BARS.items():
    bars = {case: Bar(limit, "plain passes") for case, limit in limits.items()}
    for kind in ("diagonal", "kfac") if name in PEER else ():
        bars[f"linearised {kind} to the peer's"] = Bar(PEER[name], "of laplace-torch's")
    benchmark(bars, f"laplace_{name}")(partial(speed, name))
    fits = {f"fit {structure}": Bar(MEMORY, "MiB over a plain pass") for structure in STRUCTURES}
    benchmark(fits, f"laplace_memory_{name}")(partial(memory, name))
