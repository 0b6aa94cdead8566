"""The implicit paper's Figure 1: a cubic learned from 30 points by networks of one to five hidden layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch

from .. import metrics, seeds
from ..data import Part, Scaling, load
from ..inference.implicit import Implicit
from ..inference.mean_field import MeanField
from ..likelihoods import Gaussian
from ..method import Method
from ..models import mlp
from ..prediction import RealPrediction
from ..training import KL, Training
from .experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant

DATA = "cubic-implicit"
DEPTHS = (1, 2, 3, 4, 5)
#: The noise of the points in original units, which the likelihood is told.
NOISE = 3.0


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One network.

    Args:
        method: with its settings.
        depth: hidden layers.
        hidden: units of each.
        iterations: steps of Adam on all points.
        lr: learning rate of the weights.
        variational_lr: of the factors, or of mean field's standard deviations.
        kl_warmup: steps over which the divergence's weight rises to 1.
        num_samples: draws at test time.
    """

    method: Method
    depth: int
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
    scaling: Scaling


def load_cell(cell: Cell) -> Points:
    """Draw `split` of the points, standardised by the 30."""
    data = load(DATA, cell.split, standardise=True)
    assert data.target_scaling is not None
    return Points(data.train, data.test, data.target_scaling)


def generate_cell(cell: Cell) -> Points:
    """Made-up points."""
    x = torch.linspace(-2, 2, 20).unsqueeze(1)
    stream = seeds.generator(cell.seed, "made-up points")
    y = x**3 / 4 + 0.1 * torch.randn(x.shape, generator=stream)
    return Points(Part(x, y), Part(x, y), Scaling(torch.zeros(1), torch.full((1,), 20.0)))


def run_cells(
    cells: Sequence[Cell], data: Sequence[Points], settings: Fit, steps: int | None
) -> list[Outcome]:
    """Train and judge on 1,000 new points."""
    return [run_cell(cell, points, settings, steps) for cell, points in zip(cells, data, strict=True)]


def run_cell(cell: Cell, points: Points, settings: Fit, steps: int | None) -> Outcome:
    """One network with one seed."""
    scale = float(points.scaling.scale)
    count = len(points.train.targets)
    seed = seeds.derived(cell.seed, cell.split)
    training = Training(
        iterations=settings.iterations if steps is None else steps,
        batch_size=count,
        lr=settings.lr,
        variational_lr=settings.variational_lr,
        kl=KL(warmup=settings.kl_warmup),  # a step is an epoch
    )
    posterior = settings.method.fit(
        mlp(1, (settings.hidden,) * settings.depth, num_classes=1, seed=seed),
        points.train,
        Gaussian(std=NOISE / scale),
        training=training,
        seed=seed,
        progress=False,
    )
    samples = settings.num_samples if steps is None else steps
    prediction = posterior.predict(points.test.inputs, samples, seed=seed)
    assert isinstance(prediction, RealPrediction)
    nll = -float(prediction.log_prob(points.test.targets).double().mean())
    return Outcome(
        metrics={
            "nll": nll + log(scale),  # in original units
            "rmse": scale * metrics.rmse(points.test.targets, prediction.mean),
            "std": scale * float(prediction.epistemic.sqrt().mean()),
        },
        details={"train_nll": posterior.history[-1]["nll"], "kl": posterior.history[-1]["kl"]},
    )


METHODS: dict[str, Method] = {
    "mean-field": MeanField(prior_std=1.0, initial_std=0.05),
    "implicit": Implicit(components=4, noise_samples=2, prior_std=0.1, mean_std=0.5),
}


def variants() -> dict[tuple[str, str], Variant]:
    """Both methods at all depths."""
    return {
        (DATA, f"{name}-{depth}"): Variant(
            settings=Fit(method=method, depth=depth), cpu_seconds=4.0 + 4.0 * depth
        )
        for name, method in METHODS.items()
        for depth in DEPTHS
    }


def deeper(text: str, better: str, than: str) -> Claim:
    """A claim about two depths or methods."""
    return Claim(text=text, metric="nll", better=better, than=than, data=(DATA,))


TABLES = (
    Table(
        name="implicit-figure-1",
        title="y = x³ from 30 points, hidden layers of 256 units",
        paper="implicit BNN, Figure 1",
        plus_minus="the paper shows one run as a picture",
        experiment=Experiment(
            name="implicit-cubic",
            scales={"paper": Scale(variants=variants(), splits=5)},
            load=load_cell,
            generate=generate_cell,
            run=run_cells,
        ),
        metrics=(
            Metric(name="nll", title="test NLL", lower_is_better=True),
            Metric(name="rmse", title="test RMSE", lower_is_better=True),
            Metric(name="std", title="mean epistemic std", lower_is_better=False),
        ),
        published={},
        claims=(
            deeper(
                "mean field collapses with depth: one layer is better than five",
                "mean-field-1",
                "mean-field-5",
            ),
            deeper(
                "the implicit network is better than mean field at five layers", "implicit-5", "mean-field-5"
            ),
            deeper(
                "the implicit network of five layers is better than that of one", "implicit-5", "implicit-1"
            ),
        ),
        differs="range of x and noise are not stated and those of INF's set; settings of neither method are stated",
    ),
)
