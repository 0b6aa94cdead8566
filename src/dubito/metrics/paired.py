"""Losses of the same rows under two predictions: which is lower, and is it by more than chance?"""

from math import inf

from torch import Tensor

from ..errors import DataError
from ..hints import require_dense

#: A difference that nobody would act on, in nats a row.
NEGLIGIBLE = 0.005


def wins(losses: Tensor, reference: Tensor, margin: float = 0.0, *, errors: float = 1.0) -> bool:
    """Whether losses are lower than others of the same rows by more than chance, and a margin.

    Args:
        losses: one per row, [B].
        reference: of the same rows.
        margin: a gain that nobody would act on.
        errors: paired standard errors that the gain must exceed: more where the losses are the best of many.
    """
    gain, error = paired_gain(losses, reference)
    return gain > max(errors * error, margin)


def paired_gain(losses: Tensor, reference: Tensor) -> tuple[float, float]:
    """By how much losses are lower than others of the same rows: the mean difference and its standard error.

    One row has no standard error: it is infinite. Losses that are not all finite lose for sure to those that are.

    Args:
        losses: one per row, [B].
        reference: of the same rows.
    """
    for name, values in (("losses", losses), ("reference", reference)):
        if not isinstance(values, Tensor):
            raise DataError(f"{name} must be a tensor, got {type(values).__name__}")
        require_dense(name, values)
    if losses.ndim != 1 or losses.shape != reference.shape or not len(losses):
        shapes = f"{tuple(losses.shape)} and {tuple(reference.shape)}"
        raise DataError(f"losses must be one number for each of the same rows, [B], got {shapes}")
    finite, finite_before = (bool(values.isfinite().all()) for values in (losses, reference))
    if not (finite and finite_before):
        return 0.0 if finite == finite_before else inf if finite else -inf, 0.0
    gains = reference.double() - losses.double()
    return float(gains.mean()), float(gains.std()) / len(gains) ** 0.5 if len(gains) > 1 else inf
