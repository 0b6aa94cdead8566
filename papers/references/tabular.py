"""Tables against what people use instead: dubito as it comes, boosting, MAPIE, NGBoost, Gaussian processes.

Every tool sees the same rows as the same numbers: columns standardised, words as columns of zeros and ones, gaps filled
by the median and flagged. Nothing was tuned; peers have their own defaults but where `OPTIONS` says otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature

import torch

from dubito import methods, seeds
from dubito.data import load
from dubito.integrations.sklearn import SMALL, BayesianEstimator, training_for
from dubito.protocol import Pilot, recipe
from dubito.shifts import feature_shuffled
from dubito.shifts.corruptions import chosen_rows

from ..runner.experiment import Cell, Experiment, Metric, Outcome, Scale, Table, Variant
from .tabular_scores import Classes, Reals, of_classes, of_reals
from .tabular_tools import Ground, Ours, Peer, answered

SPLITS = 5
#: At most so many rows of a split, drawn by its number.
TRAIN_ROWS, TEST_ROWS = 4000, 1000
#: Tables by their training rows in a split.
REALS = {
    "uci/yacht": 277,
    "uci/boston": 455,
    "uci/energy": 691,
    "uci/concrete": 927,
    "uci/wine-red": 1439,
    "ames": 2637,
    "uci/kin8nm": 7373,
    "uci/power": 8611,
    "uci/naval": 10741,
    "pol": 13500,
    "elevators": 14939,
    "uci/protein": 41157,
}
CLASSES = {"german-credit": 800, "satimage": 5148, "adult": 39074}
#: Methods of dubito with rough costs in CPU-seconds on many rows.
OURS = {
    "map": 5.0,
    "laplace-inf": 6.0,
    "laplace-kfac": 6.0,
    "swag": 6.0,
    "mean-field": 6.0,
    "mc-dropout": 7.0,
    "deep-ensemble": 13.0,
    "rank1": 14.0,
}
PEERS = {"boosting": 12.0, "boosting-mapie": 1.0, "ngboost": 6.0, "gaussian-process": 20.0}
#: A Gaussian process takes the cube of the rows.
MOST_ROWS_OF_A_PROCESS = 1500
#: Of the peers, the defaults of scikit-learn 1.9 and NGBoost 0.5 spelled out, but: as many trees as stopping finds
#: (scikit-learn: 100, NGBoost: 500 without stopping), and a rate of 0.05 for NGBoost's 0.01, for the sake of time.
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "boosting": {
        "watched": 0.2,
        "max_iter": 300,
        "early_stopping": True,
        "n_iter_no_change": 10,
        "tol": 1e-7,
        "learning_rate": 0.1,
        "max_leaf_nodes": 31,
        "max_depth": None,
        "min_samples_leaf": 20,
        "l2_regularization": 0.0,
        "max_features": 1.0,
        "max_bins": 255,
        "random_state": 0,
    },
    "ngboost": {
        "watched": 0.2,
        "n_estimators": 2000,
        "patience": 20,
        "learning_rate": 0.05,
        "natural_gradient": True,
        "minibatch_frac": 1.0,
        "col_sample": 1.0,
        "tree": {"criterion": "friedman_mse", "max_depth": 3, "splitter": "best"},
    },
    "gaussian-process": {"most_lengths": 20, "optimizer": "fmin_l_bfgs_b", "n_restarts_optimizer": 0},
}


def settings_of(name: str) -> Ours | Peer:
    """The settings of a row of the table."""
    if name in PEERS:
        options = OPTIONS[name.removesuffix("-mapie")]
        return Peer(tool=name, options=options, train_rows=TRAIN_ROWS, test_rows=TEST_ROWS)
    method, few = methods()[name], training_for(SMALL // 2)
    trainings = replace(few, longer=None), training_for(SMALL)
    assert few.longer is not None
    pilots = [Pilot(prior_std=0.3, best_step=400, rows=1000, real=real) for real in (False, True)]
    parameters = signature(BayesianEstimator.__init__).parameters.values()
    left_out = ("self", "method", "random_state")
    return Ours(
        method=method,
        estimator={item.name: item.default for item in parameters if item.name not in left_out},
        trainings=trainings,
        longer=few.longer,
        recipes=tuple(recipe(method, pilot, trainings[1]) for pilot in pilots),
        train_rows=TRAIN_ROWS,
        test_rows=TEST_ROWS,
    )


def variants(tables: Mapping[str, int]) -> dict[tuple[str, str], Variant]:
    """Every tool on every table that it can take."""
    return {
        (data, name): Variant(settings=settings_of(name), cpu_seconds=cost * (0.4 if rows < 1.25 * SMALL else 1.0))
        for data, rows in tables.items()
        for name, cost in {**PEERS, **OURS}.items()
        if name != "gaussian-process" or rows <= MOST_ROWS_OF_A_PROCESS
    }


def load_cell(cell: Cell) -> Ground:
    """The rows of a split."""
    data = load(cell.data, cell.split, validation=0, dtype=torch.float64)
    rows = chosen_rows(len(data.train.targets), TRAIN_ROWS, cell.split)
    judged = chosen_rows(len(data.test.targets), TEST_ROWS, cell.split)
    train, test = (data.train.inputs[rows], data.train.targets[rows]), data.test.inputs[judged]
    return _ground(*train, test, data.test.targets[judged], data.num_classes or 0)


def generate_cell(cell: Cell) -> Ground:
    """Made-up rows."""
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    inputs = torch.randn(180, 5, generator=stream, dtype=torch.float64)
    targets = inputs[:, 0] if cell.data in REALS else (inputs[:, 0] > 0).long()
    return _ground(inputs[:150], targets[:150], inputs[150:], targets[150:], 0 if cell.data in REALS else 2)


def _ground(
    inputs: torch.Tensor, targets: torch.Tensor, test: torch.Tensor, truth: torch.Tensor, classes: int
) -> Ground:
    shuffled = feature_shuffled(test, seed=0)
    parts = [part.numpy() for part in (inputs, targets.flatten(), test, truth.flatten(), shuffled)]
    return Ground(*parts, classes=classes)


def run_cells(cells: Sequence[Cell], data: Sequence[Ground], settings: Ours | Peer, steps: int | None) -> list[Outcome]:
    """A tool on splits of one table."""
    return [run_split(cell, ground, settings, steps) for cell, ground in zip(cells, data, strict=True)]


def run_split(cell: Cell, ground: Ground, settings: Ours | Peer, steps: int | None) -> Outcome:
    """A tool on one split."""
    answer = answered(cell, ground, settings, steps)
    truth = torch.from_numpy(ground.test_targets)
    if isinstance(answer.test, Reals):
        assert isinstance(answer.unknown, Reals)
        metrics = of_reals(answer.test, answer.unknown, truth)
    else:
        assert isinstance(answer.unknown, Classes)
        metrics = of_classes(answer.test, answer.unknown, truth)
    costs = {"cpu_seconds": answer.cpu_seconds, "bytes": float(answer.nbytes)}
    rows = {"train_rows": len(ground.targets), "test_rows": len(ground.test_targets)}
    return Outcome(metrics={**metrics, **answer.metrics, **costs}, details={**answer.facts, **rows})


def shared_by(cell: Cell) -> tuple[str, int]:
    """Rows with and without conformal ends share the trees of a split."""
    return cell.data, cell.split


def experiment(name: str, tables: Mapping[str, int]) -> Experiment:
    """The cells of reals, or of classes."""
    return Experiment(
        paper="references",
        name=name,
        scales={"paper": Scale(variants=variants(tables), splits=SPLITS)},
        load=load_cell,
        generate=generate_cell,
        run=run_cells,
        shares=shared_by,
    )


NLL = Metric(name="nll", title="NLL", lower_is_better=True)
COSTS = (
    Metric(name="auroc", title="AUROC, shuffled columns", lower_is_better=False),
    Metric(name="cpu_seconds", title="CPU-seconds of the fit", lower_is_better=True),
    Metric(name="bytes", title="bytes of the model", lower_is_better=True),
)
COVERAGE = Metric(name="coverage_90", title="coverage of 90 %", lower_is_better=False)
COMMON = {
    "paper": "the project's own",
    "plus_minus": "standard error over splits",
    "published": {},
    "differs": f"at most {TRAIN_ROWS:,} training and {TEST_ROWS:,} test rows of a split",
}
TABLES = (
    Table(
        name="tabular-reals",
        title="dubito's estimators and other tools on tables of reals",
        experiment=experiment("tabular-reals", REALS),
        metrics=(
            Metric(name="crps", title="CRPS", lower_is_better=True),
            Metric(name="crps_quantiles", title="CRPS of ten quantiles", lower_is_better=True),
            NLL,
            Metric(name="rmse", title="RMSE", lower_is_better=True),
            COVERAGE,
            Metric(name="width_90", title="width of 90 % intervals", lower_is_better=True),
            *COSTS,
        ),
        **COMMON,
    ),
    Table(
        name="tabular-classes",
        title="dubito's estimators and other tools on tables of classes",
        experiment=experiment("tabular-classes", CLASSES),
        metrics=(
            NLL,
            Metric(name="accuracy", title="accuracy", lower_is_better=False),
            COVERAGE,
            Metric(name="set_size_90", title="classes in a set of 90 %", lower_is_better=True),
            *COSTS,
        ),
        **COMMON,
    ),
)
