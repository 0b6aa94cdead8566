"""BALI, Figure 1: predictives on three made-up sets, and those of mean field at three KL weights (Figures 4 to 6).

The figures show curves without numbers. Every outcome keeps its curves, so that they can be drawn, and what the text
reads off them is measured: the fit on fresh points of the same law, and how much doubt grows away from the points
("growth": standard deviation of the function, or entropy of the class, far from the points over that on fresh points).

Step size, update rate and number of iterations are not stated for these sets: they are those of the regression
tables, over 1,000 iterations. Nor are the three KL weights: 1, 0.01 and 0.0001 go from one end to the other. Mean
field's prior is He's, which for inputs scaled as in the paper's Eq. 12 is a standard Normal, but for a factor of √2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dubito import BALI, Bernoulli, Gaussian, He, MeanField, metrics, seeds
from dubito.data import Part, load
from dubito.models import mlp
from dubito.posterior import Posterior
from dubito.prediction import BernoulliPrediction, RealPrediction
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ..settings import explicit

REGRESSION, MOONS = ("sines-trend", "sinc"), "two-moons"
#: Mean field's KL weights by the method's name.
WEIGHTS = {"mean-field": 1.0, "mean-field-0.01": 1e-2, "mean-field-0.0001": 1e-4}
#: Half width of the grid of a regression, and the box of the moons' one.
OUTER, BOX = 1.5, ((-3.0, 4.0), (-2.5, 3.0))
#: A place of the grid is far if no training point is so near.
FAR = {"sines-trend": 0.15, "sinc": 0.15, MOONS: 1.0}


@dataclass(frozen=True, kw_only=True)
class Toy:
    """One fit.

    Args:
        hidden: widths of the hidden layers.
        iterations: steps, on all points at once.
        step_size: α of BALI.
        update_rate: β of BALI.
        prior_std: σ_r of BALI.
        initial_std: of BALI's first weights.
        output_floor: of BALI's last layer, in units of the targets' variance.
        kl: weight of mean field's divergence.
        lr: Adam's, for mean field.
        num_samples: draws of a prediction.
        places: of the grid, per axis.
    """

    hidden: tuple[int, ...] = (256, 256, 256)
    iterations: int = 1000
    step_size: float = 0.3
    update_rate: float = 0.2
    prior_std: float = 80.0
    initial_std: float = 3.0
    output_floor: float = 1e-4
    kl: float = 1.0
    lr: float = 3e-3
    num_samples: int = 256
    places: int = 121


def load_cell(cell: Cell) -> tuple[Part, Part]:
    """One draw of the points, and fresh ones."""
    data = load(cell.data, cell.split, standardise=False, validation=0, dtype=torch.float32)
    return data.train, data.test


def generate_cell(cell: Cell) -> tuple[Part, Part]:
    """Made-up points."""
    stream = seeds.generator(cell.seed, "made-up points", cell.data)
    inputs = torch.rand(20, 2 if cell.data == MOONS else 1, generator=stream)
    targets = (inputs[:, 0] > 0.5).float() if cell.data == MOONS else inputs.sin()
    return Part(inputs, targets), Part(inputs, targets)


def run_cells(
    cells: Sequence[Cell], data: Sequence[tuple[Part, Part]], settings: Toy, steps: int | None
) -> list[Outcome]:
    """One method on draws of the points."""
    return [run_split(cell, *parts, settings, steps) for cell, parts in zip(cells, data, strict=True)]


def run_split(cell: Cell, train: Part, test: Part, settings: Toy, steps: int | None) -> Outcome:
    """One method on one draw."""
    posterior = fitted(cell, train, settings, steps)
    grid = places(cell.data, settings.places)
    far = torch.cdist(grid, train.inputs).min(1).values > FAR[cell.data]
    samples = settings.num_samples if steps is None else steps
    known, asked = (posterior.predict(inputs, samples, seed=cell.seed) for inputs in (test.inputs, grid))
    found = {"nll": -float(known.log_prob(test.targets).mean())}
    curves: dict[str, Any]
    if isinstance(known, RealPrediction) and isinstance(asked, RealPrediction):
        found["rmse"] = metrics.rmse(test.targets, known.mean)
        inside, outside = known.epistemic.sqrt().mean(), asked.epistemic.sqrt()[far].mean()
        curves = {"mean": asked.mean[:, 0], "std": asked.std[:, 0], "epistemic": asked.epistemic.sqrt()[:, 0]}
    else:
        assert isinstance(known, BernoulliPrediction) and isinstance(asked, BernoulliPrediction)
        found["error"] = float((known.labels != test.targets.reshape(known.labels.shape)).float().mean())
        inside, outside = known.total.mean(), asked.total[far].mean()
        curves = {"probs": asked.probs.reshape(len(grid)), "total": asked.total.reshape(len(grid))}
    # A method without any doubt has no growth of it to speak of.
    found |= {"growth": float(outside / inside.clamp(min=1e-6)), "far": float(outside)}
    kept = {name: [float(f"{v:.5g}") for v in values.tolist()] for name, values in curves.items()}
    drawn = {"train_inputs": train.inputs.tolist(), "train_targets": train.targets.flatten().tolist()}
    return Outcome(metrics=found, details={"grid": _rounded(grid), **kept, **drawn})


def _rounded(grid: Tensor) -> list[Any]:
    return [[round(value, 4) for value in row] for row in grid.tolist()]


def places(data: str, count: int) -> Tensor:
    """The grid of a figure, [P, D]."""
    if data != MOONS:
        return torch.linspace(-OUTER, OUTER, count)[:, None]
    return torch.cartesian_prod(*(torch.linspace(*ends, count // 4 + 1) for ends in BOX))


def fitted(cell: Cell, train: Part, settings: Toy, steps: int | None) -> Posterior:
    """The method's posterior."""
    width, moons = train.inputs.shape[1], cell.data == MOONS
    net = mlp(width, settings.hidden, num_classes=1, activation="tanh", seed=cell.seed)
    training = explicit(
        Training, iterations=steps or settings.iterations, batch_size=len(train.inputs), lr=settings.lr, kl=settings.kl
    )
    method = explicit(MeanField, prior_std=explicit(He))
    if cell.method == "bali":
        method = explicit(
            BALI,
            step_size=settings.step_size,
            update_rate=settings.update_rate,
            prior_scale=settings.prior_std**2,
            output_floor=settings.output_floor,
            effective_data=float(len(train.inputs)),
            initial_std=settings.initial_std,
        )
    likelihood = Bernoulli() if moons else explicit(Gaussian)
    seed = seeds.derived(cell.seed, cell.data, cell.split)
    return provenance.fit(method, net, train, likelihood, training=training, seed=seed, progress=False)


def variants() -> dict[tuple[str, str], Variant]:
    """BALI, and mean field at each weight, on every set."""
    found = {}
    for data in (*REGRESSION, MOONS):
        # Appendix H.1: σ_r = 80 and σ_init = 3 for the regressions, 20 and 1 for the moons
        own = Toy(prior_std=20.0, initial_std=1.0) if data == MOONS else Toy()
        # Logits of rows that are all told right grow as long as a run lasts: after 1,000 steps the NLL of fresh
        # points was 21 on the first draw, after 200 it was 0.12.
        layerwise = replace(own, iterations=200) if data == MOONS else own
        found[data, "bali"] = Variant(settings=layerwise, cpu_seconds=13.0 if data == MOONS else 45.0)
        for method, weight in WEIGHTS.items():
            found[data, method] = Variant(settings=replace(own, kl=weight), cpu_seconds=18.0)
    return found


EXPERIMENT = Experiment(
    paper="bali",
    name="bali-figure-1",
    scales={"paper": Scale(variants=variants(), splits=3)},
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
)
ALL = (*REGRESSION, MOONS)
TABLES = (
    Table(
        name="bali-figure-1",
        title="fit and growth of uncertainty on made-up sets, three hidden layers of 256 units",
        paper="BALI, Figures 1 and 4 to 6 (curves without numbers)",
        plus_minus="none",
        differs="three draws of the points instead of one, so that there are standard errors; 128 points of the sinc "
        "(Section 5.1; appendix H.1 has 256); the floor of a regression's last layer is 1e-4 of the targets' variance; "
        "what is not stated (iterations, step size, update rate, the KL weights) is chosen, the moons' 200 iterations "
        "by fresh points of the first draw",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="nll", title="NLL of fresh points", lower_is_better=True),
            Metric(name="growth", title="doubt far from the points over that on fresh ones", lower_is_better=False),
            Metric(name="far", title="doubt far from the points", lower_is_better=False),
        ),
        published={},
        claims=(
            Claim(
                text="mean field underfits where its KL weight is large: BALI has a lower NLL",
                metric="nll",
                better="bali",
                than="mean-field",
                data=ALL,
            ),
            Claim(
                text="mean field is overconfident where its KL weight is small: BALI has more doubt far away",
                metric="far",
                better="bali",
                than="mean-field-0.0001",
                data=ALL,
            ),
            Claim(
                text="BALI's doubt grows more away from the points than that of mean field at weight 1",
                metric="growth",
                better="bali",
                than="mean-field",
                data=ALL,
            ),
        ),
    ),
)
