"""Attention and recurrent layers read as single products answer what PyTorch's own do, whatever they are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from dubito.layers.passes import asking
from dubito.layers.record import Record


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answers(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any, set[str]]:
    """What the layer answers, what it answers when its uses are recorded, and the weights that were used."""
    layer = layer.double().eval()
    record = Record()
    with torch.no_grad():
        truth = layer(*args, **kwargs)
        with asking(layer, record, [name for name, _ in layer.named_parameters()]) as shell:
            read = shell(*args, **kwargs)
    for call in record.calls:
        assert call.active is None or call.active.shape == call.inputs.shape[:-1]
    return truth, read, {call.weight for call in record.calls if call.weight is not None}


def same(one: Any, two: Any) -> None:
    if isinstance(one, PackedSequence):
        assert isinstance(two, PackedSequence)
        assert torch.equal(one.batch_sizes, two.batch_sizes)
        for a, b in ((one.sorted_indices, two.sorted_indices), (one.unsorted_indices, two.unsorted_indices)):
            assert a is b or torch.equal(a, b)
        same(one.data, two.data)
    elif isinstance(one, tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            same(a, b)
    elif one is None:
        assert two is None
    else:
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-13)


ATTENTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "time first": {"batch_first": False},
    "without bias": {"bias": False},
    "other widths": {"kdim": 5, "vdim": 4},
    "biases of keys and values": {"add_bias_kv": True, "add_zero_attn": True},
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str) -> None:
    options = {"batch_first": True, "dropout": 0.4} | ATTENTIONS[name]
    layer = nn.MultiheadAttention(6, 2, **options)
    for number, parameter in enumerate(layer.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(number))
    query, key, value = normal(3, 4, 6), normal(3, 5, layer.kdim, seed=1), normal(3, 5, layer.vdim, seed=2)
    if not layer.batch_first:
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
    padding = torch.arange(5).expand(3, 5) > torch.tensor([[4], [2], [3]])
    mask = normal(6, 4, 5, seed=3)
    for call in (
        {},
        {"need_weights": False, "key_padding_mask": padding},
        {"attn_mask": mask, "average_attn_weights": False},
        {"attn_mask": mask[0] > 1, "key_padding_mask": padding},
    ):
        one, two, names = answers(layer, query, key, value, **call)
        same(one, two)
        assert names == {name for name, p in layer.named_parameters() if p.ndim == 2}
    if layer.kdim == layer.vdim == 6:
        causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
        one, two, _ = answers(layer, query, query, query, attn_mask=causal, is_causal=True, need_weights=False)
        same(one, two)


RECURRENT: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, deep": (nn.LSTM, {"num_layers": 3, "bidirectional": True, "dropout": 0.3}),
    "lstm, projected": (nn.LSTM, {"num_layers": 2, "proj_size": 2, "bidirectional": True}),
    "gru": (nn.GRU, {"bias": False}),
    "gru, deep": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "rnn": (nn.RNN, {"num_layers": 2}),
    "rnn of relus": (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, batch_first: bool) -> None:
    kind, options = RECURRENT[name]
    layer = kind(4, 3, batch_first=batch_first, **options)
    inputs = normal(5, 6, 4) if batch_first else normal(6, 5, 4)
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h, c = normal(count, 5, layer.proj_size or 3, seed=1), normal(count, 5, 3, seed=2)
    state = (h, c) if kind is nn.LSTM else h
    lengths = torch.tensor([6, 2, 4, 1, 4])
    packed = pack_padded_sequence(inputs, lengths, batch_first, enforce_sorted=False)
    in_order = pack_padded_sequence(inputs, torch.tensor([6, 4, 4, 2, 1]), batch_first)
    for args in ((inputs,), (inputs, state), (packed,), (packed, state), (in_order, state)):
        one, two, names = answers(layer, *args)
        same(one, two)
        assert names == {name for name, _ in layer.named_parameters() if name.startswith("weight")}


@pytest.mark.parametrize(
    ("kind", "options"),
    [(nn.LSTMCell, {}), (nn.GRUCell, {"bias": False}), (nn.RNNCell, {}), (nn.RNNCell, {"nonlinearity": "relu"})],
)
def test_recurrent_cells(kind: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    layer, h = kind(4, 3, **options), normal(5, 3, seed=1)
    state = (h, normal(5, 3, seed=2)) if kind is nn.LSTMCell else h
    for args in ((normal(5, 4),), (normal(5, 4), state)):
        one, two, names = answers(layer, *args)
        same(one, two)
        assert names == {"weight_ih", "weight_hh"}
