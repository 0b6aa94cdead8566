"""The marginal likelihood of a Laplace posterior, and the prior and the noise that make it largest.

With γ = tr(P⁻¹ (P − τ)), the number of weights that the data determine, the marginal likelihood has its only
maximum in τ where γ = τ |w|² [MacKay 1992]: γ falls in τ and τ |w|² rises. The data scale stays the number of
data: in both τ and the data scale there is no maximum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...curvature import Empirical
from ...distributions import StructuredNormal
from ...distributions.structured import total
from ...errors import ConfigError, warn

if TYPE_CHECKING:
    from .posterior import LaplacePosterior

#: What a prior precision may become: standard deviations of weights from 1e-4 to 1e3.
LOWEST, HIGHEST = 1e-6, 1e8
#: How far from its maximum a logarithm may stop.
CLOSE = 1e-5
#: Turns between prior and noise before the search for both ends.
MOST_TURNS = 100


@dataclass(frozen=True)
class Evidence:
    """The marginal likelihood as a function of the prior precision of each block.

    Attributes:
        normals: the distributions of each block's matrices, at any scale and prior.
        num_data: N, the number of data, over the factor of the noise's variance since the curvature was taken.
        distances: |w|² of each block, the means as seen from the prior's; None where that is 0.
    """

    normals: Mapping[str, Sequence[StructuredNormal]]
    num_data: float
    distances: Mapping[str, float] | None = None

    def log_occam(self, prior_precision: Mapping[str, float]) -> float:
        """What the weights cost: log p(w*) − ½ log|P| + P/2 log 2π, which is −½ Σ (τ |w|² + log|P/τ|)."""
        determinants = (
            float(self._at(normal, precision).relative_logdet)
            for name, precision in prior_precision.items()
            for normal in self.normals[name]
        )
        distances = (precision * self._distance(name) for name, precision in prior_precision.items())
        return -0.5 * (sum(distances) + sum(determinants))

    def num_determined(self, prior_precision: Mapping[str, float]) -> float:
        """γ over all blocks."""
        return sum(
            float(self._at(normal, precision).num_determined)
            for name, precision in prior_precision.items()
            for normal in self.normals[name]
        )

    def best_precision(self, names: Sequence[str], start: float) -> float:
        """The one prior precision of these blocks that makes the marginal likelihood largest.

        Args:
            names: of the blocks.
            start: where the search begins.
        """
        norm = sum(map(self._distance, names))

        def surplus(log_precision: float) -> float:
            # log γ − log τ|w|² falls with a slope between −1 and −2 in log τ
            precision = math.exp(log_precision)
            determined = self.num_determined(dict.fromkeys(names, precision))
            return safe_log(determined) - safe_log(precision * norm)

        root = falling_root(surplus, math.log(start), math.log(LOWEST), math.log(HIGHEST))
        return math.exp(root)

    def _distance(self, name: str) -> float:
        if self.distances is not None:
            return self.distances[name]
        return sum(squared_norm(normal) for normal in self.normals[name])

    def _at(self, normal: StructuredNormal, precision: float) -> StructuredNormal:
        return normal.rescaled(num_data=self.num_data, prior_precision=precision)


def best_prior(posterior: "LaplacePosterior", *, prior: bool, per_layer: bool, noise: bool) -> dict[str, Any]:
    """The details of a posterior with the prior precision, and the noise, of the largest marginal likelihood.

    Args:
        posterior: to begin from.
        prior: whether the prior precision is chosen; else it stays.
        per_layer: whether each block has its own prior precision.
        noise: whether the noise of a Gaussian is chosen too.
    """
    details = posterior.details
    errors, values, factor = (details[key] for key in ("squared_errors", "num_values", "noise_factor"))
    if noise and (errors is None or isinstance(posterior.method.curvature, Empirical)):
        raise ConfigError(
            "noise=True scales the noise that Gaussian() learns, whose curvature is that of Fisher() or GGN(), got "
            f"{posterior.likelihood.settings!r} and {posterior.method.curvature!r}"
        )
    precisions: Mapping[str, float] = posterior.prior_precisions
    for _ in range(MOST_TURNS if noise else 1):  # each turn raises the marginal likelihood
        before = factor
        if prior:
            precisions = best_precisions(posterior.evidence(factor), precisions, per_layer=per_layer)
        if noise:
            factor = best_noise(errors, values, partial(_determined, posterior, precisions), factor)
        if abs(math.log(factor / before)) < 10 * CLOSE:
            break
    changes: dict[str, Any] = {"noise_factor": factor}
    if prior:
        changes["prior_precision"] = dict(precisions) if per_layer else next(iter(precisions.values()))
    return changes


def _determined(posterior: "LaplacePosterior", priors: Mapping[str, float], noise_factor: float) -> float:
    """γ at another noise."""
    return posterior.evidence(noise_factor).num_determined(priors)


def best_precisions(evidence: Evidence, start: Mapping[str, float], *, per_layer: bool) -> dict[str, float]:
    """The prior precisions of the largest marginal likelihood, by block: each its own, or all the same."""
    names = list(start)
    if per_layer:
        precisions = {name: evidence.best_precision([name], start[name]) for name in names}
    else:
        precisions = dict.fromkeys(names, evidence.best_precision(names, start[names[0]]))
    ends = [name for name in names if not LOWEST * 1.01 < precisions[name] < HIGHEST / 1.01]
    if ends:
        where = ", ".join(ends) if per_layer else "all layers"
        warn(
            f"the marginal likelihood has no maximum in the prior precision of {where}, which stays at "
            f"{precisions[ends[0]]:g}: the data say nothing about these weights, or all of them are 0; leave them out "
            "with subset= or give prior_precision="
        )
    return precisions


def best_noise(squared_errors: float, num_values: int, determined: Callable[[float], float], start: float) -> float:
    """The factor κ² of the noise variance that makes the marginal likelihood largest, for given priors.

    Args:
        squared_errors: R = Σ (y − f)²/σ² over the data, at the noise σ the curvature was taken with.
        num_values: the number of squares in R.
        determined: from κ² to γ.
        start: where the search begins.
    """

    def surplus(log_factor: float) -> float:
        # ∂/∂ log κ² of −R/2κ² − V/2 log κ² − ½ log|P|, P = N/κ² · information + τ, is ½ (R/κ² + γ − V)
        factor = math.exp(log_factor)
        return safe_log(squared_errors / factor + determined(factor)) - math.log(num_values)

    return math.exp(falling_root(surplus, math.log(start), math.log(1e-12), math.log(1e12)))


def falling_root(function: Callable[[float], float], start: float, low: float, high: float) -> float:
    """Where a falling function crosses 0, to `CLOSE`; the end of [low, high] that it does not reach it before.

    The first step is as long as the value is large: for a slope steeper than −1 the root lies inside it.
    """
    left = right = min(max(start, low), high)
    at_left = at_right = function(left)
    if abs(at_left) < CLOSE:
        return left
    step = abs(at_left) if math.isfinite(at_left) else high - low
    while at_left < 0 and left > low:
        right, at_right = left, at_left
        left, step = max(low, left - step), 2 * step
        at_left = function(left)
    while at_right > 0 and right < high:
        left, at_left = right, at_right
        right, step = min(high, right + step), 2 * step
        at_right = function(right)
    if at_left <= 0 or at_right >= 0:
        return left if at_left <= 0 else right
    last = 0
    while right - left > CLOSE:
        # False position; an end that stays twice counts half [Illinois]; infinite values are bisected.
        share = at_left / (at_left - at_right)
        middle = left + (right - left) * (share if 0 < share < 1 else 0.5)
        value = function(middle)
        if abs(value) < CLOSE:
            return middle
        if value > 0:
            left, at_left, at_right = middle, value, at_right / 2 if last > 0 else at_right
        else:
            right, at_right, at_left = middle, value, at_left / 2 if last < 0 else at_left
        last = 1 if value > 0 else -1
    return (left + right) / 2


def safe_log(value: float) -> float:
    """Its logarithm, minus infinity at 0."""
    return math.log(value) if value > 0 else -math.inf


def squared_norm(normal: StructuredNormal) -> float:
    """|w|² of the mean."""
    return float(total(normal.mean.square()))
