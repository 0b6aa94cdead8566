"""Predictions of the components of a mixture, as one."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from .base import Prediction
from .classes import BernoulliPrediction, CategoricalPrediction, ClassPrediction
from .formulas import Weights, averaged, log_mean_exp, variance


def mixed(parts: Sequence[Prediction], weights: Weights = None) -> Prediction:
    """The mixture of predictions of the same rows, one per component, each with its `function_mean`.

    Draws that are kept are those of the mixture, where draw s belongs to component s mod K.

    Args:
        parts: of one kind, of as many draws each.
        weights: of the components; None where all count alike.
    """
    first = parts[0]
    per_draw = [item.name for item in fields(first) if item.metadata.get("rows") == 1]
    stacks = {name: [getattr(part, name) for part in parts] for name in per_draw}
    draws = max((len(tensor) for tensor in (s[0] for s in stacks.values()) if tensor is not None), default=1)
    changes: dict[str, Any] = {
        name: torch.stack([tensor.expand(draws, *tensor.shape[1:]) for tensor in stack], 1).flatten(0, 1)
        for name, stack in stacks.items()
        if stack[0] is not None
    }
    if not isinstance(first, ClassPrediction):
        return replace(first, **changes, weights=weights)

    def components(name: str) -> Tensor:
        return torch.stack([getattr(part, name) for part in parts])

    for name in ("log_probs", "log_complements"):
        if hasattr(first, name):
            changes[name] = log_mean_exp(components(name), weights)
    between = variance(components("function_mean"), weights)
    if isinstance(first, CategoricalPrediction):
        between = between.mean(first.class_axis)
    assert isinstance(first, CategoricalPrediction | BernoulliPrediction)
    return replace(
        first,
        **changes,
        aleatoric=averaged(components("aleatoric"), weights),
        # Var[f] = E[Var[f|k]] + Var[E[f|k]]
        function_variance=averaged(components("function_variance"), weights) + between,
        function_mean=averaged(components("function_mean"), weights),
        weights=weights,
    )
