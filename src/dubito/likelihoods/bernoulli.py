"""Yes or no, once or several times."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from ..inputs import RowNumbers, row_number
from ..prediction import BernoulliPrediction, FunctionVariance, aligned, entropy, log_sum_exp, not_binary, sum_events
from .base import BuiltLikelihood, Likelihood, at_least_float, real_outputs, stacks
from .moments import Targets


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no from logits, one or many per row; targets are 0 and 1."""

    def build(self, example_outputs: Tensor | None, example_targets: Targets | None = None) -> "BuiltLikelihood":
        return BernoulliLikelihood(self)


class BernoulliLikelihood(BuiltLikelihood):
    """See `Bernoulli`."""

    def check_outputs(self, outputs: Tensor) -> None:
        real_outputs("Bernoulli", outputs)

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        values = aligned(targets, outputs.new_empty(len(targets), *outputs.shape[1:]))
        wrong = not_binary(targets)
        if wrong is not None:
            raise DataError(
                f"Bernoulli targets must be 0 or 1, got {targets[wrong].item():g} at row {row_number(wrong[0], rows)}"
            )
        return values

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        return sum_events(-F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"), 1)

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        return (torch.special.ndtr(at_least_float(noise)) < outputs.detach().sigmoid()).to(outputs.dtype)

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        logits = outputs.detach()
        # −d² log p / df² = p(1 − p) = σ(f) σ(−f), which keeps its digits where p is close to 1
        root = (logits.sigmoid() * (-logits).sigmoid()).sqrt()
        return root.reshape(len(root), -1).diag_embed()

    def predictive(self, draws: Iterable[Tensor]) -> BernoulliPrediction:
        sums = aleatoric = torch.empty(())
        stored: list[Tensor] = []
        count, variance = 0, FunctionVariance()
        for logits in stacks(draws):  # [s, B, ...]
            variance.add(logits)
            pair = torch.stack([F.logsigmoid(-logits), F.logsigmoid(logits)], 1)  # [s, 2, B, ...]
            log_sum = log_sum_exp(pair)
            sums = log_sum if count == 0 else torch.logaddexp(sums, log_sum)
            aleatoric = entropy(pair, 1).sum(0) + (aleatoric if count else 0)
            if logits.ndim > 3 or (logits.ndim == 3 and logits.shape[2] > 1):
                stored.append(logits)
            count += len(logits)
        if count > 1:
            sums = sums.log_softmax(0)  # Σ_s p_s + Σ_s (1 − p_s) = S: this divides by S
        samples = torch.cat(stored) if stored else None
        moments: Any = {"function_variance": variance.value(), "function_mean": variance.mean()}
        return BernoulliPrediction(sums[1], aleatoric / count, sums[0], samples, **moments)
