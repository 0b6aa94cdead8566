"""Write one stored posterior and one checkpoint of every method, with what they must predict.

python -m tests.legacy.make <folder under tests/legacy, named after the version that writes>

A folder is written once, by the version it is named after, and never again: a file that no longer loads is a broken
promise, and not a reason to write another.
"""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dubito import Categorical, Gaussian, MCDropout, Training, methods, storage

HERE = Path(__file__).parent
TRAINING = Training(epochs=2, batch_size=8)


def filling(rows: int, columns: int) -> torch.Tensor:
    """Numbers that no generator draws, so that they are the same in every version of PyTorch."""
    values = torch.arange(1, rows * columns + 1, dtype=torch.float64) * 0.6180339887498949 % 1
    return (2 * values - 1).reshape(rows, columns).float()


def network() -> nn.Module:
    """A tiny network whose first weights are given."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(filling(1, parameter.numel()).reshape(parameter.shape))
    return net


INPUTS = filling(24, 3)
CASES: dict[str, tuple[Any, torch.Tensor]] = {
    "classes": (Categorical(), (INPUTS[:, 0] > 0).long()),
    "reals": (Gaussian(), INPUTS[:, :2] * 2),
}


def cases() -> dict[str, tuple[Any, str]]:
    """Methods, classes and reals in turn."""
    every = {**methods(), "own-dropout": MCDropout(rate=None)}
    return {name: (method, [*CASES][number % 2]) for number, (name, method) in enumerate(every.items())}


def fit(method: Any, kind: str, checkpoint: Path | None = None) -> Any:
    """The run that a checkpoint is of."""
    likelihood, targets = CASES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return method.fit(network(), (INPUTS, targets), likelihood, training=TRAINING, checkpoint=checkpoint)


def predicted(posterior: Any) -> list[list[float]]:
    """What is compared: the mean over its draws, or the probabilities, of some rows."""
    prediction = posterior.predict(INPUTS[:4], 4, seed=0)
    values = prediction.probs if hasattr(prediction, "probs") else prediction.mean
    return [[round(value, 7) for value in row] for row in values.tolist()]


class Stopped(Exception):
    """Ends a run after its first checkpoint with a step."""


def first_writes(work: Callable[[], Any], count: int) -> None:
    """Run until a file was written so many times."""
    before, seen = storage.write, 0

    def write(*args: Any) -> None:
        nonlocal seen
        before(*args)
        seen += 1
        if seen == count:
            raise Stopped

    storage.write = write
    try:
        work()
    except Stopped:
        pass
    finally:
        storage.write = before


def main(folder: Path) -> None:
    """Write all files."""
    from dubito.training import loop

    folder.mkdir(parents=True)
    expected: dict[str, Any] = {}
    loop.Loop._save_if_due = loop.Loop._save  # after every step
    for name, (method, kind) in cases().items():
        posterior = fit(method, kind)
        posterior.save(folder / f"{name}.safetensors")
        expected[name] = predicted(posterior)
        checkpoint = folder / f"{name}.checkpoint"
        first_writes(lambda method=method, kind=kind, path=checkpoint: fit(method, kind, path), 3)
    facts = {"expected": expected, "torch": torch.__version__}
    (folder / "expected.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(HERE / sys.argv[1])
