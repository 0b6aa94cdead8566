"""Blocks: parameters as matrices and back, and as plain values."""

import json

import pytest
import torch
from curvature_reference import normal
from torch import nn

from dubito.curvature import Block, find_blocks

NETWORKS = {
    "linear": (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3, bias=False)), (4,)),
    "grouped": (nn.Sequential(nn.Conv2d(4, 6, (3, 2), groups=2), nn.Flatten(), nn.Linear(6, 2)), (4, 3, 2)),
    "norm": (nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4, bias=False), nn.Linear(4, 3)), (4,)),
    "transposed": (nn.Sequential(nn.ConvTranspose1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(24, 2)), (4, 2)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_parameters_become_matrices_and_come_back(name: str) -> None:
    network, shape = NETWORKS[name]
    network = network.double().eval()
    named = {key: parameter.detach() for key, parameter in network.named_parameters()}
    covered = find_blocks(network, normal(3, *shape), tuple(named))
    blocks = list(covered.blocks.values())
    left_out = covered.left_out
    assert not left_out
    assert sorted(key for block in blocks for key in block.parameters) == sorted(named)
    for block in blocks:
        matrix = block.matrix(named)
        assert matrix.shape == (block.groups, block.rows, block.columns)
        assert block.size == matrix.numel() == sum(named[key].numel() for key in block.parameters)
        again = block.tensors(matrix)
        assert all(torch.equal(again[key], named[key]) for key in block.parameters)
        draws = block.tensors(torch.stack([matrix, 2 * matrix]))
        assert all(torch.equal(draws[key][1], 2 * named[key]) for key in block.parameters)
        assert Block.from_json(json.loads(json.dumps(block.to_json()))) == block


def test_names() -> None:
    network, _ = NETWORKS["grouped"]
    covered = find_blocks(network.double(), normal(3, 4, 3, 2), [n for n, _ in network.named_parameters()])
    blocks = list(covered.blocks.values())
    assert [(b.name, b.weight, b.bias, b.groups, b.rows, b.columns) for b in blocks] == [
        ("0", "0.weight", "0.bias", 2, 3, 13),
        ("2", "2.weight", "2.bias", 1, 2, 7),
    ]
    alone = nn.Linear(4, 3).double()
    covered = find_blocks(alone, normal(3, 4), ("weight", "bias"))
    blocks = list(covered.blocks.values())
    assert [(b.name, b.weight, b.bias) for b in blocks] == [("weight", "weight", "bias")]
    norm, _ = NETWORKS["norm"]
    covered = find_blocks(norm.double().eval(), normal(3, 4), [n for n, _ in norm.named_parameters()])
    blocks = list(covered.blocks.values())
    assert [b.name for b in blocks] == ["0.weight", "0.bias", "1.weight", "2"]


def test_a_grouped_convolution_is_a_matrix_per_group() -> None:
    conv = nn.Conv1d(4, 6, 2, groups=2).double()
    covered = find_blocks(nn.Sequential(conv, nn.Flatten()), normal(3, 4, 2), ("0.weight", "0.bias"))
    blocks = list(covered.blocks.values())
    matrix = blocks[0].matrix({"0.weight": conv.weight, "0.bias": conv.bias})
    inputs = normal(4, 2)
    for group in range(2):
        own = torch.cat([inputs[2 * group : 2 * group + 2].flatten(), torch.ones(1).double()])
        torch.testing.assert_close(matrix[group] @ own, conv(inputs[None])[0, 3 * group : 3 * group + 3, 0])


def test_layers_too_wide_for_factors_keep_their_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dubito.curvature.covering.LARGEST_SIDE", 4)
    network, _ = NETWORKS["linear"]
    covered = find_blocks(network.double(), normal(3, 4), ("0.weight", "0.bias", "2.weight"))
    blocks = list(covered.blocks.values())
    left_out = covered.left_out
    assert [(b.name, b.kronecker) for b in blocks] == [("0.weight", False), ("0.bias", False), ("2.weight", False)]
    assert not left_out
