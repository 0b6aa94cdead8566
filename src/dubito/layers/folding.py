"""Node factors folded into weights: W ∘ r sᵀ, or W + r sᵀ."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from .convolution import Convolution, TransposedConvolution
from .embedding import Lookup
from .factor import NodeFactors
from .form import Nodes
from .kernels import Folded
from .layout import Layout
from .linear import Dense
from .uses import Use

Views = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def fold(use: Use, weight: Tensor, factors: NodeFactors, *, additive: bool = False) -> Tensor:
    """The weight with the factors of a single pass in it, which its rows share.

    The layer then answers (W ∘ r sᵀ) x = (W (x ∘ s)) ∘ r   [rank-1, Eq. 1]; additive factors give W + r sᵀ, the same
    at all positions of a kernel.
    """
    inputs, outputs = (None if factor is None else factor.tensor()[0, 0] for factor in factors)
    return fold_values(use.views, weight, inputs, outputs, additive=additive)


def fold_values(
    views: Views, weight: Tensor, inputs: Tensor | None, outputs: Tensor | None, *, additive: bool = False
) -> Tensor:
    """Likewise for factors of the nodes, with the shapes in which a weight, or a part of one, meets them."""
    view, input_view, output_view = views
    whole = weight if weight.shape == view else weight.reshape(view)
    s = None if inputs is None else inputs.reshape(input_view)
    r = None if outputs is None else outputs.reshape(output_view)
    if s is None or r is None:
        single = r if s is None else s
        folded = whole if single is None else whole * single
    elif additive:
        folded = whole + s * r
    elif torch.is_grad_enabled() and any(t.requires_grad for t in (whole, s, r)):
        folded = Folded.apply(whole, s, r)
    else:
        folded = (whole * s).mul_(r)
    assert isinstance(folded, Tensor)
    return folded if folded.shape == weight.shape else folded.reshape(weight.shape)


def folding_is_cheaper(form: Nodes, x: Tensor, weight: Tensor) -> bool:
    """Whether a weight has fewer numbers than the activations on both sides of it.

    Kernels always have; and the gradient for inputs that need none is saved.
    """
    if type(form) is not Dense:
        return True
    return x.numel() * (1 + form.rows / form.columns) > weight.numel()


def use_of_site(values: Mapping[str, Any]) -> Use:
    """The use behind what files of version 1 hold of a weight with factors: the shapes in which they meet it."""
    view, inputs = tuple(values["view"]), tuple(values["factor_view"])
    parts = view[0] if len(values["shape"]) == 2 else 1
    return Use(values["parameter"], None, _form(view, inputs, parts), "", Layout.UNKNOWN, parts=parts)


def _form(view: tuple[int, ...], inputs: tuple[int, ...], parts: int) -> Nodes:
    if parts > 1:
        return Dense(view[1], view[2])
    if len(view) == 2:
        return Dense(*view) if inputs == (1, view[1]) else Lookup(*view)
    groups, first, second, *kernel = view
    ones, zeros = (1,) * len(kernel), (0,) * len(kernel)
    if inputs[1] == 1:
        padding = tuple((0, 0) for _ in kernel)
        return Convolution(first, second * prod(kernel), tuple(kernel), ones, padding, ones, groups)
    return TransposedConvolution(second, first, tuple(kernel), ones, zeros, zeros, ones, groups)
