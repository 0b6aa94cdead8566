"""Attention and recurrent layers opened: forward passes made of single products, each of which can be tapped.

They answer what PyTorch's own answer, to rounding, but in evaluation mode only: there is no dropout in them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

#: From a port, a product's inputs [N, ..., n], its outputs [N, ..., m] and which positions count, to the outputs.
Recorder = Callable[..., Tensor]
#: The same by the product's key.
Record = Callable[..., Tensor]


def opened(module: nn.Module, ports: Mapping[str, Any], recorder: Recorder) -> Callable[..., Any]:
    """A forward pass for the module that records its products; those without a port are not recorded."""

    def record(key: str, x: Tensor, y: Tensor, active: Tensor | None = None) -> Tensor:
        return recorder(ports[key], x, y, active) if key in ports else y

    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, record)
    if isinstance(module, nn.RNNBase):
        return _recurrent(module, record)
    assert isinstance(module, nn.RNNCellBase)
    return _cell(module, record)


def batch_axis(module: nn.Module) -> int:
    """The axis of the module's inputs that holds the cases which do not touch each other."""
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return 0 if module.batch_first else 1
    return 0


# -- attention ------------------------------------------------------------------------------------------------


def projections(module: nn.MultiheadAttention) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of query, key and value."""
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    return list(zip(weights, biases, strict=True))


def _attention(module: nn.MultiheadAttention, record: Record) -> Callable[..., Any]:
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        turned = batch_axis(module) == 1
        projected = []
        for name, x, (weight, bias) in zip("qkv", (query, key, value), projections(module), strict=True):
            x = x.transpose(0, 1) if turned else x
            projected.append(record(name, x, F.linear(x, weight, bias)).transpose(0, 1))
        # PyTorch does the rest, with projections that change nothing: a product with the identity is exact.
        identity = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
        attended, weights = F.multi_head_attention_forward(
            *projected,
            embed_dim_to_check=module.embed_dim,
            num_heads=module.num_heads,
            in_proj_weight=None,
            in_proj_bias=None,
            bias_k=module.bias_k,
            bias_v=module.bias_v,
            add_zero_attn=module.add_zero_attn,
            dropout_p=0.0,
            out_proj_weight=identity,
            out_proj_bias=None,
            training=False,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=True,
            q_proj_weight=identity,
            k_proj_weight=identity,
            v_proj_weight=identity,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        attended = attended.transpose(0, 1)
        out = F.linear(attended, module.out_proj.weight, module.out_proj.bias)
        out = record("out_proj", attended, out)
        return out.transpose(0, 1) if turned else out, weights

    return forward


# -- recurrent layers -------------------------------------------------------------------------------------------


def _step(mode: str, x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The next state (h,) or (h, c) from the projections of the inputs and of the state."""
    if mode == "LSTM":
        i, f, g, o = (x + h).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    if mode == "GRU":
        (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
        z = (xz + hz).sigmoid()
        new = (xn + (xr + hr).sigmoid() * hn).tanh()
        return (new + z * (state[0] - new),)
    return ((x + h).tanh() if mode == "RNN_TANH" else (x + h).relu(),)


def _cell(module: nn.RNNCellBase, record: Record) -> Callable[..., Any]:
    mode = {nn.LSTMCell: "LSTM", nn.GRUCell: "GRU"}.get(type(module))  # pyright: ignore
    mode = mode or f"RNN_{module.nonlinearity.upper()}"  # pyright: ignore

    def forward(input: Tensor, hx: Any = None) -> Any:
        if hx is None:
            hx = (input.new_zeros(len(input), module.hidden_size),) * (2 if mode == "LSTM" else 1)
        elif mode != "LSTM":
            hx = (hx,)
        state: tuple[Tensor, ...] = tuple(hx)
        x = record("weight_ih", input, F.linear(input, module.weight_ih, module.bias_ih))
        h = record("weight_hh", state[0], F.linear(state[0], module.weight_hh, module.bias_hh))
        state = _step(mode, x, h, state)
        return state if mode == "LSTM" else state[0]

    return forward


def _recurrent(module: nn.RNNBase, record: Record) -> Callable[..., Any]:
    turned = batch_axis(module) == 1

    def run(x: Tensor, hx: Any, active: Tensor | None) -> tuple[Tensor, Any]:
        outputs, last = _layers(module, record, x, _initial(module, x, hx), active)
        states = tuple(torch.stack(each) for each in zip(*last, strict=True))
        return outputs, states if module.mode == "LSTM" else states[0]

    def forward(input: Any, hx: Any = None) -> tuple[Any, Any]:
        if isinstance(input, PackedSequence):
            return packed(input, hx)
        outputs, final = run(input.transpose(0, 1) if turned else input, hx, None)
        return outputs.transpose(0, 1) if turned else outputs, final

    def packed(input: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
        x, lengths = pad_packed_sequence(input, batch_first=True)  # [N, T, features], in the user's order
        active = torch.arange(x.shape[1], device=x.device) < lengths[:, None].to(x.device)
        outputs, final = run(x, hx, active)
        order = input.sorted_indices
        if order is not None:
            outputs, lengths = outputs[order], lengths[order.cpu()]
        data = pack_padded_sequence(outputs, lengths, batch_first=True).data
        return PackedSequence(data, input.batch_sizes, order, input.unsorted_indices), final

    return forward


def _initial(module: nn.RNNBase, x: Tensor, hx: Any) -> tuple[Tensor, ...]:
    """The first states (h,) or (h, c), [layers · directions, N, features]."""
    if hx is not None:
        return tuple(hx) if module.mode == "LSTM" else (hx,)
    count = module.num_layers * (2 if module.bidirectional else 1)
    h = x.new_zeros(count, len(x), module.proj_size or module.hidden_size)
    return (h, x.new_zeros(count, len(x), module.hidden_size)) if module.mode == "LSTM" else (h,)


def _layers(
    module: nn.RNNBase, record: Record, x: Tensor, first: tuple[Tensor, ...], active: Tensor | None
) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
    """Outputs [N, T, features] of the last layer, and the last states of all layers and directions."""
    last: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        outputs = []
        for suffix in ("", "_reverse") if module.bidirectional else ("",):
            state = tuple(each[len(last)] for each in first)
            hidden, state = _direction(module, record, f"_l{layer}{suffix}", x, state, active)
            outputs.append(hidden)
            last.append(state)
        x = torch.cat(outputs, -1)
    return x, last


def _direction(
    module: nn.RNNBase,
    record: Record,
    suffix: str,
    x: Tensor,
    state: tuple[Tensor, ...],
    active: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer in one direction: the input projection of all steps at once, then step by step."""
    own: dict[str, Any] = {
        part: getattr(module, f"{part}{suffix}", None)
        for part in ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh")
    }
    key = f"weight_ih{suffix}"
    projected = record(key, x, F.linear(x, own["weight_ih"], own["bias_ih"]), active)
    hidden: list[Tensor] = [x] * x.shape[1]
    steps = range(x.shape[1])
    for t in reversed(steps) if suffix.endswith("_reverse") else steps:
        here = None if active is None else active[:, t]
        h = F.linear(state[0], own["weight_hh"], own["bias_hh"])
        h = record(f"weight_hh{suffix}", state[0], h, here)
        new = _step(module.mode, projected[:, t], h, state)
        if own["weight_hr"] is not None:
            short = record(f"weight_hr{suffix}", new[0], F.linear(new[0], own["weight_hr"]), here)
            new = (short, *new[1:])
        if here is not None:  # a sequence that has ended, or not yet begun, keeps its state
            new = tuple(torch.where(here[:, None], a, b) for a, b in zip(new, state, strict=True))
        state = new
        hidden[t] = state[0]
    return torch.stack(hidden, 1), state
