"""Networks without shortcuts: multilayer perceptron, LeNet, VGG."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from dubito.errors import ConfigError, require_count, unknown_name

from ..hints import checked
from .initial import he_initialised, seeded


class LeakyTanh(nn.Module):
    """tanh(x) + x / 10, the activation of BALI's classification benchmark (Section 5.3)."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply it to every element."""
        return torch.tanh(inputs) + 0.1 * inputs


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": nn.GELU,
    "leaky_tanh": LeakyTanh,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


def _require_widths(minimum: int, **sequences: Sequence[int]) -> None:
    for name, widths in sequences.items():
        if isinstance(widths, str) or not isinstance(widths, Sequence) or len(widths) < minimum:
            raise ConfigError(
                f"{name} must be a sequence of at least {minimum} widths such as (32, 64), got {widths!r}"
            )
        require_count(**{f"{name}[{index}]": width for index, width in enumerate(widths)})


def _dense(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU) -> dict[str, nn.Module]:
    """Layers fc1, act1, fc2, act2, ..., fc between `sizes`; the last, fc, gives the network's outputs."""
    layers: dict[str, nn.Module] = {}
    for index, (fan_in, fan_out) in enumerate(pairwise(sizes[:-1]), 1):
        layers[f"fc{index}"] = nn.Linear(fan_in, fan_out)
        layers[f"act{index}"] = activation()
    return {**layers, "fc": nn.Linear(sizes[-2], sizes[-1])}


def _sequence(layers: dict[str, nn.Module]) -> nn.Sequential:
    network = nn.Sequential()
    for name, layer in layers.items():
        network.add_module(name, layer)
    return network


@checked
def mlp(
    in_features: int,
    hidden: Sequence[int] = (400, 400),
    *,
    num_classes: int = 10,
    activation: str = "relu",
    seed: int = 0,
) -> nn.Sequential:
    """Multilayer perceptron; inputs of more than two axes are flattened.

    Args:
        in_features: Numbers per input.
        hidden: Widths of the hidden layers; none makes a linear model.
        num_classes: Number of outputs: classes, or the targets of a regression.
        activation: A name among `ACTIVATIONS`, so that the network can be stored by name and arguments.
        seed: Seed of the initial weights.
    """
    require_count(in_features=in_features, num_classes=num_classes)
    _require_widths(0, hidden=hidden)
    if activation not in ACTIVATIONS:
        raise unknown_name("activation", activation, ACTIVATIONS)
    with seeded(seed, "mlp"):
        dense = _dense((in_features, *hidden, num_classes), ACTIVATIONS[activation])
        return he_initialised(_sequence({"flatten": nn.Flatten(), **dense}))


@checked
def lenet(
    *,
    num_classes: int = 10,
    in_channels: int = 1,
    image_size: int = 28,
    channels: Sequence[int] = (32, 64),
    dense: Sequence[int] = (512,),
    width: int = 1,
    kernel_size: int = 5,
    same_padding: bool = True,
    seed: int = 0,
) -> nn.Sequential:
    """LeNet: convolutions, each with ReLU and 2×2 max pooling, then dense layers.

    The k-tied paper's is `lenet(num_classes=100, in_channels=3, image_size=32)`: its counts need 5×5 kernels
    though its text says 3×3. The implicit paper's on Fashion-MNIST is `lenet(channels=(6, 16),
    dense=(120, 64), same_padding=False, width=w)` with w = 1, 2, 4, 8.

    Args:
        num_classes: Number of outputs.
        in_channels: Channels of an image.
        image_size: Height and width of an image.
        channels: Output channels of each convolution.
        dense: Widths of the hidden dense layers.
        width: Factor on all of `channels` and `dense`.
        kernel_size: Height and width of the kernels, odd where the padding is to keep the size.
        same_padding: Whether zeros around an image keep its size through a convolution.
        seed: Seed of the initial weights.
    """
    require_count(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    require_count(width=width, kernel_size=kernel_size)
    _require_widths(1, channels=channels)
    _require_widths(0, dense=dense)
    if same_padding and kernel_size % 2 == 0:
        raise ConfigError(f"same_padding needs an odd kernel_size, got {kernel_size}; use an odd one")
    padding = kernel_size // 2 if same_padding else 0
    size = image_size
    for _ in channels:
        size = (size + 2 * padding - kernel_size + 1) // 2
    if size < 1:
        raise ConfigError(
            f"an image of {image_size} pixels does not survive {len(channels)} convolutions and poolings;"
            " raise image_size, lower kernel_size or take fewer channels"
        )
    maps = [in_channels, *(width * count for count in channels)]
    with seeded(seed, "lenet"):
        layers: dict[str, nn.Module] = {}
        for index, (fan_in, fan_out) in enumerate(pairwise(maps), 1):
            layers[f"conv{index}"] = nn.Conv2d(fan_in, fan_out, kernel_size, padding=padding)
            layers[f"relu{index}"] = nn.ReLU()
            layers[f"pool{index}"] = nn.MaxPool2d(2)
        layers["flatten"] = nn.Flatten()
        hidden = [width * count for count in dense]
        return he_initialised(_sequence(layers | _dense((maps[-1] * size * size, *hidden, num_classes))))


@checked
def vgg(
    stages: Sequence[Sequence[int]],
    dense: Sequence[int] = (),
    *,
    num_classes: int = 10,
    in_channels: int = 3,
    batch_norm: bool = False,
    seed: int = 0,
) -> nn.Sequential:
    """Stages of 3×3 convolutions with ReLU, max pooling after each, a mean over space, dense layers.

    Args:
        stages: For each stage the output channels of its convolutions.
        dense: Widths of the hidden dense layers.
        num_classes: Number of outputs.
        in_channels: Channels of an image.
        batch_norm: Whether batch norm takes the place of the convolutions' biases.
        seed: Seed of the initial weights.
    """
    require_count(num_classes=num_classes, in_channels=in_channels)
    if not isinstance(stages, Sequence) or not stages:
        raise ConfigError(f"stages must be a sequence such as ((64, 64), (128, 128)), got {stages!r}")
    _require_widths(1, **{f"stages[{index}]": stage for index, stage in enumerate(stages)})
    _require_widths(0, dense=dense)
    with seeded(seed, "vgg"):
        layers: dict[str, nn.Module] = {}
        fan_in = in_channels
        for stage, widths in enumerate(stages, 1):
            for index, fan_out in enumerate(widths, 1):
                layers[f"conv{stage}_{index}"] = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=not batch_norm)
                if batch_norm:
                    layers[f"bn{stage}_{index}"] = nn.BatchNorm2d(fan_out)
                layers[f"relu{stage}_{index}"] = nn.ReLU()
                fan_in = fan_out
            layers[f"pool{stage}"] = nn.MaxPool2d(2)
        layers["mean"] = nn.AdaptiveAvgPool2d(1)
        layers["flatten"] = nn.Flatten()
        return he_initialised(_sequence(layers | _dense((fan_in, *dense, num_classes))))


@checked
def vgg16(*, num_classes: int = 10, in_channels: int = 3, batch_norm: bool = False, seed: int = 0) -> nn.Sequential:
    """VGG-16 in the implicit paper's CIFAR form: 13 convolutions, then dense 512-512-classes."""
    stages = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
    options = {"num_classes": num_classes, "in_channels": in_channels, "batch_norm": batch_norm}
    return vgg(stages, (512, 512), **options, seed=seed)
