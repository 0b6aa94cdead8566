"""Residual networks: ResNet (He et al., 2015), Wide ResNet and the k-tied paper's ResNet-18.

Modules of `resnet18`, `resnet50` and `resnet152` bear torchvision's names, so its weight files load.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

from dubito.errors import ConfigError, require_count

from ..hints import checked
from .initial import he_initialised, seeded


def _conv(fan_in: int, fan_out: int, size: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(fan_in, fan_out, size, stride, padding=size // 2, bias=bias)


class PostBlock(nn.Module):
    """relu(branch + shortcut), each convolution followed by batch norm.

    The branch is 3×3, 3×3, or as a bottleneck 1×1, 3×3, 1×1 with four times as many outputs. A 1×1
    projection stands in the shortcut where the shape changes.
    """

    def __init__(self, in_channels: int, width: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        self.out_channels = 4 * width if bottleneck else width
        self.conv1 = _conv(in_channels, width, 1) if bottleneck else _conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride if bottleneck else 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, self.out_channels, 1) if bottleneck else None
        self.bn3 = nn.BatchNorm2d(self.out_channels) if bottleneck else None
        self.downsample = None
        if stride != 1 or in_channels != self.out_channels:
            projection = _conv(in_channels, self.out_channels, 1, stride)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(self.out_channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the branch to the shortcut."""
        branch = self.bn2(self.conv2(relu(self.bn1(self.conv1(inputs)))))
        if self.conv3 is not None and self.bn3 is not None:
            branch = self.bn3(self.conv3(relu(branch)))
        return relu(branch + (inputs if self.downsample is None else self.downsample(inputs)))


class PreBlock(nn.Module):
    """branch + shortcut, batch norm and ReLU before each of two 3×3 convolutions (He et al., 2016).

    A projection reads the activated input (Zagoruyko and Komodakis, 2016); it stands where the shape
    changes, or in every block.
    """

    def __init__(
        self, in_channels: int, width: int, stride: int, *, bias: bool = False, always_project: bool = False
    ) -> None:
        super().__init__()
        self.out_channels = width
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = _conv(in_channels, width, 3, stride, bias)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, 1, bias)
        project = always_project or stride != 1 or in_channels != width
        self.shortcut = _conv(in_channels, width, 1, stride, bias) if project else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the branch to the shortcut."""
        active = relu(self.bn1(inputs))
        branch = self.conv2(relu(self.bn2(self.conv1(active))))
        return branch + (inputs if self.shortcut is None else self.shortcut(active))


BlockFactory = Callable[[int, int, int], PostBlock | PreBlock]  # in_channels, width, stride


def _stages(
    block: BlockFactory, in_channels: int, widths: Sequence[int], depths: Sequence[int]
) -> tuple[list[nn.Sequential], int]:
    """The stages of a network and their output channels; every stage but the first halves the image."""
    stages = []
    for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        stage = nn.Sequential()
        for number in range(depth):
            layer = block(in_channels, width, 2 if index > 0 and number == 0 else 1)
            stage.append(layer)
            in_channels = layer.out_channels
        stages.append(stage)
    return stages, in_channels


class ResNet(nn.Module):
    """Post-activation network of four stages behind a 7×7 stem, or a 3×3 one for small images."""

    def __init__(
        self,
        block: BlockFactory,
        depths: Sequence[int],
        *,
        num_classes: int,
        in_channels: int,
        base: int,
        small_images: bool,
    ) -> None:
        super().__init__()
        self.small_images = small_images
        self.conv1 = _conv(in_channels, base, 3) if small_images else _conv(in_channels, base, 7, 2)
        self.bn1 = nn.BatchNorm2d(base)
        stages, features = _stages(block, base, [base, 2 * base, 4 * base, 8 * base], depths)
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(features, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, C] of images [B, channels, height, width]."""
        maps = relu(self.bn1(self.conv1(inputs)))
        if not self.small_images:
            maps = max_pool2d(maps, 3, stride=2, padding=1)
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return self.fc(maps.mean((-2, -1)))


class PreActivationResNet(nn.Module):
    """Pre-activation network behind a 3×3 stem, with batch norm and ReLU before the mean over space."""

    def __init__(
        self,
        block: BlockFactory,
        widths: Sequence[int],
        depths: Sequence[int],
        *,
        num_classes: int,
        in_channels: int,
        base: int,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, base, 3, bias=bias)
        stages, features = _stages(block, base, widths, depths)
        self.num_stages = len(stages)
        for index, stage in enumerate(stages, 1):
            self.add_module(f"layer{index}", stage)
        self.bn = nn.BatchNorm2d(features)
        self.fc = nn.Linear(features, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, C] of images [B, channels, height, width]."""
        maps = self.conv1(inputs)
        for index in range(1, self.num_stages + 1):
            maps = self.get_submodule(f"layer{index}")(maps)
        return self.fc(relu(self.bn(maps)).mean((-2, -1)))


def _resnet(
    name: str,
    depths: Sequence[int],
    bottleneck: bool,
    num_classes: int,
    in_channels: int,
    base: int,
    small_images: bool,
    seed: int,
) -> ResNet:
    require_count(num_classes=num_classes, in_channels=in_channels, base=base)
    with seeded(seed, name):
        return he_initialised(
            ResNet(
                partial(PostBlock, bottleneck=bottleneck),
                depths,
                num_classes=num_classes,
                in_channels=in_channels,
                base=base,
                small_images=small_images,
            )
        )


@checked
def resnet18(
    *, num_classes: int = 1000, in_channels: int = 3, base: int = 64, small_images: bool = False, seed: int = 0
) -> ResNet:
    """ResNet-18.

    Args:
        num_classes: Number of outputs.
        in_channels: Channels of an image.
        base: Width of the stem and the first stage; each stage doubles it.
        small_images: Whether the stem is the CIFAR form, 3×3 without stride and pooling.
        seed: Seed of the initial weights.
    """
    return _resnet("resnet18", (2, 2, 2, 2), False, num_classes, in_channels, base, small_images, seed)


@checked
def resnet50(
    *, num_classes: int = 1000, in_channels: int = 3, base: int = 64, small_images: bool = False, seed: int = 0
) -> ResNet:
    """ResNet-50; arguments as of `resnet18`."""
    return _resnet("resnet50", (3, 4, 6, 3), True, num_classes, in_channels, base, small_images, seed)


@checked
def resnet152(
    *, num_classes: int = 1000, in_channels: int = 3, base: int = 64, small_images: bool = False, seed: int = 0
) -> ResNet:
    """ResNet-152; arguments as of `resnet18`."""
    return _resnet("resnet152", (3, 8, 36, 3), True, num_classes, in_channels, base, small_images, seed)


@checked
def wide_resnet(
    depth: int, width: int, base: int = 16, *, num_classes: int = 10, in_channels: int = 3, seed: int = 0
) -> PreActivationResNet:
    """Wide ResNet-depth-width for small images: three stages of base·width, 2·base·width, 4·base·width.

    Args:
        depth: 6n + 4 for n blocks a stage: the stem, 6n convolutions and three projections.
        width: Factor on the stages' widths.
        base: Width of the stem, and of the first stage at `width` 1.
        num_classes: Number of outputs.
        in_channels: Channels of an image.
        seed: Seed of the initial weights.
    """
    require_count(depth=depth, width=width, base=base, num_classes=num_classes, in_channels=in_channels)
    if depth < 10 or depth % 6 != 4:
        raise ConfigError(f"depth must be 6n + 4 with n of at least 1, such as 10, 16 or 28, got {depth}")
    widths = [base * width, 2 * base * width, 4 * base * width]
    with seeded(seed, "wide_resnet"):
        network = PreActivationResNet(
            PreBlock, widths, [(depth - 4) // 6] * 3, num_classes=num_classes, in_channels=in_channels, base=base
        )
        return he_initialised(network)


@checked
def tfp_resnet18(*, num_classes: int = 10, in_channels: int = 3, base: int = 64, seed: int = 0) -> PreActivationResNet:
    """The k-tied paper's ResNet-18, TensorFlow Probability's example; arguments as of `resnet18`.

    Unlike He et al.'s it has one pre-activation block a stage, a projection in every shortcut, and biases in
    its convolutions.
    """
    require_count(num_classes=num_classes, in_channels=in_channels, base=base)
    with seeded(seed, "tfp_resnet18"):
        network = PreActivationResNet(
            partial(PreBlock, bias=True, always_project=True),
            [base, 2 * base, 4 * base, 8 * base],
            [1, 1, 1, 1],
            num_classes=num_classes,
            in_channels=in_channels,
            base=base,
            bias=True,
        )
        return he_initialised(network)
