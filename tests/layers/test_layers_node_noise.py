"""Factors on nodes: per example in training, the same as folding each example's factors into the weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dubito.layers.node_noise import bernoulli_factors, factors_on_inputs, per_example, read_first
from dubito.layers.sites import find_sites
from dubito.layers.trace import Layout, Visit, trace


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Mixed(nn.Module):
    """Convolutions, a layer called twice, two layers with one weight, a call by keyword, a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.positions = nn.Linear(3, 6)
        self.twice = nn.Linear(6, 6)
        self.alias = self.twice
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.twice.weight
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.relu_(self.conv(inputs))
        hidden = torch.tanh(self.positions(self.up(hidden).flatten(2).mT)).mean(1)
        hidden = torch.tanh(self.tied(torch.tanh(self.alias(torch.tanh(self.twice(hidden))))))
        return self.head(input=hidden)


def applied(network: nn.Module, weights: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """The network with other weights; torch ties those of a module with two names wrongly if left to it."""
    tied = {**weights, "tied.weight": weights["twice.weight"]}
    return functional_call(network, tied, (inputs,), tie_weights=False)


def test_rows_agree_with_folding_their_own_factors() -> None:
    network, inputs = Mixed().double(), normal(5, 2, 4, 3)
    sites = find_sites(network)
    assert [site.parameter for site in sites] == [
        "conv.weight",
        "up.weight",
        "positions.weight",
        "twice.weight",
        "head.weight",
    ]
    factors = {site: normal(len(inputs), *site.shape, seed=i) for i, site in enumerate(sites)}
    with factors_on_inputs(network, factors):
        together = network(inputs)
    weights = dict(network.named_parameters())
    for row in range(len(inputs)):
        folded = {s.parameter: s.fold(weights[s.parameter], values[row]) for s, values in factors.items()}
        alone = applied(network, folded, inputs[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-12, atol=1e-12)


def test_gradients_reach_the_shared_weights() -> None:
    network, inputs = Mixed().double(), normal(5, 2, 4, 3)
    factors = {site: normal(5, *site.shape, seed=i) for i, site in enumerate(find_sites(network))}
    with factors_on_inputs(network, factors):
        network(inputs).square().sum().backward()
    total = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    weights = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    for row in range(5):
        folded = {
            **weights,
            **{s.parameter: s.fold(weights[s.parameter], v[row]) for s, v in factors.items()},
        }
        loss = applied(network, folded, inputs[row : row + 1]).square().sum()
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            total[name] += gradient
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(parameter.grad, total[name], rtol=1e-10, atol=1e-12)


def test_hooks_go_even_after_an_error() -> None:
    network = Mixed().double()
    factors = {site: normal(5, *site.shape) for site in find_sites(network)}
    before = network(normal(5, 2, 4, 3))
    with pytest.raises(RuntimeError, match="size"), factors_on_inputs(network, factors):
        network(normal(4, 2, 4, 3))  # five rows of factors for four rows
    assert not any(module._forward_pre_hooks for module in network.modules())
    assert torch.equal(network(normal(5, 2, 4, 3)), before)


class TimeMajor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.time, self.unused = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.both, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.time(self.rows(inputs).transpose(0, 1)).transpose(0, 1)
        hidden = self.both(hidden) + self.both(hidden.transpose(0, 1)).transpose(0, 1)
        hidden = self.attention(hidden, hidden, hidden)[0]
        return self.lstm(hidden)[0][:, -1]


def test_only_layers_with_rows_first_have_factors_per_example() -> None:
    network = TimeMajor().double().eval()
    visits = trace(network, normal(4, 5, 3), [name for name, _ in network.named_modules() if name])
    possible = {site.parameter: per_example(site, visits) for site in find_sites(network)}
    assert possible == {
        "rows.weight": True,
        "time.weight": False,
        "unused.weight": False,
        "both.weight": False,
        "attention.in_proj_weight": False,
        "attention.out_proj.weight": False,
        "lstm.weight_ih_l0": False,
        "lstm.weight_hh_l0": False,
    }


def test_what_reads_the_inputs_comes_first() -> None:
    visits = {
        "stem": Visit(Layout.ROWS, False, 1),
        "body": Visit(Layout.ROWS, False, 1),
        "side": Visit(Layout.ROWS, True, 1),
    }
    assert read_first(visits) == {"stem", "side"}
    assert read_first({}) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_bernoulli_factors_have_mean_one(rate: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    factors = bernoulli_factors((200, 200), rate, torch.zeros(1, dtype=dtype), generator)
    assert factors.dtype == dtype
    assert set(factors.unique().tolist()) == {0.0, torch.tensor(1, dtype=dtype).div(1 - rate).item()}
    # The share of zeros has standard deviation sqrt(rate (1 - rate) / n).
    dropped = (factors == 0).double().mean().item()
    assert dropped == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 40_000) ** 0.5)
    again = bernoulli_factors((200, 200), rate, torch.zeros(1, dtype=dtype), torch.Generator().manual_seed(0))
    assert torch.equal(factors, again)
