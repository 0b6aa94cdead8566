"""Runs in processes of their own, killed at random moments and started again: `python killed_runs.py folder`.

The processes are forked from this one, so that PyTorch is loaded once; this one runs nothing itself.
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from dubito import MAP, Categorical, MeanField, Training
from dubito.training import SGD, Cosine, EarlyStopping
from examples import Noisy, data, with_statistics

KILLS = 5


def early(checkpoint: Path, out: Path) -> None:
    x, y = data(120)
    training = Training(
        epochs=60, batch_size=8, lr=0.02, optimizer=SGD(), schedule=Cosine(), checkpoint_minutes=0,
        early_stopping=EarlyStopping(patience=10, num_samples=2),
    )  # fmt: skip
    MAP().fit(
        with_statistics(), (x[:60], y[:60]), Categorical(), training=training, validation=(x[60:], y[60:]),
        checkpoint=checkpoint,
    ).save(out)  # fmt: skip


def augmented(checkpoint: Path, out: Path) -> None:
    loader = DataLoader(Noisy(*data(61)), batch_size=8, shuffle=True)
    training = Training(epochs=15, lr=0.02, warmup=2, checkpoint_minutes=0)
    MeanField().fit(
        with_statistics(), loader, Categorical(), training=training, checkpoint=checkpoint
    ).save(out)


def killed(run, folder: Path, stream: random.Random) -> dict:
    context = multiprocessing.get_context("fork")

    def started(name: str) -> multiprocessing.Process:
        process = context.Process(target=run, args=(folder / f"{name}.c", folder / f"{name}.out"))
        process.start()
        return process

    begin = time.monotonic()
    whole = started("whole")
    whole.join()
    assert whole.exitcode == 0
    duration = time.monotonic() - begin
    kills, steps = 0, []
    while kills < KILLS:
        process = started("killed")
        process.join(stream.uniform(0.1, 1.0) * duration / (KILLS + 1))
        if process.exitcode is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        if (folder / "killed.c").exists():
            with safe_open(folder / "killed.c", "pt") as file:
                steps.append(json.loads(file.metadata()["dubito"])["content"]["progress"]["step"])
    last = started("killed")
    last.join()
    assert last.exitcode == 0
    one, other = load_file(folder / "whole.out"), load_file(folder / "killed.out")
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return {"kills": kills, "steps": steps, "same": same, "seconds": duration}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # PyTorch loads much at the first optimiser: do it here
    results = {}
    for run in (early, augmented):
        folder = Path(sys.argv[1]) / run.__name__
        folder.mkdir()
        results[run.__name__] = killed(run, folder, random.Random(run.__name__))
    print(json.dumps(results))
