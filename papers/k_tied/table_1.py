"""k-tied Normal, Table 1: how many numbers families of Normals keep for one weight matrix."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from dubito import Categorical, KTied, MeanField

from ..runner import provenance
from ..runner.experiment import Cell, Experiment, Metric, Outcome, Published, Scale, Table, Variant
from ..settings import explicit

#: Matrices m × n of the paper's networks.
SHAPES = {"784x400": (784, 400), "400x400": (400, 400), "128x512": (128, 512), "4096x512": (4096, 512)}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of Normals.

    Args:
        name: in the paper's words.
        rank: k of a k-tied Normal; None for others.
    """

    name: str
    rank: int | None = None


FAMILIES = {
    "multivariate": Family(name="multivariate Normal"),
    "diagonal": Family(name="diagonal Normal"),
    "matrix": Family(name="matrix-variate Normal"),
    "matrix-diagonal": Family(name="matrix-variate Normal, diagonal", rank=1),
    **{f"{rank}-tied": Family(name="k-tied Normal", rank=rank) for rank in (1, 2, 3)},
}


def formula(method: str, m: int, n: int) -> int:
    """The paper's count."""
    by_family = {
        "multivariate": m * n + m * n * (m * n + 1) // 2,
        "diagonal": 2 * m * n,
        "matrix": m * n + m * (m + 1) // 2 + n * (n + 1) // 2,
        "matrix-diagonal": m * n + m + n,
    }
    return by_family[method] if method in by_family else m * n + FAMILIES[method].rank * (m + n)  # pyright: ignore


def triangle(size: int) -> int:
    """Entries of a symmetric matrix, row by row."""
    return sum(range(1, size + 1))


def counted(cells: Sequence[Cell], shapes: Sequence[tuple], settings: Family, steps: int | None) -> list[Outcome]:
    """Numbers of the library's posterior, or where it has no such family, of means and triangles of covariances."""
    outcomes = []
    for cell, (m, n) in zip(cells, shapes, strict=True):
        if cell.method == "multivariate":
            count = m * n + triangle(m * n)
        elif cell.method == "matrix":
            count = m * n + triangle(m) + triangle(n)
        else:
            network, likelihood = nn.Linear(m, n, bias=False), explicit(Categorical)
            method = explicit(MeanField) if settings.rank is None else explicit(KTied, rank=settings.rank)
            provenance.record(method, network, None, likelihood)
            count = method.build(network, likelihood, 1).draft.num_parameters
        outcomes.append(Outcome(metrics={"parameters": float(count)}))
    return outcomes


def shape(cell: Cell) -> tuple[int, int]:
    """Sides of a cell's matrix."""
    return SHAPES[cell.data]


EXPERIMENT = Experiment(
    paper="k_tied",
    name="ktied-families",
    scales={
        "paper": Scale(
            variants={
                (data, method): Variant(settings=family, cpu_seconds=0.5)
                for data in SHAPES
                for method, family in FAMILIES.items()
            }
        )
    },
    load=shape,
    generate=shape,
    run=counted,
)
TABLES = (
    Table(
        name="ktied-table-1",
        title="variational parameters of families of Normals for a weight matrix m × n",
        paper="k-tied Normal, Table 1, its formulas at four matrices of its networks",
        plus_minus="none: the numbers are exact",
        differs="the multivariate and the matrix-variate Normal are no families of the library: their means and "
        "triangles of covariances are counted; a diagonal matrix-variate Normal is the 1-tied one",
        experiment=EXPERIMENT,
        metrics=(Metric(name="parameters", title="parameters", lower_is_better=True),),
        published={
            (data, method, "parameters"): Published(float(formula(method, *sides)))
            for data, sides in SHAPES.items()
            for method in FAMILIES
        },
    ),
)
