"""Runs in processes of their own, killed at random moments: `python killed_runs.py folder`.

The processes are forked from this one, so that PyTorch is loaded once; this one runs nothing itself.
"""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path

import torch
from examples import Noisy, data, step_in, with_statistics
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from dubito import MAP, Categorical, MeanField, ProcessError, Training
from dubito.training import SGD, Cosine, EarlyStopping, GradientStepper

KILLS = 5


def early(checkpoint: Path, out: Path) -> None:
    x, y = data(120)
    training = Training(
        epochs=60,
        batch_size=8,
        lr=0.02,
        optimizer=SGD(momentum=0.9, nesterov=True),
        schedule=Cosine(),
        checkpoint_minutes=0,
        early_stopping=EarlyStopping(patience=40, num_samples=2),
    )
    MAP().fit(
        with_statistics(), (x[:60], y[:60]), Categorical(), training=training, validation=(x[60:], y[60:]),
        checkpoint=checkpoint,
    ).save(out)  # fmt: skip


def augmented(checkpoint: Path, out: Path) -> None:
    loader = DataLoader(Noisy(*data(61)), batch_size=8, shuffle=True)
    training = Training(epochs=15, lr=0.02, warmup=2, checkpoint_minutes=0)
    MeanField().fit(with_statistics(), loader, Categorical(), training=training, checkpoint=checkpoint).save(out)


def progressed(process: multiprocessing.Process, checkpoint: Path, step: int) -> None:
    """Wait until a run has saved a later step, or has ended."""
    while process.is_alive() and not (checkpoint.exists() and step_in(checkpoint) > step):
        time.sleep(0.002)


def killed(run, folder: Path, stream: random.Random) -> dict:
    context = multiprocessing.get_context("fork")

    def started(name: str) -> multiprocessing.Process:
        process = context.Process(target=run, args=(folder / f"{name}.c", folder / f"{name}.out"))
        process.start()
        return process

    whole = started("whole")
    progressed(whole, folder / "whole.c", 0)
    begin = time.monotonic()
    whole.join()
    assert whole.exitcode == 0
    duration = time.monotonic() - begin
    kills, steps = 0, []
    while kills < KILLS:
        process = started("killed")
        if kills:  # the first may meet the start of a run, the others a run that has gone on
            progressed(process, folder / "killed.c", steps[-1] if steps else 0)
        process.join(stream.uniform(0.1, 1.0) * duration / (KILLS + 1))
        if process.exitcode is not None:
            # The machine was busier while the whole run was timed: begin again, faster.
            if duration < 0.05:
                break
            for left in folder.glob("killed.*"):
                left.unlink()
            kills, steps, duration = 0, [], duration / 3
            continue
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        if (folder / "killed.c").exists():
            steps.append(step_in(folder / "killed.c"))
    last = started("killed")
    last.join()
    assert last.exitcode == 0
    one, other = load_file(folder / "whole.out"), load_file(folder / "killed.out")
    same = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return {"kills": kills, "steps": steps, "same": same, "seconds": duration}


def lost(how: str, folder: Path) -> dict:
    """What process 0 says when process 1 is killed, or stays silent, in the middle of a run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    peers = [context.Process(target=peer, args=(rank, port, how, folder)) for rank in (0, 1)]
    for process in peers:
        process.start()
    peers[0].join(60)
    peers[1].kill()
    return {"exit": peers[0].exitcode, **json.loads((folder / how).read_text()), "step": step_in(folder / f"{how}.c")}


def peer(rank: int, port: int, how: str, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    plain, met = GradientStepper.step, time.monotonic()

    def step(self, number, *rest):
        nonlocal met
        if number == 4:
            met = time.monotonic()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL) if how == "dead" else time.sleep(60)
        return plain(self, number, *rest)

    GradientStepper.step = step
    training = Training(epochs=9, batch_size=8, checkpoint_minutes=0, timeout=60 if how == "dead" else 5)
    try:
        MAP().fit(with_statistics(), data(27), Categorical(), training=training, checkpoint=folder / f"{how}.c")
    except ProcessError as error:
        said = {"said": str(error), "seconds": time.monotonic() - met}
        (folder / how).write_text(json.dumps(said))


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # PyTorch loads much at the first optimiser: do it here
    results = {}
    for run in (early, augmented):
        folder = Path(sys.argv[1]) / run.__name__
        folder.mkdir()
        results[run.__name__] = killed(run, folder, random.Random(run.__name__))
    for how in ("dead", "silent"):
        results[how] = lost(how, Path(sys.argv[1]))
    print(json.dumps(results))
