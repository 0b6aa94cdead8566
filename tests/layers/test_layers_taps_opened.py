"""Opened layers answer what PyTorch's own do, and convolutions' second moments are those of their patches."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from dubito.layers.convolutions import Convolution
from dubito.layers.opened import opened
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from dubito.layers.uses import mirrored


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def answers(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any, list[str]]:
    """What the layer answers, what it answers when opened, and the keys of the products it showed."""
    layer = layer.double().eval()
    keys: list[str] = []

    def recorder(key: str, x: Tensor, y: Tensor, active: Tensor | None = None) -> Tensor:
        assert len(x) == len(y) and x.shape[:-1] == y.shape[:-1]
        assert active is None or active.shape == x.shape[:-1]
        keys.append(key)
        return y

    class Ports(dict[str, str]):
        def __contains__(self, key: object) -> bool:
            return True

        def __missing__(self, key: str) -> str:
            return key

    with torch.no_grad():
        return layer(*args, **kwargs), opened(layer, Ports(), recorder)(*args, **kwargs), keys


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
        one, two, keys = answers(layer, query, key, value, **call)
        same(one, two)
        assert keys == ["q", "k", "v", "out_proj"]
    if layer.kdim == layer.vdim == 6:
        causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
        one, two, _ = answers(
            layer, query, query, query, attn_mask=causal, is_causal=True, need_weights=False
        )
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
        one, two, keys = answers(layer, *args)
        same(one, two)
        assert set(keys) == {name for name, _ in layer.named_parameters() if name.startswith("weight")}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTMCell, {}),
        (nn.GRUCell, {"bias": False}),
        (nn.RNNCell, {}),
        (nn.RNNCell, {"nonlinearity": "relu"}),
    ],
)
def test_recurrent_cells(kind: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    layer, h = kind(4, 3, **options), normal(5, 3, seed=1)
    state = (h, normal(5, 3, seed=2)) if kind is nn.LSTMCell else h
    for args in ((normal(5, 4),), (normal(5, 4), state)):
        one, two, keys = answers(layer, *args)
        same(one, two)
        assert keys == ["weight_ih", "weight_hh"]


# -- second moments of patches -----------------------------------------------------------------------------------


def moment(layer: nn.Module, x: Tensor) -> Tensor:
    """Σ a aᵀ over patches [G, n, n], columns in the weight's order, by plain indexing."""
    pads = layer._reversed_padding_repeated_twice
    x = F.pad(x, pads, mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode)
    spans = [(k - 1) * d + 1 for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
    starts = [
        range(0, size - s + 1, step) for size, s, step in zip(x.shape[2:], spans, layer.stride, strict=True)
    ]
    total = torch.zeros(())
    for start in product(*starts):
        window = [slice(a, a + s, d) for a, s, d in zip(start, spans, layer.dilation, strict=True)]
        patch = x[(slice(None), slice(None), *window)].reshape(len(x), layer.groups, -1)
        total = total + torch.einsum("bgi,bgj->gij", patch, patch)
    return total


MOMENTS: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "3x3": (nn.Conv2d(8, 2, 3, padding=1), (8, 6, 5), True),
    "valid 5x5": (nn.Conv2d(8, 2, 5), (8, 12, 11), True),
    "wide padding": (nn.Conv2d(8, 2, 3, padding=3), (8, 6, 5), True),
    "one padded side": (nn.Conv2d(8, 2, (3, 3), padding=(0, 1)), (8, 6, 5), True),
    "even kernel": (nn.Conv2d(8, 2, (2, 4), padding="same"), (8, 7, 6), True),
    "dilated": (nn.Conv2d(8, 2, 3, padding=2, dilation=2), (8, 9, 8), True),
    "grouped": (nn.Conv2d(24, 6, 3, padding=1, groups=3), (24, 6, 5), True),
    "circular": (nn.Conv2d(8, 2, 3, padding=1, padding_mode="circular"), (8, 6, 7), True),
    "reflect": (nn.Conv2d(8, 2, (1, 3), padding=(0, 2), padding_mode="reflect"), (8, 6, 7), True),
    "1d": (nn.Conv1d(9, 2, 4, padding=2), (9, 20), True),
    "3d": (nn.Conv3d(8, 2, (3, 2, 3), padding=(1, 0, 1)), (8, 4, 5, 6), True),
    "strided": (nn.Conv2d(8, 2, 3, padding=1, stride=2), (8, 6, 5), False),
    "few channels": (nn.Conv2d(3, 2, 3, padding=1), (3, 6, 5), False),
    "small image": (nn.Conv2d(8, 2, 3, padding=1), (8, 2, 2), False),
    "kernel as large as the image": (nn.Conv2d(8, 2, (4, 3)), (8, 4, 3), False),
    "pointwise": (nn.Conv2d(8, 2, 1), (8, 4, 3), False),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MOMENTS)
def test_second_moments_of_patches(name: str, dtype: torch.dtype) -> None:
    layer, shape, shifted = MOMENTS[name]
    use, x = Convolution(layer), normal(5, *shape).to(dtype)
    assert use._shifts_pay(x) is shifted
    sums = torch.zeros(use.groups, use.columns, use.columns, dtype=dtype)
    use.add_moment(sums, x)
    use.add_moment(sums, x)  # sums are added to
    place = torch.arange(use.columns) if use.order is None else use.order.argsort()
    own = mirrored(sums)[:, place][:, :, place]
    expected = 2 * moment(layer, x.double())
    error = (own.double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    total = use.inputs(x).sum((0, 2))
    torch.testing.assert_close(use.total(x), total)
