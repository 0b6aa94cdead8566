"""How every network of this room starts: drawn under its own seed, weights by He."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from dubito.seeds import forked

AnyNetwork = TypeVar("AnyNetwork", bound=nn.Module)


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Build the network `name` under `seed`: the same call draws the same weights, on any default device."""
    device = torch.get_default_device()
    # meta tensors draw nothing, so there is no state of theirs to keep
    with forked(seed, "models", name, device="cpu" if device.type == "meta" else device):
        yield


def he_initialised(network: AnyNetwork) -> AnyNetwork:
    """Draw the weights again so that variance is kept through ReLUs, Var[w] = 2 / fan_in (He et al., 2015).

    No ReLU follows the last dense layer, the network's outputs: Var[w] = 1 / fan_in there. Convolution
    biases start at 0; dense biases stay as PyTorch draws them, for zeros would put every kink of a network
    on one real input at the origin.
    """
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is layers[-1] else "relu")
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network
