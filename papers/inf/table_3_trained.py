"""INF's size on a trained network: what a ResNet-18 keeps at rank 100, over what its diagonal alone would.

The paper's Table 3 has 12,317,373 numbers for INF on a ResNet-18 trained on ImageNet, 1.055 times the diagonal's.
Which eigenvectors are kept depends on the trained network; here it is trained on CIFAR-10 images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dubito import INF, MAP, Categorical, Laplace, seeds
from dubito.data import Data, Part, load
from dubito.inference.laplace import LaplacePosterior
from dubito.models import resnet18
from dubito.prediction import CategoricalPrediction
from dubito.training import SGD, Cosine, Training

from ..runner import provenance
from ..runner.experiment import Cell, Experiment, Metric, Outcome, Published, Scale, Table, Variant
from ..settings import explicit


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How the network is trained, and what is kept.

    Args:
        rank: K of INF.
        max_rank: its largest L.
        epochs: of SGD with momentum, its rate falling by a cosine, 64 images each.
        lr: learning rate.
        train: training images.
        curvature_rows: of them for the curvature.
        base: channels of the first stage.
    """

    rank: int = 100
    max_rank: int = 1000
    epochs: int = 30
    lr: float = 0.05
    train: int = 50_000
    curvature_rows: int = 50_000
    base: int = 64


@dataclass(frozen=True)
class Images:
    """Training and test images."""

    train: Part
    test: Part


def load_cell(cell: Cell) -> Images:
    """CIFAR-10, as many of its images as there are."""
    data: Data = load("cifar10", validation=0)
    return Images(data.train, data.test)


def generate_cell(cell: Cell) -> Images:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up images", cell.data)
    part = Part(torch.randn(16, 3, 32, 32, generator=stream), torch.arange(16) % 10)
    return Images(part, part)


def run_cells(cells: Sequence[Cell], data: Sequence[Images], settings: Fit, steps: int | None) -> list[Outcome]:
    """Train and count."""
    return [run_cell(cell, images, settings, steps) for cell, images in zip(cells, data, strict=True)]


def run_cell(cell: Cell, images: Images, settings: Fit, steps: int | None) -> Outcome:
    """One network."""
    # A rehearsal has no time for factors of side 4,608, and its small layers have less than rank 100.
    base, rank = (4, None) if steps else (settings.base, settings.rank)
    net = resnet18(base=base, num_classes=10, seed=cell.seed)
    train = Part(*(tensor[: settings.train] for tensor in images.train))
    training = explicit(
        Training,
        iterations=steps or settings.epochs * math.ceil(len(train.targets) / 64),
        batch_size=64,
        lr=settings.lr,
        optimizer=explicit(SGD, momentum=0.9),
        schedule=explicit(Cosine),
    )
    point = provenance.fit(
        explicit(MAP, prior_std=1.0), net, train, explicit(Categorical), training=training, seed=cell.seed
    )
    rows = Part(*(tensor[: settings.curvature_rows] for tensor in train))
    trained = point.fold(0)
    structure = explicit(INF, rank=rank, max_rank=settings.max_rank)
    method = explicit(Laplace, structure=structure, subset=kernels(trained))
    posterior = provenance.fit(method, trained, rows, explicit(Categorical), seed=cell.seed)
    assert isinstance(posterior, LaplacePosterior)
    prediction = point.predict(images.test.inputs)
    assert isinstance(prediction, CategoricalPrediction)
    accuracy = float((prediction.probs.argmax(1) == images.test.targets).float().mean())
    return Outcome(metrics={"accuracy": 100 * accuracy, **sizes(posterior)}, details=captured(posterior))


def kernels(network: nn.Module) -> tuple[str, ...]:
    """The parameters that the paper counts: those of convolutions and of the classifier."""
    return tuple(
        f"{path}.{name}"
        for path, module in network.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
        for name, _ in module.named_parameters()
    )


def sizes(posterior: LaplacePosterior) -> dict[str, float]:
    """Numbers beside the weights, and what they and the whole posterior are over the diagonal's."""
    kept = [posterior.block_tensors(block) for block in posterior.blocks.values()]
    numbers = sum(tensor.numel() for own in kept for tensor in own.values())
    diagonal = sum(own["diagonal"].numel() for own in kept)
    beyond = sum(tensor.nbytes for own in kept for kind, tensor in own.items() if kind != "diagonal")
    return {
        "numbers": float(numbers),
        "ratio": numbers / diagonal,
        "whole": posterior.nbytes / (posterior.nbytes - beyond),
    }


def captured(posterior: LaplacePosterior) -> dict[str, object]:
    """What each layer keeps."""
    return {"layers": posterior.details["facts"]}


NAME, METHOD = "cifar10", "resnet18-inf-100"
EXPERIMENT = Experiment(
    paper="inf",
    name="inf-bytes",
    scales={
        "small": Scale(
            variants={
                (NAME, METHOD): Variant(settings=Fit(epochs=3, train=6000, curvature_rows=1000), cpu_seconds=400.0)
            },
            smaller="3 epochs on 6,000 images, curvature of 1,000 of them",
        ),
        "paper": Scale(variants={(NAME, METHOD): Variant(settings=Fit(), cpu_seconds=40_000.0)}),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)
TABLES = (
    Table(
        name="inf-bytes",
        title="what INF of rank 100 keeps of a ResNet-18 with ImageNet's stem, trained on CIFAR-10",
        paper="INF, Table 3 (ResNet-18 on ImageNet, 1,000 classes)",
        plus_minus="none: one network",
        differs="CIFAR-10 in place of ImageNet, so that the classifier has 10 rows; our training; L at most 1,000",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="ratio", title="numbers over the diagonal's", lower_is_better=True),
            Metric(name="whole", title="bytes of the posterior over the diagonal's", lower_is_better=True),
            Metric(name="numbers", title="numbers kept", lower_is_better=True),
            Metric(name="accuracy", title="test accuracy, %", lower_is_better=False),
        ),
        published={(NAME, METHOD, "ratio"): Published(round(12_317_373 / 11_679_912, 3))},
    ),
)
