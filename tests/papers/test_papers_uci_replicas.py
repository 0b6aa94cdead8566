"""BALI side by side: every fit is the one that it would be alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dubito import BALI, Categorical, Gaussian, Training, seeds
from papers.bali.uci import replicas
from papers.bali.uci.replicas import fit_many
from papers.bali.uci.stack import StackedStepper

SET = BALI(effective_data=40.0, output_floor=1e-3)


@pytest.fixture(autouse=True)
def stacks(monkeypatch) -> list[StackedStepper]:
    """Those that were made."""
    made: list[StackedStepper] = []

    def stacked(steppers):
        made.append(StackedStepper(steppers))
        return made[-1]

    monkeypatch.setattr(replicas, "stacked", stacked)
    return made


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def table(rows: int = 40, outputs: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = noise(rows, 3, seed=seed)
    y = torch.stack([x[:, 0].sin() + x[:, 1], x[:, 2] * x[:, 0]], 1)[:, :outputs]
    return x, y + 0.1 * noise(rows, outputs, seed=seed + 100)


def mlp(outputs: int = 2) -> nn.Sequential:
    with seeds.forked(0):
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, (3, 2), stride=2, padding=1)
        self.second = nn.Conv2d(4, 6, 2, groups=2, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))).mean((2, 3)))


def assert_alike(method: BALI, net: nn.Module, tables, likelihood, training: Training, fits: list[int]):
    """All fits have an order of rows of their own where each is alone: whole batches have none."""
    many = fit_many(method, net, tables, likelihood, training=training, seed=9, seeds_of_fits=fits)
    for data, posterior, seed in zip(tables, many, fits, strict=True):
        alone = method.fit(net, data, likelihood, training=training, seed=seed)
        assert posterior.method == alone.method
        for a, b in zip(alone.parameters(), posterior.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        for a, b in zip(alone.likelihood.buffers(), posterior.likelihood.buffers(), strict=True):
            torch.testing.assert_close(a, b)
        assert len(posterior.history) == len(alone.history)
        for a, b in zip(alone.history, posterior.history, strict=True):
            assert a == pytest.approx(b, abs=1e-6)
    return many


@pytest.mark.parametrize("covariance", ["mode", "sampled"])
def test_fits_side_by_side_are_fits_alone(covariance: str, stacks) -> None:
    tables = [table(seed=seed) for seed in range(3)]
    method = replace(SET, covariance=covariance, initial_std=1.0)
    assert_alike(method, mlp(), tables, Gaussian(), Training(iterations=12, batch_size=40), [5, 6, 7])
    assert [stack.count for stack in stacks] == [3]


def test_rows_in_one_order(stacks) -> None:
    tables, training = ([table(seed=seed) for seed in range(2)], Training(iterations=7, batch_size=16, accumulate=2))
    many = fit_many(SET, mlp(), tables, Gaussian(), training=training, seed=5, seeds_of_fits=[5, 5])
    for data, posterior in zip(tables, many, strict=True):
        alone = SET.fit(mlp(), data, Gaussian(), training=training, seed=5)
        torch.testing.assert_close(posterior.network[0].weight, alone.network[0].weight, rtol=1e-7, atol=1e-7)
    assert len(stacks) == 1


def test_classifiers_with_convolutions_side_by_side(stacks) -> None:
    with seeds.forked(0):
        net = Convolutions().double()
    pictures = [(noise(24, 2, 6, 5, seed=seed), torch.arange(24) % 3) for seed in (3, 4)]
    assert_alike(SET, net, pictures, Categorical(), Training(iterations=6, batch_size=24), [1, 2])
    assert len(stacks) == 1


def test_every_fit_chooses_its_own_settings(stacks) -> None:
    tables = [table(rows=160), (noise(160, 3, seed=1), 3 * noise(160, 2, seed=2))]
    many = assert_alike(BALI(), mlp(), tables, Gaussian(), Training(iterations=40, batch_size=160), [3, 4])
    assert many[0].method.output_floor != many[1].method.output_floor
    assert len(stacks) == 1
