"""The implicit paper's Figure 1: a cubic learned from 30 points by networks of one to five hidden layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dubito import Gaussian, Implicit, MeanField, metrics, seeds
from dubito.data import Part, Scaling, load
from dubito.method import Method
from dubito.models import mlp
from dubito.posterior import Posterior
from dubito.prediction import RealPrediction
from dubito.training import KL, Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ..settings import explicit

DATA = "cubic-implicit"
DEPTHS = (1, 2, 3, 4, 5)
#: Where the figure's curves are looked at, in original units.
PLACES = torch.linspace(-6, 6, 61).unsqueeze(1)
#: The noise of the points in original units, which the likelihood is told.
NOISE = 3.0


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One network of each depth.

    Args:
        method: with its settings.
        depths: hidden layers.
        hidden: units of each.
        iterations: steps of Adam on all points.
        lr: learning rate of the weights.
        variational_lr: of the factors, or of mean field's standard deviations.
        kl_warmup: steps over which the divergence's weight rises to 1.
        num_samples: draws at test time.
    """

    method: Method
    depths: tuple[int, ...] = DEPTHS
    hidden: int = 256
    iterations: int = 2000
    lr: float = 1e-3
    variational_lr: float = 1e-2
    kl_warmup: int = 1000
    num_samples: int = 128


@dataclass(frozen=True)
class Points:
    """Standardised points, and how to speak in original units."""

    train: Part
    test: Part
    inputs: Scaling
    targets: Scaling


def load_cell(cell: Cell) -> Points:
    """Draw `split` of the points, standardised by the 30."""
    data = load(DATA, cell.split, standardise=True)
    assert data.input_scaling is not None and data.target_scaling is not None
    return Points(data.train, data.test, data.input_scaling, data.target_scaling)


def generate_cell(cell: Cell) -> Points:
    """Made-up points."""
    x = torch.linspace(-2, 2, 20).unsqueeze(1)
    stream = seeds.generator(cell.seed, "made-up points")
    y = x**3 / 4 + 0.1 * torch.randn(x.shape, generator=stream)
    units = Scaling(torch.zeros(1), torch.ones(1))
    return Points(Part(x, y), Part(x, y), units, Scaling(torch.zeros(1), torch.full((1,), 20.0)))


def run_cells(cells: Sequence[Cell], data: Sequence[Points], settings: Fit, steps: int | None) -> list[Outcome]:
    """Train and judge on 1,000 new points."""
    return [run_cell(cell, points, settings, steps) for cell, points in zip(cells, data, strict=True)]


def run_cell(cell: Cell, points: Points, settings: Fit, steps: int | None) -> Outcome:
    """Networks of all depths on one draw of the points."""
    seed = seeds.derived(cell.seed, cell.split)
    samples = settings.num_samples if steps is None else steps
    targets = points.targets.undo(points.test.targets)
    found: dict[str, float] = {}
    details: dict[str, dict[str, Any]] = {}
    for depth in settings.depths:
        posterior = trained(points, settings, depth, seed, steps)
        prediction = predicted(posterior, points.test.inputs, points, samples, seed)
        found[f"nll_{depth}"] = -float(prediction.log_prob(targets).double().mean())
        found[f"rmse_{depth}"] = metrics.rmse(targets, prediction.mean)
        found[f"coverage_{depth}"] = 100 * metrics.interval_coverage(targets, *prediction.interval(0.95))
        curve = predicted(posterior, points.inputs.apply(PLACES), points, samples, seed)
        last = posterior.history[-1]
        details[str(depth)] = {
            "mean": rounded(curve.mean),
            "std": rounded(curve.epistemic.sqrt()),
            "train_nll": last["nll"],
            "kl": last["kl"],
        }
    found["rise"] = found[f"nll_{max(settings.depths)}"] - found[f"nll_{min(settings.depths)}"]
    return Outcome(metrics=found, details=details)


def trained(points: Points, settings: Fit, depth: int, seed: int, steps: int | None) -> Posterior:
    """A network of one depth."""
    training = explicit(
        Training,
        iterations=settings.iterations if steps is None else steps,
        batch_size=len(points.train.targets),
        lr=settings.lr,
        variational_lr=settings.variational_lr,
        kl=explicit(KL, warmup=settings.kl_warmup),  # a step is an epoch
    )
    return provenance.fit(
        settings.method,
        mlp(1, (settings.hidden,) * depth, num_classes=1, seed=seed),
        points.train,
        explicit(Gaussian, std=NOISE / float(points.targets.scale)),
        training=training,
        seed=seed,
        progress=False,
    )


def predicted(posterior: Posterior, inputs: Tensor, points: Points, num_samples: int, seed: int) -> RealPrediction:
    """The prediction in original units."""
    prediction = posterior.predict(inputs, num_samples, seed=seed)
    assert isinstance(prediction, RealPrediction)
    return prediction.rescaled(*points.targets)


def rounded(values: Tensor) -> list[float]:
    """Numbers to draw a curve from."""
    return [round(value, 3) for value in values.flatten().tolist()]


METHODS: dict[str, Method] = {
    "mean-field": explicit(MeanField, prior_std=1.0, initial_std=0.05),
    "implicit": explicit(Implicit, components=4, noise_samples=2, prior_std=0.1, mean_std=0.5),
}

TABLES = (
    Table(
        name="implicit-figure-1",
        title="y = x³ from 30 points, one to five hidden layers of 256 units",
        paper="implicit BNN, Figure 1 (a picture, without numbers)",
        plus_minus="none",
        experiment=Experiment(
            paper="implicit",
            name="implicit-cubic",
            scales={
                "paper": Scale(
                    variants={
                        (DATA, name): Variant(settings=Fit(method=method), cpu_seconds=75.0)
                        for name, method in METHODS.items()
                    },
                    splits=5,
                )
            },
            load=load_cell,
            generate=generate_cell,
            run=run_cells,
        ),
        metrics=(
            Metric(name="rise", title="rise of the NLL from 1 to 5 layers", lower_is_better=True),
            *(
                Metric(name=f"{name}_{depth}", title=f"{words}, {depth} layers", lower_is_better=lower)
                for name, words, lower in (
                    ("nll", "test NLL", True),
                    ("rmse", "test RMSE", True),
                    ("coverage", "test points in the 95 % interval (%)", False),
                )
                for depth in DEPTHS
            ),
        ),
        published={},
        claims=(
            Claim(
                text="with depth mean field collapses and the implicit network does not: its NLL rises less",
                metric="rise",
                better="implicit",
                than="mean-field",
                data=(DATA,),
            ),
            Claim(
                text="at five layers the implicit network has the lower NLL",
                metric="nll_5",
                better="implicit",
                than="mean-field",
                data=(DATA,),
            ),
        ),
        differs="range of x and noise are not stated and those of INF's set; settings of neither method are stated",
    ),
)
