"""Dropout layers with masks fixed by a seed: what one draw drops, it drops for every row."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dubito.layers import Layout, survey
from dubito.layers.dropout import FixedDropout, find_dropouts, fixed_dropout, with_fixed_dropout
from dubito.layers.passes import unnested
from dubito.layers.shell import leased


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layouts_of(network: nn.Module, inputs: object) -> dict[str, Layout]:
    layouts = survey(network.eval(), inputs).dropouts
    return {name: layouts[name] for name in find_dropouts(network) if name in layouts}


def masked(layer: nn.Module, inputs: Tensor, seed: int, row_axis: int = 0) -> Tensor:
    return FixedDropout(layer, seed, row_axis)(inputs)


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8])
def test_values_rate_and_mean_of_plain_dropout(rate: float) -> None:
    inputs = normal(3, 20_000) + 2
    outputs = masked(nn.Dropout(rate), inputs, seed=1)
    dropped = outputs == 0
    assert torch.equal(dropped, dropped[:1].expand_as(dropped))  # every row alike
    torch.testing.assert_close(outputs[~dropped], (inputs / (1 - rate))[~dropped])
    share = dropped[0].double().mean().item()
    assert share == pytest.approx(rate, abs=5 * (rate * (1 - rate) / 20_000) ** 0.5)


@pytest.mark.parametrize("kind", [nn.AlphaDropout, nn.FeatureAlphaDropout])
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_alpha_dropout_keeps_mean_and_variance(kind: type, rate: float) -> None:
    units = 40_000
    inputs = normal(2, units)
    outputs = masked(kind(rate), inputs, seed=1)[0]
    # Fourth moments of the outputs stay below 10, so variances have a standard deviation below 3 / sqrt(n).
    assert outputs.mean().item() == pytest.approx(0, abs=5 / units**0.5)
    assert outputs.var().item() == pytest.approx(1, abs=15 / units**0.5)
    # Dropped units sit where SELU saturates, at -λα, before the affine map that restores the moments.
    scale = (1 - rate + (1.0507009873554805 * 1.6732632423543772) ** 2 * rate * (1 - rate)) ** -0.5
    floor = scale * 1.0507009873554805 * 1.6732632423543772 * (rate - 1)
    dropped = (outputs - floor).abs() < 1e-9
    assert dropped.double().mean().item() == pytest.approx(rate, abs=5 * (rate * (1 - rate) / units) ** 0.5)
    torch.testing.assert_close(
        outputs[~dropped], (scale * (inputs[0] + 1.7580993408473766 * rate))[~dropped], rtol=1e-9, atol=1e-9
    )


def test_masks_of_many_seeds_average_to_the_input() -> None:
    inputs = torch.ones(1, 64, dtype=torch.float64)
    mean = torch.stack([masked(nn.Dropout(0.3), inputs, seed) for seed in range(3000)]).mean(0)
    # Each entry: 0 or 1/0.7, with variance 0.3/0.7.
    torch.testing.assert_close(mean, inputs, rtol=0, atol=5 * (0.3 / 0.7 / 3000) ** 0.5)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.Dropout1d, (2, 60, 5)), (nn.Dropout2d, (2, 60, 5, 4)), (nn.Dropout3d, (2, 60, 3, 4, 2))]
)
def test_channel_dropout_drops_whole_channels(kind: type, shape: tuple[int, ...]) -> None:
    kept = masked(kind(0.5), torch.ones(shape), seed=0).flatten(2)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(kept, kept[:1, :, :1].expand_as(kept))
    assert 0 < (kept[0, :, 0] == 0).sum() < 60


@pytest.mark.parametrize("kind", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_everything_dropped(kind: type) -> None:
    inputs = normal(2, 6, 3)
    expected = kind(1.0).train()(inputs)
    assert torch.equal(masked(kind(1.0), inputs, seed=0), expected)


def test_time_major_rows_share_the_mask_and_positions_do_not() -> None:
    outputs = masked(nn.Dropout(0.5), torch.ones(40, 3, 8), seed=0, row_axis=1)  # [T, B, F]
    assert torch.equal(outputs, outputs[:, :1].expand_as(outputs))
    assert len(outputs[:, 0].unique(dim=0)) > 30


class Net(nn.Module):
    """One dropout layer called twice, one under two names, one on time-major sequences, one on channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.channels = nn.Conv1d(3, 6, 3, padding=1), nn.Dropout1d(0.4)
        self.body, self.twice = nn.Linear(6, 6), nn.Dropout(0.4)
        self.time, self.alpha = nn.Linear(6, 6), nn.AlphaDropout(0.4)
        self.pair = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), self.twice)
        self.head, self.off = nn.Linear(6, 2), nn.Dropout(0.0)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.channels(torch.tanh(self.conv(inputs))).mT  # [B, T, F]
        hidden = self.twice(self.body(hidden))
        hidden = self.alpha(self.time(hidden.transpose(0, 1))).transpose(0, 1)
        return self.head(self.off(self.twice(self.pair(hidden.mean(1)))))


@pytest.fixture
def network() -> Net:
    return Net().double().eval()


def test_find_dropouts_names_each_layer_once_and_none_at_rate_zero(network: Net) -> None:
    assert find_dropouts(network) == ["channels", "twice", "alpha"]


def test_folded_copy_and_open_context_agree_whatever_the_chunks(network: Net) -> None:
    inputs = normal(7, 3, 5)
    layouts = layouts_of(network, inputs)
    assert layouts["alpha"] is Layout.SECOND
    assert layouts["twice"] is Layout.ROWS  # [B, T, F] and [B, F]: rows come first in both calls
    plain = with_fixed_dropout(network, layouts, seed=5)
    with leased(network) as shell, fixed_dropout(shell, layouts, seed=5):
        whole = shell(inputs)
        pieces = torch.cat([shell(inputs[:2]), shell(inputs[2:3]), shell(inputs[3:])])
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(inputs), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(inputs[4:5]), whole[4:5], rtol=1e-12, atol=1e-12)
    other = with_fixed_dropout(network, layouts, seed=6)
    assert not torch.allclose(other(inputs), whole)
    with torch.no_grad():
        assert not torch.allclose(network(inputs), whole)  # the context is closed: nothing drops


def test_a_layer_called_twice_has_two_masks() -> None:
    layer = nn.Dropout(0.5)
    network = nn.Sequential(layer, nn.Identity(), layer, nn.Linear(200, 200)).eval()
    with torch.no_grad():
        network[3].weight.copy_(torch.eye(200))
        network[3].bias.zero_()
    plain = with_fixed_dropout(network, {"0": Layout.ROWS}, seed=0)
    assert plain[0] is plain[2]
    kept = (plain(torch.ones(1, 200)) != 0).float().mean().item()
    assert kept == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 200) ** 0.5)  # 0.5 had one mask served both
    assert torch.equal(plain(torch.ones(1, 200)), plain(torch.ones(1, 200)))


def test_two_layers_have_different_masks() -> None:
    network = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    plain = with_fixed_dropout(network, {"0": Layout.ROWS, "1": Layout.ROWS}, seed=0)
    assert not torch.equal(plain[0](torch.ones(1, 64)), plain[1](torch.ones(1, 64)))


def test_attention_blocks_do_not_pass_their_dropout_by() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.5, batch_first=True)
    network = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.tensor([[False, False, True]]).expand(4, 3).contiguous()
    inputs = {"src": torch.randn(4, 3, 8), "src_key_padding_mask": mask}
    layouts = layouts_of(network, inputs)
    assert len(layouts) == 6
    with torch.no_grad():
        with unnested(network):
            quiet = network(**inputs)
        with leased(network) as shell, fixed_dropout(shell, layouts, seed=0):
            expected = shell(**inputs)
        folded = with_fixed_dropout(network, layouts, seed=0)(**inputs)
    assert not torch.allclose(expected[:, :2], quiet[:, :2], atol=1e-3)
    torch.testing.assert_close(folded, expected)
    assert network.use_nested_tensor


def test_an_error_leaves_the_network_as_it_was(network: Net) -> None:
    inputs = normal(3, 3, 5)
    before, layouts = network(inputs), layouts_of(network, inputs)
    with pytest.raises(RuntimeError), leased(network) as shell, fixed_dropout(shell, layouts, seed=0):
        shell(normal(3, 4, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
    assert torch.equal(network(inputs), before)


def test_the_folded_copy_shares_nothing_and_can_be_copied_again(network: Net) -> None:
    inputs = normal(3, 3, 5)
    plain = with_fixed_dropout(network, layouts_of(network, inputs), seed=0)
    again = copy.deepcopy(plain)
    expected = plain(inputs)
    with torch.no_grad():
        network.head.weight.zero_()
    assert torch.equal(plain(inputs), expected)
    assert torch.equal(again(inputs), expected)
    assert not any(isinstance(module, FixedDropout) for module in network.modules())
