"""INF's supplement: test log-likelihood of the Laplace structures on UCI tables.

The paper's numbers are in its missing supplement, so there is nothing to compare with; what is judged is how the
structures compare among themselves, at a prior precision chosen by marginal likelihood, and how INF does at several
ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from dubito import EFB, INF, KFAC, MAP, Diagonal, Gaussian, Laplace, metrics, seeds
from dubito.data import Data, Part, Scaling, load
from dubito.inference.laplace import LaplacePosterior
from dubito.inference.laplace.structures import Structure
from dubito.likelihoods import GaussianLikelihood
from dubito.models import mlp
from dubito.posterior import Posterior
from dubito.prediction import RealPrediction
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ..settings import explicit

UCI = ("yacht", "energy", "concrete", "wine-red", "boston", "kin8nm", "naval", "power", "protein")
STRUCTURES: dict[str, Structure | None] = {
    "map": None,
    "laplace-diag": Diagonal(),
    "laplace-kfac": KFAC(),
    "laplace-efb": EFB(),
    "laplace-inf-1%": explicit(INF, rank=0.01),
    "laplace-inf-5%": explicit(INF, rank=0.05),
    "laplace-inf-20%": explicit(INF, rank=0.2),
    "laplace-inf-50%": explicit(INF, rank=0.5),
    "laplace-inf": explicit(INF, rank=1.0),
}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How one split is fitted.

    Args:
        hidden: units of the hidden layer.
        iterations: steps of Adam on the MAP objective under a standard Normal prior, 128 rows each.
        lr: learning rate.
    """

    hidden: int = 50
    iterations: int = 2000
    lr: float = 1e-2


@dataclass(frozen=True)
class Split:
    """Standardised rows, and how to speak in original units."""

    train: Part
    test: Part
    scaling: Scaling


def load_cell(cell: Cell) -> Split:
    """One split, standardised by its training rows."""
    data: Data = load(f"uci/{cell.data}", cell.split, validation=0)
    assert data.target_scaling is not None
    return Split(data.train, data.test, data.target_scaling)


def generate_cell(cell: Cell) -> Split:
    """Made-up rows."""
    stream = seeds.generator(cell.seed, "made-up rows", cell.data)
    inputs = torch.randn(80, 5, generator=stream)
    targets = inputs[:, :1].sin() + 0.1 * torch.randn(80, 1, generator=stream)
    scaling = Scaling(torch.zeros(1), torch.ones(1))
    return Split(Part(inputs[:60], targets[:60]), Part(inputs[60:], targets[60:]), scaling)


def shared_work(cell: Cell) -> tuple:
    """The point estimate."""
    return cell.data, cell.split, cell.seed


def run_cells(cells: Sequence[Cell], data: Sequence[Split], settings: Fit, steps: int | None) -> list[Outcome]:
    """Fit, tune and judge: the linearised predictive of each structure, in original units."""
    return [run_split(cell, split, settings, steps) for cell, split in zip(cells, data, strict=True)]


#: Point estimates, which all structures stand around: trained once and kept for their turn.
_points: dict[tuple, tuple[Posterior, list]] = {}


def point_of(cell: Cell, split: Split, settings: Fit, steps: int | None) -> Posterior:
    """The point estimate of one split."""
    net = mlp(split.train.inputs.shape[1], (settings.hidden,), num_classes=1, seed=cell.seed)
    training = explicit(Training, iterations=steps or settings.iterations, batch_size=128, lr=settings.lr)
    method = explicit(MAP, prior_std=1.0)
    return provenance.fit(method, net, split.train, explicit(Gaussian), training=training, seed=cell.seed)


def run_split(cell: Cell, split: Split, settings: Fit, steps: int | None) -> Outcome:
    """One structure on one split."""
    key = (cell.data, cell.split, cell.seed, len(split.train.targets), settings, steps)
    point = provenance.shared(_points, key, partial(point_of, cell, split, settings, steps))
    structure = STRUCTURES[cell.method]
    assert isinstance(point.likelihood, GaussianLikelihood)
    details: dict[str, float] = {}
    if structure is None:
        prediction = point.predict(split.test.inputs)
    else:
        noise = explicit(Gaussian, std=float(point.likelihood.std()))
        method = explicit(Laplace, structure=structure, prior_precision=1.0)
        fitted = provenance.fit(method, point.fold(0), split.train, noise, seed=cell.seed)
        assert isinstance(fitted, LaplacePosterior)
        tuned = fitted.tuned()
        details["prior_precision"] = float(tuned.details["prior_precision"])
        prediction = tuned.predict(split.test.inputs, linearised=True)
    assert isinstance(prediction, RealPrediction)
    original = prediction.rescaled(*split.scaling)
    truth = split.scaling.undo(split.test.targets)
    found = {"log_likelihood": float(original.log_prob(truth).mean()), "rmse": metrics.rmse(truth, original.mean)}
    return Outcome(metrics=found, details=details)


EXPERIMENT = Experiment(
    paper="inf",
    name="inf-uci",
    scales={
        "paper": Scale(
            variants={
                (data, method): Variant(settings=Fit(), cpu_seconds=4.0 if method == "map" else 0.2)
                for data in UCI
                for method in STRUCTURES
            },
            splits={data: 5 if data == "protein" else 20 for data in UCI},
        )
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    shares=shared_work,
)
RANKS = ("laplace-inf-1%", "laplace-inf-5%", "laplace-inf-20%", "laplace-inf-50%")
PAIRS = (
    *(("laplace-inf", other) for other in ("map", "laplace-diag", "laplace-kfac", *RANKS)),
    *((rank, "laplace-diag") for rank in RANKS),
)
TABLES = (
    Table(
        name="inf-uci",
        title="test log-likelihood of Laplace structures on UCI tables, one hidden layer of 50 units",
        paper="INF, supplement (missing from our text; no numbers of the paper)",
        plus_minus="none",
        differs="prior precision by marginal likelihood, linearised predictive, learned noise; 2,000 steps of 128 rows "
        "on every table; five splits of protein",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="log_likelihood", title="log-likelihood", lower_is_better=False),
            Metric(name="rmse", title="RMSE", lower_is_better=True),
        ),
        published={},
        claims=tuple(
            Claim(
                text=f"{better} has a higher test log-likelihood than {than}",
                metric="log_likelihood",
                better=better,
                than=than,
                data=UCI,
            )
            for better, than in PAIRS
        ),
    ),
)
