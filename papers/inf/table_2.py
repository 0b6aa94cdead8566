"""INF, Table 2, upper half: LeNet on MNIST, with notMNIST as the unknown.

The paper trains networks to overfit and reports the best of 300 hyperparameters for each Laplace structure. Here the
prior is chosen by marginal likelihood and the data scale by validation rows, once, without looking at notMNIST. The
paper's ± is the standard deviation of the entropy over images, no standard error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dubito import EFB, INF, KFAC, MAP, Categorical, DeepEnsemble, Diagonal, Laplace, MCDropout, metrics, seeds
from dubito.data import Part
from dubito.inference.laplace import LaplacePosterior
from dubito.inference.laplace.structures import Structure
from dubito.models import lenet
from dubito.posterior import Posterior
from dubito.prediction import CategoricalPrediction
from dubito.shifts import detection, ood_pair
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Published, Scale, Table, Variant
from ..settings import explicit

DATA = "mnist/notmnist"
STRUCTURES: dict[str, Structure] = {
    "laplace-diag": Diagonal(),
    "laplace-kfac": KFAC(),
    "laplace-efb": EFB(),
    "laplace-inf": explicit(INF, rank=100),
}
METHODS = ("nn", "laplace-diag", "laplace-kfac", "mc-dropout", "deep-ensemble", "laplace-efb", "laplace-inf")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How one network is trained and judged.

    Args:
        rows: training images.
        judged: test images, and as many foreign ones.
        validation: validation images that choose the data scale of Laplace posteriors.
        epochs: passes over the training images, so many that the network is sure of all of them.
        batch_size: images per step.
        lr: of Adam.
        weight_decay: the paper's L2 coefficient.
        members: of the ensemble.
        rate: of dropout.
        num_samples: draws of a prediction.
    """

    rows: int = 50_000
    judged: int = 10_000
    validation: int = 2_000
    epochs: int = 20
    batch_size: int = 100
    lr: float = 1e-3
    weight_decay: float = 1e-8
    members: int = 5
    rate: float = 0.2
    num_samples: int = 30


@dataclass(frozen=True)
class Images:
    """Images to train on, to choose by, to judge by, and foreign ones."""

    train: Part
    validation: Part
    test: Part
    outside: torch.Tensor


def load_cell(cell: Cell) -> Images:
    """MNIST and notMNIST, scaled alike."""
    pair = ood_pair(cell.data)
    assert pair.inside.validation is not None
    return Images(pair.inside.train, pair.inside.validation, pair.inside.test, pair.outside)


def generate_cell(cell: Cell) -> Images:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up images")
    inputs = torch.randn(24, 1, 28, 28, generator=stream)
    part = Part(inputs, torch.arange(24) % 10)
    return Images(part, part, part, torch.rand(24, 1, 28, 28, generator=stream))


def shared_work(cell: Cell) -> tuple:
    """The point estimate, of Laplace structures."""
    return (cell.seed,)


def run_cells(cells: Sequence[Cell], data: Sequence[Images], settings: Fit, steps: int | None) -> list[Outcome]:
    """Train, judge own test images and foreign ones."""
    return [run_seed(cell, images, settings, steps) for cell, images in zip(cells, data, strict=True)]


#: Point estimates, which all Laplace structures stand around: trained once and kept for their turn.
_points: dict[tuple, tuple[Posterior, list]] = {}


def first(part: Part, rows: int) -> Part:
    """The first rows of a part."""
    return Part(part.inputs[:rows], part.targets[:rows])


def run_seed(cell: Cell, images: Images, settings: Fit, steps: int | None) -> Outcome:
    """One method, one seed."""
    posterior, details = fitted(cell, images, settings, steps)
    samples = settings.num_samples if steps is None else steps
    test = first(images.test, settings.judged)
    inside = posterior.predict(test.inputs, samples, seed=cell.seed)
    outside = posterior.predict(images.outside[: settings.judged], samples, seed=cell.seed)
    assert isinstance(inside, CategoricalPrediction) and isinstance(outside, CategoricalPrediction)
    entropies = metrics.normalised_entropy_per_example(outside.probs)
    found = detection(inside, outside)
    return Outcome(
        metrics={
            "accuracy": metrics.accuracy(inside.probs, test.targets),
            "ece": metrics.ece(inside.probs, test.targets),
            "entropy": float(entropies.mean()),
            "auroc": found["total"].auroc,
            "nll": -float(inside.log_prob(test.targets).mean()),
            "entropy_inside": metrics.normalised_entropy(inside.probs),
        },
        details={**details, "entropy_std": float(entropies.std())},
    )


def fitted(cell: Cell, images: Images, settings: Fit, steps: int | None) -> tuple[Posterior, dict[str, float]]:
    """The method's posterior, and what was chosen for it."""
    train = first(images.train, settings.rows)
    training = explicit(
        Training,
        epochs=settings.epochs if steps is None else None,
        iterations=steps,
        batch_size=settings.batch_size,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
    )
    net = lenet(channels=(6, 16), dense=(84,), same_padding=False, seed=cell.seed)
    likelihood = explicit(Categorical)
    if cell.method == "mc-dropout":
        method = explicit(MCDropout, rate=settings.rate)
        return provenance.fit(method, net, train, likelihood, training=training, seed=cell.seed), {}
    if cell.method == "deep-ensemble":
        members = explicit(DeepEnsemble, members=settings.members)
        return provenance.fit(members, net, train, likelihood, training=training, seed=cell.seed), {}
    key = (cell.data, cell.split, cell.seed, len(train.targets), settings, steps)
    train_point = partial(provenance.fit, explicit(MAP), net, train, likelihood, training=training, seed=cell.seed)
    point = provenance.shared(_points, key, train_point)
    if cell.method == "nn":
        return point, {}
    around = explicit(Laplace, structure=STRUCTURES[cell.method])
    posterior = provenance.fit(around, point.fold(0), train, likelihood, seed=cell.seed)
    assert isinstance(posterior, LaplacePosterior)
    chosen = posterior.tuned(validation=first(images.validation, settings.validation))
    return chosen, {
        "prior_precision": float(chosen.details["prior_precision"]),
        "data_scale": chosen.data_scale / chosen.num_data,
    }


def variants(settings: Fit) -> dict[tuple[str, str], Variant]:
    """All methods; an epoch costs 5 seconds, Laplace and predictions a minute."""
    trained = {"nn": 1, "mc-dropout": 1, "deep-ensemble": settings.members}
    return {
        (DATA, method): Variant(settings=settings, cpu_seconds=60.0 + trained.get(method, 0) * 5.0 * settings.epochs)
        for method in METHODS
    }


EXPERIMENT = Experiment(
    paper="inf",
    name="inf-table-2-mnist",
    scales={"paper": Scale(variants=variants(Fit()), seeds=3)},
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    shares=shared_work,
)
#: Accuracy, ECE and normalised entropy of notMNIST.
PUBLISHED = {
    "nn": (0.993, 0.395, 0.055),
    "laplace-diag": (0.9935, 0.0075, 0.555),
    "laplace-kfac": (0.9929, 0.0078, 0.599),
    "mc-dropout": (0.9929, 0.0105, 0.562),
    "deep-ensemble": (0.9937, 0.0635, 0.596),
    "laplace-efb": (0.9929, 0.012, 0.618),
    "laplace-inf": (0.9927, 0.0069, 0.635),
}
TABLES = (
    Table(
        name="inf-table-2-mnist",
        title="LeNet on MNIST: accuracy and ECE of test images, normalised entropy of notMNIST",
        paper="INF, Table 2, MNIST against notMNIST",
        plus_minus="the standard deviation of the entropy over images, which is no standard error",
        differs="prior by marginal likelihood and data scale by validation rows instead of the best of 300 "
        "hyperparameters; the sizes of LeNet's layers are not given: 6 and 16 maps, "
        "5 × 5 kernels, 84 units",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="accuracy", title="accuracy", lower_is_better=False),
            Metric(name="ece", title="ECE", lower_is_better=True),
            Metric(name="entropy", title="entropy, notMNIST", lower_is_better=False),
        ),
        published={
            (DATA, method, metric): Published(value)
            for method, values in PUBLISHED.items()
            for metric, value in zip(("accuracy", "ece", "entropy"), values, strict=True)
        },
        claims=tuple(
            Claim(
                text=f"INF is less sure of notMNIST than {other}",
                metric="entropy",
                better="laplace-inf",
                than=other,
                data=(DATA,),
            )
            for other in METHODS
            if other != "laplace-inf"
        ),
    ),
    Table(
        name="inf-table-2-mnist-auroc",
        title="the same networks: how well the entropy detects notMNIST among MNIST",
        paper="not in the paper, which reports the entropy of notMNIST alone",
        plus_minus="none",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="auroc", title="AUROC", lower_is_better=False),
            Metric(name="nll", title="NLL, MNIST", lower_is_better=True),
            Metric(name="entropy_inside", title="entropy, MNIST", lower_is_better=True),
        ),
        published={},
    ),
)
