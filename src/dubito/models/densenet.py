"""DenseNet (Huang et al., 2017): every layer reads the outputs of all layers before it in its block.

Modules bear torchvision's names, so its weight files load.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from dubito.errors import require_count

from .initial import he_initialised, seeded


class DenseLayer(nn.Module):
    """Append `growth` maps to the inputs, through a 1×1 convolution to four times as many."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs and new maps, along the channels."""
        maps = self.conv1(relu(self.norm1(inputs)))
        return torch.cat((inputs, self.conv2(relu(self.norm2(maps)))), dim=1)


def _transition(in_channels: int) -> nn.Sequential:
    transition = nn.Sequential()
    transition.add_module("norm", nn.BatchNorm2d(in_channels))
    transition.add_module("relu", nn.ReLU())
    transition.add_module("conv", nn.Conv2d(in_channels, in_channels // 2, 1, bias=False))
    transition.add_module("pool", nn.AvgPool2d(2))
    return transition


class DenseNet(nn.Module):
    """ImageNet stem, dense blocks with transitions that halve channels and image between them."""

    def __init__(self, depths: Sequence[int], growth: int, base: int, *, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(in_channels, base, 7, 2, padding=3, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(base))
        self.features.add_module("relu0", nn.ReLU())
        self.features.add_module("pool0", nn.MaxPool2d(3, stride=2, padding=1))
        channels = base
        for index, depth in enumerate(depths, 1):
            block = nn.Sequential()
            for number in range(1, depth + 1):
                block.add_module(f"denselayer{number}", DenseLayer(channels, growth))
                channels += growth
            self.features.add_module(f"denseblock{index}", block)
            if index < len(depths):
                self.features.add_module(f"transition{index}", _transition(channels))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, C] of images [B, channels, height, width]."""
        return self.classifier(relu(self.features(inputs)).mean((-2, -1)))


def densenet121(*, num_classes: int = 1000, in_channels: int = 3, seed: int = 0) -> DenseNet:
    """DenseNet-121: 64 maps from the stem, 32 more from every layer."""
    require_count(num_classes=num_classes, in_channels=in_channels)
    with seeded(seed, "densenet121"):
        network = DenseNet((6, 12, 24, 16), 32, 64, num_classes=num_classes, in_channels=in_channels)
        return he_initialised(network)


def densenet161(*, num_classes: int = 1000, in_channels: int = 3, seed: int = 0) -> DenseNet:
    """DenseNet-161: 96 maps from the stem, 48 more from every layer."""
    require_count(num_classes=num_classes, in_channels=in_channels)
    with seeded(seed, "densenet161"):
        network = DenseNet((6, 12, 36, 24), 48, 96, num_classes=num_classes, in_channels=in_channels)
        return he_initialised(network)
