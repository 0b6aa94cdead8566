"""Methods as they look for a known posterior: a fixed Normal prior, known noise, temperature 1, no early stopping."""

from dataclasses import replace

from dubito import BALI, Laplace, MCDropout, NoisyAdam, NoisyKFAC, Vadam, methods
from dubito.inference.natural_gradient.methods import NaturalGradient
from dubito.inference.swag import SWA, SWAG
from dubito.method import Method
from dubito.training import Constant, Cosine, Training

from ..settings import explicit

#: Methods whose prior is the reference's.
SAME_PRIOR = (
    "map", "mc-dropout", "deep-ensemble", "swag", "mean-field", "k-tied", "noisy-adam", "vadam", "vogn", "noisy-kfac",
    "laplace-diag", "laplace-kfac", "laplace-efb", "laplace-inf",
)  # fmt: skip
#: Those whose prior is on other things: on factors, with weight decay on the rest, or BALI's own.
OTHER_PRIOR = ("batch-ensemble", "rank1", "implicit", "bali")
#: Rows per step of methods that take their spread from the noise of gradients; others see all rows in each step.
NOISY_ROWS, ALL_ROWS = 32, 4096
#: Times the recommended rate. Under small known noise the first gradients, and so the first curvatures, are large: at
#: the recommended rate the training rows were not fitted after 4,000 steps (squared errors of 13 instead of 0.3 units
#: of noise on yacht for Noisy K-FAC, of 1.2 instead of 0.4 for Vadam).
FASTER: dict[type[Method], float] = {NoisyKFAC: 10.0, Vadam: 3.0}


def targeting(name: str, prior_std: float, rows: int, iterations: int) -> tuple[Method, Training]:
    """A registered method under a prior, and a training of fixed length.

    Args:
        name: of the method.
        prior_std: of the reference's Normal prior around 0, on all weights.
        rows: of the training data, for weight decay.
        iterations: steps.
    """
    method, changes = methods()[name], {"batch_size": ALL_ROWS, "lr": 5e-3, "schedule": explicit(Cosine)}
    if isinstance(method, Laplace):
        method = replace(method, prior_precision=prior_std**-2)
    elif name in SAME_PRIOR:
        method = replace(method, prior_std=prior_std)  # pyright: ignore[reportCallIssue]
    elif not isinstance(method, BALI):
        changes["weight_decay"] = 1 / (prior_std**2 * rows)
    if isinstance(method, MCDropout):
        method = replace(method, rate=0.05)
    if isinstance(method, SWA | SWAG):
        changes |= {"batch_size": NOISY_ROWS, "lr": 2e-3, "schedule": explicit(Constant)}
    if isinstance(method, NaturalGradient):
        changes |= {"lr": method.recommended_lr * FASTER.get(type(method), 1.0)}
    if isinstance(method, NoisyAdam | Vadam):  # squares of a batch's mean gradient, which vanishes over all rows
        changes |= {"batch_size": NOISY_ROWS}
    return method, explicit(Training, iterations=iterations, **changes)
