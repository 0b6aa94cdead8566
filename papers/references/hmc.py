"""How far is each method from the posterior it approximates? Gap splits, with our own chains as reference.

All have the same network, Normal prior and known noise, and nothing is searched for: temperature 1, no scale, no early
stopping. Wasserstein-2 distances are those of the mean function's draws to the chains', row by row, averaged, in units
of the target's standard deviation. Three independent runs of the chains are made: seed s of a method is held against
run s, and the row "hmc" is run s against run s + 1, the floor.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dubito import Gaussian, seeds
from dubito.data import Part
from dubito.errors import TrainingError
from dubito.inference.hmc.chains import diagnostics
from dubito.method import Method
from dubito.metrics import wasserstein2
from dubito.models import mlp
from dubito.posterior import Posterior
from dubito.prediction import RealPrediction
from dubito.training import Training

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Scale, Table, Variant
from ..runner.gap import gap_split
from ..runner.scores import interval_scores
from ..settings import explicit
from .gap import limited
from .hmc_chains import Chains, Network, run_chains
from .hmc_methods import OTHER_PRIOR, SAME_PRIOR, targeting

#: The column whose middle third is the gap, and the noise's standard deviation in units of the target's.
COLUMNS, NOISE = {"yacht": 5, "concrete": 0}, {"yacht": 0.1, "concrete": 0.3}
#: Training rows, for weight decay.
ROWS = {"yacht": 185, "concrete": 250}
FLOOR, RUNS = "hmc", 3
METHODS = (FLOOR, *SAME_PRIOR, *OTHER_PRIOR)
#: Chains are taken for the truth below this R-hat.
MOST_R_HAT = 1.01
#: CPU-seconds of a cell: chains are run once for all methods of a seed.
SECONDS = {FLOOR: 150.0, "noisy-kfac": 14.0, "bali": 13.0}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The posterior that all look for, and the chains that draw from it.

    Args:
        noise: known standard deviation of the targets.
        prior_std: of all weights.
        chains: how they are run.
        hidden: units of the one hidden layer, rectified.
        train_rows: at most so many training rows, drawn by seed 0.
        judged_rows: at most so many rows inside the gap, and as many outside.
    """

    noise: float
    prior_std: float = 0.3
    chains: Chains = Chains()
    hidden: int = 50
    train_rows: int = 250
    judged_rows: int = 100


@dataclass(frozen=True, kw_only=True)
class Search:
    """A method that looks for the reference's posterior.

    Args:
        reference: what it is held against.
        method: under the reference's prior, where it has one; None for the chains themselves.
        training: of fixed length.
        num_samples: draws of the mean function.
    """

    reference: Reference
    method: Method | None = None
    training: Training | None = None
    num_samples: int = 1000


class Ground(NamedTuple):
    """Rows to train on, and those to judge on."""

    train: Part
    inside: Part
    outside: Part


class Draws(NamedTuple):
    """What a posterior says of the rows inside and outside: the mean function's draws, and the predictions."""

    functions: dict[str, Tensor]
    scores: dict[str, dict[str, float]]


class Truth(NamedTuple):
    """A run of the chains, with what they are worth."""

    draws: Draws
    facts: dict[str, float]


def load_cell(cell: Cell) -> Ground:
    """The rows of a gap split, in double precision; none are set aside for validation."""
    split = gap_split(cell.data, COLUMNS[cell.data], validation=0.0, kept_back=0.1)
    parts = (split.data.train, split.inside, split.outside)
    return Ground(*(Part(*(tensor.double() for tensor in part)) for part in parts))


def generate_cell(cell: Cell) -> Ground:
    """Made-up rows."""
    inputs = torch.randn(40, 3, generator=seeds.generator(cell.seed, "made-up rows"), dtype=torch.float64)
    rows = (slice(30), slice(30, 35), slice(35, 40))
    return Ground(*(Part(inputs[some], inputs[some, :1].sin()) for some in rows))


def cut(ground: Ground, reference: Reference) -> Ground:
    """At most as many rows as the reference has."""
    counts = (reference.train_rows, reference.judged_rows, reference.judged_rows)
    return Ground(*(limited(part, count, 0) for part, count in zip(ground, counts, strict=True)))


def network(ground: Ground, reference: Reference, seed: int) -> nn.Module:
    """One hidden layer."""
    return mlp(ground.train.inputs.shape[1], [reference.hidden], num_classes=1, seed=seed).double()


_truths: dict[Any, tuple[Truth, list[dict[str, Any]]]] = {}


def truth_of(cell: Cell, ground: Ground, reference: Reference, run: int, steps: int | None) -> Truth:
    """A run of the chains, made once for all methods."""
    key = cell.data, run, reference, steps
    return provenance.shared(_truths, key, partial(chains_of, cell.data, ground, reference, run, steps))


def chains_of(data: str, ground: Ground, reference: Reference, run: int, steps: int | None) -> Truth:
    """The chains behind `truth_of`, refused where they have not converged on every row that is judged."""
    settings, likelihood = reference.chains, explicit(Gaussian, std=reference.noise)
    if steps is not None:
        settings = replace(settings, chains=2, warmup=8, draws=8, most_steps=steps)
    provenance.record(reference, network(ground, reference, run), ground.train, likelihood, seed=run)
    net = Network(ground.train.inputs.shape[1], reference.hidden)
    stream = seeds.generator(run, "chains", data)
    shape = settings.chains, sum(net.sizes)
    start = reference.prior_std * torch.randn(shape, generator=stream, dtype=torch.float64)

    def energies(weights: Tensor) -> Tensor:
        return net.energies(weights, ground.train, reference.noise, reference.prior_std)

    made = run_chains(energies, start, settings, stream)
    functions, scores = {}, {}
    facts: dict[str, float] = {"divergent": made.divergent, "acceptance": made.acceptance, "gradients": made.gradients}
    for where, (inputs, targets) in (("inside", ground.inside), ("outside", ground.outside)):
        answers = torch.stack([net.functions(weights, inputs) for weights in made.draws])  # [chains, S, B]
        facts[f"r_hat_{where}"], facts[f"effective_size_{where}"] = ranked_diagnostics(answers)
        functions[where] = answers.flatten(0, 1)[..., None]
        variance = torch.full((1, 1, 1), reference.noise**2, dtype=torch.float64)
        scores[where] = interval_scores(RealPrediction(means=functions[where], variances=variance), targets)
    worst = max(facts["r_hat_inside"], facts["r_hat_outside"])
    if steps is None and not worst < MOST_R_HAT:
        raise TrainingError(f"run {run} of the chains on {data} is no reference: R-hat is {worst:.4f}; give more draws")
    return Truth(Draws(functions, scores), facts)


def ranked_diagnostics(values: Tensor) -> tuple[float, float]:
    """The largest R-hat and the least effective size over quantities [chains, S, Q], both of normalised ranks.

    R-hat is the larger of that of the quantities and that of their distances to the median, so that chains must agree
    in place and in spread [Vehtari et al. 2021].
    """
    bulk, size = diagnostics(normal_scores(values))
    folded, _ = diagnostics(normal_scores((values - values.flatten(0, 1).median(0).values).abs()))
    return max(bulk, folded), size


def normal_scores(values: Tensor) -> Tensor:
    """The Normal quantiles of the ranks of each quantity among all its draws, [chains, S, Q]."""
    flat = values.double().flatten(0, 1)
    ranks = flat.argsort(0).argsort(0) + 1.0
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).reshape(values.shape)


def judged(posterior: Posterior, ground: Ground, samples: int) -> Draws:
    """What a posterior says of the rows inside and outside."""
    functions, scores = {}, {}
    for where, (inputs, targets) in (("inside", ground.inside), ("outside", ground.outside)):
        functions[where] = posterior.sample_outputs(inputs, samples)
        prediction = posterior.predict(inputs, samples)
        assert isinstance(prediction, RealPrediction)
        scores[where] = interval_scores(prediction, targets)
    return Draws(functions, scores)


def run_cells(cells: Sequence[Cell], data: Sequence[Ground], settings: Search, steps: int | None) -> list[Outcome]:
    """A method on one split, with some seeds."""
    return [run_split(cell, ground, settings, steps) for cell, ground in zip(cells, data, strict=True)]


def run_split(cell: Cell, ground: Ground, settings: Search, steps: int | None) -> Outcome:
    """A method against the chains of its seed."""
    reference = settings.reference
    ground = cut(ground, reference)
    truth, facts = truth_of(cell, ground, reference, cell.seed, steps)
    if settings.method is None or settings.training is None:
        ours = truth_of(cell, ground, reference, (cell.seed + 1) % RUNS, steps).draws
        costs = {}
    else:
        training, samples, started = settings.training, settings.num_samples, time.process_time()
        if steps is not None:
            training, samples = replace(training, iterations=steps), 4 * steps
        posterior = provenance.fit(
            settings.method, network(ground, reference, cell.seed), ground.train,
            explicit(Gaussian, std=reference.noise), training=training, seed=cell.seed, progress=False,
        )  # fmt: skip
        costs = {"bytes": float(posterior.nbytes), "seconds": time.process_time() - started}
        ours = judged(posterior, ground, samples)
    metrics: dict[str, float] = costs
    for where in ("inside", "outside"):
        draws, theirs = ours.functions[where], truth.functions[where]
        coverage = ours.scores[where]["coverage_90"]
        metrics |= {
            f"w2_{where}": wasserstein2(draws, theirs),
            f"coverage_90_{where}": coverage,
            f"coverage_off_{where}": abs(coverage - truth.scores[where]["coverage_90"]),
            f"spread_{where}": float((draws.var(0).mean() / theirs.var(0).mean()).sqrt()),
        }
    coverages = {where: truth.scores[where]["coverage_90"] for where in truth.scores}
    return Outcome(
        metrics=metrics, details={"column": COLUMNS[cell.data], "chains": facts, "coverage of the chains": coverages}
    )


def shared_work(cell: Cell) -> str:
    """The runs of the chains serve all methods of a table."""
    return cell.data


def settings_of(data: str, name: str) -> Search:
    """The settings of a method on a table."""
    reference = Reference(noise=NOISE[data])
    if name == FLOOR:
        return Search(reference=reference)
    method, training = targeting(name, reference.prior_std, ROWS[data], 4000)
    return Search(reference=reference, method=method, training=training)


EXPERIMENT = Experiment(
    paper="references",
    name="uci-gap-hmc",
    scales={
        "paper": Scale(
            variants={
                (data, name): Variant(settings=settings_of(data, name), cpu_seconds=SECONDS.get(name, 7.0))
                for data in COLUMNS
                for name in METHODS
            },
            seeds=RUNS,
        )
    },
    load=load_cell,
    generate=generate_cell,
    run=run_cells,
    shares=shared_work,
)


def nearer(better: str, than: str, where: str = "inside") -> Claim:
    """A claim of distance."""
    text = f"{better} is nearer to the posterior than {than} {where} the gap"
    return Claim(text=text, metric=f"w2_{where}", better=better, than=than, data=tuple(COLUMNS))


TABLES = (
    Table(
        name="uci-gap-hmc",
        title="distance to converged Hamiltonian Monte Carlo, inside a gap and outside of it",
        paper="the project's own",
        plus_minus="standard error over seeds",
        differs="one hidden layer of 50 rectified units, N(0, 0.3²) on all weights; yacht with the gap in column 5 and "
        "noise 0.1, concrete with the gap in column 0, noise 0.3 and 250 training rows, noise in units of the target's "
        "standard deviation; 8 chains of 600 draws after 300, three runs, R-hat of normalised ranks below 1.01 on "
        "every judged row; at most 100 rows inside and as many outside; W2 of the mean function's draws, in units of "
        "the target's standard deviation; hmc is the floor, one run against the next; "
        f"{', '.join(OTHER_PRIOR)} have priors of their own, with weight decay for the reference's on their points",
        experiment=EXPERIMENT,
        metrics=(
            Metric(name="w2_inside", title="W2, inside", lower_is_better=True),
            Metric(name="w2_outside", title="W2, outside", lower_is_better=True),
            Metric(name="coverage_90_inside", title="coverage of 90 % intervals, inside", lower_is_better=False),
            Metric(name="coverage_90_outside", title="coverage, outside", lower_is_better=False),
            Metric(name="coverage_off_inside", title="coverage off the chains', inside", lower_is_better=True),
            Metric(name="coverage_off_outside", title="coverage off the chains', outside", lower_is_better=True),
            Metric(name="spread_inside", title="spread over the chains', inside", lower_is_better=False),
            Metric(name="bytes", title="bytes of the posterior's tensors", lower_is_better=True),
            Metric(name="seconds", title="CPU-seconds of the fit", lower_is_better=True),
        ),
        published={},
        claims=(
            nearer("mean-field", "map"),
            nearer("deep-ensemble", "map"),
            nearer("laplace-kfac", "map"),
            nearer("laplace-kfac", "mean-field"),
            nearer("laplace-kfac", "laplace-diag"),
            nearer("deep-ensemble", "mean-field"),
            nearer("laplace-inf", "laplace-diag"),
            nearer("laplace-kfac", "mean-field", "outside"),
        ),
    ),
)
