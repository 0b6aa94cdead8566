"""Kronecker factors inside attention and recurrent layers: those of the same network made of plain Linear layers."""

import pytest
import torch
from curvature_reference import close, fitted, normal
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dubito.curvature import Statistics

ROWS = 7


class Recurrent(nn.Module):
    """An LSTM or a GRU by PyTorch, whose sequences may have lengths of their own."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            return self.head(self.layer(inputs)[0].sin().sum(1))
        packed = pack_padded_sequence(inputs, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(outputs.sin().sum(1))


class ByHand(nn.Module):
    """The same of two Linear layers: the inputs' called once, the state's once per step."""

    def __init__(self, other: Recurrent) -> None:
        super().__init__()
        size = len(other.layer.weight_ih_l0)
        self.ih, self.hh, self.head = nn.Linear(4, size), nn.Linear(3, size), other.head
        self.ih.weight, self.ih.bias = other.layer.weight_ih_l0, other.layer.bias_ih_l0
        self.hh.weight, self.hh.bias = other.layer.weight_hh_l0, other.layer.bias_hh_l0
        self.gated = isinstance(other.layer, nn.LSTM)

    def forward(self, inputs: Tensor) -> Tensor:
        h = c = inputs.new_zeros(len(inputs), 3)
        total = 0
        for x in self.ih(inputs).unbind(1):
            if self.gated:
                i, f, g, o = (x + self.hh(h)).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), self.hh(h).chunk(3, 1)
                z = torch.sigmoid(xz + hz)
                h = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
            total = total + h.sin()
        return self.head(total)


def factors(network: nn.Module, inputs: object) -> dict[str, Statistics]:
    count = len(inputs[0]) if isinstance(inputs, tuple) else len(inputs)
    targets = torch.zeros(count, dtype=torch.long)
    return fitted(network.double(), inputs, targets, kronecker=True, batch_size=3)[1]


def same(one: Statistics, two: Statistics) -> None:
    close(one.inputs, two.inputs, "A")
    close(one.gradients, two.gradients, "G")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    network, inputs = Recurrent(kind), normal(ROWS, 5, 4)
    one, two = factors(network, inputs), factors(ByHand(network), inputs)
    same(one["layer.weight_ih_l0"], two["ih"])
    same(one["layer.weight_hh_l0"], two["hh"])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences_count_each_row_by_its_own_length(kind: type[nn.RNNBase]) -> None:
    network, inputs = Recurrent(kind), normal(ROWS, 5, 4)
    lengths = torch.tensor([3, 5, 1, 4, 4, 2, 5])
    one = factors(network, (inputs, lengths))
    hand = ByHand(network)
    rows = [factors(hand, inputs[i : i + 1, : lengths[i]]) for i in range(ROWS)]
    for name, own in (("layer.weight_ih_l0", "ih"), ("layer.weight_hh_l0", "hh")):
        close(one[name].inputs, torch.stack([row[own].inputs for row in rows]).mean(0), name)
        close(one[name].gradients, torch.stack([row[own].gradients for row in rows]).mean(0), name)


class Attention(nn.Module):
    """Attention from three questions to the inputs, by PyTorch or by Linear layers."""

    def __init__(self, separate: bool) -> None:
        super().__init__()
        widths = {"kdim": 5, "vdim": 6} if separate else {}
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **widths)
        self.key, self.value = nn.Linear(4, self.attention.kdim), nn.Linear(4, self.attention.vdim)
        self.head = nn.Linear(4, 3)
        nn.init.normal_(self.attention.in_proj_bias, generator=torch.Generator().manual_seed(0))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attention(query, key, value)[0]

    def forward(self, inputs: Tensor) -> Tensor:
        query = inputs[:, :3].cos()
        return self.head(self.attend(query, self.key(inputs), self.value(inputs)).sin().mean(1))


class AttentionByHand(Attention):
    def __init__(self, other: Attention) -> None:
        super().__init__(not other.attention._qkv_same_embed_dim)
        attention = other.attention
        self.key, self.value, self.head = other.key, other.value, other.head
        del self.attention
        for part, (name, bias) in enumerate(zip("qkv", attention.in_proj_bias.detach().chunk(3), strict=True)):
            weight = attention.in_proj_weight
            own = weight.chunk(3)[part] if weight is not None else getattr(attention, f"{name}_proj_weight")
            layer = nn.Linear(own.shape[1], 4)
            layer.weight, layer.bias = nn.Parameter(own.detach().clone()), nn.Parameter(bias.clone())
            setattr(self, name, layer)
        self.out = nn.Linear(4, 4)
        self.out.weight, self.out.bias = attention.out_proj.weight, attention.out_proj.bias

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(2, (2, 2)).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        weights = (q @ k.mT / 2**0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("separate", [False, True])
def test_attention(separate: bool) -> None:
    network, inputs = Attention(separate).double(), normal(ROWS, 5, 4)
    hand = AttentionByHand(network).double()
    torch.testing.assert_close(hand(inputs), network(inputs))
    one, two = factors(network, inputs), factors(hand, inputs)
    same(one["attention.out_proj"], two["out"])
    for part, name in enumerate("qkv"):
        if separate:  # their biases stand in one tensor and are blocks of their own
            close(one[f"attention.{name}_proj_weight"].inputs, two[name].inputs[:, :-1, :-1], name)
            close(one[f"attention.{name}_proj_weight"].gradients, two[name].gradients, name)
        else:
            close(one["attention.in_proj_weight"].inputs[part : part + 1], two[name].inputs, name)
            close(one["attention.in_proj_weight"].gradients[part : part + 1], two[name].gradients, name)


class Frames(nn.Module):
    """A convolution over frames, flattened one way or the other, or frame by frame."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.conv, self.head = way, nn.Conv1d(8, 4, 3, padding=1), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.way == "apart":
            hidden = torch.stack([self.conv(frame) for frame in inputs.unbind(1)], 1)
        elif self.way == "flat":
            hidden = self.conv(inputs.flatten(0, 1)).unflatten(0, inputs.shape[:2])
        else:
            turned = inputs.transpose(0, 1)
            hidden = self.conv(turned.flatten(0, 1)).unflatten(0, turned.shape[:2]).transpose(0, 1)
        return self.head(hidden.sin().mean((1, 3)))


def test_frames_are_positions() -> None:
    networks = {way: Frames(way) for way in ("apart", "flat", "turned")}
    for network in networks.values():
        network.load_state_dict(networks["apart"].state_dict())
    found = {way: factors(network, normal(ROWS, 2, 8, 6)) for way, network in networks.items()}
    same(found["flat"]["conv"], found["apart"]["conv"])
    same(found["turned"]["conv"], found["apart"]["conv"])
