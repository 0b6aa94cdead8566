"""Runs that processes share, or that one makes alone: `torchrun --nproc_per_node 2 shared_runs.py folder`.

Each process writes what it has into the folder, as `name.rank`; the test compares it with the same runs made alone.
"""

import json
import os
import signal
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from examples import data, fresh, mlp, with_statistics
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

import dubito
from dubito import (
    INF,
    MAP,
    Categorical,
    DeepEnsemble,
    Gaussian,
    Interrupted,
    Laplace,
    MeanField,
    Training,
    TrainingError,
)
from dubito.training import KL, SGD, Cosine, EarlyStopping, GradientStepper
from dubito.training import checkpoint as checkpoints

QUICK = Training(epochs=3, batch_size=8, lr=0.02, timeout=60)
METHODS = {
    **dubito.methods(),
    "deep-ensemble": DeepEnsemble(members=3),
    # Layers this small have less than the default rank, and the fit would rightly say so.
    "laplace-inf": Laplace(structure=INF(rank=0.1)),
}


class Unused(nn.Module):
    """A network with a layer that no row ever reaches, and one that only some rows do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle, self.rare = mlp(), nn.Linear(2, 2), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.inner(inputs)
        chosen = inputs[:, 0] > 1.2
        if not chosen.any():
            return outputs
        return outputs + chosen[:, None] * self.rare(inputs)


class Odd(nn.Module):
    """Tensors that not every backend can send."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("short", torch.arange(3, dtype=torch.int16))
        self.register_buffer("none", torch.zeros(0, 4))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


class Drawing(nn.Module):
    """Draws from the global state, to no effect, as often as it has rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        torch.rand(len(inputs))
        return self.inner(inputs)


def every_method(name: str):
    """Batches of 8, 8, 8 and 3 rows."""
    return METHODS[name].fit(mlp(), data(27), Categorical(), training=QUICK, seed=2)


def lone_rows():
    """Batches of one row: one process has none."""
    return MeanField().fit(mlp(), data(5), Categorical(), training=replace(QUICK, batch_size=1))


def accumulated():
    """Steps of several passes, the last of one pass of 3 rows; regression with learned noise."""
    x, _ = data(27)
    training = replace(
        QUICK,
        accumulate=3,
        optimizer=SGD(momentum=0.9, nesterov=True),
        schedule=Cosine(),
        kl=KL(warmup=2),
        clip_norm=0.5,
        weight_decay=0.01,
    )
    net = fresh(lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)))
    return MeanField().fit(net, (x, x[:, :2] ** 2), Gaussian(), training=training)


def unused():
    training = replace(QUICK, weight_decay=0.5, lr=0.1)
    return MAP().fit(fresh(Unused), data(27), Categorical(), training=training)


def odd():
    return MAP().fit(Odd(), data(27), Categorical(), training=QUICK)


def loader():
    """Rows read through a loader, the last batch left out."""
    rows = DataLoader(Subset(TensorDataset(*data(27)), range(27)), batch_size=8, shuffle=True, drop_last=True)
    return MAP().fit(mlp(), rows, Categorical(), training=replace(QUICK, batch_size=None))


def sampler():
    """An order of the user's own, drawn from the global state: every process must find the same."""
    drawn = WeightedRandomSampler([1.0, 3.0] * 13, 25)
    rows = DataLoader(TensorDataset(*data(26)), batch_size=8, sampler=drawn)
    return MAP().fit(Drawing(), rows, Categorical(), training=replace(QUICK, batch_size=None))


def half():
    return MAP().fit(mlp(), data(27), Categorical(), training=replace(QUICK, precision="fp16"))


def standardised():
    """Targets whose mean and standard deviation a loader tells, row by row."""
    x, _ = data(26)
    drawn = WeightedRandomSampler([1.0, 3.0] * 13, 25)
    rows = DataLoader(TensorDataset(x, x[:, :2] * 50 + 700), batch_size=8, sampler=drawn)
    net = fresh(lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)))
    likelihood = Gaussian(standardise=True)
    return MAP().fit(net, rows, likelihood, training=replace(QUICK, batch_size=None))


ALIKE = (lone_rows, accumulated, unused, odd, loader, sampler, standardised)


def resumed(path: Path):
    training = Training(iterations=9, batch_size=8, lr=0.02, checkpoint_minutes=0, timeout=60)
    return MeanField().fit(mlp(), data(27), Categorical(), training=training, checkpoint=path)


class Crash(BaseException):
    pass


def crash_at(step: int) -> None:
    """Die right after the checkpoint of `step` was written; other processes die with the next sum."""
    plain = GradientStepper.step

    def made(self, number, *rest):
        if number == step:
            GradientStepper.step = plain
            raise Crash
        return plain(self, number, *rest)

    GradientStepper.step = made


def statistics():
    """Batch statistics differ between processes, and yet all must stop at the same epoch, with the same state."""
    x, y = data(70)
    training = replace(QUICK, epochs=40, batch_size=6, lr=0.05, early_stopping=EarlyStopping(patience=1, num_samples=1))
    return MAP().fit(with_statistics(), (x[:21], y[:21]), Categorical(), training=training, validation=(x[21:], y[21:]))


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said: dict[str, object] = {}

    writes, save = [], checkpoints.save

    def counted(path, *rest) -> None:
        writes.append(path)
        save(path, *rest)

    checkpoints.save = counted

    def keep(name: str, posterior) -> None:
        posterior.save(folder / f"{name}.{rank}")

    for name in METHODS:
        keep(name, every_method(name))
    for run in (*ALIKE, half, statistics):
        keep(run.__name__, run())

    # A run that one process began, finished by two; and one that two began.
    keep("resumed", resumed(folder / "begun"))
    crash_at(5)
    with suppress(Crash):
        resumed(folder / "left")

    # Ctrl-C reaches one process only; all end at the same step.
    plain = GradientStepper.step

    def pressed(self, number, *rest):
        if rank == 1 and number == 3:
            signal.raise_signal(signal.SIGINT)
        return plain(self, number, *rest)

    GradientStepper.step = pressed
    try:
        resumed(folder / "interrupted")
    except Interrupted as error:
        said["interrupted"] = str(error)
    GradientStepper.step = plain

    try:
        MAP().fit(
            mlp(), data(27), Categorical(), training=replace(QUICK, lr=1e30, optimizer=SGD(momentum=0.9, nesterov=True))
        )
    except TrainingError as error:
        said["nan"] = str(error)

    files = [path for path in folder.iterdir() if path.name.startswith(".")]
    said["stray"], said["writes"] = [str(path) for path in files], len(writes)

    (folder / f"said.{rank}").write_text(json.dumps(said))


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]))
