"""Optimisers in loops of one's own: frozen parameters, views changed in place, groups, copies, half precision."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dubito import ConfigError, Gaussian, Training
from dubito import NoisyKFAC as NoisyKFACMethod
from dubito.optim import VOGN, NoisyAdam, NoisyKFAC, Vadam

ALL = pytest.mark.parametrize("kind", [NoisyAdam, Vadam, VOGN, NoisyKFAC])


class Sequence(nn.Module):
    """A dense layer over positions, rectified in place or not."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu, self.last = nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.relu(self.first(inputs)).mean(1))


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    inputs = torch.randn(32, 5, 4, generator=stream)
    return inputs, inputs[:, :, :2].sum(1)


def step(optimizer, net: nn.Module, dtype: torch.dtype | None = None) -> None:
    inputs, targets = rows()
    optimizer.zero_grad()
    with optimizer.sampled(), torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        (net(inputs).float() - targets).square().mean().backward()
    optimizer.step(rows=len(inputs))


@ALL
def test_frozen_parameters_are_neither_drawn_nor_moved(kind) -> None:
    net = Sequence()
    net.first.bias.requires_grad_(False)
    net.last.requires_grad_(False)
    frozen = {name: p.clone() for name, p in net.named_parameters() if not p.requires_grad}
    optimizer = kind(net.parameters(), num_data=100)
    with optimizer.sampled():
        assert all(torch.equal(net.get_parameter(name), before) for name, before in frozen.items())
    before = net.first.weight.clone()
    for _ in range(3):
        step(optimizer, net)
    assert all(torch.equal(net.get_parameter(name), held) for name, held in frozen.items())
    assert not torch.equal(net.first.weight, before)


def test_a_bias_goes_on_alone_where_its_weight_is_frozen() -> None:
    net = Sequence()
    optimizer = NoisyKFAC(net.parameters(), num_data=100)
    step(optimizer, net)
    net.first.weight.requires_grad_(False)
    before = net.first.bias.clone()
    step(optimizer, net)
    assert not torch.equal(net.first.bias, before)
    net.first.weight.requires_grad_(True)
    net.first.bias.requires_grad_(False)
    held = net.first.bias.clone()
    step(optimizer, net)
    assert torch.equal(net.first.bias, held) and all(p.isfinite().all() for p in net.parameters())


def test_outputs_that_are_changed_in_place_are_seen() -> None:
    fits = []
    for inplace in (False, True):
        method = NoisyKFACMethod()
        training = Training(epochs=20, batch_size=16, lr=method.recommended_lr)
        posterior = method.fit(Sequence(inplace), rows(), Gaussian(std=0.5), training=training)
        fits.append(posterior.predict(rows(1)[0], 8))
    torch.testing.assert_close(fits[0].mean, fits[1].mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fits[0].epistemic_std, fits[1].epistemic_std, rtol=1e-3, atol=1e-4)


@ALL
def test_groups_may_be_added_and_optimisers_copied(kind) -> None:
    net = Sequence()
    optimizer = kind(net.first.parameters(), num_data=100)
    step(optimizer, net)
    with pytest.raises(ConfigError, match="lr"):
        optimizer.add_param_group({"params": list(net.last.parameters()), "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": list(net.last.parameters())})
    step(optimizer, net)
    both = copy.deepcopy((optimizer, net))
    step(optimizer, net)
    step(*both)
    for ours, theirs in zip(net.parameters(), both[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [VOGN, NoisyKFAC])
def test_sums_under_autocast_are_in_the_parameters_precision(kind) -> None:
    full, half = Sequence(), Sequence()
    for net, dtype in ((full, None), (half, torch.bfloat16)):
        optimizer = kind(net.parameters(), num_data=100, initial_std=0.01)
        for _ in range(3):
            step(optimizer, net, dtype)
    for ours, theirs in zip(half.parameters(), full.parameters(), strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02)
