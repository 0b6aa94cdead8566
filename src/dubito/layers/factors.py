"""Passes in which layers answer with factors on their input and output nodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import NetworkError
from .context import Applied, Context
from .embedding import Lookup
from .factor import Factor, NodeFactors
from .folding import fold_values, folding_is_cheaper
from .form import Form, Nodes
from .kernels import Patches, first_convolution, is_first
from .kinds import NoRule, Standin, plain
from .linear import Dense


class Factors(Context):
    """Layers answer (W (x ∘ s)) ∘ r + b with the factors and biases of P passes.

    Rows stand pass by pass, [P·n, ...]. Inputs of n rows are repeated by the first layers with factors they meet.

    Args:
        factors: on the nodes of each weight, by its name.
        biases: [P, C] by name, or [P, n, C] where rows have their own; others are the same for all passes.
        passes: P.
        rows: n.
        additive: answer W x + r (sᵀ x) + b instead; for dense layers.
        patches: kept from one pass over a batch to the next, by convolutions that read the inputs.
    """

    def __init__(
        self,
        factors: Mapping[str, NodeFactors],
        biases: Mapping[str, Tensor] | None = None,
        *,
        passes: int,
        rows: int,
        additive: bool = False,
        patches: Patches | None = None,
    ) -> None:
        self.factors, self.biases = factors, {} if biases is None else biases
        self.passes, self.rows, self.additive = passes, rows, additive
        self.patches: Patches = {} if patches is None else patches

    @property
    def names(self) -> list[str]:
        """The parameters that must ask this context."""
        return [*self.factors, *self.biases]

    def begin(self, rows: int) -> None:
        """Inputs are those of one pass."""
        self.rows = rows

    def use(
        self,
        form: Form,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None = None,
        *,
        active: Tensor | None = None,
    ) -> Tensor:
        factors, biases = self._factors(weight), self._biases(bias)
        if factors is None and biases is None:
            return super().use(form, x, weight, bias, active=active)
        if isinstance(x, Standin):
            raise NoRule("another parameter is its input")
        if not isinstance(form, Nodes):
            raise NoRule("it stands between no nodes there")
        assert weight is not None
        factors = factors or NodeFactors()
        if biases is None:
            biases = plain(bias)
        if type(form) is Lookup:
            return self._lookup(form, x, plain(weight), factors)
        if self.additive and factors.inputs is not None:
            return self._sum(form, x, plain(weight), factors, biases)
        return self._product(form, x, weight, factors, biases)

    def _product(
        self, form: Nodes, x: Tensor, weight: Tensor, factors: NodeFactors, bias: Tensor | None
    ) -> Tensor:
        """(W (x ∘ s)) ∘ r + b."""
        value, (inputs, outputs) = plain(weight), factors
        single = bias is None or bias.ndim == 1
        if self.passes == 1 and single and not factors.per_row and folding_is_cheaper(form, x, value):
            s, r = (None if side is None else side.tensor()[0, 0] for side in factors)
            views = form.view, form.input_view, form.output_view
            return form.apply(x, fold_values(views, value, s, r), bias)
        inner = bias if single and outputs is None else None
        if inputs is not None and self.passes == 1 and inputs.per_row and is_first(form, x, value):
            name = weight.parameter if isinstance(weight, Standin) else ""
            y = first_convolution(form, x, inputs.tensor()[0], value, inner, self.patches, name)
        else:
            scaled = x if inputs is None else inputs.on(x, self.rows, form.channel_axis)
            y = form.apply(scaled, value, inner)
        if outputs is None and not single:
            assert bias is not None
            outputs = Factor(bias.new_ones(bias.shape[0], bias.shape[-1]))
        return y if outputs is None else outputs.on(y, self.rows, form.channel_axis, bias)

    def _sum(
        self, form: Nodes, x: Tensor, weight: Tensor, factors: NodeFactors, bias: Tensor | None
    ) -> Tensor:
        """(W + r sᵀ) x + b = W x + r (sᵀ x) + b."""
        inputs, outputs = factors
        assert inputs is not None and outputs is not None and isinstance(form, Dense)
        along = inputs.on(x, self.rows, -1).sum(-1, keepdim=True)  # sᵀ x, [P·n, ..., 1]
        change = outputs.on(along.expand(*along.shape[:-1], form.rows), self.rows, -1, bias)
        mean = form.apply(x, weight, None)
        return change + (
            mean if mean.shape[0] == change.shape[0] else mean.repeat(self.passes, *[1] * (mean.ndim - 1))
        )

    def _lookup(self, form: Lookup, tokens: Tensor, table: Tensor, factors: NodeFactors) -> Tensor:
        """A token's vector times the token's factor, its coordinates times theirs."""
        vectors = form.apply(tokens, table, None)
        inputs, outputs = factors
        if inputs is not None:
            passes = len(inputs.mean)
            blocks = tokens.reshape(1 if tokens.shape[0] == self.rows else passes, self.rows, -1)
            scale = inputs.gathered(blocks).unsqueeze(-1)
            scaled = vectors.reshape(*blocks.shape, -1) * scale.to(vectors.dtype)
            vectors = scaled.reshape(tokens.shape[0] * passes // len(blocks), *vectors.shape[1:])
        return form.padded(tokens, vectors if outputs is None else outputs.on(vectors, self.rows, -1))

    def bound(self, form: Form, weight: Tensor, bias: Tensor | None = None) -> Applied:
        """The recurrent side of one direction of one layer: its factors are the same at every step."""
        factors, added = self._factors(weight), self._biases(bias)
        if factors is None and added is None:
            return super().bound(form, weight, bias)
        if added is None:
            added = plain(bias)
        inputs, outputs = (
            None if side is None else side.tensor().expand(-1, self.rows, -1).flatten(0, 1)
            for side in factors or NodeFactors()
        )
        if added is not None and added.ndim == 3:
            added = added.flatten(0, 1)
        elif added is not None and added.ndim == 2:
            added = added.repeat_interleave(self.rows, 0)
        matrix = plain(weight).mT

        def step(x: Tensor, active: Tensor | None = None) -> Tensor:
            nonlocal inputs, outputs, added
            # Once, where a row has several cases (frames), each of which meets the row's factors.
            inputs, outputs, added = (_for_cases(values, x.shape[0]) for values in (inputs, outputs, added))
            y = (x if inputs is None else x * inputs) @ matrix
            if outputs is None:
                return y if added is None else y + added
            return y * outputs if added is None else torch.addcmul(added, y, outputs)

        return step

    def parted(self, x: Tensor, *parameters: Tensor | None) -> Tensor:
        carries = any(isinstance(parameter, Standin) for parameter in parameters)
        if self.passes == 1 or x.shape[0] != self.rows or not carries:
            return x
        return x.repeat(self.passes, *(1 for _ in x.shape[1:]))

    def without_rule(self, function: Any, standins: Sequence[Standin], reason: str | None) -> None:
        names = sorted({standin.parameter for standin in standins})
        raise NetworkError(
            f"the network must use {names} as it did on the rows it was surveyed with, but now "
            f"{getattr(function, '__name__', function)} uses them ({reason or 'there is no rule for it'}); leave them "
            "out by subset="
        )

    def _factors(self, weight: Tensor | None) -> NodeFactors | None:
        if not isinstance(weight, Standin):
            return None
        factors = self.factors.get(weight.parameter)
        return factors if factors is None or weight.parts == 1 else factors.part(weight.part)

    def _biases(self, bias: Tensor | None) -> Tensor | None:
        """Biases that differ between passes or rows, [P, C] or [P, n, C]; those of a single pass as [C]."""
        values = self.biases.get(bias.parameter) if isinstance(bias, Standin) else None
        if values is None:
            return None
        assert isinstance(bias, Standin)
        values = values if bias.parts == 1 else values.chunk(bias.parts, -1)[bias.part]
        return values[0] if values.ndim == 2 and values.shape[0] == 1 else values


def _for_cases(values: Tensor | None, cases: int) -> Tensor | None:
    """Values [P·n, C] for as many cases, those of a row one after the other; a vector stays one."""
    if values is None or values.ndim == 1 or values.shape[0] == cases:
        return values
    return values.repeat_interleave(cases // values.shape[0], 0)
