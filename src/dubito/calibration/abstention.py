"""When to abstain: the largest share of rows that can be answered with a guaranteed error rate.

`dubito.metrics.rejection_curve` shows what was gained on rows with known targets; this chooses a threshold on
calibration rows that holds for new ones.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DataError, require_fraction
from ..hints import Checked, checked

#: Shares of the calibration rows that may be answered, evenly spaced: so many thresholds are looked at.
LOOKS = 20


@dataclass(frozen=True, kw_only=True)
class Abstention:
    """A rule for which rows to answer.

    Attributes:
        threshold: the largest uncertainty that is answered; −inf where no error rate can be promised.
        coverage: the share of calibration rows that are answered.
        risk: their error rate.
        bound: what the error rate of new rows stays below with probability 1 − delta.
    """

    threshold: float
    coverage: float
    risk: float
    bound: float

    @checked
    def answered(self, uncertainty: Tensor) -> Tensor:
        """Which rows to answer, as booleans."""
        return uncertainty <= uncertainty.new_tensor(self.threshold)


@dataclass(frozen=True, kw_only=True)
class SelectiveRisk(Checked):
    """Answer as many rows as a promised error rate allows, in steps of a twentieth [after Geifman & El-Yaniv 2017].

    Args:
        risk: the error rate that answered rows may have.
        delta: the chance, over calibration rows, that the promise fails.
    """

    risk: float = 0.05
    delta: float = 0.05

    def __post_init__(self) -> None:
        require_fraction(zero=False, risk=self.risk, delta=self.delta)

    @checked
    def fit(self, uncertainty: Tensor, correct: Tensor) -> Abstention:
        """The rule, from rows that were not trained on.

        Args:
            uncertainty: of the predictions, [B]; higher means rejected earlier.
            correct: whether each is right, booleans [B].
        """
        values, right = torch.as_tensor(uncertainty).cpu(), torch.as_tensor(correct).cpu()
        if values.ndim != 1 or values.shape != right.shape or not len(values) or values.isnan().any():
            raise DataError(
                f"uncertainty and correct must be vectors of one length without NaN, got {list(values.shape)} and "
                f"{list(right.shape)}"
            )
        if right.dtype != torch.bool:
            raise DataError(f"correct must be booleans, got {right.dtype}")
        levels, counts = torch.unique(values, return_counts=True)  # ties are answered together or not at all
        answered = counts.cumsum(0).tolist()
        wrong = (~right)[values.argsort(stable=True)].cumsum(0)
        delta = self.delta / LOOKS  # the chance to fail is shared out among the thresholds that are looked at
        for look in range(LOOKS, 0, -1):
            place = bisect_left(answered, len(values) * look / LOOKS)
            count = answered[place]
            errors = int(wrong[count - 1])
            if log_chance(errors, count, self.risk) <= math.log(delta):  # the bound is at most the risk
                return Abstention(
                    threshold=float(levels[place]),
                    coverage=count / len(values),
                    risk=errors / count,
                    bound=error_bound(errors, count, delta),
                )
        return Abstention(threshold=-math.inf, coverage=0.0, risk=0.0, bound=0.0)


def error_bound(errors: int, count: int, delta: float) -> float:
    """The error rate p at which as few as `errors` among `count` would come up with chance `delta` only.

    Σ_{i ≤ k} C(n, i) pⁱ (1 − p)ⁿ⁻ⁱ = δ, solved for p [Clopper & Pearson 1934].
    """
    if errors == count:
        return 1.0
    low, high = errors / count, 1.0
    for _ in range(60):  # one bit each
        p = (low + high) / 2
        low, high = (p, high) if log_chance(errors, count, p) > math.log(delta) else (low, p)
    return high


def log_chance(errors: int, count: int, p: float) -> float:
    """Log Σ_{i ≤ k} C(n, i) pⁱ (1 − p)ⁿ⁻ⁱ: at most `errors` among `count` at an error rate of p."""
    i = torch.arange(errors + 1, dtype=torch.float64)
    n = torch.tensor(float(count), dtype=torch.float64)
    ways = torch.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma(n - i + 1)
    return float((ways + i * math.log(p) + (n - i) * math.log1p(-p)).logsumexp(0))
