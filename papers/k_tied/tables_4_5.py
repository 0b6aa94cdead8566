"""k-tied Normal, Tables 4 and 5: what a training step costs, and how many parameters there are."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn

from dubito import MAP, Categorical, KTied, MeanField, models, seeds
from dubito.data import Part
from dubito.inputs import Batch
from dubito.method import TrainedMethod
from dubito.training import Adam

from ..runner import provenance
from ..runner.experiment import Cell, Claim, Experiment, Metric, Outcome, Published, Scale, Table, Variant
from ..settings import explicit
from . import trainings
from .tasks import kernels

# -- Table 4 ----------------------------------------------------------------------------------------------------

TIMED: dict[str, TrainedMethod] = {"point": explicit(MAP), "mean-field": explicit(MeanField), "2-tied": explicit(KTied)}
TIMED_DATA = "dense-128"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How training steps of the network 784-128-10 are timed.

    Args:
        batch_size: rows of a step, Keras' default in the tutorial whose network the paper takes.
        rounds: in each of them every method has its turn.
        steps: of a turn.
    """

    batch_size: int = 32
    rounds: int = 25
    steps: int = 40


def made_up_images(cell: Cell) -> Part:
    """Images of the right size: times do not depend on their values."""
    stream = seeds.generator(cell.seed, "made-up images")
    return Part(torch.rand(1024, 784, generator=stream), torch.randint(10, (1024,), generator=stream))


#: Times of all methods in one run: they take turns and are asked for one by one.
_timed: dict[tuple[int, Timing, int | None], tuple[dict[str, float], list]] = {}


def shared_work(cell: Cell) -> tuple:
    """All methods are timed in turn."""
    return (cell.seed,)


def timed(cells: Sequence[Cell], data: Sequence[Part], settings: Timing, steps: int | None) -> list[Outcome]:
    """CPU time of one method's training step; those of the others come along and are kept for their turn."""
    outcomes = []
    for cell, part in zip(cells, data, strict=True):
        key = (cell.seed, settings, steps)
        times = provenance.shared(_timed, key, partial(step_times, part, settings, cell.seed, steps))
        outcomes.append(Outcome(metrics={"milliseconds": times[cell.method]}))
    return outcomes


def step_times(part: Part, settings: Timing, seed: int, steps: int | None) -> dict[str, float]:
    """CPU milliseconds of a step by method: a median over rounds in which they take turns."""
    takers = {name: _stepping(method, part, settings.batch_size, seed) for name, method in TIMED.items()}
    rounds, size = (settings.rounds, settings.steps) if steps is None else (1, steps)
    spent: dict[str, list[float]] = {name: [] for name in takers}
    for number in range(rounds + 1):
        for name, take in takers.items():
            start = time.process_time()
            for _ in range(size):
                take()
            if number:  # the first round warms up
                spent[name].append(1000 * (time.process_time() - start) / size)
    return {name: median(times) for name, times in spent.items()}


def _stepping(method: TrainedMethod, part: Part, batch_size: int, seed: int) -> Callable[[], None]:
    """A function that makes one training step."""
    net, likelihood, adam = models.mlp(784, (128,), seed=seed), explicit(Categorical), explicit(Adam)
    provenance.record(method, net, part, likelihood, optimizer=adam, lr=1e-3, batch_size=batch_size, seed=seed)
    objective = method.build(net, likelihood, len(part.targets))
    optimizer = adam.make(objective.parameter_groups(1e-3))
    noise = seeds.generator(seed, "noise")
    batches = [
        Batch(inputs, targets, 0, len(targets))
        for inputs, targets in zip(part.inputs.split(batch_size), part.targets.split(batch_size), strict=True)
    ]
    turn = 0

    def take() -> None:
        nonlocal turn
        batch, turn = batches[turn % len(batches)], turn + 1
        optimizer.zero_grad()
        objective.batch_loss(batch, 1.0, noise).total.backward()
        optimizer.step()

    return take


TIMES = Experiment(
    paper="k_tied",
    name="ktied-times",
    scales={
        "paper": Scale(
            variants={
                (TIMED_DATA, name): Variant(settings=Timing(), cpu_seconds=2.0 if name != "point" else 1.0)
                for name in TIMED
            },
            seeds=10,
        )
    },
    load=made_up_images,
    generate=made_up_images,
    run=timed,
    shares=shared_work,
)

# -- Table 5 ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Count:
    """What is counted.

    Args:
        rank: k, or None for mean field.
    """

    rank: int | None


def build(cell: Cell) -> nn.Module:
    """The network of TensorFlow Probability's example."""
    return models.make(cell.data)


def counted(cells: Sequence[Cell], networks: Sequence[nn.Module], settings: Count, steps: int | None) -> list[Outcome]:
    """Parameters of the posterior, and batch norm's running statistics, which the paper counts too."""
    outcomes = []
    for network in networks:
        rank = settings.rank
        method = explicit(MeanField, subset=kernels) if rank is None else explicit(KTied, rank=rank, subset=kernels)
        provenance.record(method, network, None, explicit(Categorical))
        draft = method.build(network, explicit(Categorical), 50_000).draft
        running = sum(b.numel() for name, b in network.named_buffers() if "running" in name)
        outcomes.append(Outcome(metrics={"parameters": float(draft.num_parameters + running)}))
    return outcomes


SIZES = Experiment(
    paper="k_tied",
    name="ktied-sizes",
    scales={
        "paper": Scale(
            variants={
                ("tfp_resnet18", method): Variant(settings=Count(rank=rank), cpu_seconds=1.0)
                for method, rank in trainings.RANKS.items()
            }
        )
    },
    load=build,
    generate=build,
    run=counted,
)

TABLES = (
    Table(
        name="ktied-table-4",
        title="CPU time of a training step of a network 784-128-10, 32 rows",
        paper="k-tied Normal, Table 4 (on Google Colab)",
        plus_minus="standard error over the steps of one run",
        differs="other hardware, so only the claim can be compared; the batch size is the tutorial's default",
        experiment=TIMES,
        metrics=(Metric(name="milliseconds", title="step, ms", lower_is_better=True),),
        published={
            (TIMED_DATA, name, "milliseconds"): Published(value)
            for name, value in (("point", 2.00), ("mean-field", 7.17), ("2-tied", 6.14))
        },
        claims=(
            Claim(
                text="a 2-tied step is not slower than mean field's",
                metric="milliseconds",
                better="2-tied",
                than="mean-field",
                data=(TIMED_DATA,),
            ),
        ),
    ),
    Table(
        name="ktied-table-5",
        title="parameters of a ResNet-18 on CIFAR-10",
        paper="k-tied Normal, Table 5, its column of parameters",
        plus_minus="none: the numbers are exact",
        differs="its other columns are those of ktied-figure-5",
        experiment=SIZES,
        metrics=(Metric(name="parameters", title="parameters", lower_is_better=True),),
        published={
            ("tfp_resnet18", method, "parameters"): Published(float(value))
            for method, value in zip(trainings.METHODS, (9_814_026, 4_929_711, 4_946_964, 4_964_217), strict=True)
        },
    ),
)
