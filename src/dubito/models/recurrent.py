"""Networks over sequences: an LSTM whose last state is read by a dense layer."""

import torch
from torch import Tensor, nn

from dubito.errors import require_count

from .initial import seeded


def _lstm(in_features: int, hidden: int) -> nn.LSTM:
    """An LSTM with one bias of 4·hidden, the forget gate's at 1, as Keras and the papers have it.

    torch adds two biases, of which only the sum matters. The second becomes a buffer of zeros: no method
    learns it, draws it or counts it as a parameter.
    """
    lstm = nn.LSTM(in_features, hidden, batch_first=True)
    zeros = torch.zeros(4 * hidden)
    del lstm.bias_hh_l0
    lstm.register_buffer("bias_hh_l0", zeros)
    lstm.bias_hh_l0 = zeros  # nn.LSTM also keeps its tensors in a list, which only assignment updates
    bias = lstm.get_parameter("bias_ih_l0")
    with torch.no_grad():
        bias.zero_()
        bias[hidden : 2 * hidden] = 1.0  # gates in order: input, forget, cell, output
    return lstm


class LSTMNetwork(nn.Module):
    """Embedding (for tokens), LSTM, dense layer on the state after the last step."""

    def __init__(self, in_features: int, hidden: int, num_classes: int, embedding: nn.Embedding | None = None) -> None:
        super().__init__()
        self.embedding = embedding
        self.lstm = _lstm(in_features, hidden)
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, C] of token numbers [B, T], or without an embedding of features [B, T, F]."""
        steps = inputs if self.embedding is None else self.embedding(inputs)
        states, _ = self.lstm(steps)
        return self.fc(states[:, -1])


def imdb_lstm(
    *, num_classes: int = 1, vocabulary: int = 20_000, embedding: int = 128, hidden: int = 128, seed: int = 0
) -> LSTMNetwork:
    """The k-tied paper's network on IMDB: token numbers [B, T], padded in front, to logits [B, num_classes].

    Args:
        num_classes: Number of outputs; 1 is one logit for the positive class, of shape [B, 1].
        vocabulary: Number of tokens.
        embedding: Width of a token's embedding.
        hidden: Width of the LSTM's state.
        seed: Seed of the initial weights.
    """
    require_count(num_classes=num_classes, vocabulary=vocabulary, embedding=embedding, hidden=hidden)
    with seeded(seed, "imdb_lstm"):
        return LSTMNetwork(embedding, hidden, num_classes, nn.Embedding(vocabulary, embedding))


def clinical_lstm(num_features: int, hidden: int = 64, *, num_classes: int = 1, seed: int = 0) -> LSTMNetwork:
    """The rank-1 paper's clinical network: measurements [B, T, F] to logits [B, num_classes].

    Args:
        num_features: Measurements F per time step.
        hidden: Width of the LSTM's state.
        num_classes: Number of outputs; 1 is one logit for the event, of shape [B, 1].
        seed: Seed of the initial weights.
    """
    require_count(num_features=num_features, hidden=hidden, num_classes=num_classes)
    with seeded(seed, "clinical_lstm"):
        return LSTMNetwork(num_features, hidden, num_classes)
