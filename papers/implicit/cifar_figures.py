"""The implicit paper's Figures 2, 3 and 8 on CIFAR-10, from the networks of Table 3, which are trained already."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dubito import DeepEnsemble
from dubito.shifts import gaussian_mixed, salt_and_pepper

from ..cifar.cells import cost, rehearsed, shared_work
from ..cifar.fits import DATA, Fit
from ..cifar.images import MEAN, STD, Pictures, Pixels, generate_cell, load_cell, pictures
from ..runner.experiment import Cell, Claim, Experiment, Outcome, Scale, Table, Variant
from . import figure_2, figure_3, figures_4_8
from .fashion import Judged
from .figure_2 import Surface
from .figures_4_8 import Noises
from .table_3 import OURS, PAPER, SMALL, SMALLER

#: Test images that are looked at, and draws: four of each component.
SEEN: Mapping[str, int] = {"num_test": 2_000, "num_samples": 16}
BESIDE = "networks, prior and start are those of implicit-cifar10"


def in_pixels(noise: Callable[..., Tensor], images: Tensor, share: float, *, seed: int) -> Tensor:
    """Standardised images with noise that speaks of values from 0 to 1."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (noise((images * std + mean).clamp(0, 1), share, seed=seed) - mean) / std


#: Gaussian noise is mixed with standardised images (Eq. 28), which have its scale; salt and pepper are black and white.
NOISES: Noises = {"gaussian": gaussian_mixed, "salt-and-pepper": partial(in_pixels, salt_and_pepper)}


def run_noise(cell: Cell, seen: Pictures, settings: Judged, steps: int | None) -> Outcome:
    """Entropies of standardised images under noise."""
    return figures_4_8.run_noise(cell, seen, settings, steps, NOISES)


Run = Callable[[Cell, Pictures, Any, int | None], Outcome]


def each_cell(
    run: Run, cells: Sequence[Cell], data: Sequence[Pixels], settings: Any, steps: int | None
) -> list[Outcome]:
    """One cell after the other."""
    fit = settings.fit
    if steps is not None:
        settings = replace(settings, fit=rehearsed(fit))
    pairs = zip(cells, data, strict=True)
    return [run(cell, pictures(pixels, fit.size), settings, steps) for cell, pixels in pairs]


def experiment(name: str, kind: type[Judged], fits: Mapping[tuple[str, str], tuple[Fit, Fit]], run: Run) -> Experiment:
    """An experiment at both scales.

    Args:
        name: of its results.
        kind: of its settings.
        fits: trainings at the small scale and at the paper's, by data and method.
        run: from a cell, its images and settings to its outcome.
    """
    seconds = {key: (60.0 + further(little), cost_of(full)) for key, (little, full) in fits.items()}

    def scale(index: int, **options: Any) -> Scale:
        made = {key: kind(fit=pair[index], **SEEN) for key, pair in fits.items()}
        variants = {key: Variant(settings=value, cpu_seconds=seconds[key][index]) for key, value in made.items()}
        return Scale(variants=variants, **options)

    return Experiment(
        paper="implicit",
        name=name,
        scales={"small": scale(0, seeds=3, smaller=SMALLER), "paper": scale(1, seeds=5)},
        load=load_cell,
        generate=generate_cell,
        run=partial(each_cell, run),
        shares=shared_work,
    )


def further(fit: Fit) -> float:
    """CPU-seconds of an ensemble's members that no other table trains."""
    return cost(replace(SMALL["sgd"], fit=fit)) if isinstance(fit.method, DeepEnsemble) else 0.0


def cost_of(fit: Fit) -> float:
    """CPU-seconds of a training at the paper's size."""
    return cost(replace(PAPER["sgd"], fit=fit))


IMPLICIT, DROPOUT = ((SMALL[name].fit, PAPER[name].fit) for name in ("implicit-4", "mc-dropout"))
STARTS = tuple(chosen["deep-ensemble"].fit for chosen in (SMALL, PAPER))


def again(source: Table, name: str, title: str, made: Experiment, data: tuple[str, ...], differs: str) -> Table:
    """A table of Fashion-MNIST with another experiment behind it."""
    claims = tuple(Claim(text=c.text, metric=c.metric, better=c.better, than=c.than, data=data) for c in source.claims)
    return replace(source, name=name, title=title, experiment=made, claims=claims, differs=differs)


TABLES = (
    again(
        figure_2.TABLES[0],
        "implicit-figure-2-cifar10",
        "CIFAR-10, components of a VGG on its loss surface beside networks from four starts",
        experiment(
            "implicit-plane-cifar10",
            Surface,
            {(DATA, "implicit"): IMPLICIT, (DATA, "plain"): (STARTS[0], STARTS[1])},
            figure_2.run_plane,
        ),
        (DATA,),
        "the networks from four starts are ours, their NLL and error those of one network; between two networks the "
        f"numbers that batch norm counted are interpolated too; {BESIDE}: {OURS}",
    ),
    again(
        figure_3.TABLES[0],
        "implicit-figure-3-cifar10",
        "CIFAR-10, draws for the 10 surest and the 10 least sure test images of each of 4 classes",
        experiment(
            "implicit-draws-cifar10",
            Judged,
            {(DATA, end): IMPLICIT for end in ("lowest", "highest")},
            figure_3.run_extremes,
        ),
        (DATA,),
        f"{BESIDE}: {OURS}",
    ),
    again(
        figures_4_8.TABLES[1],
        "implicit-figure-8-cifar10",
        "CIFAR-10, entropies under noise in standardised images",
        experiment(
            "implicit-noise-cifar10",
            Judged,
            {
                (noise, name): fits
                for noise in NOISES
                for name, fits in (("implicit", IMPLICIT), ("mc-dropout", DROPOUT))
            },
            run_noise,
        ),
        tuple(NOISES),
        f"a reduced VGG for the Wide ResNet-28-10; Gaussian noise on standardised images, as the paper's inputs are; "
        f"{BESIDE}: {OURS}",
    ),
)
