"""The rows of the layer contract: small networks, each around one torch function.

A row's layer maps [B, ...] to [B, ...]; `Network` makes two outputs of what it answers, by a nonlinear function
without parameters, so that the row's parameters are the function's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dubito.layers import Layout

#: Positions of a row where rows stand on an axis with others.
POSITIONS = 3

FLAT = (Layout.FLAT, Layout.FLAT_SECOND)
ALL = (Layout.SECOND, *FLAT)

# Why a check does not apply.
NO_PRODUCT = "no matrix multiplies its inputs"
INSIDE = "its products happen inside of the function, where autograd shows no outputs of theirs"
NO_NODES = "its weight stands between no nodes"
NOT_ALONE = "the weight is used by several functions"
LENGTHS = "the lengths of its sequences are read from the data"
SIZES = "its code shapes the outputs by the number of rows it read"
DYNAMO = "PyTorch compiles no recurrent layers (it exports them)"
RESIDUAL = "it adds inputs, which are those of one draw, to outputs of all draws"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@dataclass(frozen=True, eq=False)
class Row:
    """One torch function in a small network.

    Attributes:
        layer: builds it.
        shape: of a row of inputs; integers below `tokens` where that is given.
        function: whose uses the survey must find, for every parameter that has no reason.
        layouts: in which it can be called beside rows first.
        tokens: the number of tokens that inputs are drawn from; None for real numbers.
        reasons: why parameters are not covered.
        without: checks that do not apply, and why.
    """

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    function: str
    layouts: tuple[Layout, ...] = ()
    tokens: int | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)

    def inputs(self, rows: int, seed: int = 0) -> Tensor:
        """Some rows, float64."""
        if self.tokens is None:
            return normal(rows, *self.shape, seed=seed)
        stream = torch.Generator().manual_seed(seed)
        return torch.randint(self.tokens, (rows, *self.shape), generator=stream)

    def network(self, layout: Layout = Layout.ROWS) -> "Network":
        """In evaluation mode, float64, every parameter away from its start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = Network(self.layer(), layout).double().eval()
        with torch.no_grad():
            for number, parameter in enumerate(network.parameters()):
                parameter.add_(0.3 * normal(*parameter.shape, seed=100 + number))
            network(self.arranged(2, layout))  # sets the size of its last product
        return network

    def arranged(self, rows: int, layout: Layout, seed: int = 0) -> Tensor:
        """Rows for `network(layout)`: [B, ...], or [B, T, ...] where it has positions to arrange."""
        if layout is Layout.ROWS:
            return self.inputs(rows, seed)
        return self.inputs(rows * POSITIONS, seed).unflatten(0, (rows, POSITIONS))


class Network(nn.Module):
    """Two outputs of what a layer answers; the layer sees rows in a given layout."""

    def __init__(self, layer: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.layer, self.layout = layer, layout

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.arranged(inputs)).flatten(1)
        where = torch.arange(hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        return hidden @ torch.stack([torch.cos(where), torch.sin(2 * where + 1)], 1)

    def arranged(self, inputs: Tensor) -> Tensor:
        if self.layout is Layout.ROWS:
            return self.layer(inputs)
        if self.layout is Layout.SECOND:
            return self.layer(inputs.transpose(0, 1)).transpose(0, 1)
        if self.layout is Layout.FLAT:
            return self.layer(inputs.flatten(0, 1)).unflatten(0, (-1, POSITIONS))
        turned = inputs.transpose(0, 1)
        return self.layer(turned.flatten(0, 1)).unflatten(0, (POSITIONS, -1)).transpose(0, 1)


# -- layers that need a line of code -----------------------------------------------------------------------------


class Resettable(nn.Module):
    """Parameters of one's own, which the members of an ensemble start anew."""

    def reset_parameters(self) -> None:
        for parameter in self._parameters.values():
            nn.init.normal_(parameter, std=0.3)  # pyright: ignore[reportArgumentType]


class Addmm(Resettable):
    """As Hugging Face's Conv1D: bias + x W, with W stored inputs × outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, 4), self.weight).view(*x.shape[:-1], 3)


class Matmul(Resettable):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.weight = nn.Parameter(torch.zeros(3, 4) if turned else torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.t() if self.turned else self.weight)


class LoRA(Resettable):
    """A linear layer and a product of two small ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3)
        self.down, self.up = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * F.linear(F.linear(x, self.down), self.up)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(3, 2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[..., :3], x[..., 3:])


class Recurrent(nn.Module):
    """A recurrent layer of PyTorch's; its outputs and last states."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, **options: Any) -> None:
        super().__init__()
        self.packed = packed
        self.layer = kind(3, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        first = self.layer.batch_first
        sequences: Any = x if first else x.transpose(0, 1)
        if self.packed:
            lengths = (1 + (x[:, :, 0] > 0).sum(1)).clamp(max=x.shape[1]).cpu()
            sequences = pack_padded_sequence(sequences, lengths, first, enforce_sorted=False)
        outputs, final = self.layer(sequences)
        if self.packed:
            outputs, _ = pad_packed_sequence(outputs, first, total_length=x.shape[1])
        states = final if isinstance(final, tuple) else (final,)
        last = [state.transpose(0, 1).flatten(1) for state in states]
        return torch.cat([(outputs if first else outputs.transpose(0, 1)).flatten(1), *last], 1)


class Cell(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.cell = kind(3, 4, **options)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state


class Attention(nn.Module):
    """Attention to itself, or of the first positions to the others, which may have other sizes."""

    def __init__(self, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.cross = cross
        self.layer = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x, x, x
        if self.cross:
            query, others = x[:, :2], x[:, 2:]
            key, value = others[..., : self.layer.kdim], others[..., : self.layer.vdim]
        if self.layer.batch_first:
            return self.layer(query, key, value, need_weights=False)[0]
        turned = (each.transpose(0, 1) for each in (query, key, value))
        return self.layer(*turned)[0].transpose(0, 1)


class RMS(Resettable):
    """As the RMS norms of Transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Shift(Resettable):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + self.bias


class Twice(nn.Module):
    """One module called twice, and a table whose rows also make the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.twice = nn.Embedding(6, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(self.table(tokens)))
        return F.linear(torch.tanh(self.twice(hidden)), self.table.weight)


class Chain(nn.Module):
    """Layers one after the other, as they stand in networks: one part's outputs are the next one's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 4, 3, padding=1),
            nn.BatchNorm1d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(20, 4),
            nn.LayerNorm(4),
            nn.Tanh(),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _batch_norm(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.running_mean.copy_(normal(4, seed=3))
        norm.running_var.copy_(normal(4, seed=4).square() + 0.5)
    return norm


# -- the rows ----------------------------------------------------------------------------------------------------

_SINGLE = {"kronecker": INSIDE, "moments": INSIDE}
_NORM = {"kronecker": NO_PRODUCT, "factors": NO_NODES, "moments": NO_PRODUCT}
_CELL = {**_SINGLE, "moments": "a recurrent layer applies its weights step by step"}
_STEPS = {**_CELL, "compiled": DYNAMO}
_TURNED = {"kronecker": "it is no product with patches of its inputs", "moments": NO_PRODUCT}

ROWS: dict[str, Row] = {
    "linear": Row(lambda: nn.Linear(4, 3), (4,), "linear", ALL),
    "linear, positions": Row(lambda: nn.Linear(4, 3, bias=False), (5, 4), "linear", ALL),
    "addmm": Row(Addmm, (4,), "addmm", FLAT, without={"late": SIZES}),
    # Its own positions would stand between those of the rows.
    "addmm, positions": Row(Addmm, (5, 4), "addmm", (Layout.FLAT,)),
    "x @ W": Row(lambda: Matmul(False), (4,), "matmul", ALL),
    "x @ W.t()": Row(lambda: Matmul(True), (5, 4), "matmul", ALL),
    "LoRA": Row(LoRA, (4,), "linear", ALL, without={"kronecker": NOT_ALONE, "moments": NOT_ALONE}),
    "bilinear": Row(Pairs, (5,), "bilinear", ALL, without=_NORM),
    "conv1d": Row(lambda: nn.Conv1d(4, 3, 3, stride=2, padding=1), (4, 6), "conv1d", FLAT),
    "conv1d, circular": Row(lambda: nn.Conv1d(2, 3, 3, padding=2, padding_mode="circular"), (2, 5), "conv1d", FLAT),
    "conv2d": Row(
        lambda: nn.Conv2d(4, 6, (3, 2), stride=(1, 2), padding=(1, 2), dilation=(2, 1), groups=2),
        (4, 5, 4),
        "conv2d",
        FLAT,
    ),
    "conv2d, same": Row(
        lambda: nn.Conv2d(2, 3, (3, 5), padding="same", dilation=(2, 1), bias=False), (2, 4, 5), "conv2d", FLAT
    ),
    "conv2d, reflect": Row(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4), "conv2d", FLAT),
    "conv2d, depthwise": Row(lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 4, 5), "conv2d", FLAT),
    "conv2d, pointwise": Row(lambda: nn.Conv2d(3, 4, 1), (3, 3, 2), "conv2d", FLAT),
    "conv3d": Row(
        lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=(0, 1, 1), stride=(1, 2, 1)), (2, 3, 4, 3), "conv3d", FLAT
    ),
    "conv3d, replicate": Row(
        lambda: nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate"), (2, 2, 3, 2), "conv3d", FLAT
    ),
    "conv_transpose1d": Row(
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        (4, 4),
        "conv_transpose1d",
        FLAT,
        without=_TURNED,
    ),
    "conv_transpose2d": Row(
        lambda: nn.ConvTranspose2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0)),
        (3, 3, 2),
        "conv_transpose2d",
        FLAT,
        without=_TURNED,
    ),
    "conv_transpose3d": Row(
        lambda: nn.ConvTranspose3d(2, 2, 2, dilation=2, bias=False),
        (2, 2, 2, 2),
        "conv_transpose3d",
        FLAT,
        without=_TURNED,
    ),
    "embedding": Row(
        lambda: nn.Embedding(6, 4, padding_idx=2),
        (5,),
        "embedding",
        ALL,
        tokens=6,
        without={"kronecker": NO_PRODUCT, "moments": NO_PRODUCT},
    ),
    "lstm": Row(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        (3, 3),
        "lstm",
        FLAT,
        without=_STEPS,
    ),
    "lstm, projections": Row(
        lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=2), (3, 3), "lstm", FLAT, without=_STEPS
    ),
    "lstm, packed": Row(
        lambda: Recurrent(nn.LSTM, packed=True, bidirectional=True, batch_first=True),
        (4, 3),
        "lstm",
        without={**_STEPS, "traced": LENGTHS, "late": LENGTHS},
    ),
    "gru": Row(lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), (3, 3), "gru", FLAT, without=_STEPS),
    "gru, packed": Row(
        lambda: Recurrent(nn.GRU, packed=True, num_layers=2),
        (4, 3),
        "gru",
        without={**_STEPS, "traced": LENGTHS, "late": LENGTHS},
    ),
    "rnn_tanh": Row(
        lambda: Recurrent(nn.RNN, bidirectional=True, batch_first=True), (3, 3), "rnn_tanh", FLAT, without=_STEPS
    ),
    "rnn_relu": Row(
        lambda: Recurrent(nn.RNN, nonlinearity="relu", num_layers=2, bias=False),
        (3, 3),
        "rnn_relu",
        FLAT,
        without=_STEPS,
    ),
    "lstm_cell": Row(lambda: Cell(nn.LSTMCell), (3, 3), "lstm_cell", FLAT, without=_CELL),
    "gru_cell": Row(lambda: Cell(nn.GRUCell), (3, 3), "gru_cell", FLAT, without=_CELL),
    "rnn_tanh_cell": Row(lambda: Cell(nn.RNNCell), (3, 3), "rnn_tanh_cell", FLAT, without=_CELL),
    "rnn_relu_cell": Row(lambda: Cell(nn.RNNCell, nonlinearity="relu"), (3, 3), "rnn_relu_cell", FLAT, without=_CELL),
    "attention": Row(
        lambda: Attention(batch_first=True), (3, 4), "multi_head_attention_forward", FLAT, without=_SINGLE
    ),
    "attention, time first": Row(
        lambda: Attention(bias=False), (3, 4), "multi_head_attention_forward", FLAT, without=_SINGLE
    ),
    "attention, cross": Row(
        lambda: Attention(True, batch_first=True), (5, 4), "multi_head_attention_forward", FLAT, without=_SINGLE
    ),
    "attention, other sizes": Row(
        lambda: Attention(True, kdim=3, vdim=2), (5, 4), "multi_head_attention_forward", FLAT, without=_SINGLE
    ),
    "encoder": Row(
        lambda: nn.TransformerEncoderLayer(4, 2, 6, batch_first=True),
        (3, 4),
        "multi_head_attention_forward",
        FLAT,
        without={**_SINGLE, "moments": NOT_ALONE, "late": RESIDUAL},
    ),
    "layer_norm": Row(lambda: nn.LayerNorm((3, 4)), (3, 4), "layer_norm", ALL, without=_NORM),
    "group_norm": Row(lambda: nn.GroupNorm(2, 4), (4, 3), "group_norm", FLAT, without=_NORM),
    "instance_norm": Row(lambda: nn.InstanceNorm1d(4, affine=True), (4, 5), "instance_norm", FLAT, without=_NORM),
    "batch_norm": Row(lambda: _batch_norm(nn.BatchNorm2d(4)), (4, 2, 3), "batch_norm", FLAT, without=_NORM),
    "batch_norm, vectors": Row(lambda: _batch_norm(nn.BatchNorm1d(4)), (4,), "batch_norm", FLAT, without=_NORM),
    "rms_norm": Row(lambda: nn.RMSNorm(4), (3, 4), "rms_norm", ALL, without=_NORM),
    "weight * x": Row(RMS, (3, 4), "mul", ALL, without=_NORM),
    "x + b": Row(Shift, (4,), "add", ALL, without=_NORM),
    "prelu": Row(lambda: nn.PReLU(), (4, 3), "prelu", FLAT, without=_NORM),
    "prelu, channels": Row(lambda: nn.PReLU(4), (4, 3), "prelu", FLAT, without=_NORM),
    "shared and tied": Row(
        Twice, (3,), "linear", (Layout.SECOND,), tokens=6, without={"kronecker": NOT_ALONE, "moments": NOT_ALONE}
    ),
    "chain": Row(Chain, (2, 5), "linear", FLAT, without={"kronecker": NOT_ALONE, "moments": NOT_ALONE}),
}


def rows_for(check: str) -> list[str]:
    """The rows to which a check applies."""
    return [name for name, row in ROWS.items() if check not in row.without]


@cache
def network_of(name: str, layout: Layout = Layout.ROWS) -> Network:
    """The row's network, built once: nothing changes it."""
    return ROWS[name].network(layout)


def names_of(network: nn.Module) -> list[str]:
    return [name for name, _ in network.named_parameters()]
