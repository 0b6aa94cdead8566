"""INF, Figure 5: active learning on UCI tables, rows chosen by MacKay's output variance or at random.

The paper follows Hernández-Lobato & Adams (2015): one hidden layer of 10 units, a few rows to start with, one row per
step. What it leaves open is settled here: 20 rows to start with, all other training rows of a split as the pool,
prior and noise by marginal likelihood at every step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dubito import INF, Gaussian, Laplace, seeds
from dubito.active import ActiveLearning, OutputVariance, Random, Selection
from dubito.inference.laplace import LaplacePosterior
from dubito.models import mlp
from dubito.posterior import Posterior
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Published, Scale, Table, Variant
from ..settings import explicit
from .uci import Split, generate_cell, load_cell

UCI = ("boston", "wine-red", "energy")
#: The share of the rank that is kept; random rows are fitted with all of it.
RANKS = {"inf-20%": 0.2, "inf-50%": 0.5, "inf-100%": 1.0, "random": 1.0}


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How one curve is made.

    Args:
        hidden: units of the hidden layer.
        initial: rows to start with.
        steps: rows that are asked for, one by one.
        iterations: steps of Adam for every fit, on all labelled rows at once.
        lr: learning rate.
        prior_std: of the point estimate.
    """

    hidden: int = 10
    initial: int = 20
    steps: int = 20
    iterations: int = 500
    lr: float = 2e-2
    prior_std: float = 1.0


def run_cells(cells: Sequence[Cell], data: Sequence[Split], settings: Steps, steps: int | None) -> list[Outcome]:
    """The curve of one way to choose."""
    return [run_split(cell, split, settings, steps) for cell, split in zip(cells, data, strict=True)]


def run_split(cell: Cell, split: Split, settings: Steps, steps: int | None) -> Outcome:
    """One way to choose on one split; all ways start from the same rows and weights."""
    loop = ActiveLearning(
        method=explicit(
            Laplace, structure=explicit(INF, rank=RANKS[cell.method]), prior_precision=settings.prior_std**-2
        ),
        acquisition=Random() if cell.method == "random" else OutputVariance(),
        selection=Selection(size=1, temperature=0.0),
        steps=settings.steps if steps is None else steps,
        initial=settings.initial,
        training=explicit(Training, iterations=steps or settings.iterations, lr=settings.lr),
        num_samples=32,
    )
    net = mlp(split.train.inputs.shape[1], (settings.hidden,), num_classes=1, seed=cell.seed)
    provenance.record(loop, net, split.train, explicit(Gaussian))
    curve = loop.run(
        net,
        split.train,
        split.test,
        explicit(Gaussian),
        seed=seeds.derived(cell.seed, "split", cell.split),
        finish=tuned,
        options={"linearised": True},
    )
    unit = float(split.scaling.scale)
    rmse = [unit * value for value in curve.values("rmse")]
    return Outcome(
        metrics={"rmse": unit * curve.average("rmse"), "last_rmse": rmse[-1]},
        details={"rmse": rmse, "nll": curve.values("nll"), "overhead": curve.overhead},
    )


def tuned(posterior: Posterior) -> Posterior:
    """Prior and noise by marginal likelihood."""
    assert isinstance(posterior, LaplacePosterior)
    return posterior.tuned(noise=True)


EXPERIMENT = Experiment(
    paper="inf",
    name="inf-figure-5",
    scales={
        "paper": Scale(
            variants={(data, method): Variant(settings=Steps(), cpu_seconds=24.0) for data in UCI for method in RANKS},
            splits=20,
        )
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)
#: The average RMSE along 20 steps, in the brackets of the figure's legend.
_AVERAGES = {
    "boston": (6.180, 6.011, 6.035, 6.450),
    "wine-red": (0.778, 0.779, 0.780, 0.810),
    "energy": (3.835, 3.804, 3.785, 4.223),
}
TABLES = (
    Table(
        name="inf-figure-5",
        title="active learning: test RMSE averaged over 20 steps of one row, 10 hidden units",
        paper="INF, Figure 5",
        plus_minus="none: the averages in the legend have no error",
        differs="20 rows to start with, all other training rows of a UCI split as the pool; targets standardised by "
        "all training rows; prior and noise by marginal likelihood at every step",
        experiment=EXPERIMENT,
        metrics=(Metric(name="rmse", title="average RMSE", lower_is_better=True),),
        published={
            (data, method, "rmse"): Published(value)
            for data, values in _AVERAGES.items()
            for method, value in zip(RANKS, values, strict=True)
        },
        claims=tuple(
            Claim(
                text=f"rows chosen by {method} teach more than random ones",
                metric="rmse",
                better=method,
                than="random",
                data=UCI,
            )
            for method in RANKS
            if method != "random"
        ),
    ),
)
