"""Trainings of the k-tied paper's networks, looked at along the way: −ELBO, mean σ, and how noisy gradients are."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dubito import seeds
from dubito.data import Part
from dubito.inputs import Batch
from dubito.objective import Objective
from dubito.training import KL, Adam
from dubito.weight_normals import NormalPosterior

from ..runner import provenance
from ..runner.experiment import Cell, Outcome
from ..settings import explicit
from . import trainings
from .tasks import Rows
from .trainings import Regime

#: To be raised when a change of the code changes the numbers.
REVISION = 3
MARKS = ("first", "second", "third")


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """A training at a constant rate that is looked at along the way, without annealing [appendix D.4].

    Args:
        regime: how it is trained; its epochs and its schedule do not matter.
        marks: steps whose numbers are the table's.
        every: steps between two looks.
        window: batches before each, over which moments of gradients are taken.
    """

    regime: Regime
    marks: tuple[int, int, int]
    every: int
    window: int = 10


def convergence(cells: Sequence[Cell], data: Sequence[Rows], settings: Convergence, steps: int | None) -> list[Outcome]:
    """Ratios of signal to noise of one layer's σ gradients, validation −ELBO and mean σ, by step."""
    outcomes = []
    for cell, loaded in zip(cells, data, strict=True):
        curve, stds = look_along(settings, settings.regime.task.rows(loaded), cell.seed, steps)
        at = [curve["step"].index(mark) if steps is None else -1 for mark in settings.marks]
        marked = {f"{name}_{word}": curve[name][i] for name in curve for word, i in zip(MARKS, at, strict=True)}
        outcomes.append(Outcome(metrics=marked, details={"curve": curve, "mean_stds": stds}))
    return outcomes


def look_along(
    settings: Convergence, rows: Rows, seed: int, steps: int | None
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """What is seen at each look, and the mean σ of each layer there."""
    task, num_data = settings.regime.task, len(rows.train.targets)
    last = settings.marks[-1] if steps is None else max(steps, 2)  # a variance needs two batches
    looks = {step for step in range(1, last + 1) if step % settings.every == 0} | {*settings.marks, last}
    draws = settings.regime.num_samples if steps is None else steps
    part = rows.validation or Part(rows.train.inputs[:500], rows.train.targets[:500])
    gradients: deque[Tensor] = deque(maxlen=settings.window)
    seen: list[dict[str, float]] = []
    stds: dict[str, list[float]] = {layer: [] for layer in task.layers}
    for step, objective in enumerate(run(settings.regime, rows.train, seed, last), 1):
        draft = objective.draft
        assert isinstance(draft, NormalPosterior)
        if any(0 <= look - step < settings.window for look in looks):
            gradients.append(scale_gradient(draft, task.shown))
        if step in looks:
            posterior = objective.posterior()
            assert isinstance(posterior, NormalPosterior)
            judged, _ = trainings.tested(posterior, part, num_data, draws, seed)
            for layer, name in task.layers.items():
                stds[layer].append(float(posterior.weight_scale(name).std.mean()))
            std = float(posterior.weight_scale(task.shown).std.mean())
            seen.append({"step": step, "neg_elbo": judged["neg_elbo"], **signal(torch.stack([*gradients])), "std": std})
    return {name: [look[name] for look in seen] for name in seen[0]}, stds


def run(regime: Regime, train: Part, seed: int, steps: int) -> Iterator[Objective]:
    """The objective after each of so many steps at a constant rate, its gradients still there."""
    method, net, likelihood, adam = regime.method(), regime.task.network(seed), regime.task.likelihood(), explicit(Adam)
    rates = {"lr": regime.lr, "variational_lr": regime.variational_lr}
    provenance.record(method, net, train, likelihood, optimizer=adam, batch_size=regime.batch_size, seed=seed, **rates)
    num_data = len(train.targets)
    objective = method.build(net, likelihood, num_data, seed=seed)  # every seed has a σ noise of its own
    objective.bind(train.inputs[:2])
    optimizer = adam.make(objective.parameter_groups(**rates))
    kl, per_epoch = regime.training(num_data, None).kl, -(-num_data // regime.batch_size)
    assert isinstance(kl, KL)
    for step, batch in enumerate(batches(train, regime.batch_size, seed, steps)):
        optimizer.zero_grad()
        objective.batch_loss(batch, kl.at(step, per_epoch), seeds.generator(seed, "noise", step)).total.backward()
        optimizer.step()
        yield objective


def batches(train: Part, batch_size: int, seed: int, steps: int) -> Iterator[Batch]:
    """So many batches, in a new order in every epoch."""
    made = 0
    while True:
        order = torch.randperm(len(train.targets), generator=seeds.generator(seed, "order", made))
        for rows in order.split(batch_size):
            if made == steps:
                return
            made += 1
            yield Batch(train.inputs[rows], train.targets[rows], 0, len(rows))


def scale_gradient(draft: NormalPosterior, name: str) -> Tensor:
    """The gradient of one weight's parameters of σ, raw_std or log u and log v, as one vector."""
    tensors = draft.stored()
    keys = [key for group in ("raw_std", "log_u", "log_v") if (key := f"{group}.{name}") in tensors]
    slopes = [tensors[key].grad for key in keys]
    return torch.cat([slope.detach().flatten() for slope in slopes if slope is not None])


def signal(gradients: Tensor) -> dict[str, float]:
    """Statistics of gradients [batches, entries]: E[g²] / Var[g] by the ratio of means, its median and its mean.

    The paper does not say how it sums up its ratios of entries [footnote 3]. Their mean is decided by the entries
    whose gradient hardly varies.
    """
    squares = gradients.double().square().mean(0)
    variances = gradients.double().var(0, unbiased=False)
    ratios = (squares / variances)[variances > 0]
    if not len(ratios):  # nothing varied
        return {"snr": 1.0, "median_snr": 1.0, "mean_snr": 1.0}
    return {
        "snr": float(squares.mean() / variances.mean()),
        "median_snr": float(ratios.median()),
        "mean_snr": float(ratios.mean()),
    }
