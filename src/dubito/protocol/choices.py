"""What validation rows choose of a fitted posterior: its scale, the noise of reals, the temperature of classes."""

import warnings
from typing import Any

import torch
from torch import Tensor

from ..calibration import temperature_scaled
from ..calibration.scale import SCALES, preferred_scale
from ..errors import DubitoWarning
from ..fitting import Prepared
from ..inference.laplace import LaplacePosterior
from ..inputs import weighted
from ..likelihoods import BernoulliLikelihood, CategoricalLikelihood, RealLikelihood
from ..metrics.paired import NEGLIGIBLE, wins
from ..posterior import MAX_ROWS, Posterior
from ..prediction import PredictionOptions
from ..sources import Source

#: Draws by which choices are made.
NUM_SAMPLES = 32


def settled(posterior: Posterior, prepared: Prepared, facts: dict[str, Any]) -> Posterior:
    """The posterior with what validation rows choose, and the protocol's facts among its details.

    Real targets have their noise fitted, unless it was given; a scale other than 1 and a temperature other than 1 must
    gain one paired standard error. A Laplace posterior has chosen its precision already, which is its scale, and stands
    on the MAP fit's noise or temperature: fitted anew, noise would shrink by what the weights add on the data, and lack
    where there are none (inside gaps, intervals then cover less than those of MAP).

    Args:
        posterior: as fitted.
        prepared: the fit's ingredients, validation rows among them.
        facts: of the fit.
    """
    validation, seed, history = prepared.run.validation, prepared.seed, posterior.history
    assert validation is not None
    if isinstance(posterior, LaplacePosterior):
        chosen, scale, loss = posterior, 1.0, row_losses(posterior, validation, seed)
    else:
        chosen, scale, loss = _chosen(posterior, validation, seed)
    steps = int(history[-1]["step"]) if history else 0
    chosen.details = {
        **chosen.details,
        "protocol": {
            **facts,
            "steps": steps,
            "best_step": int(history[-1].get("best_step", steps)) if history else 0,
            "scale": scale,
            "temperature": getattr(chosen.likelihood.settings, "temperature", None),
            "validation_nll": float(loss.mean()),
        },
    }
    return chosen


def _chosen(posterior: Posterior, rows: Source, seed: int) -> tuple[Posterior, float, Tensor]:
    """The posterior at the scale, and with the noise or temperature, that rows choose; the scale; the rows' losses."""
    candidates, losses = {}, {}
    for scale in SCALES if posterior.scalable else (1.0,):
        candidates[scale] = fitted = calibrated(_at(posterior, scale), rows, seed)
        losses[scale] = row_losses(fitted, rows, seed)
    scale = preferred_scale(losses, NEGLIGIBLE)
    if not isinstance(posterior.likelihood, CategoricalLikelihood | BernoulliLikelihood):
        return candidates[scale], scale, losses[scale]
    plain = _at(posterior, scale)
    untempered = row_losses(plain, rows, seed)
    if wins(losses[scale], untempered, NEGLIGIBLE):
        return candidates[scale], scale, losses[scale]
    return plain, scale, untempered


def _at(posterior: Posterior, scale: float) -> Posterior:
    return posterior if scale == 1 else posterior.scaled(scale)


def calibrated(posterior: Posterior, rows: Source, seed: int) -> Posterior:
    """The posterior with noise, or a temperature, fitted on rows; as it is where its likelihood has neither.

    Noise that the user gave, `Gaussian(std=0.1)`, is known, and stays.
    """
    likelihood = posterior.likelihood
    given = any(getattr(likelihood.settings, name, None) is not None for name in ("std", "covariance"))
    if given or not isinstance(likelihood, RealLikelihood | CategoricalLikelihood | BernoulliLikelihood):
        return posterior
    with warnings.catch_warnings():  # temperatures at the ends of the search belong to scales that lose
        warnings.simplefilter("ignore", DubitoWarning)
        return temperature_scaled(posterior, rows, num_samples=NUM_SAMPLES, seed=seed, smoothed=True)


@torch.no_grad()
def row_losses(posterior: Posterior, rows: Source, seed: int) -> Tensor:
    """The negative log-likelihood of every row, [B]."""
    options = PredictionOptions(num_samples=NUM_SAMPLES, seed=seed, max_rows=MAX_ROWS)
    prediction, targets, weights = posterior.predicted(rows, options, "validation")
    return -weighted(prediction.log_prob(targets), weights)
