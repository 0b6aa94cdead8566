"""Processes of one run of which one dies, hangs, raises or has other data: the others get an error of ours, in time."""

import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dubito import Categorical, DubitoError, ProcessError, Training

from . import Report
from .victims import METHODS, plain, rows

FORK = multiprocessing.get_context("fork")
CASES = 60
FAULTS = ("dies", "hangs", "raises", "other rows", "other weights", "other seed")
#: Seconds that processes wait for one that hangs, and in which all must have ended.
TIMEOUT, LIMIT = 5.0, 60.0


class Faulty(Dataset):
    """Rows at one of which a process dies, hangs or raises."""

    def __init__(self, how: str, after: int) -> None:
        self.inputs, self.targets = rows(28)
        self.how, self.left = how, after

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.left -= 1
        if self.left == 0 and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0 and self.how == "hangs":
            time.sleep(10 * LIMIT)
        if self.left == 0 and self.how == "raises":
            raise OSError("the disk is gone")
        return self.inputs[index], self.targets[index]


def run(size: float, seed: int) -> Report:
    """Cases drawn by seed, all faults equally often."""
    report = Report()
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        cases = range(max(len(FAULTS), round(CASES * size)))
        for part in [pool.submit(case, number, seed) for number in cases]:
            report.count(*part.result())
    return report


def case(number: int, seed: int) -> tuple[str, str | None]:
    """One run of two or three processes; how it ended, and what was wrong with that."""
    stream, how = random.Random(f"{seed} {number}"), FAULTS[number % len(FAULTS)]
    # Members of an ensemble wait for each other as long as work lasts.
    name = stream.choice([name for name in METHODS if not (name == "deep-ensemble" and how == "hangs")])
    count, after = stream.choice((2, 3)), stream.randrange(1, 160)
    rank = stream.randrange(1, count) if how.startswith("other") else stream.randrange(count)
    where = f"case {number} of seed {seed}: {name}, process {rank} of {count} {how} at row {after}"
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        peers = []
        for number in range(count):
            fault = how if number == rank else ""
            arguments = (name, number, count, port, fault, after, Path(folder))
            peers.append(FORK.Process(target=peer, args=arguments))
            peers[-1].start()
        watched = [p for n, p in enumerate(peers) if n != rank or how.startswith("other")]
        end = time.monotonic() + LIMIT
        for process in watched:
            process.join(max(0.0, end - time.monotonic()))
        late = sum(process.is_alive() for process in watched)
        for process in peers:
            process.kill()
            process.join()
        if late:
            return "late", f"{where}: {late} processes waited for more than {LIMIT:g} s"
        said = [json.loads((Path(folder) / f"{n}").read_text()) for n, p in enumerate(peers) if p in watched]
    if all(ending == "done" for ending, _ in said) and not how.startswith("other"):
        return "ended before the fault", None
    strange = [f"{ending} {words}" for ending, words in said if ending != "own"]
    return (f"own error ({how})", None) if not strange else ("foreign", f"{where}: {strange}")


def peer(name: str, rank: int, count: int, port: int, how: str, after: int, folder: Path) -> None:
    """A process of the run, which writes how it ended."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    data, network, ending = Faulty(how, after), plain(), ("done", "")
    if how == "other rows":
        data.targets[after % len(data)] = (data.targets[after % len(data)] + 1) % 3
    if how == "other weights":
        network[2].bias.data += 1e-3
    training = Training(epochs=3, batch_size=8, timeout=TIMEOUT)
    try:
        METHODS[name].fit(
            network, data, Categorical(), training=training, seed=int(how == "other seed"), progress=False
        )
    except ProcessError as error:
        ending = "own", str(error)
    except DubitoError as error:
        ending = "other error of ours", str(error)
    except Exception as error:
        ending = "foreign", f"{type(error).__name__}: {error}"
    (folder / f"{rank}").write_text(json.dumps(ending))
    os._exit(0)
