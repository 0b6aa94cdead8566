"""Every kind of layer: Φ and Λ against each row's own gradient, and what is left out says why."""

from collections.abc import Callable

import pytest
import torch
from curvature_reference import check_squares, fitted, normal, numbers
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dubito import NetworkError
from dubito.curvature import find_blocks

ROWS = 7


class Pooled(nn.Module):
    """A layer between channels and classes, pooled over space."""

    def __init__(self, layer: nn.Module, channels: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(channels, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(inputs)).flatten(2).mean(2))


# -- convolutions -----------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 9)),
    "1d, dilated": (lambda: nn.Conv1d(3, 4, 3, dilation=2, padding=2, bias=False), (3, 8)),
    "1d, shifted": (lambda: nn.Conv1d(8, 2, 5, padding=2), (8, 20)),
    "2d": (lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 2)), (3, 6, 5)),
    "2d, shifted": (lambda: nn.Conv2d(8, 3, 3, padding=1), (8, 6, 5)),
    "2d, shifted, more positions than outputs": (lambda: nn.Conv2d(8, 60, (3, 2), padding=(1, 0)), (8, 6, 5)),
    "2d, dilated": (lambda: nn.Conv2d(8, 3, (2, 3), dilation=(2, 1), padding=(1, 1)), (8, 6, 5)),
    "2d, grouped": (lambda: nn.Conv2d(16, 4, 3, padding=1, groups=2), (16, 5, 4)),
    "2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, stride=2), (4, 6, 5)),
    "2d, pointwise": (lambda: nn.Conv2d(3, 5, 1, bias=False), (3, 4, 3)),
    "2d, circular": (lambda: nn.Conv2d(8, 5, (3, 2), padding=(1, 1), padding_mode="circular"), (8, 6, 5)),
    "2d, reflect": (lambda: nn.Conv2d(8, 5, 3, padding=(2, 1), padding_mode="reflect"), (8, 6, 5)),
    "2d, replicate": (lambda: nn.Conv2d(3, 5, 3, padding="same", padding_mode="replicate"), (3, 6, 5)),
    "2d, one position": (lambda: nn.Conv2d(4, 6, (3, 2), groups=2), (4, 3, 2)),
    "3d": (lambda: nn.Conv3d(2, 3, (2, 3, 2), stride=(1, 2, 1), padding=1), (2, 3, 4, 3)),
    "3d, shifted": (lambda: nn.Conv3d(8, 3, (1, 3, 3), padding=(0, 1, 1)), (8, 3, 4, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, groups=2), (4, 5)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(3, 4, (3, 2), stride=(2, 3), padding=(1, 0), output_padding=(1, 2)),
        (3, 4, 3),
    ),
    "transposed 2d, dilated": (
        lambda: nn.ConvTranspose2d(2, 3, 2, dilation=3, output_padding=2, stride=2, bias=False),
        (2, 3, 3),
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, (2, 1, 3), stride=(1, 2, 1)), (2, 2, 3, 2)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, dtype: torch.dtype) -> None:
    build, shape = CONVOLUTIONS[name]
    layer = build()
    network = Pooled(layer, layer.out_channels).to(dtype)
    kronecker = {"head"} if name.startswith("transposed") else {"head", "layer"}
    check_squares(network, normal(ROWS, *shape, dtype=dtype), kronecker=kronecker)


# -- norms and embeddings -----------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(3, 4, 1), norm, nn.Linear(4, 3)
        for name, buffer in self.named_buffers():
            if name.startswith("norm.running"):
                buffer.copy_(normal(4, seed=len(name)).abs() + 0.5)
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(normal(*parameter.shape, seed=parameter.numel()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.relu_(self.norm(self.conv(inputs))).mean(2))


NORMS = {
    "batch": nn.BatchNorm1d(4),
    "group": nn.GroupNorm(2, 4),
    "instance": nn.InstanceNorm1d(4, affine=True),
    "instance with statistics": nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "layer over two axes": nn.LayerNorm((4, 5)),
    "layer without bias": nn.LayerNorm(5, bias=False),
    "root mean square": nn.RMSNorm(5, eps=1e-5),  # by default it depends on the dtype
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, dtype: torch.dtype) -> None:
    network = Normed(NORMS[name]).to(dtype)
    check_squares(network, normal(ROWS, 3, 5, dtype=dtype), kronecker={"conv", "head"})


class Words(nn.Module):
    """An embedding whose table is also the last layer's weight, where `tied`."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, padding_idx=2)
        self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 9)
        if tied:
            self.last.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(self.table(ids))).mean(1))


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings(tied: bool) -> None:
    ids = numbers(9, ROWS, 6)
    ids[:, 1] = ids[:, 0]  # an entry read twice adds up inside a row
    kronecker = {"body"} if tied else {"body", "last"}
    check_squares(Words(tied).double(), ids, kronecker=kronecker)


def test_an_embedding_read_by_many_rows_forms_nothing_of_rows_times_its_size() -> None:
    network = nn.Sequential(nn.Embedding(20_000, 8), nn.Flatten(), nn.Linear(16, 2))
    ids = numbers(20_000, 512, 2)
    blocks, found, _ = fitted(network, ids, torch.zeros(512, dtype=torch.long), diagonal=True, batch_size=512)
    assert [block.name for block in blocks] == ["0.weight", "2"]
    read = found["0.weight"].diagonal[0].sum(1) > 0  # 512 dense gradients would take 330 MB
    assert set(read.nonzero().flatten().tolist()) <= set(ids.flatten().tolist())
    assert int(read.sum()) > 900


# -- attention ------------------------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Self-attention, or attention from a few learned questions to the inputs, with any options."""

    def __init__(self, cross: bool, **options: object) -> None:
        super().__init__()
        width = 8 if not cross else 6
        options = {"batch_first": True} | ({"kdim": 5, "vdim": 4} if cross else {}) | options
        self.cross, self.attention = cross, nn.MultiheadAttention(width, 2, **options)
        if cross:
            self.question = nn.Linear(1, 3 * width)
            self.key, self.value = nn.Linear(8, 5), nn.Linear(8, 4)
        self.head = nn.Linear(width, 3)
        with torch.no_grad():
            for number, parameter in enumerate(self.attention.parameters()):
                parameter.copy_(0.5 * normal(*parameter.shape, seed=number))

    def forward(self, inputs: Tensor) -> Tensor:
        query = key = value = inputs
        if self.cross:
            query = self.question(inputs[:, :1, 0]).unflatten(1, (3, -1))
            key, value = self.key(inputs), self.value(inputs)
        if not self.attention.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        mask = torch.arange(inputs.shape[1]) > 2
        answer, weights = self.attention(
            query, key, value, key_padding_mask=mask.expand(len(inputs), -1), need_weights=self.cross
        )
        answer = answer if self.attention.batch_first else answer.transpose(0, 1)
        more = 0 if weights is None else weights.square().sum((1, 2))[:, None]
        return self.head(torch.tanh(answer).mean(1)) + more


ATTENTIONS: dict[str, tuple[bool, dict[str, object]]] = {
    "self": (False, {}),
    "self, time first": (False, {"batch_first": False}),
    "self without bias": (False, {"bias": False}),
    "self, zero attention": (False, {"add_zero_attn": True}),
    "cross": (True, {}),
    "cross, time first": (True, {"batch_first": False}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name: str, dtype: torch.dtype) -> None:
    cross, options = ATTENTIONS[name]
    network = Attending(cross, **options).to(dtype)
    kronecker = {"attention.out_proj", "head"}
    if cross:
        kronecker |= {f"attention.{part}_proj_weight" for part in "qkv"} | {"question", "key", "value"}
    else:
        kronecker |= {"attention.in_proj_weight"}
    check_squares(network, normal(ROWS, 5, 8, dtype=dtype), kronecker=kronecker)


def test_biases_of_keys_and_values_are_left_out() -> None:
    network = Attending(False, add_bias_kv=True).double()
    left_out = ("attention.bias_k", "attention.bias_v")
    check_squares(network, normal(ROWS, 5, 8), left_out=left_out)
    covered = find_blocks(network, normal(3, 5, 8), (*left_out, "head.weight"))
    reasons = covered.left_out
    expected = "there is no rule for the way multi_head_attention_forward uses it"
    assert reasons["attention.bias_k"] == reasons["attention.bias_v"] == expected


def test_encoders_and_decoders() -> None:
    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 6, batch_first=True, dropout=0.3), 2, enable_nested_tensor=False
            )
            self.decoder = nn.TransformerDecoderLayer(8, 2, 6, batch_first=True, norm_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            mask = torch.arange(inputs.shape[1]).expand(len(inputs), -1) > 2
            memory = self.encoder(inputs, src_key_padding_mask=mask)
            causal = nn.Transformer.generate_square_subsequent_mask(2, dtype=inputs.dtype)
            return self.head(self.decoder(inputs[:, :2], memory, tgt_mask=causal, tgt_is_causal=True)[:, -1])

    network = Translator().double()
    names = {name.rpartition(".")[0] for name, p in network.named_parameters() if p.ndim > 1}
    kronecker = {name for name in names if "attn" not in name or "out_proj" in name}
    kronecker |= {f"{name}.in_proj_weight" for name in names if name.endswith("attn")}
    check_squares(network, normal(ROWS, 4, 8), kronecker=kronecker)
    # A subset without any hook on the fast path's own layers.
    only = ("encoder.layers.0.self_attn.in_proj_weight",)
    blocks, found, _ = fitted(
        network, normal(ROWS, 4, 8), torch.zeros(ROWS, dtype=torch.long), diagonal=True, names=only
    )
    assert [block.name for block in blocks] == list(only) and found[only[0]].diagonal.min() > 0


# -- recurrent layers -------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, **options: object) -> None:
        super().__init__()
        self.packed, self.options = packed, options
        self.layer = kind(4, 3, **({"batch_first": True} | options))
        directions = 2 if self.layer.bidirectional else 1
        width = self.layer.proj_size or 3
        self.head = nn.Linear(width * directions * 2, 3)

    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = inputs if self.layer.batch_first else inputs.transpose(0, 1)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths.cpu(), self.layer.batch_first, enforce_sorted=False)
        outputs, state = self.layer(x)
        if lengths is not None:
            outputs, _ = pad_packed_sequence(outputs, self.layer.batch_first)
        state = state[0] if isinstance(state, tuple) else state
        state = state.unflatten(0, (self.layer.num_layers, -1))[-1].transpose(0, 1).flatten(1)
        return self.head(torch.cat([outputs.sin().sum(1 if self.layer.batch_first else 0), state], 1))


RECURRENT: dict[str, tuple[type[nn.RNNBase], dict[str, object]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm, time first, without bias": (nn.LSTM, {"batch_first": False, "bias": False}),
    "lstm, two layers, both ways": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "lstm, projected": (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    "gru": (nn.GRU, {}),
    "gru, two layers, both ways, time first": (nn.GRU, {"num_layers": 2, "bidirectional": True, "batch_first": False}),
    "rnn": (nn.RNN, {"bidirectional": True}),
    "rnn of relus": (nn.RNN, {"nonlinearity": "relu"}),
}


def recurrent_names(network: Recurrent) -> set[str]:
    weights = {name for name, _ in network.named_parameters() if name.startswith("layer.weight_")}
    return weights | {"head"}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: str, dtype: torch.dtype) -> None:
    kind, options = RECURRENT[name]
    network = Recurrent(kind, **options).to(dtype)
    check_squares(network, normal(ROWS, 5, 4, dtype=dtype), kronecker=recurrent_names(network))


@pytest.mark.parametrize("name", ["lstm, two layers, both ways", "gru, two layers, both ways, time first"])
def test_packed_sequences(name: str) -> None:
    kind, options = RECURRENT[name]
    network = Recurrent(kind, **options).double()
    lengths = torch.tensor([3, 5, 1, 4, 4, 2, 5])
    inputs = (normal(ROWS, 5, 4), lengths)
    found = check_squares(network, inputs, kronecker=recurrent_names(network))
    # Positions that do not exist count nowhere: the bias column holds the mean length.
    for each in (found["layer.weight_ih_l1"], found["layer.weight_hh_l0_reverse"]):
        assert each.inputs[0, -1, -1].item() == pytest.approx(lengths.double().mean().item())


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase], given: bool) -> None:
        super().__init__()
        self.cell, self.head, self.given = kind(4, 3), nn.Linear(3, 3), given

    def forward(self, inputs: Tensor) -> Tensor:
        state = None
        if self.given:
            h = inputs[:, 0, :3].cos()
            state = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        for x in inputs.unbind(1):
            state = self.cell(x) if state is None else self.cell(x, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind: type[nn.RNNCellBase], given: bool) -> None:
    network = Cells(kind, given).double()
    check_squares(network, normal(ROWS, 4, 4), kronecker={"cell.weight_ih", "cell.weight_hh", "head"})


# -- frames, shared weights, subsets -----------------------------------------------------------------------------


class Frames(nn.Module):
    """Rows of frames, flattened one way or the other, through all kinds of layers."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.conv, self.norm = nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4)
        self.up, self.attention = nn.ConvTranspose1d(4, 4, 2), nn.MultiheadAttention(4, 2, batch_first=True)
        self.gru, self.table = nn.GRU(4, 4, batch_first=True), nn.Embedding(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs.transpose(0, 1) if self.turned else inputs
        lead = x.shape[:2]
        x = x.flatten(0, 1)
        added = self.table((x[:, 0] * 3).abs().long().clamp(max=4))
        x = self.up(torch.tanh(self.norm(self.conv(x)))).mT + added
        x = self.gru(self.attention(x, x, x)[0])[0].sum(1).unflatten(0, lead)
        return self.head(x.mean(0 if self.turned else 1))


@pytest.mark.parametrize("turned", [False, True])
def test_frames_of_a_row_add_up(turned: bool) -> None:
    kronecker = {"conv", "head", "attention.in_proj_weight", "attention.out_proj"}
    kronecker |= {"gru.weight_ih_l0", "gru.weight_hh_l0"}
    check_squares(Frames(turned).double(), normal(ROWS, 2, 3, 4), kronecker=kronecker)


class SharedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.tied = nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        x = torch.tanh(self.twice(torch.tanh(self.first(inputs))))
        return self.head(torch.tanh(self.tied(torch.tanh(self.twice(x)))).mean((2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shared_convolutions(dtype: torch.dtype) -> None:
    check_squares(SharedConv().to(dtype), normal(ROWS, 2, 5, 4, dtype=dtype), sizes=(1, ROWS))


class OwnBiases(nn.Module):
    """One weight, two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


def test_a_weight_with_two_biases_has_none_as_its_column() -> None:
    check_squares(OwnBiases().double(), normal(ROWS, 4), kronecker={"first", "head"})


def test_a_subset_decides_on_weights_and_biases_apart() -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    covered = find_blocks(network, normal(3, 4), ("0.weight", "2.bias"))
    blocks = list(covered.blocks.values())
    left_out = covered.left_out
    assert [(b.name, b.bias, b.columns, b.kronecker) for b in blocks] == [
        ("0", None, 4, True),
        ("2.bias", None, 1, False),
    ]
    assert left_out == {}
    found = fitted(network, normal(ROWS, 4), torch.zeros(ROWS, dtype=torch.long), names=("2.bias",), kronecker=True)[1]
    assert found["2.bias"].diagonal.shape == (1, 3, 1) and found["2.bias"].inputs is None


# -- nothing is left out in silence -----------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))
        self.unused, self.pair = nn.Linear(4, 4), nn.Bilinear(4, 4, 3)
        self.twice = nn.Parameter(torch.ones(4, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs)) * self.scale
        hidden = hidden + nn.functional.linear(hidden, self.body.weight)  # once more, past its layer
        hidden = hidden @ self.twice + torch.einsum("bi,ij->bj", hidden, self.twice)
        return self.head(hidden) + self.pair(inputs, inputs)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_layers_are_left_out() -> None:
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))
    network = nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 3))
    left_out = find_blocks(network, normal(3, 4).float(), [name for name, _ in network.named_parameters()]).left_out
    assert left_out == dict.fromkeys(("1.weight", "1.bias"), "no torch function of the forward pass reads it")


def test_reasons() -> None:
    network = Odd().double()
    covered = find_blocks(network, normal(3, 4), [name for name, _ in network.named_parameters()])
    reasons = covered.left_out
    assert reasons == {
        "twice": "there is no rule for the way einsum uses it",
        "unused.weight": "no torch function of the forward pass reads it",
        "unused.bias": "no torch function of the forward pass reads it",
    }
    assert [block.weight for block in covered.blocks.values() if block.kronecker] == ["body.weight", "head.weight"]
    check_squares(network, normal(ROWS, 4), kronecker={"body", "head"}, left_out=list(reasons))


def test_weights_computed_from_others_are_left_out() -> None:
    network = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
    left_out = [name for name, _ in network.named_parameters() if "parametrizations" in name]
    check_squares(network, normal(ROWS, 4), kronecker={"2"}, left_out=left_out)
    covered = find_blocks(network, normal(3, 4), [*left_out, "2.weight"])
    reasons = covered.left_out
    assert set(reasons.values()) == {"a parametrisation computes the weight from it"}


class OverRows(nn.Module):
    """Recurrent over the rows of the batch, the usual slip of batch_first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(4, 4), nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(inputs)[0].mT).mean(2))


def test_layers_where_rows_touch_each_other_are_left_out() -> None:
    network = OverRows().double()
    with pytest.raises(NetworkError) as caught:
        find_blocks(network, normal(3, 5, 4), [name for name, _ in network.named_parameters()])
    assert "lstm.weight_ih_l0: its layers do not tell its whole gradient" in str(caught.value)
    assert "norm.weight: its batch norm normalises by the batch" in str(caught.value)
    assert "head.weight: which axis of its layer's inputs holds the rows cannot be determined" in str(caught.value)


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs)
        return self.head(torch.tanh(hidden - hidden.mean(0)))  # an own batch norm


def test_rows_that_touch_by_the_network_itself_are_noticed() -> None:
    network = Centred().double()
    with pytest.raises(NetworkError, match=r"body\.weight: its layers do not tell .* rows touch there"):
        find_blocks(network, normal(3, 4), [name for name, _ in network.named_parameters()])


def test_a_network_without_any_rule_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs / self.scale

    with pytest.raises(NetworkError, match=r"needs a layer with a rule, got none \(scale: there is no rule"):
        find_blocks(Scaled(), torch.ones(2, 3), ("scale",))


def test_a_layer_with_a_forward_of_its_own_is_read_by_what_it_calls() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    network = nn.Sequential(Doubled(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    check_squares(network, normal(ROWS, 4), kronecker={"0", "2"})
    network[2].forward = lambda inputs: inputs[:, :3]  # on the object
    left_out = find_blocks(network, normal(3, 4), ("0.weight", "2.weight")).left_out
    assert left_out == {"2.weight": "no torch function of the forward pass reads it"}
