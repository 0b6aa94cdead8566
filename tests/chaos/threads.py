"""Predictions from many threads at once: the serial ones bit for bit, for every method, and nothing is changed."""

import sys
import warnings
from typing import Any

import torch

from dubito import DubitoWarning
from dubito.inputs import take

from ..contract.cases import METHODS, fitted
from ..contract.test_threads import crew, equal, unchanged
from . import Report

CALLS, SEEDS, INTERVAL = 1_000, 8, 1e-4


def run(size: float, seed: int) -> Report:
    """`size` times a thousand predictions of every method, from eight threads that switch every 0.1 ms."""
    report, before = Report(), sys.getswitchinterval()
    sys.setswitchinterval(INTERVAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DubitoWarning)
            for method in METHODS:
                compare(method, max(int(CALLS * size), SEEDS), seed, report)
    finally:
        sys.setswitchinterval(before)
    return report


def compare(method: str, calls: int, seed: int, report: Report) -> None:
    """Predictions of one method from threads, beside those made alone."""
    posterior, case = fitted(method, "mlp")
    check, state = unchanged(posterior), torch.get_rng_state()

    def work(job: int) -> Any:
        number = job % SEEDS
        return posterior.predict(take(case.inputs, slice(number, number + 3)), 4, seed=seed + number)

    alone = [work(job) for job in range(SEEDS)]
    with crew() as threads:
        for job, result in enumerate(threads.map(work, range(calls))):
            same = equal(result, alone[job % SEEDS])
            report.count("equal bits" if same else "other bits", None if same else f"{method}: call {job} differs")
    if not torch.equal(torch.get_rng_state(), state):
        report.count("global generator moved", f"{method}: the global generator moved")
    try:
        check()
    except AssertionError as error:
        report.count("posterior changed", f"{method}: {error}")
