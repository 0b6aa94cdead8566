"""Laplace in plain passes: fits, linearised predictions and draws against passes over the fit's data; memory.

CPU time, one thread. All cases of a network are interleaved in every round; each is preceded by a plain forward
and backward pass over all inputs of the fit, ratios are taken to that pass, and their medians are shown.
Differences under 10 % mean nothing; a busy machine adds to them, because its caches are shared.

Networks: MLP 784-400-400-10 with 5,000 inputs in batches of 128; LeNet-5 with 1,000 inputs in batches of 128;
ResNet-18 of widths 16 to 128 at 32×32 with 512 inputs in batches of 64, its batch norm frozen. Predictions are of
1,000 inputs (the ResNet's of 100) × 10 classes.

laplace-torch stands beside it in the same rounds, from an environment of its own that holds both
(`pip install -e . laplace-torch`):

    python benchmarks/laplace.py [--rounds 5] [--networks mlp,lenet,resnet] [--peer ../peers/bin/python]

Its linearised predictions are timed on few inputs at a time and scaled to all, because they grow with the number of
inputs, and its memory with it (1.4 GB for every 50 inputs of the ResNet). What one input costs grows too: 4 at a time
take a seventh of what 16 at a time take on the ResNet.
Memory is the peak of a fit over that of a plain pass, in a process of its own (Linux).
"""

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import EFB, INF, KFAC, Categorical, Diagonal, DubitoWarning, Laplace
from dubito.models import lenet, mlp, resnet18

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
#: The least by which linearised predictions must be faster than laplace-torch's of the same structure.
FASTER = {"lenet": 20.0, "resnet": 20.0}
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
    sys.path.remove(str(Path(__file__).parent))  # this file has the package's name
    from laplace.curvature import BackPackGGN, CurvlinopsGGN  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader, TensorDataset

    from laplace import Laplace as Theirs  # pyright: ignore[reportMissingImports]

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


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(own: Task, case: Case) -> tuple[float, float]:
    """Seconds of a plain pass, and how many of them the case takes."""
    unit = seconds(own.plain)
    return unit, case[1] * seconds(case[0]) / unit


class Peer:
    """A process of another environment that measures when asked."""

    def __init__(self, python: str, network: str) -> None:
        command = [python, __file__, "--serve", network]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.cases: list[str] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("the peer's process ended; see its message above")
        return json.loads(line)

    def measured(self, case: str) -> tuple[float, float]:
        assert self.process.stdin is not None
        print(case, file=self.process.stdin, flush=True)
        unit, ratio = self._answer()
        return unit, ratio

    def close(self) -> None:
        self.process.communicate()


def serve(network: str) -> None:
    """In the peer's environment: names of cases, then a measurement for every line of input."""
    own = task(network)
    cases = theirs(own)
    own.plain()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        print(json.dumps(measured(own, cases[line.strip()])), flush=True)


def speed(network: str, rounds: int, python: str | None) -> list[dict[str, Any]]:
    """One row for every case of a network."""
    own = task(network)
    cases = ours(own)
    peer = Peer(python, network) if python else None
    units: list[float] = []
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(rounds + 1):  # the first round warms up
        for who, name in [
            *(("dubito", name) for name in cases),
            *(("laplace-torch", name) for name in (peer.cases if peer else ())),
        ]:
            unit, ratio = peer.measured(name) if peer and who != "dubito" else measured(own, cases[name])
            if number > 0:
                units.append(unit)
                found.setdefault((who, name), []).append(ratio)
    if peer:
        peer.close()
    medians = {key: statistics.median(ratios) for key, ratios in found.items()}
    rows = []
    for (who, name), ratio in medians.items():
        row: dict[str, Any] = {"network": network, "who": who, "case": name, "passes": round(ratio, 3)}
        row["plain_ms"] = round(1e3 * statistics.median(units), 1)
        other = medians.get(("laplace-torch", name))
        if who == "dubito" and name in BARS[network]:
            row |= {"bar": BARS[network][name], "met": ratio <= BARS[network][name]}
        if who == "dubito" and other is not None:
            row["times_faster"] = round(other / ratio, 2)
            if name.startswith("linearised") and network in FASTER:
                row |= {"least": FASTER[network], "met": other / ratio >= FASTER[network]}
        rows.append(row)
    return rows


def peak(network: str, structure: str) -> None:
    """In a process of its own: by how many MiB the peak memory of a fit exceeds that of a plain pass."""
    own = task(network, steps=0)  # training would have a peak of its own
    before = highest(own.plain)
    data = (own.inputs, own.targets)
    laplace = Laplace(structure=STRUCTURES[structure], batch_size=own.batch)
    after = highest(lambda: laplace.fit(own.network, data, Categorical()))
    print(json.dumps([before, after - before]))


def highest(work: Callable[[], object]) -> float:
    """The peak memory of some work, in MiB, by Linux's own count."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    work()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def memory(network: str) -> list[dict[str, Any]]:
    """One row for every structure."""
    rows = []
    for structure in STRUCTURES:
        command = [sys.executable, __file__, "--peak", network, structure]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        plain, over = json.loads(answer)
        row = {
            "network": network,
            "who": "dubito",
            "case": f"memory of fit {structure}",
            "plain_MiB": round(plain),
        }
        rows.append(row | {"over_plain_MiB": round(over, 1), "bar": MEMORY, "met": over <= MEMORY})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", default="mlp,lenet,resnet")
    parser.add_argument("--peer", help="the Python of an environment with laplace-torch and this project")
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", DubitoWarning)
    if chosen.serve:
        warnings.simplefilter("ignore")
        serve(chosen.serve)
        return
    if chosen.peak:
        peak(*chosen.peak)
        return
    if not chosen.peer:
        print("without --peer laplace-torch is not measured", file=sys.stderr)
    facts = {"rounds": chosen.rounds, "torch": torch.__version__, "machine": platform.machine()}
    rows: list[dict[str, Any]] = []
    for network in chosen.networks.split(","):
        new = [*speed(network, chosen.rounds, chosen.peer), *memory(network)]
        for row in new:
            print(json.dumps(row), flush=True)
        rows += new
        if chosen.output:
            chosen.output.parent.mkdir(parents=True, exist_ok=True)
            chosen.output.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
