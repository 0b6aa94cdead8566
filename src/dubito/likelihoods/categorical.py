"""One of several classes."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..devices import on_host
from ..errors import ConfigError, DataError, NetworkError, warn
from ..inputs import RowNumbers, row_number
from ..prediction import (
    CategoricalPrediction,
    FunctionVariance,
    entropy,
    log_sum_exp,
    sum_events,
)
from .base import BuiltLikelihood, Likelihood, at_least_float, stacks


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes from logits; targets are whole numbers.

    Args:
        class_axis: the axis of the outputs that holds the classes: 1 as in PyTorch's own losses, so that
            outputs [B, C, H, W] with targets [B, H, W] are one label per pixel.
    """

    class_axis: int = 1

    def __post_init__(self) -> None:
        if self.class_axis == 0:
            raise ConfigError("class_axis must be a whole number other than 0, the axis of rows, got 0")

    def build(
        self, example_outputs: Tensor | None, example_targets: Tensor | Iterable[Tensor] | None = None
    ) -> "BuiltLikelihood":
        return CategoricalLikelihood(self)


class CategoricalLikelihood(BuiltLikelihood):
    """See `Categorical`."""

    settings: Categorical

    def check_outputs(self, outputs: Tensor) -> None:
        axis = self.settings.class_axis
        exists = -outputs.ndim < axis < outputs.ndim  # neither beyond the last axis nor that of the rows
        if not exists or outputs.shape[axis] < 2 or not outputs.is_floating_point():
            raise NetworkError(
                f"Categorical needs real outputs [B, C, ...] with at least 2 classes on axis {axis}, "
                f"got {outputs.dtype}, {tuple(outputs.shape)}; for one logit use Bernoulli()"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(f"Categorical targets must be whole numbers, got {targets.dtype}; use y.long()")
        axis = self._axis(outputs)
        expected = outputs.shape[:axis] + outputs.shape[axis + 1 :]
        if targets.shape[1:] != expected[1:]:
            remedy = "y.squeeze(-1)" if targets.shape[-1] == 1 else f"one-hot targets: y.argmax({axis})"
            raise DataError(
                f"targets must have shape [B{''.join(f', {n}' for n in expected[1:])}], "
                f"got {tuple(targets.shape)}; {remedy}"
            )
        if not on_host(targets):
            return targets.long()
        classes = outputs.shape[axis]
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= classes:
            wrong = high if high >= classes else low
            row = row_number(int((targets == wrong).nonzero()[0][0]), rows)
            raise DataError(f"labels must lie in 0..{classes - 1} (the network has {classes} outputs), "
                            f"got {wrong} at row {row}")  # fmt: skip
        return targets.long()

    def warn(self, outputs: Tensor, targets: Tensor) -> None:
        axis = self._axis(outputs)
        rounding = 4 * outputs.shape[axis] * torch.finfo(outputs.dtype).eps
        if bool((outputs >= 0).all()) and bool(((outputs.sum(axis) - 1).abs() <= rounding).all()):
            warn(
                "the network's outputs are probabilities, as of a last Softmax, but Categorical() takes logits: its "
                "own softmax would flatten them; leave the last layer out, or take LogSoftmax"
            )

    def mean_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim != 2 or type(self).log_prob is not CategoricalLikelihood.log_prob:
            return super().mean_nll(outputs, targets)
        return F.cross_entropy(outputs, targets)

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        return sum_events(-F.cross_entropy(self._classes_second(outputs), targets, reduction="none"), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        # Gumbel-max: argmax(logits + G), with -log U ~ Exp(1) from the upper tail, which keeps its digits.
        exponential = -torch.special.log_ndtr(at_least_float(noise))
        return (outputs.detach() - exponential.log()).argmax(self._axis(outputs))

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        probs = outputs.detach().movedim(self._axis(outputs), -1).softmax(-1)
        root = probs.sqrt()
        # (diag(√p) − p √pᵀ)(diag(√p) − p √pᵀ)ᵀ = diag(p) − p pᵀ, because √pᵀ√p = 1
        return root.diag_embed() - probs.unsqueeze(-1) * root.unsqueeze(-2)

    def predictive(self, draws: Iterable[Tensor]) -> CategoricalPrediction:
        log_probs = aleatoric = torch.empty(())
        stored: list[Tensor] = []
        count, axis, variance = 0, 1, FunctionVariance()
        for outputs in stacks(draws):  # [s, B, ...]
            axis = variance.class_axis = self._axis(outputs[0])
            variance.add(outputs)
            some_log_probs = outputs.log_softmax(axis + 1)
            log_sum = log_sum_exp(some_log_probs)
            log_probs = log_sum if count == 0 else torch.logaddexp(log_probs, log_sum)
            aleatoric = entropy(some_log_probs, axis + 1).sum(0) + (aleatoric if count else 0)
            if log_probs.ndim > 2:
                stored.append(some_log_probs)
            count += len(outputs)
        samples = torch.cat(stored) if stored else None
        if count > 1:
            log_probs = log_probs.log_softmax(axis)  # Σ_c Σ_s p_sc = S: this divides by S, to 1 exactly
        moments: Any = {"function_variance": variance.value(), "function_mean": variance.mean()}
        return CategoricalPrediction(log_probs, aleatoric / count, axis, samples, **moments)

    def _axis(self, outputs: Tensor) -> int:
        return self.settings.class_axis % outputs.ndim

    def _classes_second(self, outputs: Tensor) -> Tensor:
        axis = self._axis(outputs)
        return outputs if axis == 1 else outputs.movedim(axis, 1)
