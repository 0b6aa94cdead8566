"""Exported files are hardly larger than the network's own: bytes are the same on every machine."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dubito import (
    INF,
    BatchEnsemble,
    Categorical,
    Diagonal,
    DubitoWarning,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
    last_layer,
    models,
)
from dubito.export import write_module

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

FIXED, FRESH = {"num_samples": 16, "seed": 0}, {"num_samples": 16, "sampling": "fresh"}
CASES = {
    "rank-1": (Rank1(), "mlp", FIXED, 1.3),
    "BatchEnsemble": (BatchEnsemble(), "mlp", FIXED, 1.3),
    "implicit": (Implicit(), "mlp", FIXED, 1.3),
    "MC dropout": (MCDropout(), "mlp", FIXED, 1.3),
    "fresh k-tied": (KTied(), "mlp", FRESH, 1.15),
    "fresh mean field": (MeanField(), "mlp", FRESH, 2.1),
    "last layer, diagonal": (Laplace(structure=Diagonal(), subset=last_layer), "lenet", {}, 1.2),
    "last layer, INF": (Laplace(structure=INF(), subset=last_layer), "lenet", {}, 1.2),
}


class Logits(nn.Module):
    """A network alone, as a module that can be exported."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.eval()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"outputs": self.network(inputs)}


def network(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "mlp":
        return models.mlp(64, (256, 256), num_classes=10), torch.randn(32, 64)
    return models.lenet(), torch.randn(32, 1, 28, 28)


@pytest.mark.parametrize("name", CASES)
def test_a_file_costs_little_more_than_the_networks(name: str, tmp_path: Path):
    method, kind, options, limit = CASES[name]
    net, inputs = network(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)  # one step, and layers below the default rank
        training = None if isinstance(method, Laplace) else Training(iterations=1)
        posterior = method.fit(net, (inputs, torch.arange(32) % 10), Categorical(), training=training)
        posterior.export(tmp_path / "posterior.onnx", **options)
    write_module(Logits(net), inputs, tmp_path / "plain.onnx")
    sizes = [(tmp_path / f"{part}.onnx").stat().st_size for part in ("posterior", "plain")]
    assert sizes[0] <= limit * sizes[1], sizes[0] / sizes[1]
