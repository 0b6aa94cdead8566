"""BALI, Figure 3: MNIST told from Fashion-MNIST by the entropy of predictions, and the other way round.

The figure shows ROC curves without numbers; every outcome keeps its curve, and the area under it is judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy import interp
from torch import Tensor

from dubito import Categorical, metrics, seeds
from dubito.data import Part, Scaling
from dubito.models import mlp
from dubito.posterior import Posterior
from dubito.prediction import CategoricalPrediction
from dubito.shifts import detection, ood_pair, scores

from ..runner import provenance
from ..runner.experiment import Cell, Experiment, Metric, Outcome, Scale, Table, Variant
from ..settings import explicit
from .class_fit import CONVERGENCE, METHODS, ClassFit, better, followed, method_of, training_of

PAIRS = ("mnist/fashion-mnist", "fashion-mnist/mnist")
#: What `scan.py` chose: the lowest NLL of validation rows.
CHOSEN: dict[str, Any] = {"standardise": False, "effective_share": 0.1, "step_size": 0.25}
#: What differs from the paper's Table 5, by form of BALI; the scale of pixels is not stated there.
CHANGES: dict[str, dict[str, Any]] = {"bali": {}, "bali-unit": {"standardise": False}, "bali-chosen": CHOSEN}
ALL = tuple(dict.fromkeys((*METHODS, *CHANGES)))
FORMS = {"bali": "BALI", "bali-unit": "BALI on pixels in [0, 1]", "bali-chosen": "BALI as chosen"}
#: Test images judged along training.
CURVE_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class Fit(ClassFit):
    """How one network is trained and judged; the defaults are those of Tables 5 and 6.

    Args:
        num_samples: draws of a prediction.
        standardise: images by one mean and standard deviation of all training pixels; otherwise pixels in [0, 1].
        curve_rows: test and training images that are judged along training; 0 keeps no curves.
    """

    step_size: float = 0.25
    prior_scale: float = 10.0
    effective_share: float = 0.02
    iterations: int = 30_000
    lr: float = 2e-3
    num_samples: int = 50
    standardise: bool = True
    curve_rows: int = 0


@dataclass(frozen=True)
class Images:
    """Images to train on, to judge by, and out-of-distribution ones, standardised; `scaling` leads back to [0, 1]."""

    train: Part
    test: Part
    outside: Tensor
    scaling: Scaling

    def scaled(self, standardise: bool) -> "Images":
        """With standardised pixels, or with those in [0, 1]."""
        if standardise:
            return self
        train, test = (Part(self.scaling.undo(part.inputs), part.targets) for part in (self.train, self.test))
        return replace(self, train=train, test=test, outside=self.scaling.undo(self.outside))


def load_cell(cell: Cell) -> Images:
    """All training images, and the test images of both sets."""
    pair = ood_pair(cell.data, validation=0)
    assert pair.inside.input_scaling is not None
    return Images(pair.inside.train, pair.inside.test, pair.outside, pair.inside.input_scaling)


def generate_cell(cell: Cell) -> Images:
    """Made-up images."""
    stream = seeds.generator(cell.seed, "made-up images", cell.data)
    part = Part(torch.randn(60, 1, 28, 28, generator=stream), torch.arange(60) % 10)
    outside = torch.rand(60, 1, 28, 28, generator=stream)
    return Images(part, part, outside, Scaling(torch.tensor(0.1), torch.tensor(0.3)))


def run_cells(cells: Sequence[Cell], data: Sequence[Images], settings: Fit, steps: int | None) -> list[Outcome]:
    """Train on one set, tell its test images from the other's."""
    return [run_seed(cell, images, settings, steps) for cell, images in zip(cells, data, strict=True)]


def run_seed(cell: Cell, images: Images, settings: Fit, steps: int | None) -> Outcome:
    """One method, one seed."""
    images = images.scaled(settings.standardise)
    posterior = fitted(cell, images, settings, steps)
    samples = settings.num_samples if steps is None else steps
    numbers, curve = judged(posterior, images, samples, cell.seed)
    details: dict[str, Any] = {"roc": curve}
    if settings.curve_rows:
        numbers["reach"], kept = followed(posterior.history)
        rows = slice(settings.curve_rows)
        seen = posterior.predict(images.train.inputs[rows], samples, seed=cell.seed)
        numbers["gap"] = numbers["nll"] + float(seen.log_prob(images.train.targets[rows]).mean())
        details |= kept
    return Outcome(metrics=numbers, details=details)


def fitted(cell: Cell, images: Images, settings: Fit, steps: int | None) -> Posterior:
    """The method's posterior; the rows that a curve is drawn by choose nothing."""
    num_data, rows = len(images.train.targets), slice(settings.curve_rows)
    return provenance.fit(
        method_of(cell.method, settings, num_data),
        mlp(784, settings.hidden, activation="leaky_tanh", seed=cell.seed),
        images.train,
        explicit(Categorical),
        training=training_of(cell.method, settings, num_data, steps),
        validation=Part(images.test.inputs[rows], images.test.targets[rows]) if settings.curve_rows else None,
        seed=cell.seed,
        progress=False,
    )


def judged(
    posterior: Posterior, images: Images, num_samples: int, seed: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """How well images are classified and told from others, and the ROC curve."""
    inside, outside = (posterior.predict(rows, num_samples, seed=seed) for rows in (images.test.inputs, images.outside))
    assert isinstance(inside, CategoricalPrediction) and isinstance(outside, CategoricalPrediction)
    detected, targets = detection(inside, outside)["total"], images.test.targets
    numbers = {
        "auroc": detected.auroc,
        "fpr95": detected.fpr95,
        "accuracy": metrics.accuracy(inside.probs, targets),
        "ece": metrics.ece(inside.probs, targets),
        "nll": -float(inside.log_prob(targets).mean()),
    }
    return numbers, roc(scores(inside)["total"], scores(outside)["total"])


def roc(inside: Tensor, outside: Tensor, places: int = 101) -> dict[str, list[float]]:
    """The figure's curve: shares of own images (true positives) and of foreign ones below rising thresholds."""
    thresholds = torch.cat([inside, outside]).double().quantile(torch.linspace(0, 1, places).double())
    return {
        name: [float((values.double() <= threshold).double().mean()) for threshold in thresholds]
        for name, values in (("true_positives", inside), ("false_positives", outside))
    }


def paper_positives(outcome: Outcome) -> dict[str, float]:
    """FPR95 as in the paper's figure, from the kept curve: in-distribution images are the positives.

    The share of out-of-distribution images below the entropy that 95 % of the in-distribution ones stay below, by a
    straight line between the curve's places; `fpr95` has the others as positives.
    """
    true, false = outcome.details["roc"]["true_positives"], outcome.details["roc"]["false_positives"]
    return {"fpr95_inside": float(interp(0.95, true, false))}


def variants(settings: Fit, layerwise: float, dropout: float, point: float) -> dict[tuple[str, str], Variant]:
    """Every method on both pairs, with CPU-seconds of forms of BALI, of MC dropout and of the point estimate."""
    seconds = {"mc-dropout": dropout, "map": point}
    return {
        (data, method): Variant(
            settings=replace(settings, **CHANGES.get(method, {})), cpu_seconds=seconds.get(method, layerwise)
        )
        for data in PAIRS
        for method in ALL
    }


EXPERIMENT = Experiment(
    paper="bali",
    name="bali-figure-3",
    scales={
        "small": Scale(
            variants=variants(Fit(iterations=3000, batch_size=1024), 150.0, 50.0, 40.0),
            seeds=3,
            smaller="3,000 iterations of 1,024 images instead of 30,000 of 2,048",
        ),
        "third": Scale(
            variants=variants(Fit(iterations=10_000, curve_rows=CURVE_ROWS), 900.0, 330.0, 270.0),
            seeds=3,
            smaller="10,000 iterations instead of 30,000",
        ),
        "paper": Scale(variants=variants(Fit(curve_rows=CURVE_ROWS), 2700.0, 1000.0, 800.0), seeds=3),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    derived=paper_positives,
)
DIFFERS = (
    "50 draws of a prediction, whose number is not given; bali has the paper's Table 5 with pixels standardised by one "
    "mean and standard deviation, bali-unit with pixels in [0, 1], bali-chosen the scale of pixels, N_eff and α that "
    "the scan chose by validation rows"
)
TABLES = (
    Table(
        name="bali-figure-3",
        title="MNIST against Fashion-MNIST by entropy: area under the ROC curve",
        paper="BALI, Figure 3 (curves without numbers)",
        plus_minus="none",
        differs=DIFFERS,
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="auroc", title="AUROC", lower_is_better=False),
            Metric(name="fpr95_inside", title="FPR95, in-distribution images as positives", lower_is_better=True),
            Metric(name="fpr95", title="FPR95, out-of-distribution images as positives", lower_is_better=True),
        ),
        published={},
        claims=better("tells Fashion-MNIST from MNIST better", "auroc", PAIRS[:1], FORMS),
    ),
    Table(
        name="bali-table-2-images",
        title="accuracy and calibration on the first of a pair of image sets, two hidden layers of 256 units",
        paper="BALI, Table 2, whose numbers are missing from our text",
        plus_minus="none",
        differs=f"{DIFFERS}; 15 bins of the calibration error, whose number is not given",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="accuracy", title="accuracy", lower_is_better=False),
            Metric(name="ece", title="ECE", lower_is_better=True),
        ),
        published={},
        claims=better("is better calibrated", "ece", PAIRS, FORMS),
    ),
    Table(
        name="bali-figure-2-images",
        title="how soon the NLL has converged on MNIST and Fashion-MNIST, and how far training and test rows are apart",
        paper="BALI, Figure 2 (curves without numbers)",
        plus_minus="none",
        differs=f"{DIFFERS}; along the run {CURVE_ROWS:,} test images are judged by 8 draws after every epoch, and the "
        "training NLL is that of the steps themselves; test images choose nothing",
        experiment=EXPERIMENT,
        metrics=CONVERGENCE,
        published={},
        claims=better("converges in fewer iterations", "reach", PAIRS, FORMS),
        sizes=("third", "paper"),
    ),
)
