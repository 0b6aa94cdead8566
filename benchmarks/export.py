"""Exported rank-1 draws in onnxruntime, one thread: beside the plain network, S copies of it, and draws made once."""

import tempfile
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dubito import Categorical, Rank1, Training
from dubito.export import write_module

from .bars import Bar, Values, benchmark, importable, interleaved, ratios

DRAWS = 16
SIZES = {"64-256-256-10": (64, 256, 256, 10), "784-400-400-10": (784, 400, 400, 10)}
UNIT = "runs of the exported plain network"


class Plain(nn.Module):
    """Networks one after the other, as a module that can be exported."""

    def __init__(self, networks: list[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Mean probabilities, or the outputs of one network alone."""
        if len(self.networks) == 1:
            return {"outputs": self.networks[0](inputs)}
        return {"probs": torch.stack([network(inputs).softmax(-1) for network in self.networks]).mean(0)}


def session(path: Path) -> Any:
    """A session of one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def bars() -> Mapping[str, Bar]:
    """A limit at one row; the rest is shown beside it."""
    table = {}
    for size in SIZES:
        for rows in (1, 256):
            table[f"rank-1, {size}, {rows} rows"] = Bar(6 if rows == 1 else None, UNIT)
            table[f"{DRAWS} folded copies, {size}, {rows} rows"] = Bar(None, UNIT)
            table[f"sampled(...).predict, {size}, {rows} rows"] = Bar(None, UNIT)
    return table


@benchmark(bars())
def exported(rounds: int) -> Values:
    """CPU time of a call, over that of the plain network on the same rows."""
    values: dict[str, list[float]] = {}
    for size, widths in SIZES.items() if importable("onnxruntime") else ():
        values |= measured(size, widths, rounds)
    return values


def measured(size: str, widths: tuple[int, ...], rounds: int) -> dict[str, list[float]]:
    """The ratios of one network."""
    first, second, third = (nn.Linear(*pair) for pair in pairwise(widths))
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
    x, y = torch.randn(256, widths[0]), torch.arange(256) % 10
    posterior = Rank1().fit(net, (x, y), Categorical(), training=Training(epochs=1))
    fixed, values = posterior.sampled(DRAWS), {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_module(Plain([net]), x, path)
        plain = session(path)
        write_module(Plain([fixed.fold(index) for index in range(DRAWS)]), x, path)
        copies = session(path)
        posterior.export(path, num_samples=DRAWS)
        drawn = session(path)
    for rows in (1, 256):
        some, feeds = x[:rows], {"inputs": x[:rows].numpy()}
        works = {
            "plain": partial(plain.run, None, feeds),
            "rank-1": partial(drawn.run, None, feeds),
            f"{DRAWS} folded copies": partial(copies.run, None, feeds),
            "sampled(...).predict": partial(fixed.predict, some),
        }
        seconds = interleaved(works, rounds)
        others = (name for name in works if name != "plain")
        values |= {f"{name}, {size}, {rows} rows": ratios(seconds, name, "plain") for name in others}
    return values
