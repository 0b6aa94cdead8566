"""Recurrent layers with factors per row: drawn once per sequence, the input side of all steps in one product."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .values import Factor, Sides

#: From a weight's own name in its module to the factors on its sides, and to the biases [P, C] by their names.
Weights = dict[str, Sides]
Biases = dict[str, Tensor]


class LSTMGates(Function):
    """What an LSTM makes of its gates' sums [R, 4H], in the order input, forget, cell, output."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        gates = sums.sigmoid()
        size = cell.shape[-1]
        gates[:, 2 * size : 3 * size] = sums[:, 2 * size : 3 * size].tanh()
        i, f, g, o = gates.chunk(4, -1)
        after = torch.addcmul(f * cell, i, g)
        shown = after.tanh()
        ctx.save_for_backward(gates, cell, shown)
        return o * shown, after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        state, after = grads
        gates, cell, shown = ctx.saved_tensors
        i, f, g, o = gates.chunk(4, -1)
        # c' = f c + i g and h = o tanh(c'): σ' = σ (1 − σ), tanh' = 1 − tanh²
        inner = torch.addcmul(after, state * o, 1 - shown * shown)
        own = torch.cat([inner * g, inner * cell, inner * i, state * shown], -1)
        slopes = gates * (1 - gates)
        size = cell.shape[-1]
        slopes[:, 2 * size : 3 * size] = 1 - g * g
        return own * slopes, inner * f


def projected(x: Tensor, weight: Tensor, sides: Sides | None, bias: Tensor | None, rows: int) -> Tensor:
    """(W (x ∘ s)) ∘ r + b over the last axis, with biases [P, C], [1, C] or [P, n, C]."""
    inputs, outputs = sides or (None, None)
    if inputs is not None:
        x = inputs.on(x, rows, -1)
    if outputs is None and bias is not None and len(bias) == 1 and bias.ndim == 2:
        return F.linear(x, weight, bias[0])
    y = F.linear(x, weight)
    if outputs is None and bias is not None:
        outputs = Factor(bias.new_ones(len(bias), bias.shape[-1]))
    return y if outputs is None else outputs.on(y, rows, -1, bias)


class Step:
    """The recurrent side of one direction of one layer: W_hh with factors, ready for every step."""

    def __init__(self, weight: Tensor, sides: Sides | None, bias: Tensor | None, rows: int) -> None:
        def flat(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.expand(-1, rows, -1).flatten(0, 1)

        inputs, outputs = sides or (None, None)
        self.weight = weight.mT
        self.inputs = flat(None if inputs is None else inputs.tensor())
        self.outputs = flat(None if outputs is None else outputs.tensor())
        if bias is not None and bias.ndim == 2:  # [1, C] is for all rows
            bias = bias if len(bias) == 1 else bias.repeat_interleave(rows, 0)
        self.bias = bias if bias is None or bias.ndim == 2 else bias.flatten(0, 1)

    def __call__(self, state: Tensor) -> Tensor:
        """(W (h ∘ s)) ∘ r + b."""
        y = (state if self.inputs is None else state * self.inputs) @ self.weight
        if self.outputs is None:
            return y if self.bias is None else y + self.bias
        return y * self.outputs if self.bias is None else torch.addcmul(self.bias, y, self.outputs)


def advance(kind: str, x: Tensor, step: Step, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The state after one step, from the input side's sums [R, gates]."""
    h = state[0]
    if kind == "LSTM":
        return LSTMGates.apply(x + step(h), state[1])  # pyright: ignore[reportReturnType]
    if kind == "GRU":
        reset_x, update_x, new_x = x.chunk(3, -1)
        reset_h, update_h, new_h = step(h).chunk(3, -1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(torch.addcmul(new_x, torch.sigmoid(reset_x + reset_h), new_h))
        return (torch.lerp(new, h, update),)
    sums = x + step(h)
    return (sums.tanh() if kind == "RNN_TANH" else sums.relu(),)


def recurrent_forward(
    module: nn.RNNBase, weights: Weights, biases: Biases, rows: int, passes: int
) -> Callable[..., Any]:
    """The forward pass of nn.LSTM, nn.GRU or nn.RNN with factors per row on its weights."""

    def forward(input: Tensor, hx: Any = None) -> Any:
        x = input if module.batch_first else input.transpose(0, 1)
        total = passes * rows
        if len(x) == rows and passes > 1:
            x = x.repeat(passes, *(1 for _ in x.shape[1:]))
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(module.num_layers):
            sides = []
            for direction in range(2 if module.bidirectional else 1):
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                sums = projected(
                    x,
                    getattr(module, f"weight_ih{suffix}"),
                    weights.get(f"weight_ih{suffix}"),
                    biases.get(f"bias_ih{suffix}"),
                    rows,
                )
                step = Step(
                    getattr(module, f"weight_hh{suffix}"),
                    weights.get(f"weight_hh{suffix}"),
                    biases.get(f"bias_hh{suffix}"),
                    rows,
                )
                state = _start(module, hx, len(ends), x, total)
                states = []
                times = range(x.shape[1])
                columns = sums.unbind(1)
                for time in reversed(times) if direction else times:
                    state = advance(module.mode, columns[time], step, state)
                    states.append(state[0])
                ends.append(state)
                sides.append(torch.stack(states[::-1] if direction else states, 1))
            x = sides[0] if len(sides) == 1 else torch.cat(sides, -1)
            if layer + 1 < module.num_layers:
                x = F.dropout(x, module.dropout, module.training)
        final = tuple(torch.stack(parts) for parts in zip(*ends, strict=True))
        out = x if module.batch_first else x.transpose(0, 1)
        return out, final if module.mode == "LSTM" else final[0]

    return forward


def cell_forward(
    module: nn.RNNCellBase, weights: Weights, biases: Biases, rows: int, passes: int
) -> Callable[..., Any]:
    """The forward pass of nn.LSTMCell, nn.GRUCell or nn.RNNCell with factors per row on its weights."""
    kind = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}.get(type(module))
    kind = kind or f"RNN_{module.nonlinearity.upper()}"  # pyright: ignore

    def forward(input: Tensor, hx: Any = None) -> Any:
        total = passes * rows
        if len(input) == rows and passes > 1:
            input = input.repeat(passes, 1)
        if hx is None:
            zeros = input.new_zeros(total, module.hidden_size)
            state: tuple[Tensor, ...] = (zeros, zeros)
        else:
            state = tuple(hx) if kind == "LSTM" else (hx,)
            if len(state[0]) == rows and passes > 1:
                state = tuple(part.repeat(passes, 1) for part in state)
        own = module.weight_ih, weights.get("weight_ih"), biases.get("bias_ih")
        step = Step(module.weight_hh, weights.get("weight_hh"), biases.get("bias_hh"), rows)
        after = advance(kind, projected(input, *own, rows), step, state)
        return after if kind == "LSTM" else after[0]

    return forward


def _start(module: nn.RNNBase, hx: Any, index: int, x: Tensor, total: int) -> tuple[Tensor, ...]:
    """The state before the first step of one direction of one layer."""
    if hx is None:
        zeros = x.new_zeros(total, module.hidden_size)
        return zeros, zeros
    parts = tuple(hx) if module.mode == "LSTM" else (hx,)
    own = tuple(part[index] for part in parts)
    return tuple(part if len(part) == total else part.repeat(total // len(part), 1) for part in own)
