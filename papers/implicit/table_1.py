"""The implicit paper's Table 1: weights and nodes of common networks, counted from their layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from dubito import models

from ..runner.experiment import Cell, Experiment, Metric, Outcome, Published, Scale, Table, Variant


@dataclass(frozen=True, kw_only=True)
class Count:
    """What is counted: input features of dense layers and input channels of convolutions   [implicit, Table 1]."""

    layers: str = "dense layers and convolutions, shortcuts among them"


def alexnet() -> nn.Sequential:
    """AlexNet's layers with weights, in torchvision's form: five convolutions, then dense 4096-4096-1000."""
    convolutions = [
        nn.Conv2d(3, 64, 11, 4, 2),
        nn.Conv2d(64, 192, 5, padding=2),
        *(nn.Conv2d(*channels, 3, padding=1) for channels in pairwise((192, 384, 256, 256))),
    ]
    return nn.Sequential(*convolutions, *dense(256 * 6 * 6))


def vgg16_large() -> nn.Sequential:
    """VGG-16's layers with weights for images of 224×224: 13 convolutions, then dense 4096-4096-1000."""
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    return nn.Sequential(*(nn.Conv2d(*channels, 3, padding=1) for channels in pairwise(widths)), *dense(512 * 7 * 7))


def dense(features: int) -> list[nn.Linear]:
    """The three dense layers behind both."""
    return [nn.Linear(*widths) for widths in pairwise((features, 4096, 4096, 1000))]


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "lenet": lambda: models.lenet(channels=(6, 16), dense=(120, 64), same_padding=False),
    "alexnet": alexnet,
    "vgg16-small": models.vgg16,
    "vgg16-large": vgg16_large,
    "resnet50": models.resnet50,
    "wide-resnet-28x10": lambda: models.wide_resnet(28, 10),
}


def build(cell: Cell) -> nn.Module:
    """The network, without memory for its weights."""
    with torch.device("meta"):
        return NETWORKS[cell.data]()


def nodes(network: nn.Module) -> int:
    """Inputs of all layers with weights."""
    dense = [module.in_features for module in network.modules() if isinstance(module, nn.Linear)]
    channels = [module.in_channels for module in network.modules() if isinstance(module, nn.Conv2d)]
    return sum(dense) + sum(channels)


def count(cells: Sequence[Cell], networks: Sequence[nn.Module], settings: Count, steps: int | None) -> list[Outcome]:
    """Weights, biases among them, and nodes."""
    return [
        Outcome(
            metrics={
                "weights": float(sum(weight.numel() for weight in network.parameters())),
                "nodes": float(nodes(network)),
            }
        )
        for network in networks
    ]


#: Table 1 as printed: weights, nodes.
PRINTED = """
lenet              42e3      23
alexnet            61e6   18307
vgg16-small        15e6    5251
vgg16-large       138e6   36995
resnet50           26e6   24579
wide-resnet-28x10  36e6    9475
"""

TABLES = (
    Table(
        name="implicit-table-1",
        title="weights and nodes of common networks",
        paper="implicit BNN, Table 1",
        plus_minus="none: nodes are exact, weights rounded",
        experiment=Experiment(
            paper="implicit",
            name="implicit-counts",
            scales={
                "paper": Scale(
                    variants={(name, "counted"): Variant(settings=Count(), cpu_seconds=1.0) for name in NETWORKS}
                )
            },
            load=build,
            generate=build,
            run=count,
        ),
        metrics=(
            Metric(name="weights", title="weights", lower_is_better=True),
            Metric(name="nodes", title="nodes", lower_is_better=True),
        ),
        published={
            (name, "counted", metric): Published(float(value))
            for name, *values in map(str.split, PRINTED.strip().splitlines())
            for metric, value in zip(("weights", "nodes"), values, strict=True)
        },
        differs="LeNet's 23 nodes are 1 + 6 + 16: inputs of its dense layers (256 + 120 + 64) are left out, against "
        "the paper's own definition, by which there are 447",
    ),
)
