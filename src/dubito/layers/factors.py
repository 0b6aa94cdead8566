"""Factors on the nodes of weights: what they are, and passes in which layers answer with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import NetworkError
from .context import Applied, Context
from .embedding import Lookup
from .form import Form, Nodes
from .kernels import Bounds, Scaled, ScaledDraw, as_blocks, fold_values, folding_is_cheaper, product
from .kinds import NoRule, Standin, plain
from .loop_kernels import Patches, first_convolution, is_first
from .special_factors import looked_up, recurrent_step, summed
from .stack import Stack
from .uses import Use


@dataclass(frozen=True)
class Factor:
    """P passes of factors on C nodes: mean, or mean + std · noise held between ±bound, or its exponential.

    Attributes:
        mean: [P, *C].
        std: [P, *C], of either sign; None where factors are points.
        noise: [n, *C], the same for all passes; [P, 1, *C] where the rows of a pass share a draw.
        bound: the largest absolute value; None sets no limit.
        positive: whether factors are exponentials.
        given: whether `mean` holds the factors of every row themselves, [P, n, *C].
    """

    mean: Tensor
    std: Tensor | None = None
    noise: Tensor | None = None
    bound: float | None = None
    positive: bool = False
    given: bool = False

    @property
    def bounds(self) -> Bounds:
        """Of mean + std · noise."""
        if self.bound is None:
            return None, None
        return (None, log(self.bound)) if self.positive else (-self.bound, self.bound)

    @property
    def per_row(self) -> bool:
        """Whether each row has factors of its own."""
        return self.given or (self.noise is not None and self.noise.ndim == self.mean.ndim)

    def tensor(self) -> Tensor:
        """The factors, [P, n or 1, *C]."""
        if self.given:
            return self.mean
        mean = self.mean.unsqueeze(1)
        if self.std is None or self.noise is None:
            return mean.exp() if self.positive else mean
        values = torch.addcmul(mean, self.std.unsqueeze(1), self.noise)
        values = values if self.bounds == (None, None) else values.clamp(*self.bounds)
        return values.exp() if self.positive else values

    def part(self, index: int) -> "Factor":
        """The factors of one part of nodes [parts, C]."""
        mean, std, noise = (
            None if values is None else values[..., index, :] for values in (self.mean, self.std, self.noise)
        )
        assert mean is not None
        return replace(self, mean=mean, std=std, noise=noise)

    def on(self, x: Tensor, rows: int, axis: int, bias: Tensor | None = None) -> Tensor:
        """X ∘ f (+ b) on the channels of activations, whose rows are those of all passes, or of one.

        Args:
            x: activations [P·n, ...] or, before passes part, [n, ...].
            rows: n.
            axis: of the channels.
            bias: [C], [P, C], or [P, n, C] where rows have their own.
        """
        passes = self.mean.shape[0]
        if rows == 1 and self._plain(x) and (bias is None or bias.ndim < 3):  # one row of every pass
            return product(x, self.mean, bias)
        if self.given and passes == 1 and bias is None and x.shape[0] == rows and not self.mean.requires_grad:
            return self._given_on(x, axis)
        if torch.compiler.is_compiling() and x.ndim == 2 and not self.per_row and (bias is None or bias.ndim < 3):
            # Few operators, of which each costs as much as a row's products do
            y = x.unflatten(0, (-1, rows)) * self.tensor()
            return (y if bias is None else y + (bias if bias.ndim == 1 else bias.unsqueeze(1))).flatten(0, 1)
        blocks = as_blocks(x, passes, rows, axis)
        added = None if bias is None else bias.reshape(*(*bias.shape[:-1], 1, 1)[:2], 1, bias.shape[-1], 1)
        if self.per_row and not self.positive and not self.given:
            assert self.std is not None and self.noise is not None
            wide = [t[:, None, None, :, None] for t in (self.mean, self.std)]
            out = ScaledDraw.apply(blocks, *wide, self.noise[None, :, None, :, None], added, self.bounds)
        else:
            out = Scaled.apply(blocks, self.tensor()[:, :, None, :, None], added)
        assert isinstance(out, Tensor)
        return out.reshape(x.shape[0] * passes // blocks.shape[0], *x.shape[1:])

    def _plain(self, x: Tensor) -> bool:
        """Whether the factors are numbers, one for each of x's, and nothing is traced or differentiated."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or self.std is not None or self.positive:
            return False
        return x.shape == self.mean.shape and x.dtype == self.mean.dtype

    def _given_on(self, x: Tensor, axis: int) -> Tensor:
        """X ∘ f with the factors of every row of one pass."""
        factors = self.mean[0].to(x.dtype)
        if x.ndim > 2:
            shape = [1] * x.ndim
            shape[0], shape[axis] = x.shape[0], x.shape[axis]
            factors = factors.reshape(shape)
        return x * factors


class NodeFactors(NamedTuple):
    """The factors on the input and on the output nodes of a weight; None where a side has none."""

    inputs: Factor | None = None
    outputs: Factor | None = None

    @property
    def per_row(self) -> bool:
        """Whether each row has factors of its own on some side."""
        inputs, outputs = self
        return (inputs is not None and inputs.per_row) or (outputs is not None and outputs.per_row)

    def part(self, index: int) -> "NodeFactors":
        """Those of one of the equal parts that a packed weight is cut in."""
        return NodeFactors(*(None if side is None else side.part(index) for side in self))


def fold(use: Use, weight: Tensor, factors: NodeFactors, *, additive: bool = False) -> Tensor:
    """The weight with the factors of a single pass in it, which its rows share.

    The layer then answers (W ∘ r sᵀ) x = (W (x ∘ s)) ∘ r   [rank-1, Eq. 1]; additive factors give W + r sᵀ, the same
    at all positions of a kernel.
    """
    inputs, outputs = (None if factor is None else factor.tensor()[0, 0] for factor in factors)
    return fold_values(use.views, weight, inputs, outputs, additive=additive)


class Factors(Context):
    """Layers answer (W (x ∘ s)) ∘ r + b with the factors and biases of P passes.

    Rows stand pass by pass, [P·n, ...]. Inputs of n rows are repeated by the first layers with factors they meet.

    Args:
        factors: on the nodes of each weight, by its name.
        biases: [P, C] by name, or [P, n, C] where rows have their own; others are the same for all passes. Those of
            fewer passes, whose number divides P, repeat.
        passes: P.
        rows: n.
        additive: answer W x + r (sᵀ x) + b instead; for dense layers.
        patches: kept from one pass over a batch to the next, by convolutions that read the inputs.
        repeated: whether the network's inputs are repeated before a pass, to P·n rows.
        stack: answers where a weight without factors differs between passes; its parameters ask too.
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
        repeated: bool = False,
        stack: Stack | None = None,
    ) -> None:
        self.factors, self.biases, self.repeated = factors, {} if biases is None else biases, repeated
        self.stack = stack
        self.passes, self.rows, self.additive = passes, rows, additive
        self.patches: Patches = {} if patches is None else patches

    @property
    def names(self) -> list[str]:
        """The parameters that must ask this context."""
        return list(dict.fromkeys([*self.factors, *self.biases, *(self.stack.names if self.stack else ())]))

    def begin(self, rows: int) -> None:
        """Inputs are those of one pass, or of all."""
        self.rows = rows // self.passes if self.repeated else rows
        if self.stack is not None:
            self.stack.begin(rows)

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        factors, biases = self._factors(weight), self._biases(bias)
        if factors is None and self.stack is not None:
            self.stack.number, self.stack.function = self.number, self.function
            return self.stack.use(form, x, weight, bias, active=active)
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
            return looked_up(form, x, plain(weight), factors, self.rows)
        if self.additive and factors.inputs is not None:
            return summed(form, x, plain(weight), factors, biases, self.passes, self.rows)
        return self._product(form, x, weight, factors, biases)

    def _product(self, form: Nodes, x: Tensor, weight: Tensor, factors: NodeFactors, bias: Tensor | None) -> Tensor:
        """(W (x ∘ s)) ∘ r + b   [rank-1, Eq. 1]."""
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

    def bound(self, form: Form, weight: Tensor, bias: Tensor | None = None) -> Applied:
        """The recurrent side of one direction of one layer: its factors are the same at every step."""
        factors, biases = self._factors(weight), self._biases(bias)
        if factors is None and (biases is None or self.stack is not None):
            return super().bound(form, weight, bias)
        added = plain(bias) if biases is None else biases
        return recurrent_step(plain(weight), factors or NodeFactors(), added, self.rows)

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
        if 1 < values.shape[0] < self.passes:
            values = values.repeat(self.passes // values.shape[0], *[1] * (values.ndim - 1))
        return values[0] if values.ndim == 2 and values.shape[0] == 1 else values
