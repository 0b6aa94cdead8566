"""Rank-1's Table 2: methods of equal size on CIFAR-10, on the clean test images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dubito import (
    MAP,
    BatchEnsemble,
    Categorical,
    DeepEnsemble,
    Flipout,
    MCDropout,
    MeanField,
    Rank1,
    Reparameterised,
    factors,
    metrics,
    seeds,
)
from dubito.data import Part, load
from dubito.method import Method
from dubito.models import wide_resnet
from dubito.prediction import CategoricalPrediction
from dubito.training import KL, SGD, Step, Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Published, Scale, Table, Variant
from ..settings import explicit

DATA = "cifar10"


@dataclass(frozen=True, kw_only=True)
class Images:
    """How one method is trained and judged.

    Args:
        method: with its settings.
        depth: of the Wide ResNet.
        width: likewise.
        base: likewise.
        epochs: passes over the images.
        kl_warmup: epochs over which the divergence's weight rises to 1.
        lr: learning rate of SGD with Nesterov's momentum, one epoch of warm-up, then times 0.2 at 40, 80 and 90 %.
        weight_decay: on slow weights; 1e-4 · Σw² has the gradient of a decay of 2e-4.
        batch_size: images per step.
        num_samples: draws at test time, in all.
    """

    method: Method
    depth: int = 28
    width: int = 10
    base: int = 16
    epochs: int = 200
    kl_warmup: float = 160.0
    lr: float = 0.1
    weight_decay: float = 2e-4
    batch_size: int = 128
    num_samples: int = 4

    def training(self, steps: int | None) -> Training:
        """The run, ended after `steps` where given."""
        return explicit(
            Training,
            epochs=self.epochs if steps is None else None,
            iterations=steps,
            batch_size=self.batch_size,
            lr=self.lr,
            optimizer=explicit(SGD),
            schedule=explicit(Step, at=(0.4, 0.8, 0.9)),
            warmup=1.0,
            weight_decay=self.weight_decay,
            kl=explicit(KL, warmup=self.kl_warmup),
            channels_last=True,
        )


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Standardised images."""

    train: Part
    test: Part


def load_cell(cell: Cell) -> Pictures:
    """CIFAR-10, as many training images as are at hand."""
    data = load(DATA, validation=0)
    return Pictures(train=data.train, test=data.test)


def generate_cell(cell: Cell) -> Pictures:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up pictures")
    parts = [Part(torch.randn(8, 3, 8, 8, generator=stream), torch.arange(8) % 10) for _ in range(2)]
    return Pictures(train=parts[0], test=parts[1])


def run_cells(cells: Sequence[Cell], data: Sequence[Pictures], settings: Images, steps: int | None) -> list[Outcome]:
    """Train and judge."""
    return [run_cell(cell, pictures, settings, steps) for cell, pictures in zip(cells, data, strict=True)]


def run_cell(cell: Cell, pictures: Pictures, settings: Images, steps: int | None) -> Outcome:
    """One method with one seed."""
    width = settings.width if steps is None else 1  # two steps of the widest network take minutes
    posterior = provenance.fit(
        settings.method,
        wide_resnet(settings.depth, width, settings.base, seed=cell.seed),
        pictures.train,
        explicit(Categorical),
        training=settings.training(steps),
        seed=cell.seed,
        progress=False,
    )
    count = settings.num_samples if steps is None else steps
    prediction = posterior.predict(pictures.test.inputs, count, seed=cell.seed)
    assert isinstance(prediction, CategoricalPrediction)
    probs, labels = prediction.probs.double(), pictures.test.targets
    return Outcome(
        metrics={
            "nll": -float(prediction.log_prob(labels).double().mean()),
            "accuracy": 100 * metrics.accuracy(probs, labels),
            "ece": metrics.ece(probs, labels),
        },
        details={
            "parameters": posterior.num_parameters,
            "images": len(pictures.train.targets),
            "train_nll": posterior.history[-1]["nll"],
        },
    )


#: The authors' settings: random signs, divergences summed over components.
SIGNS = explicit(factors.Signs, probability=0.5)
PAPER: Mapping[str, Images] = {
    "deterministic": Images(method=explicit(MAP)),
    "batch-ensemble": Images(method=explicit(BatchEnsemble, initial=SIGNS), epochs=250),
    "mc-dropout": Images(method=explicit(MCDropout, rate=0.1), num_samples=10),
    "mean-field": Images(method=explicit(MeanField, prior_std=0.1, estimator=explicit(Flipout)), num_samples=10),
    "rank1-normal": Images(method=explicit(Rank1, initial=SIGNS, kl="sum"), epochs=250, kl_warmup=200.0),
    "rank1-cauchy": Images(
        method=explicit(Rank1, family=explicit(factors.Cauchy), initial=SIGNS, kl="sum"),
        epochs=250,
        kl_warmup=200.0,
        num_samples=16,
    ),
    "deep-ensemble": Images(method=explicit(DeepEnsemble)),
}


def small(method: Method, num_samples: int = 16) -> Images:
    """What two CPU cores do."""
    return Images(method=method, depth=10, width=1, base=8, epochs=15, kl_warmup=12.0, num_samples=num_samples)


SMALL: Mapping[str, Images] = {
    "deterministic": small(explicit(MAP)),
    "batch-ensemble": small(explicit(BatchEnsemble)),
    "mc-dropout": small(explicit(MCDropout, rate=0.1)),
    "mean-field": small(explicit(MeanField, prior_std=0.1, estimator=Reparameterised())),
    "rank1-normal": small(explicit(Rank1)),
    "rank1-cauchy": small(explicit(Rank1, family=explicit(factors.Cauchy))),
    "deep-ensemble": small(explicit(DeepEnsemble)),
}
#: CPU-seconds of one small run: that of the plain network times what a method's step costs.
STEP_COSTS = {
    "deterministic": 1.0,
    "batch-ensemble": 4.4,
    "mc-dropout": 1.2,
    "mean-field": 1.2,
    "rank1-normal": 5.0,
    "rank1-cauchy": 5.0,
    "deep-ensemble": 4.0,
}
PLAIN_SECONDS, PAPER_SECONDS = 150.0, 4e6


def variants(settings: Mapping[str, Images], seconds: float) -> dict[tuple[str, str], Variant]:
    """All methods at one scale."""
    return {
        (DATA, name): Variant(settings=each, cpu_seconds=seconds * STEP_COSTS[name]) for name, each in settings.items()
    }


EXPERIMENT = Experiment(
    paper="rank1",
    name="rank1-cifar10",
    scales={
        "small": Scale(
            variants=variants(SMALL, PLAIN_SECONDS),
            smaller="20,000 images for 50,000, Wide ResNet-10-1 of base 8 for 28-10, 15 epochs for 200 to 250, "
            "1 seed for 10",
        ),
        "paper": Scale(variants=variants(PAPER, PAPER_SECONDS), seeds=10),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)

#: Table 2 as printed, without its errors: NLL, accuracy in percent, ECE.
PRINTED = """
deterministic   0.159  96.0  0.023
batch-ensemble  0.143  96.2  0.020
mc-dropout      0.160  95.9  0.024
mean-field      0.214  94.7  0.029
rank1-normal    0.128  96.3  0.008
rank1-cauchy    0.120  96.5  0.009
deep-ensemble   0.114  96.6  0.010
"""


def published() -> dict[tuple[str, str, str], Published]:
    """The paper's numbers by data, method and metric."""
    return {
        (DATA, name, metric): Published(float(value))
        for name, *values in map(str.split, PRINTED.strip().splitlines())
        for metric, value in zip(("nll", "accuracy", "ece"), values, strict=True)
    }


TABLES = (
    Table(
        name="rank1-cifar10-small",
        title="CIFAR-10's clean test images, networks of equal size",
        paper="rank-1 BNN, Table 2",
        plus_minus="the paper gives none",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="nll", title="NLL", lower_is_better=True),
            Metric(name="accuracy", title="accuracy (%)", lower_is_better=False),
            Metric(name="ece", title="ECE", lower_is_better=True),
        ),
        published=published(),
        claims=(
            Claim(
                text="rank-1 Normal has a lower NLL than BatchEnsemble",
                metric="nll",
                better="rank1-normal",
                than="batch-ensemble",
                data=(DATA,),
            ),
            Claim(
                text="rank-1 Cauchy has a lower NLL than the deterministic network",
                metric="nll",
                better="rank1-cauchy",
                than="deterministic",
                data=(DATA,),
            ),
        ),
        differs="no flips and crops of the training images; batch norm follows each component by itself where the "
        "components are looped over",
    ),
)
