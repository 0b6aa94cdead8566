"""Recurrent layers as single products: the input side of all steps at once, the recurrent side step by step.

They answer what PyTorch's own functions answer, to rounding.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .context import Applied, Context
from .kinds import Declared, declares, kind
from .linear import dense, product

#: The attribute under which the data of a packed sequence say in which order its rows stand.
ORDER = "row_order"

#: The torch functions of this family, whose weights are used step by step.
MODES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
FUNCTIONS = frozenset((*MODES, *(f"{mode}_cell" for mode in MODES)))

State = tuple[Tensor, ...]


class Weights(NamedTuple):
    """The parameters of one direction of one layer."""

    ih: Tensor
    hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    projection: Tensor | None = None


class Settings(NamedTuple):
    """What a recurrent function is told beside its tensors."""

    mode: str
    layers: int
    directions: int
    dropout: float
    training: bool


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
        sums = torch.cat([inner * g, inner * cell, inner * i, state * shown], -1)
        slopes = gates * (1 - gates)
        size = cell.shape[-1]
        slopes[:, 2 * size : 3 * size] = 1 - g * g
        return sums * slopes, inner * f


def advance(at: Context, mode: str, x: Tensor, h: Tensor, state: State) -> State:
    """The next state (h,) or (h, c) from the projections of the inputs and of the state."""
    # Gradients of gradients are wanted, or transforms are at work: the function above knows neither.
    if mode == "lstm" and (at.keep_graph or torch._C._are_functorch_transforms_active()):
        i, f, g, o = (x + h).chunk(4, -1)
        after = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
        return o.sigmoid() * after.tanh(), after
    if mode == "lstm":
        return LSTMGates.apply(x + h, state[1])  # pyright: ignore[reportReturnType]
    if mode == "gru":
        reset_x, update_x, new_x = x.chunk(3, -1)
        reset_h, update_h, new_h = h.chunk(3, -1)
        update = torch.sigmoid(update_x + update_h)
        new = torch.tanh(torch.addcmul(new_x, torch.sigmoid(reset_x + reset_h), new_h))
        return (torch.lerp(new, state[0], update),)
    return ((x + h).tanh() if mode == "rnn_tanh" else (x + h).relu(),)


# -- functions of whole sequences --------------------------------------------------------------------------------


@kind(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def recurrent(at: Context, input: Tensor, *args: Any) -> Any:
    """Of nn.LSTM, nn.GRU and nn.RNN, whose inputs may be packed sequences."""
    mode = at.function
    if isinstance(args[2], bool):
        hx, flat, biased, layers, dropout, training, bidirectional, batch_first = args
        x, active = input if batch_first else input.transpose(0, 1), None
        settings = Settings(mode, layers, 1 + bidirectional, dropout, training)
        outputs, final = _sequences(at, x, _states(mode, hx), _weights(flat, biased, settings), settings, active)
        return (outputs if batch_first else outputs.transpose(0, 1), *final)
    sizes, hx, flat, biased, layers, dropout, training, bidirectional = args
    settings = Settings(mode, layers, 1 + bidirectional, dropout, training)
    return _packed(at, input, sizes, _states(mode, hx), _weights(flat, biased, settings), settings)


def _packed(at: Context, data: Tensor, sizes: Tensor, states: State, weights: list[Weights], settings: Settings) -> Any:
    """Packed rows stand by their lengths; they go through padded, in the order of the batch."""
    order: Tensor | None = getattr(data, ORDER, None)
    back = None if order is None else order.argsort()
    x, lengths = pad_packed_sequence(PackedSequence(data, sizes, order, back), batch_first=True)
    if back is not None:
        states = tuple(state[:, back] for state in states)
    active = torch.arange(x.shape[1], device=x.device) < lengths[:, None].to(x.device)
    outputs, final = _sequences(at, x, states, weights, settings, active)
    if order is not None:
        outputs, lengths = outputs[order], lengths[order.cpu()]
        final = tuple(state[:, order] for state in final)
    return (pack_padded_sequence(outputs, lengths, batch_first=True).data, *final)


def _states(mode: str, hx: Any) -> State:
    return tuple(hx) if mode == "lstm" else (hx,)


def _weights(flat: Sequence[Tensor], biased: bool, settings: Settings) -> list[Weights]:
    """The parameters of each direction of each layer."""
    count = len(flat) // (settings.layers * settings.directions)
    directions = (flat[start : start + count] for start in range(0, len(flat), count))
    plain = 4 if biased else 2
    return [
        Weights(
            params[0],
            params[1],
            params[2] if biased else None,
            params[3] if biased else None,
            params[plain] if count > plain else None,
        )
        for params in directions
    ]


def _sequences(
    at: Context, x: Tensor, first: State, weights: list[Weights], settings: Settings, active: Tensor | None
) -> tuple[Tensor, State]:
    """Outputs [N, T, features] of the last layer, and the last states of all layers and directions."""
    final: list[State] = []
    for layer in range(settings.layers):
        outputs = []
        for direction in range(settings.directions):
            state = tuple(part[len(final)] for part in first)
            chosen = weights[len(final)]
            hidden, state = _direction(at, settings.mode, x, chosen, state, active, reverse=direction == 1)
            outputs.append(hidden)
            final.append(state)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        if settings.dropout and layer + 1 < settings.layers:
            x = F.dropout(x, settings.dropout, settings.training)
    return x, tuple(torch.stack(parts) for parts in zip(*final, strict=True))


def _direction(
    at: Context, mode: str, x: Tensor, weights: Weights, state: State, active: Tensor | None, *, reverse: bool
) -> tuple[Tensor, State]:
    """One layer in one direction: the input projection of all steps at once, then step by step."""
    x = at.parted(x, *weights)
    sums = at.use(dense(*weights.ih.shape), x, weights.ih, weights.bias_ih, active=active).unbind(1)
    step = at.bound(dense(*weights.hh.shape), weights.hh, weights.bias_hh)
    short = None if weights.projection is None else at.bound(dense(*weights.projection.shape), weights.projection)
    state = _tiled(state, sums[0])
    if active is not None and active.shape[0] != sums[0].shape[0]:
        raise ValueError("packed sequences cannot be repeated inside of a pass")
    hidden = []
    for time in _times(len(sums), reverse):
        here = None if active is None else active[:, time]
        state = _stepped(at, mode, sums[time], step, short, state, here)
        hidden.append(state[0])
    return torch.stack(hidden[::-1] if reverse else hidden, 1), state


def _stepped(
    at: Context, mode: str, x: Tensor, step: Applied, short: Applied | None, state: State, here: Tensor | None
) -> State:
    """The state after one step; a sequence that has ended, or not yet begun, keeps its state."""
    new = advance(at, mode, x, step(state[0], active=here), state)
    if short is not None:
        new = (short(new[0], active=here), *new[1:])
    if here is None:
        return new
    return tuple(torch.where(here[:, None], after, before) for after, before in zip(new, state, strict=True))


def _tiled(state: State, sums: Tensor) -> State:
    """The first state for as many rows as the sums of the inputs have, where draws have parted there."""
    rows, before = sums.shape[0], state[0].shape[0]  # no `len`, which would fix the size in exported programs
    return state if rows == before else tuple(part.repeat(rows // before, 1) for part in state)


def _times(count: int, reverse: bool) -> Iterator[int]:
    yield from reversed(range(count)) if reverse else range(count)


def note_order(_: Any, args: tuple[Any, ...]) -> None:
    """Before a recurrent module of a shell runs: let a packed sequence's data say in which order its rows stand."""
    if args and isinstance(args[0], PackedSequence):
        setattr(args[0].data, ORDER, args[0].sorted_indices)


# -- cells -------------------------------------------------------------------------------------------------------


@kind(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell)
def cell(
    at: Context,
    input: Tensor,
    hx: Any,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """Of nn.LSTMCell, nn.GRUCell and nn.RNNCell."""
    mode = at.function[: -len("_cell")]
    state = _states(mode, hx)
    sums = product(at, at.parted(input, w_ih, w_hh, b_ih, b_hh), w_ih, b_ih)
    state = _tiled(state, sums)
    after = advance(at, mode, sums, product(at, state[0], w_hh, b_hh), state)
    return after if mode == "lstm" else after[0]


@declares(nn.RNNBase)
def recurrent_module(module: nn.RNNBase) -> Iterator[Declared]:
    """A product with the inputs and one with the state for each layer and direction; a projection has no bias."""
    function = module.mode.lower()
    for name, weight in module._parameters.items():
        if name.startswith("weight_") and weight is not None:
            bias = name.replace("weight", "bias", 1)
            yield Declared(name, bias if bias in module._parameters else None, dense(*weight.shape), function)


@declares(nn.RNNCellBase)
def cell_module(module: nn.RNNCellBase) -> Iterator[Declared]:
    """A product with the inputs and one with the state."""
    names = {nn.LSTMCell: "lstm_cell", nn.GRUCell: "gru_cell"}
    function = next((name for kind, name in names.items() if isinstance(module, kind)), "rnn_tanh_cell")
    for side in ("ih", "hh"):
        weight = module._parameters.get(f"weight_{side}")
        if weight is not None:
            yield Declared(f"weight_{side}", f"bias_{side}", dense(*weight.shape), function)
