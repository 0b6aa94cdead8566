"""Runs that are killed: each writes what came of it to `out`, the same bytes whatever happened on the way.

The campaign's processes import this module once and fork, so that a run to be killed starts without loading PyTorch.
"""

import json
import os
import sys
import warnings
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pyro.infer  # noqa: F401  loaded here once, not in every process
import torch
from torch import Tensor, nn

import dubito
from dubito import HMC, INF, MAP, Categorical, DeepEnsemble, Gaussian, Laplace, MeanField, Training
from dubito.active import ActiveLearning, Entropy, Selection
from dubito.cli import main
from dubito.training import EarlyStopping

#: Every registered method, small enough for a second, and runs beside them.
METHODS = {
    **dubito.methods(),
    "deep-ensemble": DeepEnsemble(members=2),
    "laplace-inf": Laplace(structure=INF(rank=0.1)),
}
OTHERS = ("hmc", "auto", "active", "compare", "reproduce")
TRAINING = Training(epochs=12, batch_size=8, lr=0.01, checkpoint_minutes=0, early_stopping=EarlyStopping(patience=12))

torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # PyTorch loads much at the first optimiser


def rows(count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(11)
    inputs = torch.randn(count, 4, generator=stream)
    return inputs, (inputs[:, :classes] + 0.5 * torch.randn(count, classes, generator=stream)).argmax(1)


def network(outputs: int = 3) -> nn.Module:
    """Batch statistics and dropout: state and noise that a resumed run must find again."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.3), nn.Linear(9, outputs))


def plain(outputs: int = 3) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs))


def victim(name: str, folder: Path, minutes: float = 0.0) -> None:
    """Run it to the end, from what an earlier process left in the folder."""
    quiet(folder)
    if name in METHODS:
        method(name, folder, minutes)
    else:
        {"hmc": hmc, "auto": auto, "active": active, "compare": compare, "reproduce": reproduce}[name](folder)


def quiet(folder: Path) -> None:
    """One thread, and all that is said goes to a file, that of workers too."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with (folder / "said").open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def method(name: str, folder: Path, minutes: float) -> None:
    x, y = rows(80)
    METHODS[name].fit(
        network(),
        (x[:40], y[:40]),
        Categorical(),
        training=replace(
            TRAINING,
            checkpoint_minutes=minutes,
            early_stopping=None if name in ("swa", "swag") else TRAINING.early_stopping,
        ),
        validation=(x[40:], y[40:]),
        checkpoint=folder / "c",
        progress=False,
    ).save(folder / "out")


def hmc(folder: Path) -> None:
    method = HMC(num_samples=8, warmup=8, chains=4, tree_depth=3)
    method.fit(plain(), rows(20), Categorical(), checkpoint=folder / "c", progress=False).save(folder / "out")


def auto(folder: Path) -> None:
    x, _ = rows(60)
    training = Training.auto(iterations=30, batch_size=16)
    MeanField().fit(
        plain(1), (x[:40], x[:40, :1] ** 2), Gaussian(), training=training,
        validation=(x[40:], x[40:, :1] ** 2), checkpoint=folder / "c", progress=False,
    ).save(folder / "out")  # fmt: skip


def active(folder: Path) -> None:
    x, y = rows(60)
    training = Training(epochs=2, batch_size=16, lr=0.03)
    loop = ActiveLearning(
        method=MAP(), acquisition=Entropy(), selection=Selection(size=2), steps=5, initial=6, training=training
    )
    curve = loop.run(
        plain(), (x[:40], y[:40]), (x[40:], y[40:]), Categorical(), checkpoint=folder / "c", progress=False
    )
    told = [[point.num_labelled, point.metrics, point.chosen] for point in curve.points]
    (folder / "out").write_text(json.dumps(told))


def compare(folder: Path, *more: str) -> None:
    table = folder.parent / "table.csv"  # splits of a table go by its name
    if not table.exists():
        x, _ = rows(90)
        lines = [f"{a:.4f},{b:.4f},{c:.4f},{a * b + 0.1 * c:.4f}" for a, b, c, _ in x.tolist()]
        table.write_text("\n".join(["a,b,c,y", *lines]))
    command = ["compare", str(table), "--target", "y", "--methods", "map,mean-field,laplace-kfac", *more]
    code = main([*command, "--steps", "40", "--out", str(folder / "results")])
    if code:
        raise SystemExit(code)
    told = json.loads((folder / "results" / "results.json").read_text())
    told = told.get("content", told)
    (folder / "out").write_text(json.dumps([[row["method"], row["metrics"], row["failure"]] for row in told["rows"]]))


def reproduce(folder: Path, jobs: int | None = None) -> None:
    """Cells that take their time, kept one by one."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "papers"))
    experiment = import_module("papers_examples").experiment

    from papers.runner import Results, run

    made = experiment(wait=0.05, splits=2)
    results = Results(folder=folder / "results")
    failures = run(made, "paper", made.scales["paper"].cells, results, jobs=jobs)
    outcomes = [results.read(made, "paper", cell) for cell in made.scales["paper"].cells]
    told = [outcome and outcome.metrics for outcome in outcomes]
    (folder / "out").write_text(json.dumps([told, [finished.failure for finished in failures]]))
