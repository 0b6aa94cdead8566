"""Numbers of parameters and nodes, against the figures printed in the papers and their notes."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from dubito import models


@pytest.fixture(autouse=True)
def without_memory() -> Iterator[None]:
    with torch.device("meta"):
        yield


def parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def weight_layers(network: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def kernels(network: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in weight_layers(network))


def tied(layers: list[nn.Conv2d | nn.Linear], rank: int) -> int:
    """Numbers in U and V of a k-tied Normal, kernels flattened to (c_in·k_h·k_w, c_out)."""
    return sum(rank * (layer.weight[0].numel() + layer.weight.shape[0]) for layer in layers)


def rank1(network: nn.Module, components: int, num_classes: int) -> int:
    """Mean and std of both factors of every layer and component, and one dense bias per component."""
    nodes = sum(sum(layer.weight.shape[:2]) for layer in weight_layers(network))
    return parameters(network) + components * 2 * nodes + (components - 1) * num_classes


@pytest.mark.parametrize(
    ("factory", "weights"),
    [
        (models.resnet18, 11_679_912),
        (models.resnet50, 25_503_912),
        (models.resnet152, 60_041_384),
        (models.densenet121, 7_895_208),
        (models.densenet161, 28_461_064),
    ],
)
def test_convolutions_and_classifier_match_table_3_of_inf(factory: Callable[..., nn.Module], weights: int) -> None:
    network = factory(num_classes=1000)
    layers = weight_layers(network)
    assert [layer.bias is not None for layer in layers] == [False] * (len(layers) - 1) + [True]
    assert sum(parameters(layer) for layer in layers) == weights


@pytest.mark.parametrize(("num_classes", "count"), [(10, 36_479_194), (100, 36_536_884)])
def test_wide_resnet_has_36_5_million(num_classes: int, count: int) -> None:
    assert parameters(models.wide_resnet(28, 10, num_classes=num_classes)) == count


@pytest.mark.parametrize("depth", [10, 16, 28])
def test_depth_counts_the_convolutions_of_a_wide_resnet(depth: int) -> None:
    *convolutions, _ = weight_layers(models.wide_resnet(depth, 2))
    assert len(convolutions) == depth


@pytest.mark.parametrize(
    ("name", "arguments", "nodes"),
    [("vgg16", {}, 5_251), ("resnet50", {}, 24_579), ("wide_resnet", {"depth": 28, "width": 10}, 9_475)],
)
def test_nodes_match_table_1_of_the_implicit_paper(name: str, arguments: dict, nodes: int) -> None:
    # a node is an input channel of a convolution or an input feature of a dense layer, shortcuts included
    assert sum(layer.weight.shape[1] for layer in weight_layers(models.make(name, **arguments))) == nodes


def test_vgg16_has_15_million_weights() -> None:
    convolutions = sum(9 * a * b for a, b in [(3, 64), (64, 64), (64, 128), (128, 128), (128, 256)])
    convolutions += 9 * (2 * 256 * 256 + 256 * 512 + 5 * 512 * 512)
    assert kernels(models.vgg16(num_classes=10)) == convolutions + 2 * 512 * 512 + 512 * 10 == 15_239_872


def test_rank_1_counts_match_the_paper() -> None:
    assert round(rank1(models.wide_resnet(28, 10), 4, 10) / 1e6, 1) == 36.6
    assert round(rank1(models.resnet50(), 4, 1000) / 1e6, 1) == 26.0


def test_mlp_counts_match_the_k_tied_paper() -> None:
    network = models.mlp(784, (400, 400), num_classes=10)
    assert parameters(network) == 478_410
    biases = parameters(network) - kernels(network)
    counts = [kernels(network) + 2 * biases + tied(weight_layers(network), rank) for rank in (1, 2, 3)]
    assert counts == [481_614, 484_008, 486_402]


def test_lenet_counts_match_the_k_tied_paper() -> None:
    network = models.lenet(num_classes=100, in_channels=3, image_size=32)
    assert 2 * parameters(network) == 4_405_320
    dense = [layer for layer in weight_layers(network) if isinstance(layer, nn.Linear)]
    dense_kernels = sum(layer.weight.numel() for layer in dense)
    assert 2 * parameters(network) - dense_kernels + tied(dense, 2) == 2_267_408


def test_lenet_of_the_performance_notes() -> None:
    network = models.lenet(num_classes=100, in_channels=3, image_size=32, kernel_size=3)
    assert [tuple(layer.weight.shape) for layer in weight_layers(network)] == [
        (32, 3, 3, 3),
        (64, 32, 3, 3),
        (512, 4096),
        (100, 512),
    ]


@pytest.mark.parametrize(("width", "thousands"), [(1, 42), (2, 165), (4, 657), (8, 2619)])
def test_fashion_mnist_lenet_sizes_match_figure_4_of_the_implicit_paper(width: int, thousands: int) -> None:
    network = models.lenet(channels=(6, 16), dense=(120, 64), same_padding=False, width=width)
    assert round(parameters(network) / 1000) == thousands


def test_imdb_counts_match_the_k_tied_paper() -> None:
    network = models.imdb_lstm()
    assert network.lstm.bias_hh_l0.numel() == 512
    matrices = [network.lstm.get_parameter(name) for name in ("weight_ih_l0", "weight_hh_l0")]
    stds_of_dense = parameters(network.fc)
    assert parameters(network) + sum(m.numel() for m in matrices) + stds_of_dense == 2_822_914
    assert parameters(network) + sum(2 * sum(m.shape) for m in matrices) + stds_of_dense == 2_694_402


def test_tfp_resnet18_counts_match_table_5_of_the_k_tied_paper() -> None:
    network = models.tfp_resnet18()
    statistics = sum(b.numel() for name, b in network.named_buffers() if "running" in name)
    points = parameters(network) + statistics
    assert points + kernels(network) == 9_814_026
    counts = [points + tied(weight_layers(network), rank) for rank in (1, 2, 3)]
    assert counts == [4_929_711, 4_946_964, 4_964_217]


def test_a_narrow_tfp_resnet18_has_stages_of_its_own_width() -> None:
    stages, before, wanted = (16, 32, 64, 128), 16, 27 * 16 + 10 * 128
    for width in stages:
        wanted += 9 * before * width + 9 * width * width + before * width  # two 3×3 kernels and a projection
        before = width
    assert kernels(models.tfp_resnet18(base=16)) == wanted
