"""Disks that are full, writers of one path at the same time, and paths that are no files.

A disk is full where root may mount a small one, and else where the system lets no file grow (RLIMIT_FSIZE). Whatever
happens, the error is the library's, the old file is whole, and nothing is left beside it.
"""

import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dubito
from dubito import Categorical, MeanField, Training
from dubito.active import ActiveLearning, OutputVariance, Selection
from dubito.compare.folder import Folder
from dubito.errors import DubitoError
from dubito.posterior import Posterior
from dubito.storage import write_text

from . import Report

#: Cases of each kind at size 1: rounds on a full disk, and writes of each of several processes.
ROUNDS, WRITES, WRITERS = 40, 60, 4
#: Bytes of the disk that is filled.
SMALL = 192 * 1024

INPUTS = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 3
WRITER = """
import sys, dubito
from tests.chaos.disk import network
posterior = dubito.load(sys.argv[1], network())
for _ in range(int(sys.argv[2])):
    posterior.save(sys.argv[1])
"""


def network() -> nn.Module:
    """Small, but larger than a block of a disk."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 3))


def fit(checkpoint: Path | None = None) -> Posterior:
    """A short run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training = Training(epochs=1, batch_size=32)
        return MeanField().fit(network(), (INPUTS, LABELS), Categorical(), training=training, checkpoint=checkpoint)


@cache
def fitted() -> Posterior:
    """The posterior that is saved."""
    return fit()


def learn(path: Path) -> None:
    """Active learning, with its checkpoint."""
    loop = ActiveLearning(
        method=dubito.MAP(),
        acquisition=OutputVariance(),
        selection=Selection(size=1),
        steps=1,
        initial=4,
        training=Training(epochs=1),
        num_samples=1,
    )
    data = INPUTS, INPUTS[:, :3]
    loop.run(network(), data, data, dubito.Gaussian(), checkpoint=path)


#: All that writes files.
WRITES_FILES: dict[str, Callable[[Path], Any]] = {
    "posterior": lambda path: fitted().save(path),
    "checkpoint": fit,
    "active learning": learn,
    "results": lambda path: Folder(path.parent).write(path.name, {"rows": list(range(40_000))}),
    "text": lambda path: write_text(path, "word " * 50_000),
}


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A folder on a disk of a few blocks, or None where this user may mount none."""
    folder = Path(tempfile.mkdtemp(prefix="dubito-disk-"))
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(folder)], capture_output=True, check=False
        ).returncode
    )
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def no_growth(size: int) -> Iterator[None]:
    """While open no file of this process grows beyond a size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def refused(report: Report, words: str, work: Callable[[], Any], sound: Callable[[], bool]) -> None:
    """Count a case that must end in an error of ours, and leave what was there."""
    try:
        work()
    except DubitoError:
        outcome = "own error"
    except BaseException as error:
        report.count("foreign error", f"{words}: {type(error).__name__}: {error}")
        return
    else:
        outcome = "written after all"
    if sound():
        report.count(outcome, None if outcome == "own error" else f"{words}: nothing was refused")
    else:
        report.count("old file lost", f"{words}: the old file is not what it was, or something is left beside it")


def full(report: Report, folder: Path, chance: random.Random, rounds: int, limited: bool) -> None:
    """Write over old files, and anew, where nothing fits."""
    for number in range(rounds):
        name, work = chance.choice(sorted(WRITES_FILES.items()))
        for left in folder.iterdir():
            left.unlink()
        target = folder / name.replace(" ", "-")
        shown = target.with_name(f"{target.name}.json") if name == "results" else target
        old = name != "checkpoint" and name != "active learning" and bool(chance.getrandbits(1))
        if old:
            shown.write_bytes(b"what was there")
        filler = folder / "filler"
        if not limited:
            with suppress(OSError), filler.open("wb") as file:
                left = chance.randrange(0, 9_000) if number % 2 else 0
                file.write(bytes(SMALL - 4096 - left // 4096 * 4096))
                file.write(bytes(SMALL))

        def sound(shown: Path = shown, old: bool = old) -> bool:
            others = {path.name for path in folder.iterdir()} - {"filler", shown.name}
            return not others and (shown.read_bytes() == b"what was there" if old else not shown.exists())

        words = f"{name} on a full disk, {'over an old file' if old else 'anew'}"
        with no_growth(chance.randrange(0, 1_000)) if limited else nullcontext():
            refused(report, words, lambda work=work, target=target: work(target), sound)


def odd_paths(report: Report, folder: Path) -> None:
    """Paths that are no regular files."""
    old = folder / "old"
    fitted().save(old)
    before = old.read_bytes()
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "to-fifo").symlink_to(folder / "fifo")
    paths: dict[str, Any] = {
        "a FIFO": folder / "fifo", "a link to a FIFO": folder / "to-fifo", "a folder": folder / "folder",
        "a loop of links": folder / "loop", "a device": Path("/dev/null"), "a long name": folder / ("x" * 300),
        "a long path": folder / "/".join(["y" * 200] * 30), "NUL": str(folder / "a\0b"), "None": None, "a number": 3,
        "bytes": b"x", "nothing": "", "no folder": folder / "nowhere" / "p", "a file for a folder": old / "p",
    }  # fmt: skip
    if os.geteuid() == 0:
        with suppress(OSError):
            os.mknod(folder / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))
            paths["a device of one's own"] = folder / "device"
    kinds = {name: os.lstat(path).st_mode for name, path in paths.items() if isinstance(path, Path) and _there(path)}
    works: dict[str, Callable[[Any], Any]] = {
        "save": fitted().save,
        "load": lambda path: dubito.load(path, network()),
        "checkpoint": fit,
    }
    for name, path in paths.items():
        for verb, work in works.items():
            if verb == "checkpoint" and path is None:
                continue  # none is kept

            def sound(name: str = name, path: Any = path) -> bool:
                same = name not in kinds or os.lstat(path).st_mode == kinds[name]
                return same and old.read_bytes() == before

            refused(report, f"{verb} at {name}", lambda work=work, path=path: work(path), sound)
    link = folder / "link"
    link.symlink_to(old)
    fitted().scaled(0.5).save(link)
    followed = link.is_symlink() and old.read_bytes() != before and dubito.load(link, network()).scale == 0.5
    report.count("link followed", None if followed else "a link was replaced, or what it points to was not written")
    dangling = folder / "dangling"
    dangling.symlink_to(folder / "new")
    fitted().save(dangling)
    made = dangling.is_symlink() and (folder / "new").read_bytes() == before
    report.count("link followed", None if made else "a link to nothing yet was replaced")


def _there(path: Path) -> bool:
    try:
        os.lstat(path)
    except OSError:
        return False
    return True


def several(report: Report, folder: Path, writes: int, writers: int) -> None:
    """Several processes that save to one path, and one that reads it all the while."""
    path = folder / "shared"
    fitted().save(path)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", WRITER, str(path), str(writes)]
    workers = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(writers)]
    reads = 0
    while any(worker.poll() is None for worker in workers):
        try:
            dubito.load(path, network())
            reads += 1
            time.sleep(0.05)
        except Exception as error:
            report.count("half a file read", f"a reader beside writers: {error}")
    report.outcomes["read whole"] += reads
    for number, worker in enumerate(workers):
        words = (worker.communicate()[1] or "").strip().splitlines()
        if worker.returncode:
            report.count("writer died", f"writer {number} of one path: {words[-1] if words else ''}")
        else:
            report.outcomes["written beside others"] += writes
    left = [entry.name for entry in folder.iterdir() if entry.name.endswith(".partial")]
    if left:
        report.count("left over", f"writers left {left}")


def run(size: float = 1.0, seed: int = 0) -> Report:
    """Fill disks, take odd paths, and let processes write at once."""
    report, chance = Report(), random.Random(seed)
    rounds = max(4, round(ROUNDS * size))
    with small_disk() as disk:
        if disk is not None:
            full(report, disk, chance, rounds, limited=False)
    for work in (
        lambda folder: full(report, folder, chance, rounds, limited=True),
        lambda folder: odd_paths(report, folder),
        lambda folder: several(report, folder, max(5, round(WRITES * size)), max(2, round(WRITERS * size))),
    ):
        folder = Path(tempfile.mkdtemp(prefix="dubito-disk-"))
        try:
            work(folder)
        finally:
            shutil.rmtree(folder)
    return report
