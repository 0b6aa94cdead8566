"""CIFAR-10 against Hamiltonian Monte Carlo: the ResNet-20 of the NeurIPS 2021 competition on approximate inference."""

from dataclasses import replace
from functools import partial

import torch

from dubito import seeds
from dubito.data import Part

from ..runner.experiment import Cell, Experiment, Scale, Table, Variant
from .bdl import Ground, pictures
from .bdl_fits import REFERENCE, run_cells, shared_by
from .bdl_imdb import METRICS, nearer
from .bdl_methods import Plan
from .bdl_networks import image_network

#: All images, as the reference has them.
PLAN = Plan(prior_std=5**-0.5, train_rows=50_000, test_rows=10_000, epochs=50, more_epochs=25, channels_last=True)
REDUCED = replace(PLAN, train_rows=4000, test_rows=1000, epochs=6, more_epochs=3, num_samples=16)
#: What is run, with the CPU-seconds of a reduced cell whose MAP fit is there already.
SECONDS = {"map": 170.0, "deep-ensemble": 680.0, "swag": 200.0, "mean-field": 115.0, "rank1": 830.0}
#: How many times as much a cell of the reference's size is.
TIMES = 104.0


def variants(plan: Plan, times: float) -> dict[tuple[str, str], Variant]:
    """Every cell's settings and cost."""
    fits = plan.methods()
    return {
        (REFERENCE, name): Variant(settings=fits[name], cpu_seconds=times * seconds)
        for name, seconds in SECONDS.items()
    }


def load_cell(cell: Cell) -> Ground:
    """The images as the reference saw them."""
    return Ground(*pictures(), image_network)


def generate_cell(cell: Cell) -> Ground:
    """Made-up images for a small network of the same form."""
    stream = seeds.generator(cell.seed, "made-up pictures")
    images, labels = torch.randn(40, 3, 8, 8, generator=stream), torch.arange(40) % 10
    train, validation, test = (Part(images[rows], labels[rows]) for rows in (slice(20), slice(20, 20), slice(20, 40)))
    probs = torch.rand(20, 10, generator=stream).softmax(1)
    return Ground(train, validation, test, probs, partial(image_network, depth=8, base=4))


EXPERIMENT = Experiment(
    paper="references",
    name="bdl-cifar10",
    scales={
        "reduced": Scale(
            variants=variants(REDUCED, 1.0),
            splits=3,
            smaller="4,000 training images for 50,000, so that its posterior is wider than the reference's, every "
            "tenth test image (1,000), 6 epochs for 50 and 3 for 25 beyond the MAP fit, 16 draws for 32",
        ),
        "paper": Scale(variants=variants(PLAN, TIMES), splits=3),
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    shares=shared_by,
)
TABLES = (
    Table(
        name="bdl-cifar10",
        title="how near methods come to HMC's predictions for CIFAR-10, as the reference's posterior",
        paper="NeurIPS 2021 competition on approximate inference; Izmailov et al. 2021",
        plus_minus="none; the reference's own accuracy is 91.44 %, its NLL 0.277",
        experiment=EXPERIMENT,
        metrics=METRICS,
        published={},
        claims=(
            nearer("deep-ensemble", "map"),
            nearer("mean-field", "map"),
            nearer("deep-ensemble", "mean-field"),
            nearer("swag", "map"),
            nearer("rank1", "map"),
        ),
        differs="Adam along half a cosine, 100 images a step, without augmentation (the reference has none either), in "
        "place of long chains; 4 members or components; 32 draws per prediction; pixels scaled as bnn_hmc does, which "
        "the reference is inferred to have; rank-1 has the prior as weight decay on shared weights and its own on "
        "factors, and learns the norms' numbers as points",
    ),
)
