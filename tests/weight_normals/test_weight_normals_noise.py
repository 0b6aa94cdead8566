"""Estimators of weight noise against formed variances, weights per row, and each other by Monte Carlo."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dubito import ConfigError, Flipout, LocalReparameterised, NetworkError, UnknownNameError
from dubito.layers import reasons, survey
from dubito.layers.layout import Layout
from dubito.layers.passes import asking
from dubito.weight_normals import streams as stream_module
from dubito.weight_normals.noise import FlippedNoise, LocalNoise, Moments
from dubito.weight_normals.placement import Placement, assign_noise
from dubito.weight_normals.scales import OwnScale, TiedScale, TruncatedScale, WeightScale
from dubito.weight_normals.streams import RowStreams

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
    "conv2d around": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular", dilation=1), (3, 2, 4, 4)),
    "conv2d dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2), (3, 2, 4, 5)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (3, 2, 3, 3, 2)),
}
every_layer = pytest.mark.parametrize("name", LAYERS)
forms = pytest.mark.parametrize("form", ["own", "tied", "truncated"])


def make(name: str) -> tuple[nn.Module, Tensor]:
    build, shape = LAYERS[name]
    return build().double(), normal(*shape)


def scale_of(weight: Tensor, form: str, seed: int) -> WeightScale:
    m, n = len(weight), weight[0].numel()
    if form == "own" or weight.ndim == 1:
        return OwnScale((normal(*weight.shape, seed=seed) - 1).requires_grad_())
    u, v = normal(2, m, seed=seed) - 0.5, normal(2, n, seed=seed + 1) - 0.5
    if form == "tied":
        return TiedScale(u.requires_grad_(), v.requires_grad_(), weight.shape)
    return TruncatedScale(u.requires_grad_(), v.requires_grad_(), 0.1, weight.shape)


def scales_of(module: nn.Module, form: str) -> dict[str, WeightScale]:
    named = enumerate(module.named_parameters())
    return {name: scale_of(parameter, form, 10 * number) for number, (name, parameter) in named}


def formed(scale: WeightScale) -> Tensor:
    """σ in the weight's shape, written out."""
    if isinstance(scale, OwnScale):
        return torch.log1p(scale.raw_std.exp())
    if isinstance(scale, TiedScale):
        return torch.einsum("am,an->mn", scale.log_u.exp(), scale.log_v.exp()).view(scale.shape)
    assert isinstance(scale, TruncatedScale)
    return torch.einsum("am,an->mn", scale.u, scale.v).clamp(min=scale.floor).view(scale.shape)


def leaves(scales: dict[str, WeightScale]) -> list[Tensor]:
    return [t for scale in scales.values() for t in vars(scale).values() if isinstance(t, Tensor) and t.is_leaf]


def exact_variance(module: nn.Module, scales: dict[str, WeightScale], x: Tensor) -> Tensor:
    """The layer itself, on squares, with variances in place of its weights."""
    squares = {name: formed(scale).square() for name, scale in scales.items()}
    return functional_call(module, squares, (x.square(),))


def placed(network: nn.Module, x: Tensor, names: list[str] | None = None, wanted: list[str] | None = None) -> Placement:
    parameters = [name for name, _ in network.named_parameters()] if names is None else names
    return assign_noise(survey(network, x), network, parameters, wanted)


def local(
    network: nn.Module,
    scales: dict[str, WeightScale],
    x: Tensor,
    streams: RowStreams | None = None,
    moments: Moments | None = None,
    placement: Placement | None = None,
) -> Tensor:
    placement = placement or placed(network, x, list(scales))
    noise = LocalNoise(placement, scales.__getitem__, streams or RowStreams(0, 0, len(x)), moments)
    with asking(network, noise, placement.names) as shell:
        return shell(x)


def flipped(
    network: nn.Module,
    changes: dict[str, Tensor],
    x: Tensor,
    streams: RowStreams | None = None,
    placement: Placement | None = None,
) -> Tensor:
    placement = placement or placed(network, x, list(changes))
    noise = FlippedNoise(placement, changes, streams or RowStreams(0, 0, len(x)))
    with asking(network, noise, placement.names) as shell:
        return shell(x)


# -- local reparameterisation -------------------------------------------------------------------------------------


@every_layer
@forms
def test_local_noise_equals_the_formed_variance_in_value_and_gradient(name: str, form: str) -> None:
    module, x = make(name)
    x.requires_grad_()
    scales = scales_of(module, form)
    out = local(module, scales, x)
    noise = RowStreams(0, 0, len(x)).normal(("", 0), tuple(out.shape[1:]), out)
    expected = module(x) + (exact_variance(module, scales, x) + 1e-8).sqrt() * noise
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    inputs = [x, *module.parameters(), *leaves(scales)]
    weights = normal(*out.shape, seed=3)
    ours = torch.autograd.grad((weights * out).sum(), inputs)
    theirs = torch.autograd.grad((weights * expected).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    assert "forward" not in vars(module) and not module._forward_pre_hooks  # nothing shared is changed


@pytest.mark.parametrize("absent", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "conv2d"])
@pytest.mark.parametrize("form", ["own", "tied"])
def test_points_among_a_layers_parameters(name: str, form: str, absent: str) -> None:
    module, x = make(name)
    scales = scales_of(module, form)
    del scales[absent]
    out = local(module, scales, x)
    noise = RowStreams(0, 0, len(x)).normal(("", 0), tuple(out.shape[1:]), out)
    zeros = {absent: torch.zeros_like(module.get_parameter(absent))}
    squares = {key: formed(scale).square() for key, scale in scales.items()} | zeros
    variance = functional_call(module, squares, (x.square(),))
    torch.testing.assert_close(out, module(x) + (variance + 1e-8).sqrt() * noise)
    changes = {key: formed(scale) * 0.3 for key, scale in scales.items()}
    expected = torch.cat([row_output(module, changes, x, row) for row in range(len(x))])
    torch.testing.assert_close(flipped(module, changes, x), expected)


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
    monkeypatch.setattr(stream_module, "BLOCK_SIZE", 1)  # noise is drawn row by row, in small tensors
    module, x = module.double().requires_grad_(False), normal(*shape)
    placement, largest, weight = placed(module, x), {}, module.get_parameter("weight")
    for form in ("tied", "own"):
        scales = scales_of(module, form)
        with Sizes(weight) as sizes:
            local(module, scales, x, placement=placement).sum().backward()
        assert all(leaf.grad is not None for leaf in leaves(scales))
        largest[form] = max(sizes.found)
    assert largest["own"] >= weight.numel() > largest["tied"]


def test_moments_are_kept_for_the_same_inputs_only() -> None:
    network, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double(), normal(6, 5)
    scales, placement, moments = scales_of(network, "tied"), placed(network, x), {}
    assert [use.reads_input for use in placement.uses] == [True, False]
    with torch.no_grad():
        for seed, inputs in enumerate((x, x, x.clone(), x + 1, x)):
            streams = RowStreams(seed, 0, 6)
            expected = local(network, scales, inputs, streams, placement=placement)
            kept = local(network, scales, inputs, streams, moments, placement)
            torch.testing.assert_close(kept, expected, rtol=1e-12, atol=1e-12)
    assert set(moments) == {("0", 0)}


# -- flipout ------------------------------------------------------------------------------------------------------


def row_output(module: nn.Module, changes: dict[str, Tensor], x: Tensor, row: int) -> Tensor:
    """The layer on one row, with that row's own weights μ + Δ ∘ r sᵀ put into it."""
    streams, name = RowStreams(0, 0, len(x)), "weight" if "weight" in changes else "bias"
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
    changes = {key: normal(*p.shape, seed=20) for key, p in module.named_parameters()}
    out = flipped(module, changes, x)
    expected = torch.cat([row_output(module, changes, x, row) for row in range(len(x))])
    torch.testing.assert_close(out, expected)
    change = (out - module(x)).detach()
    assert not torch.allclose(change[0].abs(), change[1].abs())


def test_flipout_is_the_same_at_positions_that_see_the_same_patch() -> None:
    tile = normal(1, 2, 3, 3)
    image = tile.repeat(4, 1, 3, 3)  # every third position sees the same patch
    module = nn.Conv2d(2, 5, 3).double()
    changes = {key: normal(*p.shape, seed=20) for key, p in module.named_parameters()}
    change = (flipped(module, changes, image, RowStreams(1, 0, 4)) - module(image)).detach()
    torch.testing.assert_close(change[..., :3, :3], change[..., 3:6, 3:6])
    assert (change[..., :3, :3] - change[..., 1:4, 1:4]).abs().max() > 0.1  # other patches, other changes
    assert len({tuple(row) for row in change[:, :, 0, 0].round(decimals=8).tolist()}) > 1  # rows differ
    sequence, dense = normal(1, 1, 4).repeat(3, 5, 1), nn.Linear(4, 6).double()
    changes = {key: normal(*p.shape, seed=21) for key, p in dense.named_parameters()}
    out = flipped(dense, changes, sequence, RowStreams(1, 0, 3))
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
    uses = placed(network, x).uses
    assert [(use.weight, use.bias, use.calls) for use in uses] == [
        ("inner.weight", "inner.bias", 2),
        ("inner.weight", None, 1),
    ]
    out = flipped(network, changes, x)
    for row in range(3):
        signs = [RowStreams(0, 0, 3).signs(("inner.weight", side), 4, x)[row] for side in ("out", "in")]
        own = copy.deepcopy(network)
        with torch.no_grad():
            own.inner.weight += changes["inner.weight"] * signs[0][:, None] * signs[1]
            own.inner.bias += changes["inner.bias"] * signs[0]
        torch.testing.assert_close(out[row], own(x[row]))


class Again(nn.Module):
    """A layer that reads the same inputs three times, the last time by another layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x), self.layer(x), self.other(x) + self.layer.bias], 1)


def test_local_noise_is_new_in_every_call() -> None:
    network, x = Again().double(), normal(3, 4)
    scales: dict[str, WeightScale] = {"layer.weight": scale_of(network.layer.weight, "own", 0)}
    with torch.no_grad():
        noise = local(network, scales, x) - network(x)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert (noise[:, first] - noise[:, second]).abs().min() > 1e-4


# -- the three agree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["own", "tied"])
@pytest.mark.parametrize("name", ["linear", "linear at positions", "conv1d", "conv2d in groups", "conv3d"])
def test_means_and_variances_agree_by_monte_carlo(name: str, form: str) -> None:
    count = 1500
    module, x = make(name)
    scales = scales_of(module, form)
    placement, weights = placed(module, x), dict(module.named_parameters())
    with torch.no_grad():
        mean, variance = module(x), exact_variance(module, scales, x)
        generator = torch.Generator().manual_seed(5)

        def reparameterised() -> Tensor:
            drawn = {key: one.draw(weights[key], generator) for key, one in scales.items()}
            return functional_call(module, drawn, (x,))

        # The same rows many times over in one batch: each has noise of its own.
        many = x.repeat(count, *(1 for _ in x.shape[1:]))
        locally = local(module, scales, many, RowStreams(6, 0, len(many)), placement=placement)
        locally = locally.view(count, *mean.shape)
        flips = []
        for batch in range(count):
            noise = {key: torch.randn(w.shape, generator=generator, dtype=DOUBLE) for key, w in weights.items()}
            changes = {key: formed(scales[key]) * noise[key] for key in scales}
            flips.append(flipped(module, changes, x, RowStreams(batch, 0, len(x)), placement))
        for draws in (torch.stack([reparameterised() for _ in range(count)]), locally, torch.stack(flips)):
            # Flipped perturbations are products of signs and a Normal: every output is Normal given the signs.
            scores = (draws.mean(0) - mean) / (variance / count).sqrt()
            assert scores.abs().max() < 5
            assert (draws.var(0) / variance - 1).abs().max() < 5 * (2 / count) ** 0.5


def test_rows_are_independent_given_one_perturbation() -> None:
    # Flipout's gain: what rows have in common averages out, where one draw shared by all rows keeps it.
    module, x = nn.Linear(3, 2).double(), normal(1, 3).repeat(2, 1)
    placement, count = placed(module, x), 1500
    products = []
    with torch.no_grad():
        for batch in range(count):
            changes = {key: normal(*p.shape, seed=batch) for key, p in module.named_parameters()}
            first, second = flipped(module, changes, x, RowStreams(batch, 0, 2), placement) - module(x)
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
    scales = scales_of(networks[layout], form)
    changes = {key: formed(one) for key, one in scales.items()}

    def run(network: nn.Module, first: int, end: int) -> tuple[Tensor, Tensor]:
        placement, part = placed(network, x), x[first:end]
        assert placement.uses[0].layout is getattr(network, "layout")  # noqa: B009
        streams = RowStreams(2, first, end - first, 6)
        with torch.no_grad():
            return (
                local(network, scales, part, streams, placement=placement),
                flipped(network, changes, part, streams, placement),
            )

    whole = run(networks[Layout.ROWS], 0, 6)
    for first, end in ((0, 6), (0, 2), (2, 6)):
        for ours, expected in zip(run(networks[layout], first, end), whole, strict=True):
            torch.testing.assert_close(ours, expected[first:end])


def test_rows_that_lie_elsewhere_than_before_are_refused() -> None:
    network, x = nn.Sequential(nn.Linear(4, 2)).double(), normal(6, 4)
    scales = scales_of(network, "own")
    changes = {key: formed(one) for key, one in scales.items()}
    with pytest.raises(NetworkError, match=r"layer '0' sees \(6, 2\) for 5 rows"):
        local(network, scales, x, RowStreams(0, 0, 5))
    with pytest.raises(NetworkError, match=r"layer '0' sees \(6, 2\) for 5 rows"):
        flipped(network, changes, x, RowStreams(0, 0, 5))


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
    placement = placed(network, ids)
    on_outputs = {"body.weight", "body.bias", "idle.weight"} | {
        f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    }
    assert set(placement.names) == on_outputs and set(placement.drawn) == set(names) - on_outputs
    why = {
        "embedding.weight": reasons.NO_PRODUCT,  # though a linear layer reads it too
        "lstm.weight_ih_l0": reasons.STEPS,
        "lstm.weight_hh_l0": reasons.STEPS,
        "norm.weight": reasons.NO_PRODUCT,
        "idle.bias": reasons.UNREAD,
    }
    assert why.items() <= placement.drawn.items()
    assert list(placed(network, ids, ["body.bias"]).by_key) == [(None, "body.bias", 0, 0)]
    assert placed(network, ids, ["lstm.weight_hh_l0"]).uses == ()
    only = placed(network, ids, names, ["body", "idle.weight"])
    assert only.names == ("body.weight", "body.bias", "idle.weight")
    assert only.drawn["attention.in_proj_weight"] == reasons.NOT_ASKED


def test_layers_asked_for_by_name_must_be_able_to() -> None:
    network, ids = Mixed().eval(), torch.randint(9, (4, 5))
    for wanted, reason in (
        ("lstm", reasons.STEPS),
        ("idle", reasons.UNREAD),
        ("decoder", f"embedding.weight: {reasons.NO_PRODUCT}"),
    ):
        with pytest.raises(NetworkError, match=rf"layer '{wanted}' cannot carry .*{reason}\)"):
            placed(network, ids, wanted=[wanted])
    with pytest.raises(UnknownNameError, match="unknown layer 'bodi', did you mean 'body'"):
        placed(network, ids, wanted=["bodi"])
    two, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), normal(3, 4).float()
    placement = placed(two, x, ["0.weight", "2.weight"], ["2"])
    assert placement.names == ("2.weight",) and placement.drawn == {"0.weight": reasons.NOT_ASKED}
    with pytest.raises(NetworkError, match=r"layer '1' .* it has no parameters"):
        placed(two, x, wanted=["1"])
    for wrong in ("body", [], [3]):
        for estimator in (LocalReparameterised, Flipout):
            with pytest.raises(ConfigError, match="layers must be a list of layer names"):
                estimator(layers=wrong)
    assert LocalReparameterised(layers=["a"]) == LocalReparameterised(layers=("a",))


def test_what_a_layers_forward_pass_does_decides() -> None:
    network, x = nn.Sequential(nn.Linear(4, 4)), normal(3, 4).float()
    network[0].forward = lambda inputs: 2 * inputs  # pyright: ignore
    placement = placed(network, x, ["0.weight"])
    assert placement.names == () and placement.drawn == {"0.weight": reasons.UNREAD}
