"""Small formulas that predictions and likelihoods share."""

import math
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..devices import moved, on_host
from ..errors import DataError, NetworkError

#: Weights of K components; None where all draws count alike.
Weights: TypeAlias = tuple[float, ...] | None


def with_rows(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with its row axis (the second) expanded to `rows`."""
    return tensor.expand(tensor.shape[0], rows, *tensor.shape[2:]) if tensor.shape[1] != rows else tensor


def entropy(log_probs: Tensor, axis: int) -> Tensor:
    """-Σ p log p along `axis`, with 0 log 0 = 0."""
    if torch.compiler.is_compiling():  # two operators in place of eight
        return -(log_probs.exp() * log_probs.clamp(min=-1e4)).sum(axis)
    return torch.special.entr(log_probs.exp()).sum(axis)


class FunctionVariance:
    """The variance over draws of logits that come some draws at a time; of classes that of centred logits, their mean.

    A constant on all logits of a row changes no probability, and so is taken away. What is summed are differences to
    the first draw: of S draws, none is farther than √(S − 1) standard deviations from their mean, so that little
    cancels, however large the logits are; equal draws have a variance of exactly 0.

    Args:
        class_axis: of the classes in the logits of one draw, [B, ...]; None where each logit stands for itself.
    """

    def __init__(self, class_axis: int | None = None) -> None:
        self.class_axis, self.count = class_axis, 0
        self.first = self.sums = self.squares = self.latest = torch.zeros(())

    def add(self, logits: Tensor) -> None:
        """Take some more draws, [s, B, ...]."""
        self.latest = logits
        self.first = self.first if self.count else logits[0]
        change = logits - self.first
        if self.class_axis is not None:
            change -= change.mean(self.class_axis + 1, keepdim=True)
        self.sums, self.count = self.sums + change.sum(0), self.count + len(logits)
        self.squares = self.squares + change.square_().sum(0)

    def value(self) -> Tensor:
        """The variance over all draws so far, laid out like the logits of a draw without their classes."""
        if torch.compiler.is_compiling() and len(self.latest) == self.count:  # half as many operators
            axis = () if self.class_axis is None else (self.class_axis + 1,)
            centred = self.latest - self.latest.mean(axis, keepdim=True) if axis else self.latest
            return (centred - centred.mean(0)).square().mean((0, *axis))
        variance = (self.squares / self.count - (self.sums / self.count).square()).clamp(min=0)
        return variance if self.class_axis is None else variance.mean(self.class_axis)

    def mean(self) -> Tensor:
        """The mean over all draws so far, laid out like the logits of a draw; of classes centred."""
        mean = self.first + self.sums / self.count
        return mean if self.class_axis is None else mean - mean.mean(self.class_axis, keepdim=True)


def require_answers(answers: Tensor, axis: int = 0, first: int = 0, *, logarithms: bool = False) -> None:
    """Refuse answers that are no numbers, naming their rows; those of a device are not looked at.

    Args:
        answers: what a network, or a prediction made of it, says.
        axis: of the rows.
        first: the number of the first row.
        logarithms: whether minus infinity, the logarithm of 0, is an answer.
    """
    if not on_host(answers) or not answers.is_floating_point() or math.isfinite(answers.detach().sum()):
        return
    wrong = answers.isnan() if logarithms else ~answers.isfinite()
    rows = wrong.movedim(axis, 0).reshape(answers.shape[axis], -1).any(1).nonzero().flatten().tolist()
    if rows:
        named = ", ".join(str(first + row) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
        raise NetworkError(
            f"predictions must be finite, but {len(rows)} of {answers.shape[axis]} rows are answered by NaN or "
            f"infinity (rows {named}); look at these inputs, or, where it is all of them, at the weights"
        )


def sum_events(values: Tensor, start: int) -> Tensor:
    """The sum over all axes from `start` on."""
    return values.flatten(start).sum(start) if values.ndim > start else values


def per_row(values: Tensor) -> Tensor:
    """One number per row, [B]: the mean over its outputs and positions."""
    return values.reshape(len(values), -1).mean(1)


def std_per_row(stds: Tensor) -> Tensor:
    """One standard deviation per row, [B]: the geometric mean over outputs, so that rows rank alike in whatever units.

    A plain mean would be that of the output with the largest numbers.
    """
    return per_row(stds.log()).exp()


def log_sum_exp(draws: Tensor) -> Tensor:
    """Log Σ_s exp(draws_s) over the leading axis; a single draw costs no pass."""
    return draws[0] if len(draws) == 1 else draws.logsumexp(0)


def log_mean_exp(draws: Tensor, weights: Weights = None) -> Tensor:
    """Log Σ_s w_s exp(draws_s) over the leading axis; see `per_draw`."""
    if weights is not None:
        return (draws + per_draw(draws, weights).log()).logsumexp(0)
    return draws.logsumexp(0) - math.log(len(draws))


def averaged(draws: Tensor, weights: Weights = None) -> Tensor:
    """Σ_s w_s draws_s over the leading axis; see `per_draw`."""
    return draws.mean(0) if weights is None else (per_draw(draws, weights) * draws).sum(0)


def variance(draws: Tensor, weights: Weights = None) -> Tensor:
    """Σ_s w_s (draws_s − mean)² over the leading axis."""
    if weights is None:
        return draws.var(0, unbiased=False)
    return averaged((draws - averaged(draws, weights)).square(), weights)


def per_draw(draws: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Weights of S draws that sum to 1, [S, 1, ...]: draw s has an even share of the weight of component s mod K."""
    times = len(draws) // len(weights)
    return (draws.new_tensor(weights).repeat(times) / times).reshape(-1, *[1] * (draws.ndim - 1))


def labels_for(log_probs: Tensor, targets: Tensor, class_axis: int, ignored: int | None = None) -> Tensor:
    """Class numbers where the log-probabilities are; refused on the host where there is no such class.

    Labels that are `ignored` stay as they are.
    """
    expected = log_probs.shape[:class_axis] + log_probs.shape[class_axis:][1:]
    if targets.shape != expected:
        raise DataError(f"targets must have shape {tuple(expected)}, got {tuple(targets.shape)}")
    classes = log_probs.shape[class_axis]
    judged = targets if ignored is None or not on_host(targets) else targets[targets != ignored]
    if targets.is_floating_point() or (
        on_host(judged) and judged.numel() and (judged.min() < 0 or judged.max() >= classes)
    ):
        raise DataError(f"targets must be class numbers below {classes}")
    return moved(targets, log_probs.device, torch.long)


def gathered(log_probs: Tensor, labels: Tensor, class_axis: int, ignored: int | None = None) -> Tensor:
    """Log-probability of each row's labels, summed over positions, [B]; NaN where a device holds one that is none."""
    index = labels if on_host(labels) and ignored is None else labels.clamp(0, log_probs.shape[class_axis] - 1)
    chosen = log_probs.gather(class_axis, index.unsqueeze(class_axis)).squeeze(class_axis)
    if index is not labels:
        chosen = chosen.masked_fill(index != labels, math.nan)
    if ignored is not None:
        chosen = chosen.masked_fill(labels == ignored, 0.0)
    return sum_events(chosen, 1)


def aligned(targets: Tensor | np.ndarray, outputs: Tensor) -> Tensor:
    """Targets in the shape, device and dtype of the outputs; a missing or extra axis of size 1 is mended."""
    targets = moved(torch.as_tensor(targets), outputs.device, outputs.dtype)
    if targets.shape == outputs.shape:
        return targets
    if targets.ndim + 1 == outputs.ndim and outputs.shape[-1] == 1 and targets.shape == outputs.shape[:-1]:
        return targets.unsqueeze(-1)
    if targets.ndim == outputs.ndim + 1 and targets.shape[-1] == 1 and targets.shape[:-1] == outputs.shape:
        return targets.squeeze(-1)
    raise DataError(f"targets must have the outputs' shape {tuple(outputs.shape)}, got {tuple(targets.shape)}")


def not_binary(values: Tensor) -> tuple[int, ...] | None:
    """Where the first value stands that is neither 0 nor 1, if there is one; no device is asked."""
    if not on_host(values):
        return None
    wrong = (values != 0) & (values != 1)
    return tuple(wrong.nonzero()[0].tolist()) if wrong.any() else None


def normal_log_prob(errors: Tensor, *, std: Tensor | None = None, scale_tril: Tensor | None = None) -> Tensor:
    """Log N(errors | 0, ·): per element for `std`, joint over the last axis for `scale_tril`."""
    if scale_tril is None:
        assert std is not None
        return -0.5 * (errors / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)
    # log N(e | 0, L Lᵀ) = -½ |L⁻¹ e|² - Σ log L_ii - C/2 log 2π
    white = torch.linalg.solve_triangular(scale_tril, errors.unsqueeze(-1), upper=False).squeeze(-1)
    log_det = scale_tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return -0.5 * white.square().sum(-1) - log_det - 0.5 * errors.shape[-1] * math.log(2 * math.pi)
