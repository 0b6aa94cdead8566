"""Effective data, step size and the scale of pixels for BALI on MNIST, before Figure 3 is run at the paper's size.

Judged are validation rows alone: 2,000 of the last 10,000 training images of MNIST, and as many of Fashion-MNIST's as
out-of-distribution images. No test image is read. Figure 3's "bali-chosen" has the setting with the lowest NLL of the
former, a criterion that knows nothing of other images; the area under the ROC curve is shown beside it.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from dubito.data import Part, load

from ..runner.experiment import Cell, Experiment, Metric, Outcome, Scale, Table, Variant
from .figure_3 import Fit, Images, fitted, generate_cell, judged

DATA = "mnist/fashion-mnist"
#: N_eff over the number of training rows and α, the paper's first, and whether pixels are
#: standardised (else in [0, 1]).
SHARES, STEP_SIZES, PIXELS = (0.02, 0.1, 0.5), (0.25, 1.0), {"standardised": True, "unit": False}
#: Validation rows of either set that are judged.
JUDGED = 2000


def name(pixels: str, share: float, step_size: float) -> str:
    """Of a setting."""
    return f"{pixels}-{share:g}-{step_size:g}"


def load_cell(cell: Cell) -> Images:
    """50,000 images to train on, and validation rows of both sets."""
    inside, outside = cell.data.split("/")
    data = load(inside)
    assert data.validation is not None and data.input_scaling is not None
    other = load(outside, input_scaling=data.input_scaling)
    assert other.validation is not None
    judged_rows = Part(data.validation.inputs[:JUDGED], data.validation.targets[:JUDGED])
    return Images(data.train, judged_rows, other.validation.inputs[:JUDGED], data.input_scaling)


def run_cells(cells: Sequence[Cell], data: Sequence[Images], settings: Fit, steps: int | None) -> list[Outcome]:
    """Train with one setting, judge validation rows."""
    return [run_seed(cell, images, settings, steps) for cell, images in zip(cells, data, strict=True)]


def run_seed(cell: Cell, images: Images, settings: Fit, steps: int | None) -> Outcome:
    """One setting, one seed."""
    images = images.scaled(settings.standardise)
    posterior = fitted(replace(cell, method="bali"), images, settings, steps)
    numbers, _ = judged(posterior, images, settings.num_samples if steps is None else steps, cell.seed)
    return Outcome(metrics=numbers)


def variants(seconds: float, **changes: Any) -> dict[tuple[str, str], Variant]:
    """Every setting of the grid."""
    return {
        (DATA, name(pixels, share, step_size)): Variant(
            settings=Fit(
                step_size=step_size, effective_share=share, standardise=standardise, num_samples=20, **changes
            ),
            cpu_seconds=seconds,
        )
        for (pixels, standardise), share, step_size in product(PIXELS.items(), SHARES, STEP_SIZES)
    }


EXPERIMENT = Experiment(
    paper="bali",
    name="bali-scan",
    scales={
        "small": Scale(
            variants=variants(9.0, iterations=200, batch_size=256),
            seeds=3,
            smaller="200 iterations of 256 images instead of 30,000 of 2,048",
        ),
        "paper": Scale(variants=variants(2400.0), seeds=3),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)
TABLES = (
    Table(
        name="bali-scan",
        title="BALI on MNIST by scale of pixels, N_eff / N and α: validation rows of MNIST and of Fashion-MNIST",
        paper="BALI, Table 5 and Figure 3: a scan of our own, which the paper has not",
        plus_minus="none",
        differs="validation rows in place of test rows; 20 draws of a prediction",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="nll", title="NLL", lower_is_better=True),
            Metric(name="accuracy", title="accuracy", lower_is_better=False),
            Metric(name="ece", title="ECE", lower_is_better=True),
            Metric(name="auroc", title="AUROC", lower_is_better=False),
        ),
        published={},
    ),
)
