"""Is every method, as it comes, no worse than MAP, and is its uncertainty real? Sixteen tables, and the UCI gaps.

Defaults were chosen on rows split off the training rows of the first eight tables, `CHOSEN_ON`, and are confirmed on
the other eight. Test rows of neither were looked at before. Gap splits [Foong et al. 2019] hold out the middle third of
the rows in order of one column.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from dubito import seeds
from dubito.compare.network import suited
from dubito.data import Part, load
from dubito.models import mlp
from dubito.training import AutoTraining

from ..runner.experiment import Cell, Experiment, Metric, Scale, Table, Variant
from ..runner.gap import GAP_SPLITS, gap_split
from ..settings import explicit
from .fits import LIKELIHOODS, METHODS, Ground, ground_of, run_cells, settings_of

#: Tables by the splits that are run: ten where there are fewer than 2,000 rows, else three.
CHOSEN_ON: Mapping[str, int] = {
    "digits": 10,
    "german-credit": 10,
    "spambase": 3,
    "magic": 3,
    "uci/wine-red": 10,
    "uci/concrete": 10,
    "uci/energy": 10,
    "uci/yacht": 10,
}
CONFIRMED_ON: Mapping[str, int] = {
    "satimage": 3,
    "adult": 3,
    "mnist": 3,
    "fashion-mnist": 3,
    "uci/power": 3,
    "elevators": 3,
    "pol": 3,
    "ames": 3,
}
TABLES_OF_DATA = {**CHOSEN_ON, **CONFIRMED_ON}
IMAGES = ("mnist", "fashion-mnist")
REALS = ("uci/wine-red", "uci/concrete", "uci/energy", "uci/yacht", "uci/power", "elevators", "pol", "ames")

AUTO = explicit(AutoTraining)
#: Rough costs of a fit in CPU-seconds: of most methods, and of dearer ones.
SECONDS = {"bali": 9.0, "noisy-kfac": 7.0, "deep-ensemble": 6.0, "rank1": 6.0, "batch-ensemble": 5.0, "map": 4.0}


def variants(data: Mapping[str, int], **changes: int) -> dict[tuple[str, str], Variant]:
    """Every method on every table."""
    return {
        (name, method): Variant(
            settings=settings_of(method, AUTO, **changes, **({"train_rows": 2000} if name in IMAGES else {})),
            cpu_seconds=SECONDS.get(method, 3.0) * (8 if name in IMAGES else 1),
        )
        for name in data
        for method in METHODS
    }


def load_cell(cell: Cell) -> Ground:
    """The rows of a split; images, which have one, are drawn by the number of the split."""
    limits = (2000, 500, 1000) if cell.data in IMAGES else (5000, 5000, 1000)
    split = 0 if cell.data in IMAGES else cell.split
    return ground_of(load(cell.data, split, validation=0.1), *limits, seed=cell.split)


def load_gap(cell: Cell) -> Ground:
    """The rows of a gap split: those around the gap to train on, a tenth of them to steer, those in it to judge."""
    data = gap_split(cell.data.removeprefix("gap/"), cell.split).data
    network = suited(data, data.num_outputs, None).build(cell.split)
    assert data.validation is not None
    return Ground(data.train, data.validation, data.test, network, LIKELIHOODS[data.task]())


def generate_cell(cell: Cell) -> Ground:
    """Made-up rows."""
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    inputs = torch.randn(90, 5, generator=stream)
    real = cell.data in REALS or cell.data.startswith("gap/")
    targets = inputs[:, :1] if real else (inputs[:, 0] > 0).long()
    train, validation, test = (Part(inputs[rows], targets[rows]) for rows in (slice(50), slice(50, 70), slice(70, 90)))
    kind = "regression" if real else "classification"
    return Ground(train, validation, test, mlp(5, [8], num_classes=1 if real else 2), LIKELIHOODS[kind]())


def shared_by(cell: Cell) -> tuple[str, int]:
    """Methods of a split share its MAP fit."""
    return cell.data, cell.split


EXPERIMENT = Experiment(
    paper="defaults",
    name="defaults-tables",
    scales={"paper": Scale(variants=variants(TABLES_OF_DATA), splits=TABLES_OF_DATA)},
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    shares=shared_by,
)
#: Large tables are left out: `uci-gap` has them all.
SMALL = ("boston", "concrete", "energy", "power", "wine-red", "yacht")
GAPS = {f"gap/{name}": GAP_SPLITS[name] for name in SMALL}
GAP_EXPERIMENT = replace(
    EXPERIMENT, name="defaults-gap", scales={"paper": Scale(variants=variants(GAPS), splits=GAPS)}, load=load_gap
)
NLL = Metric(name="difference", title="NLL less MAP's", lower_is_better=True)
AUROC = Metric(name="auroc_total", title="AUROC, shuffled columns", lower_is_better=False)
COVERAGE = Metric(name="coverage_90", title="coverage of 90 % intervals", lower_is_better=False)
COMMON = {"paper": "the project's own", "plus_minus": "standard error over splits", "published": {}}
TABLES = (
    Table(
        name="defaults-tables",
        title="every method by the protocol against a MAP fit as well trained",
        experiment=EXPERIMENT,
        metrics=(NLL, AUROC),
        **COMMON,
    ),
    Table(
        name="defaults-gap",
        title="the same inside the gaps of UCI tables",
        experiment=GAP_EXPERIMENT,
        metrics=(NLL, COVERAGE),
        **COMMON,
    ),
)
