"""INF, Table 3: how many numbers each structure keeps for large networks, counted from their layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dubito import models

from ..runner.experiment import Cell, Experiment, Metric, Outcome, Published, Scale, Table, Variant

NETWORKS = ("resnet18", "resnet50", "resnet152", "densenet121", "densenet161")
METHODS = ("laplace-diag", "laplace-kfac", "laplace-efb")


@dataclass(frozen=True, kw_only=True)
class Count:
    """What is counted: every convolution and the classifier, biases as one more column, 1000 classes."""

    num_classes: int = 1000


def build(cell: Cell) -> nn.Module:
    """The network, without memory for its weights."""
    with torch.device("meta"):
        return models.make(cell.data)


def count(cells: Sequence[Cell], networks: Sequence[nn.Module], settings: Count, steps: int | None) -> list[Outcome]:
    """Numbers beside the weights: mn for the diagonal, n² + m² for the factors, both for EFB."""
    outcomes = []
    for cell, network in zip(cells, networks, strict=True):
        layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        shapes = [(len(m.weight), m.weight[0].numel() + (m.bias is not None)) for m in layers]
        diagonal = sum(m * n for m, n in shapes)
        factors = sum(n * n + m * m for m, n in shapes)
        kept = {"laplace-diag": diagonal, "laplace-kfac": factors, "laplace-efb": factors + diagonal}
        outcomes.append(Outcome(metrics={"numbers": float(kept[cell.method])}))
    return outcomes


EXPERIMENT = Experiment(
    paper="inf",
    name="inf-sizes",
    scales={
        "paper": Scale(
            variants={
                (name, method): Variant(settings=Count(), cpu_seconds=1.0) for name in NETWORKS for method in METHODS
            }
        )
    },
    load=build,
    generate=build,
    run=count,
)

#: Table 3 as printed: diagonal, KFAC, EFB, INF.
PRINTED = """
resnet18     11679912   95013546  106693458  12317373
resnet50     25503912  153851562  179355474  27614896
resnet152    60041384  389519018  449560402  65558402
densenet121   7895208  103094954  110990162   9711081
densenet161  28461064  379105514  407566578  32329191
"""


def published() -> dict[tuple[str, str, str], Published]:
    """The paper's numbers by network, method and metric."""
    return {
        (name, method, "numbers"): Published(float(value))
        for name, *values in map(str.split, PRINTED.strip().splitlines())
        for method, value in zip((*METHODS, "laplace-inf"), values, strict=True)
    }


TABLES = (
    Table(
        name="inf-table-3",
        title="numbers in the information matrix of ResNets and DenseNets for ImageNet",
        paper="INF, Table 3",
        plus_minus="none: the numbers are exact",
        differs="INF's own column depends on networks trained on ImageNet and is not run",
        experiment=EXPERIMENT,
        metrics=(Metric(name="numbers", title="numbers kept", lower_is_better=True),),
        published=published(),
    ),
)
