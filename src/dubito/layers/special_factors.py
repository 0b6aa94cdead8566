"""Factors on tables of vectors, in recurrent steps, and added to weights."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .context import Applied
from .embedding import Lookup
from .form import Nodes
from .linear import Dense

if TYPE_CHECKING:
    from .factors import Factor, NodeFactors


def looked_up(form: Lookup, tokens: Tensor, table: Tensor, factors: "NodeFactors", rows: int) -> Tensor:
    """A token's vector times the token's factor, its coordinates times theirs."""
    vectors = form.apply(tokens, table, None)
    inputs, outputs = factors
    if inputs is not None:
        passes = len(inputs.mean)
        blocks = tokens.reshape(1 if tokens.shape[0] == rows else passes, rows, -1)
        scale = gathered(inputs, blocks).unsqueeze(-1)
        scaled = vectors.reshape(*blocks.shape, -1) * scale.to(vectors.dtype)
        vectors = scaled.reshape(tokens.shape[0] * passes // len(blocks), *vectors.shape[1:])
    return form.padded(tokens, vectors if outputs is None else outputs.on(vectors, rows, -1))


def gathered(factor: "Factor", nodes: Tensor) -> Tensor:
    """The factors of some nodes per row: nodes [1 or P, n, A] give [P, n, A]; for one axis of nodes."""
    assert not factor.given
    passes = len(factor.mean)
    nodes = nodes.expand(passes, -1, -1)
    flat = nodes.reshape(passes, -1)
    values = factor.mean.gather(1, flat).view(nodes.shape)
    if factor.std is not None and factor.noise is not None:
        noise = factor.noise if factor.noise.ndim == 3 else factor.noise.unsqueeze(0)
        drawn = noise.expand(passes, nodes.shape[1], -1).gather(2, nodes)
        values = torch.addcmul(values, factor.std.gather(1, flat).view(nodes.shape), drawn)
        values = values if factor.bounds == (None, None) else values.clamp(*factor.bounds)
    return values.exp() if factor.positive else values


def recurrent_step(weight: Tensor, factors: "NodeFactors", bias: Tensor | None, rows: int) -> Applied:
    """H ↦ (W (h ∘ s)) ∘ r + b for the states of all passes, with the factors of a whole sequence."""
    inputs, outputs = (None if side is None else side.tensor().expand(-1, rows, -1).flatten(0, 1) for side in factors)
    if bias is not None and bias.ndim == 3:
        bias = bias.flatten(0, 1)
    elif bias is not None and bias.ndim == 2:
        bias = bias.unsqueeze(1).expand(-1, rows, -1).flatten(0, 1)
    matrix = weight.mT

    def step(x: Tensor, active: Tensor | None = None) -> Tensor:
        nonlocal inputs, outputs, bias
        # Once, where a row has several cases (frames), each of which meets the row's factors.
        inputs, outputs, bias = (_for_cases(values, x.shape[0]) for values in (inputs, outputs, bias))
        y = (x if inputs is None else x * inputs) @ matrix
        if outputs is None:
            return y if bias is None else y + bias
        return y * outputs if bias is None else torch.addcmul(bias, y, outputs)

    return step


def _for_cases(values: Tensor | None, cases: int) -> Tensor | None:
    """Values [P·n, C] for as many cases, those of a row one after the other; a vector stays one."""
    if values is None or values.ndim == 1 or values.shape[0] == cases:
        return values
    return values.repeat_interleave(cases // values.shape[0], 0)


def summed(
    form: Nodes, x: Tensor, weight: Tensor, factors: "NodeFactors", bias: Tensor | None, passes: int, rows: int
) -> Tensor:
    """(W + r sᵀ) x + b = W x + r (sᵀ x) + b   [rank-1, Section 3.1: additive perturbations]."""
    inputs, outputs = factors
    assert inputs is not None and outputs is not None and isinstance(form, Dense)
    along = inputs.on(x, rows, -1).sum(-1, keepdim=True)  # sᵀ x, [P·n, ..., 1]
    change = outputs.on(along.expand(*along.shape[:-1], form.rows), rows, -1, bias)
    mean = form.apply(x, weight, None)
    return change + (mean if mean.shape[0] == change.shape[0] else mean.repeat(passes, *[1] * (mean.ndim - 1)))
