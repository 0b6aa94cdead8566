"""Which weights stand between nodes, and factors folded into them against the same factors on the nodes themselves."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dubito.layers import Layout, Survey, Use, survey
from dubito.layers.declared import declared, shared_weights, stored_uses, weights_with_nodes
from dubito.layers.factors import Factor, NodeFactors, fold
from dubito.layers.version_1 import use_of_site

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype])


def folded(use: Use, weight: Tensor, factors: Tensor) -> Tensor:
    return fold(use, weight, NodeFactors(Factor(factors.unsqueeze(0))))


DIRECT = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5), -1),
    "linear over positions": (lambda: nn.Linear(5, 3, bias=False), (4, 6, 2, 5), -1),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (4, 4, 11), 1),
    "conv1d depthwise": (lambda: nn.Conv1d(4, 8, 3, groups=4), (4, 4, 9), 1),
    "conv2d": (lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0)), (4, 3, 7, 6), 1),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=(1, 2), bias=False), (4, 4, 8, 9), 1),
    "conv2d same": (lambda: nn.Conv2d(3, 5, (1, 3), padding="same"), (4, 3, 5, 6), 1),
    "conv2d circular": (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (4, 3, 5, 6), 1),
    "conv2d reflect": (lambda: nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="reflect", groups=2), (4, 4, 5, 6), 1),
    "conv3d": (lambda: nn.Conv3d(4, 6, (1, 2, 3), groups=2, padding=(0, 1, 1)), (4, 4, 3, 4, 5), 1),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (4, 4, 7), 1),
    "transposed 2d": (lambda: nn.ConvTranspose2d(3, 5, (2, 3), stride=2, output_padding=1), (4, 3, 4, 5), 1),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, (1, 2, 2), padding=(0, 1, 1), dilation=2), (4, 2, 3, 4, 4), 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIRECT)
def test_folding_equals_factors_on_the_input(name: str, dtype: torch.dtype) -> None:
    make, shape, axis = DIRECT[name]
    layer, inputs = make().to(dtype), normal(*shape, dtype=dtype)
    use = weights_with_nodes(layer)["weight"]
    assert use.input_shape == (shape[axis],)
    assert shared_weights({"weight": use}, survey(layer.eval(), inputs)) == []
    factors = normal(*use.input_shape, dtype=dtype, seed=1)
    expected = layer((inputs.movedim(axis, -1) * factors).movedim(-1, axis))
    close(functional_call(layer, {"weight": folded(use, layer.weight, factors)}, (inputs,)), expected)


@pytest.mark.parametrize("name", DIRECT)
def test_output_factors_scale_the_outputs(name: str) -> None:
    make, shape, axis = DIRECT[name]
    layer, inputs = make().double(), normal(*shape)
    use = weights_with_nodes(layer)["weight"]
    r = normal(*use.output_shape, seed=1)
    weight = fold(use, layer.weight, NodeFactors(None, Factor(r.unsqueeze(0))))
    plain = {"bias": torch.zeros_like(layer.bias)} if layer.bias is not None else {}
    outputs = functional_call(layer, plain, (inputs,))
    expected = (outputs.movedim(axis, -1) * r).movedim(-1, axis)
    close(functional_call(layer, {"weight": weight, **plain}, (inputs,)), expected)


@pytest.mark.parametrize("name", DIRECT)
def test_what_modules_declare_is_what_a_survey_sees(name: str) -> None:
    make, shape, _ = DIRECT[name]
    layer = make().double().eval()
    (said,) = declared(layer)
    (seen,) = survey(layer, normal(*shape)).uses
    assert (said.weight, said.bias, said.function, said.views) == (seen.weight, seen.bias, seen.function, seen.views)
    if "circular" not in name and "reflect" not in name:  # these pad before the function sees the inputs
        assert said.form == seen.form


@pytest.mark.parametrize("name", DIRECT)
def test_factors_of_one_keep_the_weight_bit_by_bit(name: str) -> None:
    layer = DIRECT[name][0]()
    use = weights_with_nodes(layer)["weight"]
    assert torch.equal(folded(use, layer.weight, torch.ones(use.input_shape)), layer.weight)


# -- recurrent layers, against loops written out -----------------------------------------------------------


def lstm_step(x: Tensor, state: tuple[Tensor, Tensor], w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (F.linear(x, w["ih"], w["bih"]) + F.linear(state[0] * w["s_hh"], w["hh"], w["bhh"])).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def gru_step(x: Tensor, state: tuple[Tensor, Tensor], w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = state[0]
    from_x = F.linear(x, w["ih"], w["bih"]).chunk(3, -1)
    from_h = F.linear(h * w["s_hh"], w["hh"], w["bhh"]).chunk(3, -1)
    r, z = (from_x[0] + from_h[0]).sigmoid(), (from_x[1] + from_h[1]).sigmoid()
    new = (from_x[2] + r * from_h[2]).tanh()
    return (1 - z) * new + z * h, h


def rnn_step(x: Tensor, state: tuple[Tensor, Tensor], w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    h = (F.linear(x, w["ih"], w["bih"]) + F.linear(state[0] * w["s_hh"], w["hh"], w["bhh"])).tanh()
    return h, h


STEPS = {nn.LSTM: lstm_step, nn.GRU: gru_step, nn.RNN: rnn_step}


def written_out(layer: nn.RNNBase, inputs: Tensor, factors: dict[str, Tensor]) -> Tensor:
    """Outputs [B, T, ·] with factors on what each weight reads."""
    step, hidden = STEPS[type(layer)], inputs
    for number in range(layer.num_layers):
        directions = []
        for suffix in ("", "_reverse")[: 2 if layer.bidirectional else 1]:
            end = f"_l{number}{suffix}"
            weights = {
                **{key: getattr(layer, f"weight_{key}{end}") for key in ("ih", "hh")},
                **{f"b{key}": getattr(layer, f"bias_{key}{end}") for key in ("ih", "hh")},
                "s_hh": factors[f"weight_hh{end}"],
            }
            read = hidden * factors[f"weight_ih{end}"]
            state = (read.new_zeros(len(read), layer.hidden_size),) * 2
            outputs = []
            for time in reversed(range(read.shape[1])) if suffix else range(read.shape[1]):
                state = step(read[:, time], state, weights)
                outputs.append(state[0])
            directions.append(torch.stack(outputs[::-1] if suffix else outputs, 1))
        hidden = torch.cat(directions, -1)
    return hidden


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_fold_every_kernel(kind: type, bidirectional: bool) -> None:
    layer = kind(3, 4, num_layers=2, batch_first=True, bidirectional=bidirectional).double()
    uses = weights_with_nodes(layer)
    assert set(uses) == {n for n, _ in layer.named_parameters() if n.startswith("weight")}
    factors = {key: normal(*use.input_shape, seed=i) for i, (key, use) in enumerate(uses.items())}
    weights = {key: folded(use, getattr(layer, key), factors[key]) for key, use in uses.items()}
    inputs = normal(2, 5, 3, seed=9)
    close(functional_call(layer, weights, (inputs,))[0], written_out(layer, inputs, factors))


def test_cells_fold_both_kernels() -> None:
    cell = nn.LSTMCell(3, 4).double()
    uses = weights_with_nodes(cell)
    assert {name: use.input_shape for name, use in uses.items()} == {"weight_ih": (3,), "weight_hh": (4,)}
    x, h, c = normal(2, 3), normal(2, 4, seed=1), normal(2, 4, seed=2)
    s, t = normal(3, seed=3), normal(4, seed=4)
    weights = {key: folded(uses[key], getattr(cell, key), v) for key, v in (("weight_ih", s), ("weight_hh", t))}
    close(functional_call(cell, weights, (x, (h, c)))[0], cell(x * s, (h * t, c))[0])


# -- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
def test_attention_folds_its_three_projections(separate: bool) -> None:
    sizes = {"kdim": 3, "vdim": 5} if separate else {}
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **sizes).double()
    query, key, value = normal(2, 4, 8), normal(2, 6, sizes.get("kdim", 8), seed=1), normal(
        2, 6, sizes.get("vdim", 8), seed=2
    )  # fmt: skip
    uses = weights_with_nodes(layer)
    if separate:
        names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        parts = [normal(*uses[name].input_shape, seed=5 + i) for i, name in enumerate(names)]
        weights = {n: folded(uses[n], getattr(layer, n), s) for n, s in zip(names, parts, strict=True)}
    else:
        assert uses["in_proj_weight"].input_shape == (3, 8)
        stacked = normal(3, 8, seed=5)
        parts = list(stacked)
        weights = {"in_proj_weight": folded(uses["in_proj_weight"], layer.in_proj_weight, stacked)}
    expected = layer(query * parts[0], key * parts[1], value * parts[2])[0]
    close(functional_call(layer, weights, (query, key, value))[0], expected)


def test_attention_folds_its_output_projection() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    use = weights_with_nodes(layer)["out_proj.weight"]
    x, factors = normal(2, 4, 8), normal(8, seed=1)
    identity = {"out_proj.weight": torch.eye(8, dtype=torch.float64), "out_proj.bias": torch.zeros(8).double()}
    heads = functional_call(layer, identity, (x, x, x))[0]
    expected = F.linear(heads * factors, layer.out_proj.weight, layer.out_proj.bias)
    weights = {"out_proj.weight": folded(use, layer.out_proj.weight, factors)}
    close(functional_call(layer, weights, (x, x, x))[0], expected)


# -- sharing ------------------------------------------------------------------------------------------------


class Joined(nn.Module):
    """Two modules of which the second holds the first's weight, each on inputs of its own."""

    def __init__(self, plain: nn.Module, other: nn.Module, weight: str, inputs: list[Tensor]) -> None:
        super().__init__()
        self.plain, self.other, self.inputs = plain, other, inputs
        setattr(other, weight, plain.weight)

    def forward(self, rows: Tensor) -> Tensor:
        answers = (self.plain, self.inputs[0]), (self.other, self.inputs[1])
        total = rows.new_zeros(len(rows))
        for module, like in answers:
            if like.is_floating_point():
                x = like[None] * rows[:, 0].reshape(-1, *[1] * like.ndim)
            else:
                x = rows[:, 1:].long() % 3
            out = module(x)
            total = total + (out[0] if isinstance(out, tuple) else out).flatten(1).sum(1)
        return total[:, None]


def joined(plain: nn.Module, other: nn.Module, weight: str, *inputs: Tensor) -> tuple[dict[str, Use], Survey]:
    network = Joined(plain, other, weight, list(inputs)).double().eval()
    seen = survey(network, normal(4, 3).abs() * 5)
    return weights_with_nodes(network), seen


def test_a_shared_weight_has_a_use_in_each_of_its_modules() -> None:
    uses, seen = joined(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), "weight", normal(4), normal(4, seed=1))
    assert list(uses) == ["plain.weight"]
    assert shared_weights(uses, seen) == []


@pytest.mark.parametrize(
    ("plain", "other", "weight", "inputs", "alike"),
    [
        (nn.Conv2d(5, 5, 3), nn.ConvTranspose2d(5, 5, 3), "weight", (normal(5, 4, 4), normal(5, 3, 3)), False),
        (nn.Linear(3, 4), nn.LSTM(3, 1, batch_first=True), "weight_ih_l0", (normal(3), normal(2, 3)), True),
        (nn.Conv1d(4, 6, 3, groups=2), nn.Conv1d(2, 6, 3), "weight", (normal(4, 5), normal(2, 5)), False),
        (nn.Linear(4, 3), nn.Embedding(3, 4), "weight", (normal(4), torch.zeros(2).long()), False),
    ],
    ids=["transposed", "recurrent", "grouped", "embedding"],
)
def test_rows_have_their_own_factors_where_all_uses_agree_about_nodes(
    plain: nn.Module, other: nn.Module, weight: str, inputs: tuple[Tensor, Tensor], alike: bool
) -> None:
    assert getattr(other, weight).shape == plain.weight.shape
    uses, seen = joined(plain, other, weight, *inputs)
    assert ("plain.weight" in shared_weights(uses, seen)) == (not alike)


class Layouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.time, self.unused = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.both, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm, self.flat = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.time(self.rows(inputs).transpose(0, 1)).transpose(0, 1)
        hidden = self.both(hidden) + self.both(hidden.transpose(0, 1)).transpose(0, 1)
        hidden = self.attention(hidden, hidden, hidden)[0]
        hidden = self.flat(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return self.lstm(hidden)[0][:, -1]


def test_only_layers_with_rows_first_have_factors_per_row() -> None:
    network = Layouts().double().eval()
    seen, uses = survey(network, normal(4, 5, 3)), weights_with_nodes(network)
    assert shared_weights(uses, seen) == ["time.weight", "unused.weight", "both.weight"]
    assert shared_weights(uses, seen, layouts=(Layout.ROWS,), steps=False) == [
        "time.weight",
        "unused.weight",
        "both.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "flat.weight",
    ]
    assert set(shared_weights(uses, seen, additive=True)) == {
        "time.weight",
        "unused.weight",
        "both.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
    }


def test_parametrised_weights_are_left_out() -> None:
    network = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    assert list(weights_with_nodes(network)) == ["1.weight"]


def test_layers_without_an_input_product_have_none() -> None:
    network = nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Bilinear(2, 2, 2))
    assert weights_with_nodes(network, embeddings=False) == {}
    assert list(weights_with_nodes(network)) == ["0.weight"]


#: What version 1 stored of a weight: a convolution, a transposed one, packed projections, a table, a dense layer.
SITES = {
    "conv": (
        nn.Conv2d(4, 6, 3, groups=2),
        "weight",
        {"shape": [4], "view": [2, 3, 2, 3, 3], "factor_view": [2, 1, 2, 1, 1], "outputs": [6]},
    ),
    "transposed": (
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        "weight",
        {"shape": [4], "view": [2, 2, 3, 3, 3], "factor_view": [2, 2, 1, 1, 1], "outputs": [6]},
    ),
    "attention": (
        nn.MultiheadAttention(8, 2),
        "in_proj_weight",
        {"shape": [3, 8], "view": [3, 8, 8], "factor_view": [3, 1, 8], "outputs": [3, 8]},
    ),
    "embedding": (nn.Embedding(5, 3), "weight", {"shape": [5], "view": [5, 3], "factor_view": [5, 1], "outputs": [3]}),
    "dense": (nn.Linear(5, 3), "weight", {"shape": [5], "view": [3, 5], "factor_view": [1, 5], "outputs": [3]}),
}


@pytest.mark.parametrize("name", SITES)
def test_files_of_version_1_tell_the_same_nodes(name: str) -> None:
    module, parameter, values = SITES[name]
    site = {"parameter": parameter, "modules": [""], "hooked": True, "channel_axis": -1, **values}
    use, now = use_of_site(site), weights_with_nodes(module)[parameter]
    assert (use.views, use.input_shape, use.output_shape) == (now.views, now.input_shape, now.output_shape)
    details = {"sites": [site], "shared": []}
    assert stored_uses(details) == {parameter: use}
    assert stored_uses(json.loads(json.dumps(details))) == {parameter: use}  # as it is stored from now on


def test_uses_survive_json() -> None:
    network = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3, groups=2), "mha": nn.MultiheadAttention(8, 2)})
    uses = weights_with_nodes(network)
    restored = [Use.from_json(json.loads(json.dumps(use.to_json()))) for use in uses.values()]
    assert restored == list(uses.values())
