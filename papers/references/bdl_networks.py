"""The two networks whose posteriors were sampled for the NeurIPS 2021 competition [Izmailov et al. 2021], in PyTorch.

The reference's are haiku's, so three things differ from what PyTorch would do by itself: its LSTM has one bias and adds
1 to the forget gate outside of it; a convolution of stride 2 pads behind the image alone; filter response norm ends in
a learned threshold, max(y, τ), before the activation.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from dubito.errors import require_count
from dubito.models.initial import he_initialised, seeded

EPS = 1e-6


class TextNetwork(nn.Module):
    """Embedding, convolution, max-pooling, LSTM, dense layer on the state after the last step."""

    def __init__(self, vocabulary: int, embedding: int, filters: int, width: int, pooling: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.conv = nn.Conv1d(embedding, filters, width)
        self.pool = nn.MaxPool1d(pooling)
        self.lstm = _lstm(filters, hidden)
        self.fc = nn.Linear(hidden, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, 2] of word numbers [B, T], padded in front."""
        features = self.conv(self.embedding(inputs).transpose(1, 2))
        states, _ = self.lstm(self.pool(features.relu()).transpose(1, 2))
        return self.fc(states[:, -1])


def _lstm(in_features: int, hidden: int) -> nn.LSTM:
    """An LSTM with one learned bias; in place of the second stands haiku's 1 of the forget gate, which is no weight."""
    lstm = nn.LSTM(in_features, hidden, batch_first=True)
    forget = torch.zeros(4 * hidden)
    forget[hidden : 2 * hidden] = 1.0  # gates in order: input, forget, cell, output
    del lstm.bias_hh_l0
    lstm.register_buffer("bias_hh_l0", forget)
    lstm.bias_hh_l0 = forget  # nn.LSTM also keeps its tensors in a list, which only assignment updates
    nn.init.zeros_(lstm.get_parameter("bias_ih_l0"))
    return lstm


def text_network(
    *,
    vocabulary: int = 20_000,
    embedding: int = 128,
    filters: int = 64,
    width: int = 5,
    pooling: int = 4,
    hidden: int = 128,
    std: float = 40**-0.5,
    seed: int = 0,
) -> TextNetwork:
    """The reference's CNN-LSTM for IMDB.

    Args:
        vocabulary: number of words.
        embedding: width of a word's embedding.
        filters: of the convolution.
        width: of a filter, in words.
        pooling: words that are pooled.
        hidden: width of the LSTM's state.
        std: of the first embeddings; PyTorch's of 1 lie 6 standard deviations from the prior's centre.
        seed: of the first weights.
    """
    require_count(vocabulary=vocabulary, embedding=embedding, filters=filters, width=width, hidden=hidden)
    with seeded(seed, "bdl-imdb"):
        network = TextNetwork(vocabulary, embedding, filters, width, pooling, hidden)
        nn.init.normal_(network.embedding.weight, std=std)
        return network


class FilterResponseNorm(nn.Module):
    """max(γ x / √(mean x² over space + ε) + β, τ) by channels [Singh and Krishnan 2020].

    γ and β meet the features on the last axis, where the library's readers of layers know them. Of τ they know no rule,
    so that Laplace leaves it a point; factors on nodes leave all three. Methods on weight tensors treat all alike.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.tau = nn.Parameter(torch.zeros(channels))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps [B, C, H, W] of maps [B, C, H, W]."""
        normalised = inputs * (inputs.square().mean((-2, -1), keepdim=True) + EPS).rsqrt()
        scaled = normalised.permute(0, 2, 3, 1) * self.gamma + self.beta
        return torch.maximum(scaled, self.tau).permute(0, 3, 1, 2)


class Layer(nn.Module):
    """A convolution with bias, filter response norm."""

    def __init__(self, in_channels: int, channels: int, size: int, stride: int) -> None:
        super().__init__()
        # "same" padding of stride 2: an even image needs one row and one column, behind it.
        self.behind = (0, size - stride, 0, size - stride) if stride > 1 and size > 1 else None
        self.conv = nn.Conv2d(in_channels, channels, size, stride, padding=0 if self.behind or size == 1 else size // 2)
        self.norm = FilterResponseNorm(channels)

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps of maps."""
        return self.norm(self.conv(inputs if self.behind is None else pad(inputs, self.behind)))


class Block(nn.Module):
    """swish(branch + shortcut), the branch two 3×3 layers, a 1×1 layer in the shortcut where the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.layer1 = Layer(in_channels, channels, 3, stride)
        self.layer2 = Layer(channels, channels, 3, 1)
        self.shortcut = Layer(in_channels, channels, 1, stride) if stride > 1 else None

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps of maps."""
        branch = self.layer2(silu(self.layer1(inputs)))
        return silu(branch + (inputs if self.shortcut is None else self.shortcut(inputs)))


class ImageNetwork(nn.Module):
    """ResNet of depth 6n + 2 with filter response norm and swish."""

    def __init__(self, depth: int, base: int, num_classes: int) -> None:
        super().__init__()
        self.stem = Layer(3, base, 3, 1)
        blocks = []
        for stage in range(3):
            for number in range((depth - 2) // 6):
                first = stage > 0 and number == 0
                channels = base * 2**stage
                blocks.append(Block(channels // 2 if first else channels, channels, 2 if first else 1))
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(4 * base, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, C] of images [B, 3, height, width]."""
        return self.fc(self.blocks(silu(self.stem(inputs))).mean((-2, -1)))


def image_network(*, depth: int = 20, base: int = 16, num_classes: int = 10, seed: int = 0) -> ImageNetwork:
    """The reference's ResNet-20 for CIFAR-10.

    Args:
        depth: 6n + 2 for n blocks a stage.
        base: channels of the first stage.
        num_classes: number of outputs.
        seed: of the first weights.
    """
    require_count(depth=depth, base=base, num_classes=num_classes)
    with seeded(seed, "bdl-cifar10"):
        return he_initialised(ImageNetwork(depth, base, num_classes))
