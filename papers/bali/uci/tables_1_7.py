"""BALI's regression benchmark: Tables 1 and 7, test RMSE and log-likelihood on UCI tables."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from dubito import BALI, PBP, MeanField, NoisyKFAC, Vadam, seeds
from dubito.data import Part, load

from ...runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ...settings import explicit
from .baselines import BaselineRun, run_baseline
from .dropout import DropoutSearch, search
from .layerwise import LayerwiseRun, run_layerwise
from .pbp import FilterRun, run_filter
from .printed import LOG_LIKELIHOOD, RMSE, compared, published

#: Grids of noise precisions of Gal and Ghahramani's runs, in original units.
PRECISIONS = {
    "yacht": (0.25, 0.5, 0.75),
    "energy": (0.25, 0.5, 0.75),
    "concrete": (0.025, 0.05, 0.075),
    "wine-red": (2.5, 3.0, 3.5),
}
#: CPU-seconds of one split at the paper's scale, measured.
SECONDS = {"yacht": 15, "energy": 28, "concrete": 35, "wine-red": 52}
#: Rows and columns, the smallest table first.
SHAPES = {
    "yacht": (308, 6),
    "energy": (768, 8),
    "concrete": (1030, 8),
    "wine-red": (1599, 11),
    "kin8nm": (8192, 8),
    "power": (9568, 4),
    "protein": (45730, 9),
}
#: CPU-seconds of one split of BALI's at the paper's scale, measured.
LAYERWISE_SECONDS = {
    "yacht": 8,
    "energy": 13,
    "concrete": 17,
    "wine-red": 20,
    "kin8nm": 25,
    "power": 24,
    "protein": 160,
}
#: Floors of BALI's last layer, in units of the targets' variance, chosen on tenths of training rows; kin8nm's and
#: protein's are the smallest of the others'.
OUTPUT_FLOORS = {
    "yacht": 1e-5,
    "energy": 1e-5,
    "concrete": 0.05,
    "wine-red": 0.5,
    "kin8nm": 1e-5,
    "power": 1e-5,
    "protein": 1e-5,
}
#: Table 4's step size is too short for kin8nm's rows: kept from training, they had an RMSE of 0.0803 and a
#: log-likelihood of 1.104 with it, 0.0744 and 1.185 with this one (0.0854 and 1.038 with 0.1).
STEP_SIZES = {"kin8nm": 1.0}
#: CPU-seconds of PBP for a row of one split, ten of which are filtered side by side, measured.
ROW_SECONDS = 2e-4
#: Methods whose settings are ours, found on tenths of the training rows of yacht and concrete: the method, learning
#: rate, steps, rows per step on tables below and above 2,000 rows, and CPU-seconds of one split of either, measured.
#: Vadam sees few rows, because the square of a batch's mean gradient understates the curvature by the batch's size.
BASELINES = {
    "noisy-kfac": (explicit(NoisyKFAC, beta=0.2), 0.1, 5_000, (32, 128), (4.0, 5.0)),
    "vadam": (explicit(Vadam), 0.01, 10_000, (4, 16), (3.0, 3.0)),
    "mean-field": (explicit(MeanField, initial_std=0.03), 0.01, 10_000, (128, 128), (3.0, 4.0)),
}


def load_cell(cell: Cell) -> tuple[Part, Part]:
    """Training and test rows in original units; standardising is the method's."""
    data = load(f"uci/{cell.data}", cell.split, standardise=False, validation=0, dtype=torch.float64)
    return data.train, data.test


def generate_cell(cell: Cell) -> tuple[Part, Part]:
    """Made-up rows in the shape of the table."""
    rows, columns = SHAPES[cell.data]
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    inputs = torch.randn(rows, columns, generator=stream, dtype=torch.float64)
    targets = 10 + 5 * inputs[:, :1].sin() + torch.randn(rows, 1, generator=stream, dtype=torch.float64)
    train = round(0.9 * rows)
    return Part(inputs[:train], targets[:train]), Part(inputs[train:], targets[train:])


def run_cells(
    cells: Sequence[Cell],
    data: Sequence[tuple[Part, Part]],
    settings: DropoutSearch | LayerwiseRun | BaselineRun | FilterRun,
    steps: int | None,
) -> list[Outcome]:
    """One method on the splits of one table."""
    own = [seeds.derived(cell.seed, cell.data, cell.split) for cell in cells]
    trains, tests = zip(*data, strict=True)
    if isinstance(settings, LayerwiseRun):
        return run_layerwise(trains, tests, settings, seeds_of_parts=own, steps=steps)
    if isinstance(settings, BaselineRun):
        return run_baseline(trains, tests, settings, seeds_of_parts=own, steps=steps)
    if isinstance(settings, FilterRun):
        return run_filter(trains, tests, settings, seeds_of_parts=own, steps=steps)
    return search(trains, tests, settings, seeds_of_parts=own, steps=steps)


def dropout_variants(epochs: int = 4000, num_samples: int = 10_000) -> dict[tuple[str, str], Variant]:
    """Monte Carlo dropout on every table."""
    return {
        (data, "mc-dropout"): Variant(
            settings=DropoutSearch(precisions=grid, epochs=epochs, num_samples=num_samples),
            cpu_seconds=SECONDS[data] * epochs / 4000,
        )
        for data, grid in PRECISIONS.items()
    }


def layerwise_variants(
    iterations: int | None = None, tables: Sequence[str] = tuple(SHAPES)
) -> dict[tuple[str, str], Variant]:
    """BALI on every table, with the settings of its Table 4; `iterations` in place of the paper's own.

    "bali-chosen" chooses the last layer's floor and the effective data itself, on rows kept from training.
    """
    variants = {}
    for data in tables:
        rows = round(0.9 * SHAPES[data][0])
        protein = data == "protein"
        steps = iterations or (30_000 if protein else 20_000)
        method = explicit(
            BALI,
            step_size=STEP_SIZES.get(data, 0.3),
            update_rate=0.1 if protein else 0.2,
            prior_scale=20.0 if protein else 40.0,
            hidden_floor=0.01,
            output_floor=OUTPUT_FLOORS[data],
            effective_data=float(rows) if rows < 2000 else rows / 4,
            initial_std=1.0,
        )
        settings = LayerwiseRun(
            method=method, iterations=steps, batch_size=2048 if protein else 1024, hidden=100 if protein else 50
        )
        seconds = LAYERWISE_SECONDS[data] * steps / (30_000 if protein else 20_000)
        variants[data, "bali"] = Variant(settings=settings, cpu_seconds=seconds)
        free = replace(settings, method=replace(method, output_floor=None, effective_data=None))
        variants[data, "bali-chosen"] = Variant(settings=free, cpu_seconds=2 * seconds)
    return variants


def baseline_variants() -> dict[tuple[str, str], Variant]:
    """Noisy K-FAC, Vadam and mean field on every table."""
    return {
        (data, name): Variant(
            settings=BaselineRun(
                method=method,
                lr=lr,
                iterations=iterations,
                batch_size=batch_sizes[rows > 2000],
                hidden=100 if data == "protein" else 50,
            ),
            cpu_seconds=seconds[rows > 2000],
        )
        for data, (rows, _) in SHAPES.items()
        for name, (method, lr, iterations, batch_sizes, seconds) in BASELINES.items()
    }


def filter_variants() -> dict[tuple[str, str], Variant]:
    """PBP on every table, with the settings of its paper: 40 passes over the rows."""
    return {
        (data, "pbp"): Variant(
            settings=FilterRun(method=explicit(PBP), hidden=100 if data == "protein" else 50),
            cpu_seconds=round(0.9 * rows) * 40 * ROW_SECONDS,
        )
        for data, (rows, _) in SHAPES.items()
    }


EXPERIMENT = Experiment(
    paper="bali",
    name="bali-uci",
    scales={
        "paper": Scale(
            variants={**dropout_variants(), **layerwise_variants(), **baseline_variants(), **filter_variants()},
            splits={data: 5 if data == "protein" else 20 for data in SHAPES},
        ),
        "small": Scale(
            variants={
                **dropout_variants(epochs=400, num_samples=1000),
                **layerwise_variants(iterations=2000, tables=tuple(PRECISIONS)),
            },
            splits=5,
            smaller="MC dropout: 400 epochs for 4,000, 1,000 draws for 10,000; BALI: 2,000 iterations for 20,000; "
            "5 splits for 20, the four smallest tables for seven",
        ),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    together=10,
)


PLUS_MINUS = "standard error of the mean over 20 splits"
DIFFERS = (
    "MC dropout is trained once per dropout rate, not once per rate and noise precision; the least noise of BALI's "
    "last layer is not the paper's 0.01, which its own Table 7 contradicts, but chosen on rows kept from training "
    "(for kin8nm and protein the smallest value of the other sets, without a choice of their own), as is kin8nm's "
    "step size, 1 for the paper's 0.3; the paper's "
    "columns of Noisy K-FAC (NNG-MVG), Vadam and mean field (BBB) are other papers', tuned by searches of their own, "
    "ours have one setting for all tables; bali-chosen stands beside the paper's BALI"
)
TABLES = (
    Table(
        name="bali-table-1",
        title="test RMSE on UCI tables, one hidden layer of 50 units",
        paper="BALI, Table 1; its dropout column is from the code of Gal and Ghahramani",
        plus_minus=PLUS_MINUS,
        differs=DIFFERS,
        experiment=EXPERIMENT,
        metrics=(Metric(name="rmse", title="RMSE", lower_is_better=True),),
        published=published("rmse", RMSE),
        claims=(
            Claim(
                text="BALI has a lower RMSE than MC dropout",
                metric="rmse",
                better="bali",
                than="mc-dropout",
                data=("yacht", "energy", "concrete"),
            ),
            *compared("rmse", RMSE, (*BASELINES, "pbp"), "lower RMSE", lower=True),
        ),
    ),
    Table(
        name="bali-table-7",
        title="test log-likelihood on UCI tables, one hidden layer of 50 units",
        paper="BALI, Table 7; its dropout column is from the code of Gal and Ghahramani",
        plus_minus=PLUS_MINUS,
        differs=DIFFERS,
        experiment=EXPERIMENT,
        metrics=(Metric(name="log_likelihood", title="log-likelihood", lower_is_better=False),),
        published=published("log_likelihood", LOG_LIKELIHOOD),
        claims=(
            Claim(
                text="BALI has a higher log-likelihood than MC dropout",
                metric="log_likelihood",
                better="bali",
                than="mc-dropout",
                data=("yacht", "energy"),
            ),
            *compared("log_likelihood", LOG_LIKELIHOOD, (*BASELINES, "pbp"), "higher log-likelihood", lower=False),
        ),
    ),
)
