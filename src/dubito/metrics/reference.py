"""How far predictions are from those of a reference, such as long chains of Hamiltonian Monte Carlo.

The scores of the NeurIPS 2021 competition on approximate inference [Wilson et al. 2022]: agreement and total variation
of class probabilities, and the Wasserstein-2 distance of draws of real targets. None of them needs labels. The distance
of two independent runs of the reference is the least that can be asked of an approximation.
"""

import torch
from torch import Tensor

from dubito.errors import DataError

from ._checks import finite, probabilities, same_shape


def agreement_per_example(probs: Tensor, reference: Tensor) -> Tensor:
    """Whether both find the same class most probable, as booleans [B]; of classes that tie, the lower one counts."""
    probs, reference = _both(probs, reference)
    return probs.argmax(1) == reference.argmax(1)


def agreement(probs: Tensor, reference: Tensor) -> float:
    """Share of examples whose most probable class is that of the reference.

    Args:
        probs: class probabilities [B, C], or those of class 1 of two, [B].
        reference: likewise, of the reference.
    """
    same = agreement_per_example(probs, reference)
    return int(same.sum()) / len(same)


def total_variation_per_example(probs: Tensor, reference: Tensor) -> Tensor:
    """Total variation distance of each example, [B], from 0 to 1."""
    probs, reference = _both(probs, reference)
    # ½ Σ_c |p_bc − q_bc|
    return (probs - reference).abs().sum(1) / 2


def total_variation(probs: Tensor, reference: Tensor) -> float:
    """Mean total variation distance, from 0 to 1; the arguments are those of `agreement`."""
    return float(total_variation_per_example(probs, reference).mean())


def wasserstein2_per_example(draws: Tensor, reference: Tensor) -> Tensor:
    """Wasserstein-2 distance of each example's draws, [B, ...], in the units of the targets.

    Args:
        draws: of the targets, or of the mean function, [S, B, ...], along the first axis.
        reference: draws of the reference, [T, B, ...].
    """
    draws, reference = finite("draws", draws), finite("reference", reference)
    if draws.ndim < 2 or draws.shape[1:] != reference.shape[1:]:
        raise DataError(
            f"draws [S, B, ...] and reference [T, B, ...] must have the same rows, got {list(draws.shape)} and "
            f"{list(reference.shape)}"
        )
    ordered, others = draws.sort(0).values, reference.to(draws).sort(0).values
    # W₂² = ∫₀¹ (F⁻¹(u) − G⁻¹(u))² du; both quantile functions are constant between neighbouring multiples of 1/S, 1/T
    count, count_others = len(ordered), len(others)
    ends = torch.cat([torch.arange(1, count + 1) * count_others, torch.arange(1, count_others + 1) * count]).unique()
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    widths = ((ends - starts).double() / (count * count_others)).to(ordered)
    squares = torch.zeros_like(ordered[0])
    for start, width in zip(starts.tolist(), widths, strict=True):
        squares += width * (ordered[start // count_others] - others[start // count]).square()
    return squares.sqrt()


def wasserstein2(draws: Tensor, reference: Tensor) -> float:
    """Mean Wasserstein-2 distance over examples and outputs; the arguments are those of `wasserstein2_per_example`."""
    return float(wasserstein2_per_example(draws, reference).mean())


def _both(probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    probs, reference = probabilities(probs), probabilities(reference)
    same_shape("probs", probs, "reference", reference)
    wider = torch.promote_types(probs.dtype, reference.dtype)  # rounding would make classes tie
    return probs.to(wider), reference.to(probs.device, wider)
