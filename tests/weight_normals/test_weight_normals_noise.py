"""Estimators of weight noise against formed variances, weights per row, and each other by Monte Carlo."""

import copy
from collections.abc import Callable

import pytest
import torch
from dubito.layers.weight_noise import (
    OwnSpread,
    RowStreams,
    Spread,
    TiedSpread,
    TruncatedSpread,
    flipped_noise,
    local_noise,
    place,
    rows,
)
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dubito import ConfigError, Flipout, LocalReparameterised, NetworkError, UnknownNameError
from dubito.layers.trace import Layout

DOUBLE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 4), (3, 5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), (3, 5)),
    "linear at positions": (lambda: nn.Linear(5, 4), (3, 2, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 3, 6)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 1), padding="same"), (3, 2, 4, 4)),
    "conv2d in groups": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (3, 4, 4, 3)),
    "conv2d by channel": (lambda: nn.Conv2d(3, 3, 2, groups=3, bias=False), (3, 3, 3, 3)),
    "conv2d around": (
        lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dilation=1),
        (3, 2, 4, 4),
    ),
    "conv2d dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2), (3, 2, 4, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (3, 2, 3, 3, 2)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
forms = pytest.mark.parametrize("form", ["own", "tied", "truncated"])


def make(name: str) -> tuple[nn.Module, Tensor]:
    build, shape = LAYERS[name]
    return build().double(), normal(*shape)


def spread(weight: Tensor, form: str, seed: int) -> Spread:
    m, n = len(weight), weight[0].numel()
    if form == "own" or weight.ndim == 1:
        return OwnSpread((normal(*weight.shape, seed=seed) - 1).requires_grad_())
    u, v = normal(2, m, seed=seed) - 0.5, normal(2, n, seed=seed + 1) - 0.5
    if form == "tied":
        return TiedSpread(u.requires_grad_(), v.requires_grad_(), weight.shape)
    return TruncatedSpread(u.requires_grad_(), v.requires_grad_(), 0.1, weight.shape)


def spreads_of(module: nn.Module, form: str) -> dict[str, Spread]:
    named = enumerate(module.named_parameters())
    return {name: spread(parameter, form, 10 * number) for number, (name, parameter) in named}


def formed(spread: Spread) -> Tensor:
    """σ in the weight's shape, written out."""
    if isinstance(spread, OwnSpread):
        return torch.log1p(spread.raw_std.exp())
    if isinstance(spread, TiedSpread):
        return torch.einsum("am,an->mn", spread.log_u.exp(), spread.log_v.exp()).view(spread.shape)
    assert isinstance(spread, TruncatedSpread)
    return torch.einsum("am,an->mn", spread.u, spread.v).clamp(min=spread.floor).view(spread.shape)


def leaves(spreads: dict[str, Spread]) -> list[Tensor]:
    return [
        t for spread in spreads.values() for t in vars(spread).values() if isinstance(t, Tensor) and t.is_leaf
    ]


def exact_variance(module: nn.Module, spreads: dict[str, Spread], x: Tensor) -> Tensor:
    """The layer itself, on squares, with variances in place of its weights."""
    squares = {name: formed(spread).square() for name, spread in spreads.items()}
    return functional_call(module, squares, (x.square(),))


def layers_of(network: nn.Module, x: Tensor):
    return place(network, [name for name, _ in network.named_parameters()], None, x).layers


def local(module: nn.Module, spreads: dict[str, Spread], x: Tensor, seed: int = 0) -> Tensor:
    with local_noise(module, layers_of(module, x), spreads, RowStreams(seed, 0, len(x))):
        return module(x)


# -- local reparameterisation -------------------------------------------------------------------------------------


@every_layer
@forms
def test_local_noise_equals_the_formed_variance_in_value_and_gradient(name: str, form: str) -> None:
    module, x = make(name)
    x.requires_grad_()
    spreads = spreads_of(module, form)
    out = local(module, spreads, x)
    noise = RowStreams(0, 0, len(x)).normal(("", 0), tuple(out.shape[1:]), out)
    expected = module(x) + (exact_variance(module, spreads, x) + 1e-8).sqrt() * noise
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    inputs = [x, *module.parameters(), *leaves(spreads)]
    weights = normal(*out.shape, seed=3)
    ours = torch.autograd.grad((weights * out).sum(), inputs)
    theirs = torch.autograd.grad((weights * expected).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    assert "forward" not in vars(module) and not module._forward_pre_hooks  # all is as it was


@pytest.mark.parametrize("absent", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("form", ["own", "tied"])
def test_points_among_a_layers_parameters(name: str, form: str, absent: str) -> None:
    module, x = make(name)
    spreads = spreads_of(module, form)
    del spreads[absent]
    layers = place(module, list(spreads), None, x).layers
    with local_noise(module, layers, spreads, RowStreams(0, 0, len(x))):
        out = module(x)
    noise = RowStreams(0, 0, len(x)).normal(("", 0), tuple(out.shape[1:]), out)
    zeros = {absent: torch.zeros_like(module.get_parameter(absent))}
    squares = {key: formed(spread).square() for key, spread in spreads.items()} | zeros
    variance = functional_call(module, squares, (x.square(),))
    torch.testing.assert_close(out, module(x) + (variance + 1e-8).sqrt() * noise)
    changes = {key: formed(spread) * 0.3 for key, spread in spreads.items()}
    with flipped_noise(module, layers, changes, RowStreams(0, 0, len(x))):
        flipped = module(x)
    expected = torch.cat([row_output(module, layers[0], changes, x, row) for row in range(len(x))])
    torch.testing.assert_close(flipped, expected)


class Sizes(TorchDispatchMode):
    """Records the number of entries of every tensor that is made, but for views of one that was there."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.found: set[int] = set()
        self.known = known.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, Tensor)]
        self.found |= {t.numel() for t in made if t.untyped_storage().data_ptr() != self.known}
        return out


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Linear(90, 70), (3, 90)), (nn.Conv2d(10, 60, 3), (2, 10, 3, 3)), (nn.Conv1d(90, 60, 1), (3, 90, 1))],
    ids=["linear", "conv2d", "conv1d"],
)
def test_no_variance_of_the_weights_size_is_ever_formed(
    module: nn.Module, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK_SIZE", 1)  # noise is drawn row by row, in small tensors
    module, x = module.double().requires_grad_(False), normal(*shape)
    layers, found, weight = layers_of(module, x), {}, module.get_parameter("weight")
    for form in ("tied", "own"):
        spreads = spreads_of(module, form)
        with local_noise(module, layers, spreads, RowStreams(0, 0, len(x))), Sizes(weight) as sizes:
            module(x).sum().backward()
        assert all(leaf.grad is not None for leaf in leaves(spreads))
        found[form] = max(sizes.found)
    assert found["own"] >= weight.numel() > found["tied"]


def test_moments_are_kept_for_the_same_inputs_only() -> None:
    network, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), normal(6, 5)
    spreads, layers, moments = spreads_of(network, "tied"), layers_of(network, x), {}
    assert [layer.reads_input for layer in layers] == [True, False]
    with torch.no_grad():
        for seed, inputs in enumerate((x, x, x.clone(), x + 1, x)):
            streams = RowStreams(seed, 0, 6)
            with local_noise(network, layers, spreads, streams):
                expected = network(inputs)
            with local_noise(network, layers, spreads, streams, moments):
                torch.testing.assert_close(network(inputs), expected, rtol=1e-12, atol=1e-12)
    assert set(moments) == {("0", 0)}


# -- flipout ------------------------------------------------------------------------------------------------------


def row_output(module: nn.Module, layer, changes: dict[str, Tensor], x: Tensor, row: int) -> Tensor:
    """The layer on one row, with that row's own weights μ + Δ ∘ r sᵀ put into it."""
    streams, name = RowStreams(0, 0, len(x)), layer.weight or layer.bias
    weight = module.get_parameter("weight")
    groups = getattr(module, "groups", 1)
    r = streams.signs((name, "out"), len(weight), weight)[row]
    weights = {}
    if "weight" in changes:
        s = streams.signs((name, "in"), weight.shape[1] * groups, weight)[row]
        per_output = s.view(groups, 1, -1).expand(-1, len(weight) // groups, -1).reshape(len(weight), -1)
        signs = (r[:, None] * per_output).view(*weight.shape[:2], *(1 for _ in weight.shape[2:]))
        weights["weight"] = weight + changes["weight"] * signs
    if "bias" in changes:
        weights["bias"] = module.get_parameter("bias") + changes["bias"] * r
    return functional_call(module, weights, (x[row : row + 1],))


@every_layer
def test_flipout_gives_each_row_weights_of_its_own(name: str) -> None:
    module, x = make(name)
    layers = layers_of(module, x)
    changes = {key: normal(*p.shape, seed=20) for key, p in module.named_parameters()}
    with flipped_noise(module, layers, changes, RowStreams(0, 0, len(x))):
        out = module(x)
    expected = torch.cat([row_output(module, layers[0], changes, x, row) for row in range(len(x))])
    torch.testing.assert_close(out, expected)
    change = (out - module(x)).detach()
    assert not torch.allclose(change[0].abs(), change[1].abs())


def test_flipout_is_the_same_at_positions_that_see_the_same_patch() -> None:
    tile = normal(1, 2, 3, 3)
    image = tile.repeat(4, 1, 3, 3)  # every third position sees the same patch
    module = nn.Conv2d(2, 5, 3).double()
    changes = {key: normal(*p.shape, seed=20) for key, p in module.named_parameters()}
    with flipped_noise(module, layers_of(module, image), changes, RowStreams(1, 0, 4)):
        change = (module(image) - nn.Conv2d.forward(module, image)).detach()
    torch.testing.assert_close(change[..., :3, :3], change[..., 3:6, 3:6])
    assert (change[..., :3, :3] - change[..., 1:4, 1:4]).abs().max() > 0.1  # other patches, other changes
    assert len({tuple(row) for row in change[:, :, 0, 0].round(decimals=8).tolist()}) > 1  # rows differ
    sequence, dense = normal(1, 1, 4).repeat(3, 5, 1), nn.Linear(4, 6).double()
    changes = {key: normal(*p.shape, seed=21) for key, p in dense.named_parameters()}
    with flipped_noise(dense, layers_of(dense, sequence), changes, RowStreams(1, 0, 3)):
        out = dense(sequence)
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


class Twice(nn.Module):
    """One layer called twice, and another layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


def test_flipout_keeps_a_rows_weights_through_all_calls() -> None:
    network, x = Twice().double(), normal(3, 4)
    changes = {key: normal(*p.shape, seed=22) for key, p in network.named_parameters()}
    layers = layers_of(network, x)
    assert [layer.name for layer in layers] == ["inner", "other"]
    with flipped_noise(network, layers, changes, RowStreams(0, 0, 3)):
        out = network(x)
    for row in range(3):
        signs = [RowStreams(0, 0, 3).signs(("inner.weight", side), 4, x)[row] for side in ("out", "in")]
        own = copy.deepcopy(network)
        with torch.no_grad():
            own.inner.weight += changes["inner.weight"] * signs[0][:, None] * signs[1]
            own.inner.bias += changes["inner.bias"] * signs[0]
        torch.testing.assert_close(out[row], own(x[row]))


def test_local_noise_is_new_in_every_call() -> None:
    layer = nn.Linear(4, 4).double()
    network = nn.Sequential(layer, layer)
    x = normal(3, 4)
    spreads = {"0.weight": spread(layer.weight, "own", 0), "0.bias": spread(layer.bias, "own", 1)}
    seen: list[Tensor] = []
    with torch.no_grad():
        plain = layer(x)
        with local_noise(network, layers_of(network, x), spreads, RowStreams(0, 0, 3)):
            seen += [layer(x) - plain, layer(x) - plain]
    assert not torch.allclose(*seen)


# -- the three agree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["own", "tied"])
@pytest.mark.parametrize("name", ["linear", "linear at positions", "conv1d", "conv2d in groups", "conv3d"])
def test_means_and_variances_agree_by_monte_carlo(name: str, form: str) -> None:
    count = 1500
    module, x = make(name)
    spreads = spreads_of(module, form)
    layers, weights = layers_of(module, x), dict(module.named_parameters())
    with torch.no_grad():
        mean, variance = module(x), exact_variance(module, spreads, x)
        generator = torch.Generator().manual_seed(5)

        def reparameterised() -> Tensor:
            drawn = {key: one.draw(weights[key], generator) for key, one in spreads.items()}
            return functional_call(module, drawn, (x,))

        # The same rows many times over in one batch: each has noise of its own.
        many = x.repeat(count, *(1 for _ in x.shape[1:]))
        with local_noise(module, layers, spreads, RowStreams(6, 0, len(many))):
            local = module(many).view(count, *mean.shape)
        flips = []
        for batch in range(count):
            noise = {
                key: torch.randn(w.shape, generator=generator, dtype=DOUBLE) for key, w in weights.items()
            }
            changes = {key: formed(spreads[key]) * noise[key] for key in spreads}
            with flipped_noise(module, layers, changes, RowStreams(batch, 0, len(x))):
                flips.append(module(x))
        for draws in (torch.stack([reparameterised() for _ in range(count)]), local, torch.stack(flips)):
            # Flipped perturbations are products of signs and a Normal: every output is Normal given the signs.
            scores = (draws.mean(0) - mean) / (variance / count).sqrt()
            assert scores.abs().max() < 5
            assert (draws.var(0) / variance - 1).abs().max() < 5 * (2 / count) ** 0.5


def test_rows_are_independent_given_one_perturbation() -> None:
    # Flipout's gain: what rows have in common averages out, where one draw shared by all rows keeps it.
    module, x = nn.Linear(3, 2).double(), normal(1, 3).repeat(2, 1)
    layers, count = layers_of(module, x), 1500
    products = []
    with torch.no_grad():
        for batch in range(count):
            changes = {key: normal(*p.shape, seed=batch) for key, p in module.named_parameters()}
            with flipped_noise(module, layers, changes, RowStreams(batch, 0, 2)):
                first, second = module(x) - nn.Linear.forward(module, x)
            products.append(first * second)
    each = torch.stack(products)
    assert (each.mean(0) / (each.std(0) / count**0.5)).abs().max() < 4.5


# -- where rows lie -----------------------------------------------------------------------------------------------


class Arranged(nn.Module):
    """Rows first, second, or folded together with positions."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.layer, self.head = layout, nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, steps = x.shape[:2]
        if self.layout in (Layout.SECOND, Layout.FLAT_SECOND):
            x = x.transpose(0, 1)
        if self.layout in (Layout.FLAT, Layout.FLAT_SECOND):
            x = x.reshape(rows * steps, -1)
        x = torch.tanh(self.layer(x))
        if self.layout is Layout.FLAT:
            x = x.view(rows, steps, -1)
        if self.layout is Layout.FLAT_SECOND:
            x = x.view(steps, rows, -1)
        return self.head(x.mean(0 if self.layout in (Layout.SECOND, Layout.FLAT_SECOND) else 1))


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.SECOND, Layout.FLAT, Layout.FLAT_SECOND])
@pytest.mark.parametrize("form", ["own", "tied"])
def test_rows_keep_their_noise_wherever_they_lie(layout: Layout, form: str) -> None:
    x = normal(6, 3, 4)
    networks = {each: Arranged(each).double() for each in (Layout.ROWS, layout)}
    networks[layout].load_state_dict(networks[Layout.ROWS].state_dict())
    spreads = spreads_of(networks[layout], form)
    changes = {key: formed(one) for key, one in spreads.items()}

    def run(network: nn.Module, first: int, end: int) -> tuple[Tensor, Tensor]:
        layers = layers_of(network, x)
        assert layers[0].layout is getattr(network, "layout")  # noqa: B009
        streams = RowStreams(2, first, end - first, 6)
        with torch.no_grad():
            with local_noise(network, layers, spreads, streams):
                local = network(x[first:end])
            with flipped_noise(network, layers, changes, streams):
                return local, network(x[first:end])

    whole = run(networks[Layout.ROWS], 0, 6)
    for first, end in ((0, 6), (0, 2), (2, 6)):
        for ours, expected in zip(run(networks[layout], first, end), whole, strict=True):
            torch.testing.assert_close(ours, expected[first:end])


def test_rows_that_lie_elsewhere_than_before_are_refused() -> None:
    network, x = nn.Sequential(nn.Linear(4, 2)).double(), normal(6, 4)
    spreads = spreads_of(network, "own")
    for noise in (
        local_noise(network, layers_of(network, x), spreads, RowStreams(0, 0, 5)),
        flipped_noise(
            network, layers_of(network, x), {k: formed(s) for k, s in spreads.items()}, RowStreams(0, 0, 5)
        ),
    ):
        with pytest.raises(NetworkError, match=r"layer '0' sees \(6, 2\) for 5 rows"), noise:
            network(x)
    assert "forward" not in vars(network[0])


# -- which layers ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers that can carry noise on their outputs, and layers that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm, self.body, self.idle = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 9, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.lstm(self.embedding(ids))[0]
        hidden = self.norm(self.attention(hidden, hidden, hidden)[0].mean(1))
        return self.decoder(F.linear(torch.relu(self.body(hidden)), self.idle.weight))


def test_other_layers_fall_back_and_say_why() -> None:
    network, ids = Mixed().eval(), torch.randint(9, (4, 5))
    names = [name for name, _ in network.named_parameters()]
    found = place(network, names, None, ids)
    assert [(layer.name, layer.weight, layer.bias) for layer in found.layers] == [
        ("body", "body.weight", "body.bias")
    ]
    why = {
        "embedding.weight": "Embedding",  # though a linear layer reads it too
        "lstm.weight_hh_l0": "LSTM",
        "attention.in_proj_weight": "MultiheadAttention",
        "attention.out_proj.weight": "NonDynamicallyQuantizableLinear",
        "norm.weight": "LayerNorm",
        "idle.weight": "not called as a layer",
    }
    assert why.items() <= found.drawn.items()
    assert set(found.drawn) == set(names) - {"body.weight", "body.bias"}
    assert place(network, ["body.bias"], None, ids).layers[0].weight is None
    assert place(network, ["lstm.weight_hh_l0"], None, ids).layers == ()
    only = place(network, names, ["body"], ids)
    assert [layer.name for layer in only.layers] == ["body"]


def test_layers_asked_for_by_name_must_be_able_to() -> None:
    network, ids = Mixed().eval(), torch.randint(9, (4, 5))
    names = [name for name, _ in network.named_parameters()]
    for wanted, reason in (
        ("lstm", "LSTM"),
        ("idle", "not called as a layer"),
        ("decoder", "shares a weight with Embedding"),
    ):
        with pytest.raises(NetworkError, match=rf"layer '{wanted}' cannot carry .* \({reason}\)"):
            place(network, names, [wanted], ids)
    with pytest.raises(UnknownNameError, match="unknown layer 'bodi', did you mean 'body'"):
        place(network, names, ["bodi"], ids)
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found = place(two, ["0.weight", "1.weight"], ["1"], torch.zeros(3, 4))
    assert [layer.name for layer in found.layers] == ["1"] and found.drawn == {"0.weight": "not asked for"}
    for wrong in ("body", [], [3]):
        for estimator in (LocalReparameterised, Flipout):
            with pytest.raises(ConfigError, match="layers must be a list of layer names"):
                estimator(layers=wrong)
    assert LocalReparameterised(layers=["a"]) == LocalReparameterised(layers=("a",))


def test_a_forward_pass_put_on_a_layer_is_left_alone() -> None:
    network, x = nn.Sequential(nn.Linear(4, 4)), torch.zeros(3, 4)
    network[0].forward = lambda inputs: 2 * inputs  # pyright: ignore
    found = place(network, ["0.weight"], None, x)
    assert found.layers == () and found.drawn == {"0.weight": "has a forward pass of its own"}
