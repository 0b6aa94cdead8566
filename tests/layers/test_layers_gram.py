"""Sums of products by blocks: upper triangles, mirrored, at widths where the blocks begin."""

import pytest
import torch
from torch import nn

from dubito.inference.bali.products import gram
from dubito.inference.bali.setup import find_layers
from dubito.layers.grams import WIDE, add_gram, mirrored
from dubito.layers.record import recorded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 7, WIDE - 1, WIDE, WIDE + 1, 300, 513])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_mirrored_are_the_whole_product(dtype: torch.dtype, width: int, groups: int) -> None:
    stream = torch.Generator().manual_seed(0)
    matrices = torch.randn(groups, 11, width, generator=stream, dtype=dtype)
    start = torch.randn(groups, width, width, generator=stream, dtype=dtype)
    start = start + start.mT
    sums = start.clone()
    add_gram(sums, matrices, 0.5)
    sums[..., torch.ones(width, width).tril(-1).bool()] = torch.nan  # nothing below the diagonal may be read
    found = mirrored(sums)
    torch.testing.assert_close(found, start + 0.5 * matrices.mT @ matrices)
    assert torch.equal(found, found.mT)


@pytest.mark.parametrize(("inputs", "outputs"), [(5, 3), (300, 20), (250, 10)])
def test_sums_of_a_layer_are_those_of_its_inputs_ones_and_gradients(inputs: int, outputs: int) -> None:
    """From 256 columns on they are filled up to whole lines, of which nothing remains."""
    net = nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, 2)).double()
    x = torch.randn(9, inputs, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = find_layers(net, x, None)
    block = found.blocks[0]
    record = found.cover.record()
    with torch.enable_grad(), recorded(net, found.cover.parameters, record) as shell:
        hidden = shell[0](x)
        hidden.retain_grad()
        shell[2](shell[1](hidden)).square().sum().backward()
    sums, cases = gram(found.cover.parts[block.name], record, 9)
    joint = torch.cat([x, torch.ones(9, 1, dtype=torch.float64), hidden.grad], 1)
    torch.testing.assert_close(sums, (joint.mT @ joint)[None])
    assert cases == 9
