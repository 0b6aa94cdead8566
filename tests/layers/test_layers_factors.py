"""Factors on both sides of layers: every row is answered by the network with that row's factors in its weights."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito.errors import NetworkError
from dubito.inputs import call, take
from dubito.layers import Use, kernels, survey
from dubito.layers.declared import shared_weights, weights_with_nodes
from dubito.layers.factors import Factor, Factors, NodeFactors, fold
from dubito.layers.passes import asked, asking
from dubito.networks import run

PASSES, ROWS = 2, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Shared(nn.Module):
    """A layer called twice, two layers with one weight, a module under two names, a call by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(4, 6), nn.Linear(6, 6)
        self.alias = self.twice
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.alias(torch.tanh(self.first(input=inputs))))))
        return self.head(torch.tanh(self.tied(hidden)))


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase, width: int) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(7, 5, padding_idx=0), layer, nn.Linear(width, 3)

    def forward(self, ids: Tensor) -> Tensor:
        steps = self.embedding(ids)
        if not self.layer.batch_first:
            steps = steps.transpose(0, 1)
        states, last = self.layer(steps)
        final = last[0] if isinstance(last, tuple) else last
        return self.head(
            states.mean(1 if self.layer.batch_first else 0)
            + torch.cat([final[-1]] * (states.shape[-1] // final.shape[-1]), -1)
        )


class Cells(nn.Module):
    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.cell(inputs[:, 0])
        for time in range(1, inputs.shape[1]):
            state = self.cell(inputs[:, time], state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Positions(nn.Module):
    """Dense layers over positions, rows first and rows with their positions in one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.flat, self.head = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(inputs))
        flat = torch.tanh(self.flat(hidden.flatten(0, 1)))
        return self.head(flat.unflatten(0, hidden.shape[:2]).mean(1))


class Attention(nn.Module):
    """Packed query, key and value projections, keys other than queries."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(4, 6), nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.embed(inputs))
        return self.head(self.attention(hidden, hidden[:, :2], hidden[:, 1:3])[0].mean(1))


class Separate(nn.Module):
    """Projections apart, because keys and values have sizes of their own; their biases are parts of one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True)
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.attention(self.embed(inputs), inputs, torch.tanh(inputs[..., :3]))[0].mean(1))


class Conv1D(nn.Module):
    """A dense layer as the GPT-2 of Transformers writes it: [inputs, outputs], by `addmm`."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs)))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = Conv1D(6, 4), Conv1D(3, 6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(inputs))).mean(1)


class Bare(nn.Module):
    """Products with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(3, 6))
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.first + self.shift) @ self.second.t()


class LoRA(nn.Module):
    """A dense layer beside a product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(6, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        low = F.linear(F.linear(inputs, self.down), self.up)
        return self.head(torch.tanh(self.base(inputs) + 0.5 * low))


class Packed(nn.Module):
    """Sequences of different lengths, of which the shorter ones end earlier."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        lengths = (inputs[:, :, 0] > -9).sum(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][0][-1])


def ragged() -> Tensor:
    inputs = normal(ROWS, 5, 4)
    inputs[0, 3:], inputs[2, 4:] = -10.0, -10.0
    return inputs


def pixels(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


IDS = torch.tensor([[0, 2, 3, 6], [5, 1, 1, 4], [0, 0, 6, 2]])
NETWORKS = {
    "dense": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), normal(ROWS, 4)),
    "shared": (Shared, normal(ROWS, 4)),
    "positions": (Positions, normal(ROWS, 5, 4)),
    "conv1d": (lambda: pixels(nn.Conv1d(4, 6, 3, stride=2, groups=2), nn.Tanh()), normal(ROWS, 4, 9)),
    "conv2d": (
        lambda: pixels(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=1, padding_mode="circular"),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, padding="same", groups=2, bias=False),
        ),
        normal(ROWS, 2, 6, 5),
    ),
    "first conv2d": (
        lambda: pixels(nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), nn.Tanh()),
        normal(ROWS, 2, 6, 5),
    ),
    "conv3d": (lambda: pixels(nn.Conv3d(2, 4, 2, dilation=2), nn.Tanh()), normal(ROWS, 2, 4, 4, 3)),
    "transposed": (
        lambda: pixels(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, output_padding=1), nn.Tanh()),
        normal(ROWS, 4, 3, 2),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM(5, 6, num_layers=2, batch_first=True), 6), IDS),
    "lstm both ways": (lambda: Recurrent(nn.LSTM(5, 6, bidirectional=True), 12), IDS),
    "gru": (lambda: Recurrent(nn.GRU(5, 6, num_layers=2, bidirectional=True, batch_first=True), 12), IDS),
    "rnn": (lambda: Recurrent(nn.RNN(5, 6, nonlinearity="relu", bias=False), 6), IDS),
    "lstm with projections": (lambda: Recurrent(nn.LSTM(5, 6, num_layers=2, proj_size=4, batch_first=True), 4), IDS),
    "packed": (Packed, ragged()),
    "attention": (Attention, normal(ROWS, 3, 4)),
    "attention with separate projections": (Separate, normal(ROWS, 3, 4)),
    "addmm": (Turned, normal(ROWS, 3, 4)),
    "own products": (Bare, normal(ROWS, 4)),
    "low rank": (LoRA, normal(ROWS, 4)),
    "lstm cell": (lambda: Cells(nn.LSTMCell(4, 6)), normal(ROWS, 3, 4)),
    "gru cell": (lambda: Cells(nn.GRUCell(4, 6)), normal(ROWS, 3, 4)),
    "rnn cell": (lambda: Cells(nn.RNNCell(4, 6)), normal(ROWS, 3, 4)),
}
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
every_network = pytest.mark.parametrize("name", NETWORKS)


#: Inputs must be repeated before: rows and positions share an axis, or sequences are packed.
EARLY = {"positions", "packed", "addmm"}


def made(name: str) -> tuple[nn.Module, Tensor, dict[str, Use]]:
    torch.manual_seed(0)
    make, inputs = NETWORKS[name]
    network = make()
    call(network.eval(), inputs if not inputs.is_floating_point() else inputs.float())
    network = network.double().eval()
    seen = survey(network, inputs)
    uses = weights_with_nodes(network, seen)
    assert set(uses) == {key for key, p in network.named_parameters() if p.ndim > 1}
    assert shared_weights(uses, seen) == []
    return network, inputs, uses


def answered(network: nn.Module, context: Factors, inputs: Tensor) -> Tensor:
    return asked(network, context, context.names, training={}).outputs(inputs)


def folded(use: Use, weight: Tensor, s: Tensor, r: Tensor) -> Tensor:
    """W ∘ r sᵀ written out."""
    view, inputs, outputs = use.views
    return (weight.reshape(view) * s.reshape(inputs) * r.reshape(outputs)).reshape(weight.shape)


def leaves(network: nn.Module, uses: dict[str, Use]) -> tuple[dict, dict[str, Tensor]]:
    """Random means and deviations of two passes per side, noise per row, and biases of their own per pass."""
    given, seed = {}, 0
    for key, use in uses.items():
        for side, nodes in (("in", use.input_shape), ("out", use.output_shape)):
            seed += 3
            mean = 1 + 0.3 * normal(PASSES, *nodes, seed=seed)
            std = 0.4 * normal(PASSES, *nodes, seed=seed + 1)
            noise = normal(ROWS, *nodes, seed=seed + 2)
            given[key, side] = mean.requires_grad_(), std.requires_grad_(), noise
    biases = {
        name: (p.detach() + 0.1 * normal(PASSES, *p.shape, seed=seed + len(name))).requires_grad_()
        for name, p in network.named_parameters()
        if "bias" in name
    }
    return given, biases


def reference(network, inputs, uses, given, biases, bound, positive) -> Tensor:
    """Outputs [P·n, 3] by running every pass of every row alone, with its factors multiplied into the weights."""
    rows = []
    own = dict(network.named_parameters())
    for index in range(PASSES):
        for row in range(ROWS):
            weights = {name: values[index] for name, values in biases.items()}
            for key, use in uses.items():
                s, r = (
                    (mean[index] + std[index] * noise[row])
                    for mean, std, noise in (given[key, "in"], given[key, "out"])
                )
                if positive:
                    s, r = s.exp(), r.exp()
                    s, r = s.clamp(max=bound), r.clamp(max=bound)
                else:
                    s, r = s.clamp(-bound, bound), r.clamp(-bound, bound)
                weights[key] = folded(use, own[key], s, r)
            rows.append(run(network, weights, take(inputs, slice(row, row + 1))))
    return torch.cat(rows)


def placed(network, inputs, uses, given, biases, bound, positive, chosen: slice) -> Tensor:
    def factor(key: str, side: str) -> Factor:
        mean, std, noise = given[key, side]
        return Factor(mean[chosen], std[chosen], noise, bound, positive)

    factors = {key: NodeFactors(factor(key, "in"), factor(key, "out")) for key in uses}
    own = {name: values[chosen] for name, values in biases.items()}
    return answered(network, Factors(factors, own, passes=chosen.stop - chosen.start, rows=ROWS), inputs)


@every_network
@pytest.mark.parametrize(("bound", "positive"), [(1.2, False), (float("inf"), False), (1.3, True)])
def test_rows_of_all_passes_agree_with_folding_their_own_factors(name: str, bound: float, positive: bool):
    network, inputs, uses = made(name)
    given, biases = leaves(network, uses)
    limit = None if bound == float("inf") else bound
    learned = [*network.parameters(), *biases.values(), *(t for pair in given.values() for t in pair[:2])]
    expected = reference(network, inputs, uses, given, biases, bound, positive)
    weights = normal(*expected.shape, seed=99)
    truth = torch.autograd.grad((expected * weights).sum(), learned, allow_unused=True)
    late = None
    if name not in EARLY:
        late = placed(network, inputs, uses, given, biases, limit, positive, slice(0, PASSES))
    tiled = inputs.repeat(PASSES, *(1 for _ in inputs.shape[1:]))
    early = placed(network, tiled, uses, given, biases, limit, positive, slice(0, PASSES))
    loop = [placed(network, inputs, uses, given, biases, limit, positive, slice(k, k + 1)) for k in range(PASSES)]
    for outputs in (early, torch.cat(loop), *(() if late is None else (late,))):
        torch.testing.assert_close(outputs, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((outputs * weights).sum(), learned, allow_unused=True)
        for mine, true in zip(found, truth, strict=True):
            torch.testing.assert_close(
                torch.zeros(()) if mine is None else mine,
                torch.zeros(()) if true is None else true,
                rtol=1e-8,
                atol=1e-9,
                check_dtype=False,
            ) if mine is not None or true is not None else None


@every_network
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_of_one_leave_the_outputs_as_they_were(name: str, dtype: torch.dtype):
    network, inputs, uses = made(name)
    network = network.to(dtype)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    before = copy.deepcopy(network.state_dict())
    plain = call(network, inputs)
    ones = {
        key: NodeFactors(
            *(
                Factor(
                    torch.ones(1, *nodes, dtype=dtype),
                    torch.zeros(1, *nodes, dtype=dtype),
                    torch.randn(ROWS, *nodes, dtype=dtype),
                )
                for nodes in (use.input_shape, use.output_shape)
            )
        )
        for key, use in uses.items()
    }
    context = Factors(ones, passes=1, rows=ROWS)
    with asking(network, context, context.names) as shell:
        again = call(shell, inputs)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(again, plain, rtol=tolerance, atol=tolerance)
    assert torch.equal(call(network, inputs), plain)  # nothing is left behind
    for key, value in network.state_dict().items():
        assert torch.equal(value, before[key])


@every_network
def test_points_are_folded_where_that_is_cheaper(name: str):
    """The same outputs and gradients whether factors that rows share meet the weights or the activations."""
    network, inputs, uses = made(name)
    values = {
        key: [(1 + 0.3 * normal(1, *nodes, seed=i)).requires_grad_() for nodes in (use.input_shape, use.output_shape)]
        for i, (key, use) in enumerate(uses.items())
    }
    learned = [*network.parameters(), *(v for pair in values.values() for v in pair)]
    own = dict(network.named_parameters())
    points = {key: NodeFactors(Factor(a), Factor(b)) for key, (a, b) in values.items()}
    outputs = answered(network, Factors(points, passes=1, rows=ROWS), inputs)
    weights = {key: folded(uses[key], own[key], a[0], b[0]) for key, (a, b) in values.items()}
    expected = run(network, weights, inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-11, atol=1e-11)
    found = torch.autograd.grad(outputs.square().sum(), learned, allow_unused=True)
    truth = torch.autograd.grad(expected.square().sum(), learned, allow_unused=True)
    for mine, true in zip(found, truth, strict=True):
        assert (mine is None) == (true is None)
        if mine is not None:
            torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-10)


def test_folding_has_the_gradient_of_the_product():
    use = weights_with_nodes(nn.Conv2d(4, 6, 3, groups=2))["weight"]
    leaves = (
        normal(6, 2, 3, 3).requires_grad_(),
        normal(1, 4, seed=1).requires_grad_(),
        normal(1, 6, seed=2).requires_grad_(),
    )
    assert torch.autograd.gradcheck(lambda w, s, r: fold(use, w, NodeFactors(Factor(s), Factor(r))), leaves)


def test_channels_last_stays_channels_last():
    conv, x = nn.Conv2d(4, 6, 3).double(), normal(ROWS, 4, 6, 5).contiguous(memory_format=torch.channels_last)
    inward = Factor(normal(1, 4), normal(1, 4, seed=1), normal(ROWS, 4, seed=2))
    outward = Factor(normal(1, 6), normal(1, 6, seed=1), normal(ROWS, 6, seed=2))
    context = Factors({"weight": NodeFactors(inward, outward)}, passes=1, rows=ROWS)
    outputs = answered(conv.to(memory_format=torch.channels_last), context, x)
    assert outputs.is_contiguous(memory_format=torch.channels_last)
    expected = F.conv2d(x * inward.tensor()[0, :, :, None, None], conv.weight)
    expected = expected * outward.tensor()[0, :, :, None, None] + conv.bias[:, None, None]
    torch.testing.assert_close(outputs, expected)


@pytest.mark.parametrize("turned", [False, True])
def test_additive_factors_of_dense_layers(turned: bool):
    layer, x = (Conv1D(6, 4) if turned else nn.Linear(4, 6)).double(), normal(ROWS, 5, 4)
    inputs = Factor(normal(PASSES, 4), normal(PASSES, 4, seed=1), normal(ROWS, 4, seed=2))
    outputs = Factor(normal(PASSES, 6, seed=3), normal(PASSES, 6, seed=4), normal(ROWS, 6, seed=5))
    sides = {"weight": NodeFactors(inputs, outputs)}
    tiled = x.repeat(PASSES, 1, 1)  # the turned layer flattens its positions
    answer = answered(layer, Factors(sides, passes=PASSES, rows=ROWS, additive=True), tiled)
    s, r = inputs.tensor(), outputs.tensor()
    matrix = layer.weight.mT if turned else layer.weight
    weights = matrix + r[..., :, None] * s[..., None, :]  # [P, n, 6, 4]
    expected = torch.einsum("pnoi,nti->pnto", weights, x) + layer.bias
    torch.testing.assert_close(answer, expected.flatten(0, 1))


@pytest.mark.parametrize("name", ["dense", "conv2d", "lstm", "attention"])
def test_autocast_keeps_activations_in_its_precision(name: str):
    network, inputs, uses = made(name)
    network = network.float()
    inputs = inputs.float() if inputs.is_floating_point() else inputs
    given, _ = leaves(network, uses)
    factors = {
        key: NodeFactors(
            *(
                Factor(mean[:1].float(), std[:1].float(), noise.float())
                for mean, std, noise in (given[key, "in"], given[key, "out"])
            )
        )
        for key in uses
    }
    context = Factors(factors, passes=1, rows=ROWS)
    plain = answered(network, context, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        lowered = answered(network, context, inputs)
        assert lowered.dtype == call(network, inputs).dtype == torch.bfloat16
    torch.testing.assert_close(lowered.float(), plain, rtol=0.1, atol=0.2)  # eight bits, a few layers deep


def test_a_pass_refuses_a_weight_that_is_used_otherwise():
    network = nn.Sequential(Own(4, 6), nn.Linear(6, 3))
    context = Factors({"0.weight": NodeFactors(Factor(torch.ones(1, 4)))}, passes=1, rows=ROWS)
    with pytest.raises(NetworkError, match=r"must use \['0.weight'\] as it did"):
        answered(network, context, torch.randn(ROWS, 4))


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight / self.weight.norm(), self.bias)


def test_layers_with_a_forward_pass_of_their_own_share_a_draw():
    network = nn.Sequential(Own(4, 6), nn.Linear(6, 3)).eval()
    uses = weights_with_nodes(network)
    assert list(uses) == ["0.weight", "1.weight"]
    assert shared_weights(uses, survey(network, torch.randn(ROWS, 4))) == ["0.weight"]


@pytest.mark.parametrize("piece", [1, 40, 10**6])
def test_gradients_do_not_depend_on_the_pieces_they_are_computed_in(piece: int, monkeypatch):
    monkeypatch.setattr(kernels, "PIECE", piece)
    network, inputs, uses = made("conv2d")
    given, biases = leaves(network, uses)
    learned = [*network.parameters(), *biases.values(), *(t for pair in given.values() for t in pair[:2])]
    expected = reference(network, inputs, uses, given, biases, 1.2, False)
    truth = torch.autograd.grad(expected.square().sum(), learned, allow_unused=True)
    outputs = placed(network, inputs, uses, given, biases, 1.2, False, slice(0, PASSES))
    found = torch.autograd.grad(outputs.square().sum(), learned, allow_unused=True)
    for mine, true in zip(found, truth, strict=True):
        if true is not None:
            torch.testing.assert_close(mine, true, rtol=1e-9, atol=1e-10)


def test_convolutions_of_inputs_cut_their_patches_once():
    network, inputs, uses = made("first conv2d")
    given, _ = leaves(network, uses)
    patches: dict = {}
    cuts = []
    for _ in range(2):
        mean, std, noise = given["0.weight", "in"]
        factor = Factor(mean[:1], std[:1], noise)
        context = Factors({"0.weight": NodeFactors(factor)}, passes=1, rows=ROWS, patches=patches)
        outputs = answered(network, context, inputs)
        (kept,) = patches.values()
        assert kept[0] is inputs
        cuts.append(kept[1])
        found = torch.autograd.grad(outputs.square().sum(), [network[0].weight, network[0].bias, mean, std])
        x = inputs * factor.tensor()[0][:, :, None, None]
        truth = torch.autograd.grad(network(x).square().sum(), [network[0].weight, network[0].bias, mean, std])
        for mine, true in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, true)
    assert cuts[0] is cuts[1]


@pytest.mark.parametrize(("rows", "passes"), [(1, 3), (3, 3), (2, 3), (1, 1)])
@pytest.mark.parametrize("per_row", [False, True])
def test_passes_without_gradients_are_those_with(rows: int, passes: int, per_row: bool) -> None:
    """One row of every pass meets the factors as they are; as many rows as passes do not."""
    stream = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 4, generator=stream), torch.randn(5, 4, generator=stream)
    s, r = torch.randn(passes, 4, generator=stream), torch.randn(passes, 5, generator=stream)
    bias = torch.randn((passes, rows, 5) if per_row else (passes, 5), generator=stream)
    truth = torch.stack([((x * s[p]) @ weight.T) * r[p] + bias[p] for p in range(passes)])
    inputs, outputs = Factor(s), Factor(r)
    for tiled in (x, x.repeat(passes, 1)):
        for enabled in (False, True):
            with torch.set_grad_enabled(enabled):
                scaled = inputs.on(tiled, rows, -1)
                answer = outputs.on(scaled @ weight.T, rows, -1, bias)
            torch.testing.assert_close(answer.view(passes, rows, 5), truth)
