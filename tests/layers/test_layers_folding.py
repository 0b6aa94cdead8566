"""Sites: factors folded into a weight against the same factors on the nodes themselves."""

import json

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dubito.layers.sites import Site, find_sites

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=TOLERANCE[expected.dtype], atol=TOLERANCE[expected.dtype]
    )


DIRECT = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5), -1),
    "linear over positions": (lambda: nn.Linear(5, 3, bias=False), (4, 6, 2, 5), -1),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2), (4, 4, 11), 1),
    "conv1d depthwise": (lambda: nn.Conv1d(4, 8, 3, groups=4), (4, 4, 9), 1),
    "conv2d": (lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0)), (4, 3, 7, 6), 1),
    "conv2d grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2, dilation=(1, 2), bias=False), (4, 4, 8, 9), 1),
    "conv2d same": (lambda: nn.Conv2d(3, 5, (1, 3), padding="same"), (4, 3, 5, 6), 1),
    "conv2d circular": (lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular"), (4, 3, 5, 6), 1),
    "conv2d reflect": (
        lambda: nn.Conv2d(4, 2, 3, padding=(1, 2), padding_mode="reflect", groups=2),
        (4, 4, 5, 6),
        1,
    ),
    "conv3d": (lambda: nn.Conv3d(4, 6, (1, 2, 3), groups=2, padding=(0, 1, 1)), (4, 4, 3, 4, 5), 1),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (4, 4, 7), 1),
    "transposed 2d": (lambda: nn.ConvTranspose2d(3, 5, (2, 3), stride=2, output_padding=1), (4, 3, 4, 5), 1),
    "transposed 3d": (
        lambda: nn.ConvTranspose3d(2, 3, (1, 2, 2), padding=(0, 1, 1), dilation=2),
        (4, 2, 3, 4, 4),
        1,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", DIRECT)
def test_folding_equals_factors_on_the_input(name: str, dtype: torch.dtype) -> None:
    make, shape, axis = DIRECT[name]
    layer, inputs = make().to(dtype), normal(*shape, dtype=dtype)
    (site,) = find_sites(layer)
    assert (site.parameter, site.modules, site.hooked) == ("weight", ("",), True)
    assert site.shape == (shape[axis],)
    factors = normal(*site.shape, dtype=dtype, seed=1)
    expected = layer((inputs.movedim(axis, -1) * factors).movedim(-1, axis))
    close(functional_call(layer, {"weight": site.fold(layer.weight, factors)}, (inputs,)), expected)


@pytest.mark.parametrize("name", DIRECT)
def test_factors_per_example_are_the_folded_weights_of_that_example(name: str) -> None:
    make, shape, _ = DIRECT[name]
    layer, inputs = make().double(), normal(*shape)
    (site,) = find_sites(layer)
    factors = normal(len(inputs), *site.shape, seed=1)
    together = layer(site.on_input(inputs, factors))
    for row in range(len(inputs)):
        alone = functional_call(
            layer, {"weight": site.fold(layer.weight, factors[row])}, (inputs[row : row + 1],)
        )
        close(together[row : row + 1], alone)


@pytest.mark.parametrize("name", DIRECT)
def test_factors_of_one_keep_the_weight_bit_by_bit(name: str) -> None:
    layer = DIRECT[name][0]()
    (site,) = find_sites(layer)
    folded = site.fold(layer.weight, torch.ones(site.shape))
    assert torch.equal(folded, layer.weight)


# -- recurrent layers, against loops written out -----------------------------------------------------------


def lstm_step(x: Tensor, state: tuple[Tensor, Tensor], w: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    i, f, g, o = (F.linear(x, w["ih"], w["bih"]) + F.linear(state[0] * w["s_hh"], w["hh"], w["bhh"])).chunk(
        4, -1
    )
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
    sites = find_sites(layer)
    assert {s.parameter for s in sites} == {n for n, _ in layer.named_parameters() if n.startswith("weight")}
    assert not any(site.hooked for site in sites)
    factors = {site.parameter: normal(*site.shape, seed=i) for i, site in enumerate(sites)}
    weights = {s.parameter: s.fold(getattr(layer, s.parameter), factors[s.parameter]) for s in sites}
    inputs = normal(2, 5, 3, seed=9)
    close(functional_call(layer, weights, (inputs,))[0], written_out(layer, inputs, factors))


def test_cells_fold_both_kernels() -> None:
    cell = nn.LSTMCell(3, 4).double()
    sites = {site.parameter: site for site in find_sites(cell)}
    assert {name: site.shape for name, site in sites.items()} == {"weight_ih": (3,), "weight_hh": (4,)}
    x, h, c = normal(2, 3), normal(2, 4, seed=1), normal(2, 4, seed=2)
    s, t = normal(3, seed=3), normal(4, seed=4)
    folded = {"weight_ih": sites["weight_ih"].fold(cell.weight_ih, s),
              "weight_hh": sites["weight_hh"].fold(cell.weight_hh, t)}  # fmt: skip
    close(functional_call(cell, folded, (x, (h, c)))[0], cell(x * s, (h * t, c))[0])


# -- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
def test_attention_folds_its_three_projections(separate: bool) -> None:
    sizes = {"kdim": 3, "vdim": 5} if separate else {}
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **sizes).double()
    query, key, value = normal(2, 4, 8), normal(2, 6, sizes.get("kdim", 8), seed=1), normal(
        2, 6, sizes.get("vdim", 8), seed=2
    )  # fmt: skip
    sites = {site.parameter: site for site in find_sites(layer)}
    if separate:
        names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
        parts = [normal(*sites[name].shape, seed=5 + i) for i, name in enumerate(names)]
        folded = {n: sites[n].fold(getattr(layer, n), s) for n, s in zip(names, parts, strict=True)}
    else:
        assert sites["in_proj_weight"].shape == (3, 8)
        stacked = normal(3, 8, seed=5)
        parts = list(stacked)
        folded = {"in_proj_weight": sites["in_proj_weight"].fold(layer.in_proj_weight, stacked)}
    assert not any(sites[name].hooked for name in folded)
    expected = layer(query * parts[0], key * parts[1], value * parts[2])[0]
    close(functional_call(layer, folded, (query, key, value))[0], expected)


def test_attention_folds_its_output_projection() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).double()
    site = next(site for site in find_sites(layer) if site.parameter == "out_proj.weight")
    x, factors = normal(2, 4, 8), normal(8, seed=1)
    identity = {
        "out_proj.weight": torch.eye(8, dtype=torch.float64),
        "out_proj.bias": torch.zeros(8).double(),
    }
    heads = functional_call(layer, identity, (x, x, x))[0]
    expected = F.linear(heads * factors, layer.out_proj.weight, layer.out_proj.bias)
    weights = {"out_proj.weight": site.fold(layer.out_proj.weight, factors)}
    close(functional_call(layer, weights, (x, x, x))[0], expected)


# -- sharing ------------------------------------------------------------------------------------------------


def test_a_shared_weight_is_one_site_of_all_its_modules() -> None:
    network = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4, bias=False)})
    network["b"].weight = network["a"].weight
    network["c"] = network["a"]
    (site,) = find_sites(network)
    assert site.parameter == "a.weight"
    assert site.modules == ("a", "b", "c")
    assert site.hooked


def test_a_weight_tied_to_an_embedding_is_folded_never_hooked() -> None:
    network = nn.ModuleDict({"head": nn.Linear(4, 9), "tokens": nn.Embedding(9, 4)})
    network["tokens"].weight = network["head"].weight
    (site,) = find_sites(network)
    assert site.modules == ("head", "tokens")
    assert not site.hooked


@pytest.mark.parametrize(
    ("plain", "other", "weight"),
    [
        (nn.Conv2d(5, 5, 3), nn.ConvTranspose2d(5, 5, 3), "weight"),
        (nn.Linear(3, 4), nn.LSTM(3, 1), "weight_ih_l0"),
        (nn.Conv1d(4, 6, 3, groups=2), nn.Conv1d(2, 6, 3), "weight"),
    ],
    ids=["transposed", "recurrent", "grouped"],
)
def test_modules_that_read_a_weight_differently_carry_no_factors_on_inputs(
    plain: nn.Module, other: nn.Module, weight: str
) -> None:
    network = nn.ModuleDict({"plain": plain, "other": other})
    assert getattr(other, weight).shape == plain.weight.shape
    setattr(other, weight, plain.weight)
    site = next(site for site in find_sites(network) if site.parameter == "plain.weight")
    assert site.modules == ("plain", "other")
    assert not site.hooked


def test_parametrised_weights_are_left_out() -> None:
    network = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    assert [site.parameter for site in find_sites(network)] == ["1.weight"]


def test_layers_without_an_input_product_have_no_sites() -> None:
    assert find_sites(nn.Sequential(nn.Embedding(5, 3), nn.BatchNorm1d(3), nn.Bilinear(2, 2, 2))) == []


def test_sites_survive_json() -> None:
    network = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3, groups=2), "mha": nn.MultiheadAttention(8, 2)})
    sites = find_sites(network)
    restored = [Site.from_json(json.loads(json.dumps(site.to_json()))) for site in sites]
    assert restored == sites
    assert dict.fromkeys(restored, 1) == dict.fromkeys(sites, 1)  # hashable again
