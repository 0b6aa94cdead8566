"""One of several classes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..devices import on_host
from ..errors import ConfigError, DataError, NetworkError, require_positive, warn
from ..inputs import RowNumbers, row_number
from ..prediction import CategoricalPrediction, FunctionVariance, entropy, log_sum_exp, sum_events
from .base import BuiltLikelihood, Likelihood, at_least_float, stacks
from .moments import Targets


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One of C classes from logits; targets are whole numbers.

    Args:
        class_axis: the axis of the outputs that holds the classes. None is 1, as in PyTorch's own losses, so that
            outputs [B, C, H, W] with targets [B, H, W] are one label per pixel; with `ignore_index` and outputs of
            three axes, [B, T, C], as language models have them, it is the last.
        class_weights: how often a training row of each class counts, one number per class; None for once. They are
            weights of rows: predictions and evaluations know nothing of them.
        ignore_index: a label that says nothing, such as Transformers' -100: such positions count nowhere, neither do
            rows that hold no other label, and rows may differ in length from batch to batch.
        shift: whether position t is judged by the label of position t + 1, as causal language models of Transformers
            shift their labels inside of their loss.
    """

    class_axis: int | None = None
    class_weights: tuple[float, ...] | None = None
    ignore_index: int | None = None
    shift: bool = False

    def __post_init__(self) -> None:
        if self.class_axis is None and self.ignore_index is None:
            object.__setattr__(self, "class_axis", 1)
        if self.class_axis == 0:
            raise ConfigError("class_axis must be a whole number other than 0, the axis of rows, got 0")
        if self.class_weights is not None:
            weights = {f"class_weights[{number}]": value for number, value in enumerate(self.class_weights)}
            require_positive(zero=True, **weights)
            if not sum(self.class_weights) > 0:
                raise ConfigError(f"class_weights must have a sum above 0, got {self.class_weights}")
            object.__setattr__(self, "class_weights", tuple(map(float, self.class_weights)))
        if self.shift and self.ignore_index is None:
            raise ConfigError("shift=True leaves the last position without a label: give ignore_index=-100 too")

    def build(self, example_outputs: Tensor | None, example_targets: Targets | None = None) -> "BuiltLikelihood":
        return CategoricalLikelihood(self.resolved(example_outputs))

    def resolved(self, outputs: Tensor | None) -> Self:
        """The settings with the axis of classes that outputs like these have."""
        if self.class_axis is not None or outputs is None:
            return self
        return replace(self, class_axis=self.axis(outputs))

    def axis(self, outputs: Tensor) -> int:
        """The axis of the classes in these outputs."""
        if self.class_axis is None:
            return 2 if outputs.ndim == 3 else 1
        return self.class_axis % outputs.ndim


class CategoricalLikelihood(BuiltLikelihood):
    """See `Categorical`."""

    settings: Categorical

    @property
    def ignores(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.settings.ignore_index is not None

    def check_outputs(self, outputs: Tensor) -> None:
        axis = self.settings.class_axis or self.settings.axis(outputs)
        exists = -outputs.ndim < axis < outputs.ndim  # neither beyond the last axis nor that of the rows
        if not exists or outputs.shape[axis] < 2 or not outputs.is_floating_point():
            raise NetworkError(
                f"Categorical needs real outputs [B, C, ...] with at least 2 classes on axis {axis}, "
                f"got {outputs.dtype}, {tuple(outputs.shape)}; for one logit use Bernoulli()"
            )
        weights = self.settings.class_weights
        if weights is not None and (outputs.ndim != 2 or len(weights) != outputs.shape[axis]):
            raise NetworkError(
                f"class_weights weigh rows with one label each, and need as many numbers as the network has outputs, "
                f"got {len(weights)} for outputs {tuple(outputs.shape)}"
            )

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
            raise DataError(f"Categorical targets must be whole numbers, got {targets.dtype}; use y.long()")
        axis = self._axis(outputs)
        expected = outputs.shape[:axis] + outputs.shape[axis + 1 :]
        ignored = self.settings.ignore_index
        same = targets.shape[1:] == expected[1:]
        if not (same if ignored is None else targets.ndim == len(expected)):  # rows of other lengths may come
            remedy = "y.squeeze(-1)" if targets.shape[-1] == 1 else f"one-hot targets: y.argmax({axis})"
            raise DataError(
                f"targets must have shape [B{''.join(f', {n}' for n in expected[1:])}], "
                f"got {tuple(targets.shape)}; {remedy}"
            )
        if self.settings.shift and ignored is not None:
            targets = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], ignored)], 1)
        seen = self.observed(targets)
        if not on_host(targets) or not (targets if seen is None else targets[seen]).numel():
            return targets.long()
        classes = outputs.shape[axis]
        low, high = (int(end) for end in (targets if seen is None else targets[seen]).aminmax())
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

    def observed(self, targets: Tensor) -> Tensor | None:
        return None if self.settings.ignore_index is None else targets != self.settings.ignore_index

    def mean_nll(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        plain = weights is None and outputs.ndim == 2 and self.settings.ignore_index is None
        if not plain or type(self).log_prob is not CategoricalLikelihood.log_prob:
            return super().mean_nll(outputs, targets, weights)
        return F.cross_entropy(outputs, targets)

    def row_weights(self, targets: Tensor, dtype: torch.dtype) -> Tensor | None:
        weights = self.settings.class_weights
        if weights is None:
            return None
        labels = targets.clamp(0, len(weights) - 1)  # those that are ignored weigh nothing anyway
        return torch.tensor(weights, dtype=dtype, device=targets.device)[labels]

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        classes, ignored = self._classes_second(outputs), self.settings.ignore_index
        if ignored is None:
            return sum_events(-F.cross_entropy(classes, targets, reduction="none"), 1)
        if targets.shape != classes[:, 0].shape:  # lengths that were not known when the data came in
            raise DataError(
                f"targets must have shape {tuple(classes[:, 0].shape)}, one label per position, got "
                f"{tuple(targets.shape)}; classes are read on axis {self._axis(outputs)}, which class_axis= sets"
            )
        return sum_events(-F.cross_entropy(classes, targets, ignore_index=ignored, reduction="none"), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        # Gumbel-max: argmax(logits + G), with -log U ~ Exp(1) from the upper tail, which keeps its digits.
        exponential = -torch.special.log_ndtr(at_least_float(noise))
        return (outputs.detach() - exponential.log()).argmax(self._axis(outputs))

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        probs = outputs.detach().movedim(self._axis(outputs), -1).softmax(-1)
        root = probs.sqrt()
        # (diag(√p) − p √pᵀ)(diag(√p) − p √pᵀ)ᵀ = diag(p) − p pᵀ, because √pᵀ√p = 1
        root = root.diag_embed() - probs.unsqueeze(-1) * root.unsqueeze(-2)
        seen = None if targets is None else self.observed(targets)
        return root if seen is None else root * seen[..., None, None]

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
        ignored = self.settings.ignore_index
        return CategoricalPrediction(log_probs, aleatoric / count, axis, samples, ignore_index=ignored, **moments)

    def _axis(self, outputs: Tensor) -> int:
        return self.settings.axis(outputs)

    def _classes_second(self, outputs: Tensor) -> Tensor:
        axis = self._axis(outputs)
        return outputs if axis == 1 else outputs.movedim(axis, 1)
