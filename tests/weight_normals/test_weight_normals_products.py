"""Noise on the outputs of products that are no module of PyTorch's: attention, `addmm`, `x @ W`, transposed weights."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dubito.layers import survey
from dubito.layers.form import Form
from dubito.layers.passes import asking
from dubito.weight_normals.calls import OutputNoise
from dubito.weight_normals.noise import FlippedNoise, LocalNoise
from dubito.weight_normals.placement import Placement, assign_noise
from dubito.weight_normals.scales import OwnScale, TiedScale, WeightScale
from dubito.weight_normals.streams import RowStreams

DOUBLE, DRAWS = torch.float64, 20_000


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


class Addmm(nn.Module):
    """As the layers of GPT-2: weights [inputs, outputs], `torch.addmm` over flattened positions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(normal(4, 3)), nn.Parameter(normal(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Own(nn.Module):
    """A product of one's own, plain or with the parameter transposed."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.matrix = nn.Parameter(normal(3, 4) if transposed else normal(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.matrix.t() if self.transposed else self.matrix)


class Attention(nn.Module):
    """Self-attention; with one token its answer is the output projection of the value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True, dtype=DOUBLE)
        with torch.no_grad():
            self.inner.in_proj_bias.copy_(normal(12, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, inputs, the parameters with noise, and outputs [S, ...] of many sets of weights, written out."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    names: tuple[str, ...]
    answer: Callable[[nn.Module, Weights, Tensor], Tensor]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for weights [S, m, n]."""
    out = torch.einsum("...i,soi->s...o", x, weight)
    return out if bias is None else out + bias.view(len(bias), *(1 for _ in x.shape[:-1]), -1)


def values(network: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    assert isinstance(network, Attention)
    inside = product(x, weights["inner.in_proj_weight"][:, 8:], weights["inner.in_proj_bias"][:, 8:])
    return inside @ network.inner.out_proj.weight.T + network.inner.out_proj.bias


def projected(network: nn.Module, weights: Weights, x: Tensor) -> Tensor:
    assert isinstance(network, Attention)
    x = x @ network.inner.in_proj_weight[8:].T + network.inner.in_proj_bias[8:]
    return product(x, weights["inner.out_proj.weight"], weights["inner.out_proj.bias"])


CASES = {
    "addmm": Case(Addmm, (2, 4), ("weight", "bias"), lambda _, w, x: product(x, w["weight"].mT, w["bias"])),
    "addmm at positions": Case(
        Addmm, (2, 3, 4), ("weight", "bias"), lambda _, w, x: product(x, w["weight"].mT, w["bias"])
    ),
    "x @ W": Case(lambda: Own(transposed=False), (2, 4), ("matrix",), lambda _, w, x: product(x, w["matrix"].mT)),
    "x @ W.t()": Case(lambda: Own(transposed=True), (2, 2, 4), ("matrix",), lambda _, w, x: product(x, w["matrix"])),
    "attention's values": Case(Attention, (2, 1, 4), ("inner.in_proj_weight", "inner.in_proj_bias"), values),
    "attention's outputs": Case(Attention, (2, 1, 4), ("inner.out_proj.weight", "inner.out_proj.bias"), projected),
}
every_case = pytest.mark.parametrize("name", CASES)
forms = pytest.mark.parametrize("form", ["own", "tied"])


def scale_of(weight: Tensor, form: str, seed: int) -> WeightScale:
    if form == "own" or weight.ndim == 1:
        return OwnScale((normal(*weight.shape, seed=seed) - 1).requires_grad_())
    log_u, log_v = normal(2, len(weight), seed=seed) - 1, normal(2, weight[0].numel(), seed=seed + 1) - 1
    return TiedScale(log_u.requires_grad_(), log_v.requires_grad_(), weight.shape)


def std_of(scale: WeightScale) -> Tensor:
    """σ written out."""
    if isinstance(scale, OwnScale):
        return torch.log1p(scale.raw_std.exp())
    assert isinstance(scale, TiedScale)
    return torch.einsum("am,an->mn", scale.log_u.exp(), scale.log_v.exp()).view(scale.shape)


def make(name: str, form: str) -> tuple[Case, nn.Module, Tensor, dict[str, WeightScale], Placement]:
    case = CASES[name]
    network, x = case.build().eval(), normal(*case.shape, seed=9)
    own = dict(network.named_parameters())
    scales = {key: scale_of(own[key], form, 10 * number) for number, key in enumerate(case.names)}
    placement = assign_noise(survey(network, x), network, case.names)
    assert placement.names == case.names and not placement.drawn
    return case, network, x, scales, placement


def run(network: nn.Module, noise: OutputNoise, x: Tensor) -> Tensor:
    with asking(network, noise, noise.placement.names) as shell:
        return shell(x)


def drawn_weights(network: nn.Module, scales: dict[str, WeightScale], count: int) -> Weights:
    own = dict(network.named_parameters())
    return {
        key: own[key] + std_of(scale) * normal(count, *own[key].shape, seed=70 + number)
        for number, (key, scale) in enumerate(scales.items())
    }


@torch.no_grad()
@every_case
@forms
def test_local_noise_has_the_moments_of_drawn_weights(name: str, form: str) -> None:
    case, network, x, scales, placement = make(name, form)
    truth = case.answer(network, drawn_weights(network, scales, DRAWS), x)
    many = x.repeat(DRAWS, *(1 for _ in x.shape[1:]))
    noise = LocalNoise(placement, scales.__getitem__, RowStreams(3, 0, len(many)))
    ours = run(network, noise, many).view(DRAWS, *truth.shape[1:])
    spread = ((truth.var(0) + ours.var(0)) / DRAWS).sqrt()
    assert ((ours.mean(0) - truth.mean(0)) / spread).abs().max() < 5
    # The logarithm of a Normal's sample variance has a variance of 2 / S.
    assert ((ours.var(0) / truth.var(0)).log() / math.sqrt(4 / DRAWS)).abs().max() < 5


@torch.no_grad()
@every_case
def test_flipped_noise_has_the_moments_of_drawn_weights(name: str) -> None:
    case, network, x, scales, placement = make(name, "own")
    truth = case.answer(network, drawn_weights(network, scales, DRAWS), x)
    copies = 10  # of the rows, each with signs of its own under one perturbation
    many = x.repeat(copies, *(1 for _ in x.shape[1:]))
    centre = network(x)
    firsts, seconds = [], []
    for batch in range(DRAWS // copies):
        changes = {
            key: std_of(scale) * normal(*std_of(scale).shape, seed=10 * batch + number)
            for number, (key, scale) in enumerate(scales.items())
        }
        noise = FlippedNoise(placement, changes, RowStreams(batch, 0, len(many)))
        change = run(network, noise, many).view(copies, *centre.shape) - centre
        firsts.append(change.mean(0))
        seconds.append(change.square().mean(0))
    for found, expected in ((firsts, truth.mean(0) - centre), (seconds, truth.var(0))):
        each = torch.stack(found)  # independent from batch to batch
        of_truth = truth.var(0) / DRAWS if found is firsts else 2 * truth.var(0).square() / DRAWS
        error = (each.var(0) / len(each) + of_truth).sqrt()
        assert ((each.mean(0) - expected) / error).abs().max() < 5


class Seen(LocalNoise):
    """Keeps the answers of all uses."""

    def use(
        self, form: Form, x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, active: Tensor | None = None
    ) -> Tensor:
        answer = super().use(form, x, weight, bias, active=active)
        self.__dict__.setdefault("answers", []).append(answer.clone())
        return answer


@torch.no_grad()
@forms
def test_query_key_and_value_have_noise_of_their_own_weights(form: str) -> None:
    network, x = Attention().eval(), normal(2, 3, 4, seed=9)
    own, names = dict(network.named_parameters()), ("inner.in_proj_weight", "inner.in_proj_bias")
    scales = {key: scale_of(own[key], form, 10 * number) for number, key in enumerate(names)}
    placement = assign_noise(survey(network, x), network, names)
    many = x.repeat(DRAWS, 1, 1)
    noise = Seen(placement, scales.__getitem__, RowStreams(3, 0, len(many)))
    run(network, noise, many)
    *answers, _ = (answer.view(DRAWS, 2, 3, 4) for answer in vars(noise)["answers"])  # the last is a point's
    weights = drawn_weights(network, scales, DRAWS)
    truth = product(x, weights["inner.in_proj_weight"], weights["inner.in_proj_bias"]).chunk(3, -1)
    for ours, theirs in zip(answers, truth, strict=True):
        error = ((ours.var(0) + theirs.var(0)) / DRAWS).sqrt()
        assert ((ours.mean(0) - theirs.mean(0)) / error).abs().max() < 5
        assert ((ours.var(0) / theirs.var(0)).log() / math.sqrt(4 / DRAWS)).abs().max() < 5
    query, key = (answer - answer.mean(0) for answer in answers[:2])
    scores = (query * key).mean(0) / (query.var(0) * key.var(0) / DRAWS).sqrt()
    assert scores.abs().max() < 5  # parts of one weight have noise of their own


# -- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["addmm", "x @ W", "x @ W.t()"])
@forms
def test_gradients_are_those_of_noise_written_out(name: str, form: str) -> None:
    _, network, x, scales, placement = make(name, form)
    x.requires_grad_()
    ours = run(network, LocalNoise(placement, scales.__getitem__, RowStreams(2, 0, len(x))), x)
    own = dict(network.named_parameters())
    key = "weight" if "weight" in own else "matrix"
    turned = not getattr(network, "transposed", False)
    mean, variance = own[key], std_of(scales[key]).square()
    if not turned:
        mean, variance = mean.T, variance.T
    bias, bias_variance = (own["bias"], std_of(scales["bias"]).square()) if "bias" in own else (0.0, 0.0)
    stream = "" if key == "weight" else key
    noise = RowStreams(2, 0, len(x)).normal((stream, 0), tuple(ours.shape[1:]), ours)
    theirs = x @ mean + bias + (x.square() @ variance + bias_variance + 1e-8).sqrt() * noise
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    leaves = [x, *own.values()]
    leaves += [t for s in scales.values() for t in vars(s).values() if isinstance(t, Tensor) and t.is_leaf]
    weights = normal(*ours.shape, seed=4)
    found, wanted = (torch.autograd.grad((weights * out).sum(), leaves) for out in (ours, theirs))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


class Folded(nn.Module):
    """An autoencoder with one weight, back and forth."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


def test_flipout_keeps_a_rows_weight_where_it_is_transposed() -> None:
    network, x = Folded(), normal(5, 4)
    placement = assign_noise(survey(network, x), network, ["weight"])
    assert placement.names == ("weight",)
    change = normal(3, 4, seed=6).requires_grad_()
    ours = run(network, FlippedNoise(placement, {"weight": change}, RowStreams(1, 0, 5)), x)
    r, s = (RowStreams(1, 0, 5).signs(("weight", side), n, x) for side, n in (("out", 3), ("in", 4)))
    weights = network.weight + change * r[:, :, None] * s[:, None]  # [rows, 3, 4]
    theirs = torch.einsum("bo,boi->bi", torch.tanh(torch.einsum("bi,boi->bo", x, weights)), weights)
    torch.testing.assert_close(ours, theirs)
    leaves, direction = [network.weight, change], normal(5, 4, seed=8)
    found, wanted = (torch.autograd.grad((direction * out).sum(), leaves) for out in (ours, theirs))
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_flipout_of_attention_is_that_of_weights_per_row() -> None:
    network, x = Attention().eval(), normal(3, 4, 4, seed=9)
    own = dict(network.named_parameters())
    placement = assign_noise(survey(network, x), network, list(own))
    assert set(placement.names) == set(own)
    changes = {key: 0.5 * normal(*p.shape, seed=30 + n) for n, (key, p) in enumerate(own.items())}
    ours = run(network, FlippedNoise(placement, changes, RowStreams(1, 0, 3)), x)
    streams = RowStreams(1, 0, 3)
    for row in range(3):
        weights = {}
        for prefix, outputs in (("inner.in_proj_", 12), ("inner.out_proj.", 4)):
            r = streams.signs((f"{prefix}weight", "out"), outputs, x)[row]
            s = streams.signs((f"{prefix}weight", "in"), 4, x)[row]
            weights[f"{prefix}weight"] = own[f"{prefix}weight"] + changes[f"{prefix}weight"] * r[:, None] * s
            weights[f"{prefix}bias"] = own[f"{prefix}bias"] + changes[f"{prefix}bias"] * r
        expected = torch.func.functional_call(network, weights, (x[row : row + 1],))
        torch.testing.assert_close(ours[row : row + 1], expected)


class Cross(nn.Module):
    """Attention with separate weights for query, key and value, and a bias in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 1, kdim=3, vdim=3, batch_first=True, dtype=DOUBLE)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.inner(query, key, value, need_weights=False)[0]


@forms
@pytest.mark.parametrize("names", [("in_proj_bias",), ("in_proj_bias", "q_proj_weight", "v_proj_weight")])
def test_parts_of_a_bias_beside_whole_weights(names: tuple[str, ...], form: str) -> None:
    network = Cross().eval()
    inputs = {"query": normal(2, 1, 4), "key": normal(2, 1, 3, seed=1), "value": normal(2, 1, 3, seed=1)}
    own = dict(network.inner.named_parameters())
    placement = assign_noise(survey(network, inputs), network, [f"inner.{n}" for n in names])
    assert placement.names == tuple(f"inner.{n}" for n in names)
    scales = {f"inner.{n}": scale_of(own[n], form, 10 * i) for i, n in enumerate(names)}
    noise = LocalNoise(placement, scales.__getitem__, RowStreams(3, 0, 2))
    with asking(network, noise, placement.names) as shell, torch.no_grad():
        ours = shell(**inputs)
    stream = "inner.v_proj_weight" if len(names) > 1 else "inner.in_proj_bias"
    drawn = RowStreams(3, 0, 2).normal((stream, 0 if len(names) > 1 else 2), (1, 4), ours)
    variance = std_of(scales["inner.in_proj_bias"])[8:].square().expand(2, 1, 4)
    if len(names) > 1:
        variance = variance + inputs["value"].square() @ std_of(scales["inner.v_proj_weight"]).square().T
    values = inputs["value"] @ own["v_proj_weight"].T + own["in_proj_bias"][8:]
    values = values + (variance + 1e-8).sqrt() * drawn
    torch.testing.assert_close(ours, values @ own["out_proj.weight"].T + own["out_proj.bias"])
