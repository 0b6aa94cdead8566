"""The methods of BALI's classification benchmark, with the settings of its Tables 5 and 6."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dubito import BALI, MAP, MCDropout
from dubito.method import Method
from dubito.training import Training

from ..runner.experiment import Claim, Metric
from ..settings import explicit

METHODS = ("bali", "mc-dropout", "map")
#: How near to its best a run has converged, and how many places of its curve are kept.
NEAR, PLACES = 1.05, 60


#: What is read off a run's curves.
CONVERGENCE = (
    Metric(name="reach", title="steps to within 5 % of the best NLL", lower_is_better=True),
    Metric(name="nll", title="test NLL", lower_is_better=True),
    Metric(name="gap", title="test less training NLL", lower_is_better=True),
)


def better(text: str, metric: str, data: tuple[str, ...], methods: Mapping[str, str]) -> tuple[Claim, ...]:
    """That forms of BALI are better than MC dropout and the point estimate.

    Args:
        text: what they do better.
        metric: by which.
        data: where.
        methods: forms of BALI, and how to call them.
    """
    return tuple(
        Claim(text=f"{name} {text} than {other}", metric=metric, better=method, than=other, data=data)
        for method, name in methods.items()
        for other in METHODS[1:]
    )


@dataclass(frozen=True, kw_only=True)
class ClassFit:
    """How one network is trained.

    Args:
        step_size: α of BALI.
        prior_scale: σ_r² of BALI.
        effective_share: N_eff of BALI over the number of training rows.
        update_rate: β of BALI.
        initial_std: of BALI's first weights.
        hidden: widths of the hidden layers.
        iterations: training steps.
        batch_size: rows per step.
        lr: of Adam, for dropout and the point estimate.
        weight_decay: likewise.
        rate: of dropout.
    """

    step_size: float
    prior_scale: float
    effective_share: float
    update_rate: float = 0.1
    initial_std: float = 1.0
    hidden: tuple[int, ...] = (256, 256)
    iterations: int
    batch_size: int = 2048
    lr: float
    weight_decay: float = 1e-4
    rate: float = 0.1


def method_of(name: str, settings: ClassFit, num_data: int) -> Method:
    """The method with the paper's settings."""
    if name == "mc-dropout":
        return explicit(MCDropout, rate=settings.rate)
    if name == "map":
        return explicit(MAP)
    return explicit(
        BALI,
        step_size=settings.step_size,
        update_rate=settings.update_rate,
        prior_scale=settings.prior_scale,
        effective_data=max(1.0, settings.effective_share * num_data),
        initial_std=settings.initial_std,
        sampling="local" if name == "bali-l" else "weight",
    )


def training_of(name: str, settings: ClassFit, num_data: int, steps: int | None) -> Training:
    """How it is trained; BALI has no rate and no decay."""
    return explicit(
        Training,
        iterations=steps or settings.iterations,
        batch_size=min(settings.batch_size, num_data),
        lr=settings.lr,
        weight_decay=settings.weight_decay if name in ("mc-dropout", "map") else 0.0,
    )


def followed(history: Sequence[Mapping[str, float]]) -> tuple[float, dict[str, list[list[float]]]]:
    """When a run had converged, and its curves: NLL of rows judged after every epoch, and of the rows it trained on.

    Args:
        history: of the run; the NLL of training rows is that of its own steps, under one draw each.
    """
    curves = {
        f"{kind}_nll_by_step": [(int(entry["step"]), entry[key]) for entry in history]
        for kind, key in (("test", "validation_nll"), ("train", "nll"))
    }
    return float(reached(curves["test_nll_by_step"])), {name: thinned(curve) for name, curve in curves.items()}


def reached(curve: Sequence[tuple[int, float]]) -> int:
    """The first step of a curve near its lowest value."""
    best = min(value for _, value in curve)
    return next(step for step, value in curve if value <= NEAR * best)


def thinned(curve: Sequence[tuple[int, float]], places: int = PLACES) -> list[list[float]]:
    """A curve's first, last and evenly many points between, evenly on a logarithmic scale."""
    wanted = torch.logspace(0, torch.tensor(float(len(curve))).log10(), places).round().long().unique() - 1
    return [[step, float(f"{value:.5g}")] for step, value in (curve[place] for place in wanted.tolist())]
