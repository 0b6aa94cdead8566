"""Files of version 1: what they hold of a weight with factors, read as a use."""

from collections.abc import Mapping
from math import prod
from typing import Any

from .convolution import Convolution, TransposedConvolution
from .embedding import Lookup
from .form import Nodes
from .layout import Layout
from .linear import Dense
from .uses import Use


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
