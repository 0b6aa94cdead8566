"""What validation rows choose of a fitted posterior: the noise of real targets."""

from typing import Any

from ..calibration import temperature_scaled
from ..fitting import Prepared
from ..likelihoods import Gaussian
from ..posterior import Posterior


def settled(posterior: Posterior, prepared: Prepared, facts: dict[str, Any]) -> Posterior:
    """The posterior with what validation rows choose, and the protocol's facts among its details.

    Args:
        posterior: as fitted.
        prepared: the fit's ingredients, validation rows among them.
        facts: of the fit.
    """
    validation, history = prepared.run.validation, posterior.history
    if isinstance(posterior.likelihood.settings, Gaussian):
        posterior = temperature_scaled(posterior, validation, seed=prepared.seed)
    steps = history[-1]["step"] if history else 0
    facts = {**facts, "steps": steps, "best_step": history[-1].get("best_step", steps) if history else 0}
    posterior.details = {**posterior.details, "protocol": facts}
    return posterior
