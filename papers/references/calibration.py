"""Simulation-based calibration [Talts et al. 2018]: are the true function's ranks among posterior draws uniform?

A replication draws weights from the prior, targets from them and the known noise, fits, and counts how many draws of
the mean function lie below the true one at three places: among the data, in a gap between them, and beyond them.
Weights can be exchanged without changing the function, so the function is ranked and not they. Where a method draws
from the posterior, all ranks are equally likely; where it is too sure, the truth falls among the outermost. A
replication is the same for all methods.

`python -m papers.references.calibration` prints histograms with their chi-square tests from what is stored.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table as Shown
from torch import Tensor, nn

from dubito import HMC, Gaussian, seeds
from dubito.data import Part
from dubito.errors import DubitoWarning
from dubito.inference.hmc import HMCPosterior
from dubito.method import Method
from dubito.models import mlp
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ..runner.store import Results
from ..settings import explicit
from .hmc_methods import SAME_PRIOR, targeting

DATA, REFERENCE = "simulated", "hmc"
METHODS = (REFERENCE, *SAME_PRIOR)
#: Where the function is ranked.
PLACES = {"among": 1.5, "between": 0.0, "beyond": 3.0}
#: Blocks, replications of each, and bins of a histogram of ranks.
BLOCKS, BLOCK, BINS = 12, 8, 8
SECONDS = {REFERENCE: 200.0, "noisy-kfac": 12.0, "deep-ensemble": 12.0}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """All that decides the numbers.

    Args:
        method: under the prior that the true weights come from.
        training: of fixed length; None for chains.
        hidden: widths of the hidden layers, of hyperbolic tangents.
        prior_std: of all weights.
        noise: standard deviation of the targets.
        rows: half of them on either side of the gap.
        draws: L, so that ranks go from 0 to L.
    """

    method: Method
    training: Training | None
    hidden: tuple[int, ...] = (20,)
    prior_std: float = 0.5
    noise: float = 0.3
    rows: int = 20
    draws: int = 63


class Replication(NamedTuple):
    """Rows, and the true function at the places."""

    rows: Part
    truth: Tensor


def places() -> Tensor:
    """Where the function is ranked, as inputs."""
    return torch.tensor(list(PLACES.values()), dtype=torch.float64)[:, None]


def network(settings: Simulation, seed: int) -> nn.Module:
    """The network that is drawn, and that is fitted."""
    return mlp(1, settings.hidden, num_classes=1, activation="tanh", seed=seed).double()


@torch.no_grad()
def simulated(number: int, settings: Simulation) -> Replication:
    """One replication: inputs from 1 to 2 on either side of 0, weights of the prior, targets with noise."""
    stream, drawn = seeds.generator(number, "replication"), network(settings, 0)
    for parameter in drawn.parameters():
        parameter.copy_(settings.prior_std * torch.randn(parameter.shape, generator=stream, dtype=torch.float64))
    sides = torch.ones(settings.rows, 1, dtype=torch.float64)
    sides[::2] = -1
    inputs = sides * (1 + torch.rand(settings.rows, 1, generator=stream, dtype=torch.float64))
    noise = torch.randn(settings.rows, 1, generator=stream, dtype=torch.float64)
    return Replication(Part(inputs, drawn(inputs) + settings.noise * noise), drawn(places())[:, 0])


def ranks(draws: Tensor, truth: Tensor) -> Tensor:
    """How many of the draws [L, Q] lie below the truth [Q]."""
    return (draws < truth).sum(0)


def histogram(values: Tensor, draws: int) -> Tensor:
    """Counts of ranks from 0 to `draws` in equal bins."""
    return torch.bincount(values.long() * BINS // (draws + 1), minlength=BINS)


def uniformity(counts: Tensor) -> float:
    """The chance of a histogram at least as far from uniform, by Pearson's chi-square."""
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))


def load_cell(cell: Cell) -> range:
    """The numbers of a block's replications."""
    return range(cell.split * BLOCK, (cell.split + 1) * BLOCK)


def run_cells(cells: Sequence[Cell], data: Sequence[range], settings: Simulation, steps: int | None) -> list[Outcome]:
    """Blocks of replications."""
    return [run_block(numbers, settings, steps) for numbers in data]


def run_block(numbers: range, settings: Simulation, steps: int | None) -> Outcome:
    """The ranks of some replications, and the share of them that lies in the outermost quarter."""
    results = [fitted_ranks(number, settings, steps) for number in numbers[: steps or len(numbers)]]
    ranked, sizes = torch.stack([values for values, _ in results]), [size for _, size in results]
    outer = (ranked * BINS // (settings.draws + 1) - (BINS - 1) / 2).abs() > (BINS - 2) / 2
    by_place = {f"tails_{name}": float(outer[:, place].double().mean()) for place, name in enumerate(PLACES)}
    listed = {name: ranked[:, place].tolist() for place, name in enumerate(PLACES)}
    return Outcome(
        metrics={"tails": float(outer.double().mean()), **by_place},
        details={"ranks": listed, "draws": settings.draws, "effective sizes": sizes},
    )


def fitted_ranks(number: int, settings: Simulation, steps: int | None) -> tuple[Tensor, float | None]:
    """The ranks of one replication, and the effective size of the chains' thinned draws."""
    rows, truth = simulated(number, settings)
    method, options = settings.method, {}
    if settings.training is not None:
        options["training"] = replace(settings.training, iterations=steps or settings.training.iterations)
    elif steps is not None:
        assert isinstance(method, HMC)
        method = replace(method, num_samples=4 * method.thin, warmup=steps, tree_depth=2)
    with warnings.catch_warnings():  # chains too short for a reference serve for ranks, and say so
        warnings.simplefilter("ignore", DubitoWarning)
        posterior = provenance.fit(
            method, network(settings, number), rows, explicit(Gaussian, std=settings.noise),
            seed=number, progress=False, **options,
        )  # fmt: skip
    answers = posterior.sample_outputs(places(), settings.draws, seed=number)[..., 0]
    size = posterior.effective_sample_size if isinstance(posterior, HMCPosterior) else None
    return ranks(answers, truth), size


def settings_of(name: str) -> Simulation:
    """The settings of a method."""
    example = Simulation(method=explicit(HMC), training=None)
    if name == REFERENCE:
        # 64 draws, two apart; at this depth successive ones hardly correlate, where with 32 gradients they did
        chains = explicit(HMC, num_samples=128, warmup=300, chains=1, thin=2, prior_std=example.prior_std, tree_depth=8)
        return replace(example, method=chains)
    method, training = targeting(name, example.prior_std, example.rows, 1000)
    return replace(example, method=method, training=training)


EXPERIMENT = Experiment(
    paper="references",
    name="sbc",
    scales={
        "paper": Scale(
            variants={
                (DATA, name): Variant(settings=settings_of(name), cpu_seconds=SECONDS.get(name, 7.0))
                for name in METHODS
            },
            splits=BLOCKS,
        )
    },
    load=load_cell,
    generate=load_cell,
    run=run_cells,
)


def histograms(name: str, results: Results) -> Mapping[str, Tensor]:
    """The histogram of a method's ranks at each place, of the blocks that were run."""
    read = [results.read(EXPERIMENT, "paper", cell) for cell in EXPERIMENT.scales["paper"].select(methods=[name])]
    stored = [outcome.details for outcome in read if outcome is not None]
    return {
        place: sum(
            (histogram(torch.tensor(block["ranks"][place]), block["draws"]) for block in stored),
            torch.zeros(BINS, dtype=torch.long),
        )
        for place in PLACES
    }


def section(results: Results) -> str:
    """Histograms of all methods with their tests, for the page; nothing where nothing was run."""
    rows = []
    for name in METHODS:
        counted = histograms(name, results)
        total = int(next(iter(counted.values())).sum())
        if total:
            cells = (f"{tails(counts):.2f} ({uniformity(counts):.2g})" for counts in counted.values())
            rows.append(f"| {name} | {total} | {' | '.join(cells)} |")
    if not rows:
        return ""
    head = f"| | replications | {' | '.join(f'{place} the data' for place in PLACES)} |"
    return "\n".join(
        [
            "## Calibration by simulation",
            "",
            "Weights drawn from the prior, data from them: how often the true function is among the outermost quarter "
            "of 63 draws (.25 where a method draws from the posterior; more, and it is too sure), and in brackets the "
            f"chance of a histogram of ranks at least as uneven, by chi-square. Table `sbc`. {of_reference(results)}",
            "",
            head,
            "|---|---:|" + "---:|" * len(PLACES),
            *rows,
        ]
    )


def of_reference(results: Results) -> str:
    """Whether the chains' own ranks are uniform, over all places together; nothing where no chain was run."""
    counted = histograms(REFERENCE, results)
    if not all(counts.sum() for counts in counted.values()):
        return ""
    chances = sorted(map(uniformity, counted.values()))
    together = min(1.0, len(chances) * chances[0])  # Bonferroni
    told = f"The least of {REFERENCE}'s {len(chances)} chances is {chances[0]:.2g}, {together:.2g} for all of them: "
    if together < 0.05:
        return told + "its ranks are not uniform, its draws not yet the posterior's, and others are held against .25."
    return told + "its ranks are uniform as far as these replications can tell."


def tails(counts: Tensor) -> float:
    """The share of ranks in the first and the last bin."""
    return float((counts[0] + counts[-1]) / counts.sum())


def shown(results: Results) -> Shown:
    """Histograms of all methods with the chance of each under uniformity."""
    table = Shown("method", "place", "replications", "ranks, in eighths", "p, uniform")
    for name in METHODS:
        for place, counts in histograms(name, results).items():
            total = int(counts.sum())
            chance = f"{uniformity(counts):.2g}" if total else ""
            table.add_row(name, place, str(total), " ".join(map(str, counts.tolist())), chance)
    return table


TABLES = (
    Table(
        name="sbc",
        title="simulation-based calibration: the true function's ranks among posterior draws",
        paper="the project's own, after Talts et al. 2018",
        plus_minus="standard error over blocks of 8 replications",
        differs="one hidden layer of 20 hyperbolic tangents (61 weights), N(0, 0.5²) on all, 20 rows with noise 0.3 on "
        "either side of a gap; 63 draws, those of HMC two apart, of one chain after 300; tails are the share of ranks "
        "in the outermost quarter, 0.25 where ranks are uniform; `python -m papers.references.calibration` prints "
        "histograms and chi-square tests",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="tails", title="ranks in the outermost quarter (uniform: 0.25)", lower_is_better=True),
            *(
                Metric(name=f"tails_{place}", title=f"the same {place} the data", lower_is_better=True)
                for place in PLACES
            ),
        ),
        published={},
        claims=tuple(
            Claim(
                text=f"{name} is surer than the posterior: more of its ranks are outermost than HMC's",
                metric="tails", better=REFERENCE, than=name, data=(DATA,),
            )
            for name in SAME_PRIOR
        ),
    ),
)  # fmt: skip

if __name__ == "__main__":
    Console(width=120).print(shown(Results()))
