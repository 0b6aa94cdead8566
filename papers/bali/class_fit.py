"""The methods of BALI's classification benchmark, with the settings of its Tables 5 and 6."""

from dataclasses import dataclass

from dubito import BALI, MAP, MCDropout
from dubito.method import Method
from dubito.training import Training

from ..settings import explicit

METHODS = ("bali", "mc-dropout", "map")


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
