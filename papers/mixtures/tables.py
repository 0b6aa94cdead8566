"""Four modes of each kind beside deep ensembles of as many bytes, on five data sets."""

from collections.abc import Mapping
from typing import Any

import torch

from dubito import INF, KFAC, MAP, SWAG, Bernoulli, Categorical, Gaussian, Laplace, Rank1, seeds
from dubito.data import Part, load
from dubito.models import imdb_lstm, lenet, mlp
from dubito.shifts import feature_shuffled
from dubito.training import Cosine, Linear, Training

from ..runner.experiment import Cell, Experiment, Metric, Scale, Table, Variant
from ..settings import explicit
from .fits import Fit, Ground, run_cells

#: Splits (of images and texts: seeds) by data set.
DATA: Mapping[str, int] = {"uci/concrete": 10, "uci/energy": 10, "digits": 10, "fashion-mnist": 3, "imdb": 3}
REALS = ("uci/concrete", "uci/energy")
#: Rows to train on, to validate on, to judge on and out of distribution.
ROWS = {"fashion-mnist": (10_000, 1000, 2000), "imdb": (10_000, 1000, 2000)}
#: Deep ensembles of these sizes; the largest is the pool.
SIZES = (1, 4, 5, 6, 7, 8, 10, 12, 16, 20)
MODES = 4
EPOCHS = {"uci/concrete": 80, "uci/energy": 80, "digits": 30, "fashion-mnist": 10, "imdb": 4}
#: Standard deviations of the Laplace mixtures are multiplied by one of these, and so are those of the others.
SCALES = (0.03, 0.1, 0.2, 0.35, 0.6, 1.0, 1.5)
#: Rough costs in CPU-seconds of one member.
SECONDS = {"uci/concrete": 0.6, "uci/energy": 0.5, "digits": 0.6, "fashion-mnist": 30.0, "imdb": 60.0}


def training_of(data: str, **changes: Any) -> Training:
    """The training of a member, of one length for all methods."""
    given = {"epochs": EPOCHS[data], "batch_size": 64, "lr": 3e-3, "schedule": explicit(Cosine)}
    return explicit(Training, **{**given, **changes})


def settings_of(data: str) -> dict[str, Fit]:
    """Every row of the table on one data set."""
    # The embedding of a text is a table of 20,000 words, of which Laplace keeps points.
    subset = ("lstm", "fc") if data == "imdb" else None
    common = {"pool": SIZES[-1], "prior_std": 1.0, "training": training_of(data)}
    around = {**common, "members": MODES, "scales": SCALES}
    kinds = {"inf": explicit(INF, rank=20), "kfac": explicit(KFAC)}
    laplaces = {
        name: explicit(
            Laplace, structure=structure, subset=subset, prior_precision=None, curvature=None, linearised=True
        )
        for name, structure in kinds.items()
    }
    gathered = training_of(data, schedule=explicit(Linear, start=0.4, end=0.5, final=0.3))
    swag = {**around, "training": gathered}
    return {
        **{f"ensemble-{size}": Fit(method=explicit(MAP, prior_std=1.0), members=size, **common) for size in SIZES},
        "inf-4": Fit(method=laplaces["inf"], **around),
        "inf-4-shared": Fit(method=laplaces["inf"], shared="diagonal", **around),
        "kfac-4": Fit(method=laplaces["kfac"], **around),
        "swag-4": Fit(method=explicit(SWAG, prior_std=1.0, rank=2), **swag),
        "rank1-4": Fit(method=explicit(Rank1, components=1), **around),
    }


def variants() -> dict[tuple[str, str], Variant]:
    """Every row on every data set."""
    return {
        (data, name): Variant(
            settings=settings,
            cpu_seconds=SECONDS[data] * {"swag-4": 8, "rank1-4": 16, "inf-4": 4, "ensemble-1": 20}.get(name, 1),
        )
        for data in DATA
        for name, settings in settings_of(data).items()
    }


def load_cell(cell: Cell) -> Ground:
    """The rows of a split; images and texts, which have one, are drawn by the number of the split."""
    if cell.data not in ROWS:
        data = load(cell.data, cell.split, validation=0.1)
        assert data.validation is not None
        hidden = [64, 64]
        network = mlp(data.train.inputs.shape[1], hidden, num_classes=data.num_outputs, seed=cell.split)
        likelihood = explicit(Gaussian) if cell.data in REALS else explicit(Categorical)
        outside = feature_shuffled(data.test.inputs, seed=0)
        return Ground(data.train, data.validation, data.test, outside, network, likelihood)
    data = load(cell.data, 0)
    train, validation, test = ROWS[cell.data]
    order = torch.randperm(len(data.train.targets), generator=seeds.generator(cell.split, "rows"))
    fitted, watched = (
        Part(*(tensor[some] for tensor in data.train)) for some in (order[:train], order[train : train + validation])
    )
    judged = Part(*(tensor[:test] for tensor in data.test))
    if cell.data == "imdb":
        network = imdb_lstm(embedding=32, hidden=32, seed=cell.split)
        outside = feature_shuffled(judged.inputs.double(), seed=0).long()  # words, place by place
        return Ground(fitted, watched, judged, outside, network, explicit(Bernoulli))
    others = load("kmnist", input_scaling=data.input_scaling, validation=0)
    network = lenet(channels=(6, 16), dense=(120, 84), seed=cell.split)
    return Ground(fitted, watched, judged, others.test.inputs[:test], network, explicit(Categorical))


def generate_cell(cell: Cell) -> Ground:
    """Made-up rows."""
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    if cell.data == "imdb":
        inputs, network = (
            torch.randint(50, (90, 6), generator=stream),
            imdb_lstm(vocabulary=50, embedding=4, hidden=4),
        )
        targets, likelihood = (inputs[:, :1] > 25).float(), explicit(Bernoulli)
    elif cell.data == "fashion-mnist":
        inputs = torch.randn(90, 1, 8, 8, generator=stream)
        network = lenet(channels=(2,), dense=(6,), image_size=8, kernel_size=3, num_classes=2)
        targets, likelihood = (inputs[:, 0, 0, 0] > 0).long(), explicit(Categorical)
    else:
        inputs, real = torch.randn(90, 5, generator=stream), cell.data in REALS
        network = mlp(5, [8], num_classes=1 if real else 2)
        targets = inputs[:, :1] if real else (inputs[:, 0] > 0).long()
        likelihood = explicit(Gaussian) if real else explicit(Categorical)
    fitted, watched, judged = (Part(inputs[rows], targets[rows]) for rows in (slice(50), slice(50, 70), slice(70, 90)))
    return Ground(fitted, watched, judged, inputs.flip(0)[:20], network, likelihood)


def shared_by(cell: Cell) -> tuple[str, int]:
    """Rows of a split share its pool."""
    return cell.data, cell.split


EXPERIMENT = Experiment(
    paper="mixtures",
    name="mixtures",
    scales={"paper": Scale(variants=variants(), splits=DATA)},
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    shares=shared_by,
)
TABLES = (
    Table(
        name="mixtures",
        title="four modes of each kind beside deep ensembles of as many bytes",
        paper="the project's own",
        plus_minus="standard error over splits",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="nll", title="NLL", lower_is_better=True),
            Metric(name="calibration_error", title="ECE, or coverage less 90 %", lower_is_better=True),
            Metric(name="auroc_total", title="AUROC, out of distribution", lower_is_better=False),
            Metric(name="share_of_networks", title="bytes, in networks", lower_is_better=True),
        ),
        published={},
    ),
)
