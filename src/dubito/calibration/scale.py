"""The scale of a posterior, chosen on validation rows: changed only for a gain of one paired standard error."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..fitting import checked_rows
from ..hints import checked
from ..metrics.paired import wins
from ..posterior import MAX_ROWS, Posterior
from ..prediction import PredictionOptions
from .temperature import FittedPosterior

#: Scales that are tried; 0 is the posterior's centre.
SCALES = (0.0, 0.1, 0.3, 1.0, 3.0)


@checked
def posterior_scaled(posterior: FittedPosterior, validation: Any, **options: Any) -> FittedPosterior:
    """The posterior at the scale that `chosen_scale` finds, which takes the options; `result.scale` tells it."""
    return posterior.scaled(chosen_scale(posterior, validation, **options))


@checked
@torch.no_grad()
def chosen_scale(
    posterior: Posterior,
    validation: Any,
    *,
    scales: Sequence[float] = SCALES,
    num_samples: int = 32,
    seed: int = 0,
    max_rows: int = MAX_ROWS,
    linearised: bool | None = None,
) -> float:
    """The factor of all standard deviations that predicts validation rows best, by the rule of `preferred_scale`.

    Args:
        posterior: with standard deviations (`posterior.scalable`).
        validation: rows that were not trained on: a pair, a `Dataset` or a `DataLoader`; they are read once.
        scales: factors of the posterior's scale; 1 is always among them, and all see the same noise.
        num_samples: as in `predict`.
        seed: as in `predict`.
        max_rows: as in `predict`.
        linearised: as in `predict`.
    """
    options = PredictionOptions(num_samples, seed, max_rows, linearised)
    predictors = {scale: posterior._view(scale).predictor(options) for scale in (1.0, *scales)}
    losses: dict[float, list[Tensor]] = {scale: [] for scale in predictors}
    judged = posterior.network, posterior.likelihood, validation
    for batch in checked_rows(*judged, seed=seed, max_rows=max_rows, name="validation"):
        for scale, predict in predictors.items():
            losses[scale].append(-batch.weighted(predict(batch.inputs).log_prob(batch.targets)))
    return preferred_scale({scale: torch.cat(parts) for scale, parts in losses.items()})


def preferred_scale(losses: dict[float, Tensor], margin: float = 0.0) -> float:
    """1, or of the scales that gain more than one paired standard error on it the one of the least mean loss.

    0, no uncertainty, is the last resort: taken where every other scale loses to it by more than a standard error.

    Args:
        losses: of the same rows, [B], by scale; 1 is among them.
        margin: a gain that nobody would act on: it must be larger than this too.
    """
    above = {scale: values for scale, values in losses.items() if scale > 0}
    if 0 in losses and all(wins(losses[0], values, margin) for values in above.values()):
        return 0.0
    better = [scale for scale, values in above.items() if wins(values, losses[1], margin)]
    return min(better, key=lambda scale: float(above[scale].mean()), default=1.0)
