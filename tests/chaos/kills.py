"""SIGKILL and SIGTERM at random moments: what is started again ends where the run that nobody killed ends.

Every registered method, HMC, the protocol, active learning, `dubito compare` and the runner behind `dubito reproduce`;
then commands with workers, whose parent is killed, or one of themselves.
"""

import multiprocessing
import os
import random
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from . import Report
from .victims import METHODS, OTHERS, compare, quiet, reproduce, victim

FORK = multiprocessing.get_context("fork")
#: Kills of each run at size 1, and the most that one of its trials meets.
KILLS, MOST = 20, 5
#: Kills of a command with workers at size 1, and seconds after which none of these may be left.
COMMANDS, GONE = 4, 60.0


def run(size: float, seed: int) -> Report:
    """Kill everything; about 450 kills at size 1."""
    report = Report()
    names = [*METHODS, *OTHERS]
    if size < 0.1:  # a few of them, others with every seed
        names = random.Random(seed).sample(names, max(2, round(size * 10 * len(names))))
    # Processes that run nothing themselves, so that they may fork.
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(killed, name, size, seed) for name in names]
        parts += [
            pool.submit(orphans, command, number, seed)
            for number in range(round(COMMANDS * size))
            for command in (_compared, _reproduced)
        ]
        for part in parts:
            report.outcomes += part.result().outcomes
            report.failures += part.result().failures
    return report


def killed(name: str, size: float, seed: int) -> Report:
    """All kills of one run."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        Campaign(report, Path(folder), name, random.Random(f"{seed} {name}")).run(size)
    return report


class Campaign:
    """All kills of one run."""

    def __init__(self, report: Report, folder: Path, name: str, stream: random.Random) -> None:
        self.report, self.folder, self.name, self.stream = report, folder, name, stream

    def run(self, size: float) -> None:
        """Time a whole run, then kill others."""
        whole = self.folder / "whole"
        begin = time.monotonic()
        process = self.started(whole)
        process.join()
        self.duration = time.monotonic() - begin
        if process.exitcode != 0:
            self.report.count("failed alone", f"{self.name} ended with code {process.exitcode}")
            return
        self.expected = (whole / "out").read_bytes()
        kills, trial = max(2, round(KILLS * size)), 0
        if self.name in ("compare", "auto"):  # they take longer
            kills = max(1, kills // 2)
        while kills > 0 and trial < 4 * KILLS:
            trial += 1
            kills -= self.trial(self.folder / f"{trial}", min(MOST, kills))
        if self.name in METHODS:
            self.terminate(self.folder / "terminated")

    def started(self, folder: Path, minutes: float = 0.0) -> BaseProcess:
        folder.mkdir(parents=True, exist_ok=True)
        process = FORK.Process(target=victim, args=(self.name, folder, minutes))
        process.start()
        return process

    def trial(self, folder: Path, most: int) -> int:
        """Kill a run again and again, and let it end; returns how often."""
        kills = 0
        while kills < most:
            process = self.started(folder)
            process.join(self.stream.uniform(0, 1) * 2 * self.duration / (most + 1))
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            kills += 1
        self.ended(folder, kills, "SIGKILL")
        return kills

    def ended(self, folder: Path, kills: int, kind: str) -> None:
        """Let it run to its end, and compare."""
        last = self.started(folder)
        last.join()
        where = f"{self.name} after {kills} {kind}s"
        if last.exitcode != 0:
            failure = f"{where} ended with code {last.exitcode}: {(folder / 'said').read_text()[-300:]!r}"
        elif (folder / "out").read_bytes() != self.expected:
            failure = f"{where} came to another result"
        elif left := [path.name for path in folder.rglob("*.partial")]:
            failure = f"{where} left {left}"
        else:
            failure = None
        if kills == 0:
            kind, kills = "early end", 1
        self.report.outcomes[f"{kind} with equal bits" if failure is None else f"{kind} lost"] += kills
        self.report.failures += [] if failure is None else [failure]

    def terminate(self, folder: Path) -> None:
        """SIGTERM saves, though no checkpoint is due for an hour, and what goes on from it ends in the same bits."""
        begin = time.monotonic()
        self.started(folder.with_name("timed"), minutes=60.0).join()  # it writes less, and is faster
        duration = time.monotonic() - begin
        process = self.started(folder, minutes=60.0)
        process.join(self.stream.uniform(0.2, 0.9) * duration)
        kills = 0
        if process.exitcode is None and process.pid is not None:
            sent = time.time()
            os.kill(process.pid, signal.SIGTERM)
            process.join()
            out = folder / "out"
            late = process.exitcode == 0 and out.exists() and out.stat().st_mtime <= sent  # all was done before
            kills = 0 if late else 1
            if not late and process.exitcode not in (143, -signal.SIGTERM):
                self.report.count("wrong status", f"{self.name} after SIGTERM: {process.exitcode}")
                return
            if process.exitcode == 143 and not list(folder.glob("c*")):
                self.report.count("not saved", f"{self.name} after SIGTERM left no checkpoint")
                return
        self.ended(folder, kills, "SIGTERM")


def _compared(folder: Path) -> None:
    _as_command(compare, folder, "--jobs", "2")


def _reproduced(folder: Path) -> None:
    _as_command(reproduce, folder, 2)


def _as_command(function: Callable[..., None], folder: Path, *arguments: Any) -> None:
    """Run it as a process of its own would: a forked one would wait for idle workers at its end."""
    quiet(folder)
    code = 1
    try:
        function(folder, *arguments)
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def orphans(command: Callable[[Path], None], number: int, seed: int) -> Report:
    """Kill the parent of some workers, or one of them, and see that none is left and nothing lost."""
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        how = ("parent", "worker", "SIGTERM to the parent")[number % 3]
        _orphans(report, command, Path(folder), how, random.Random(f"{seed} {number}"))
    return report


def _orphans(report: Report, command: Callable[[Path], None], folder: Path, how: str, stream: random.Random) -> None:
    whole, killed = folder / "whole", folder / "killed"
    for path in (whole, killed):
        path.mkdir()
    process = FORK.Process(target=command, args=(whole,))
    process.start()
    process.join()
    process = FORK.Process(target=command, args=(killed,))
    process.start()
    assert process.pid is not None
    workers: set[int] = set()
    while process.is_alive() and len(workers) < 2:
        workers |= loky_workers(process.pid)
        time.sleep(0.05)
    process.join(stream.uniform(0.5, 3.0))
    workers |= loky_workers(process.pid)
    target = process.pid if how != "worker" else stream.choice(sorted(workers) or [process.pid])
    if process.is_alive():
        os.kill(target, signal.SIGTERM if "SIGTERM" in how else signal.SIGKILL)
    process.join()
    end = time.monotonic() + GONE
    while (alive := [pid for pid in workers if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)
    where = f"{command.__name__} after the death of a {how}"
    if alive:
        report.count("orphans", f"{where} left {len(alive)} workers")
        return
    if how == "worker" and process.exitcode != 0:
        report.count("worker not replaced", f"{where}: code {process.exitcode}")
        return
    last = FORK.Process(target=command, args=(killed,))
    last.start()
    last.join()
    outs = [path / "out" for path in (whole, killed)]
    same = all(out.exists() for out in outs) and len({out.read_bytes() for out in outs}) == 1
    report.count(f"{how} killed" if same else "lost", None if same else f"{where} came to another result")


def loky_workers(parent: int) -> set[int]:
    """The processes that joblib started for a parent; on other systems than Linux none is seen."""
    pids: set[int] = set()
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        try:
            pids |= {int(pid) for pid in path.read_text().split()}
        except OSError:
            continue
    return {pid for pid in pids if b"loky" in _command(pid) and b"resource_tracker" not in _command(pid)}


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
