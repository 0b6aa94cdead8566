"""The network that is compared on: one that suits the data, or a factory of the user's own."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from .. import models, seeds
from ..data import Data
from ..errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Network:
    """How the network is made: by a built-in name and arguments, or by a factory.

    Attributes:
        name: of a built-in network.
        arguments: of the built-in network, but for its seed.
        factory: `package.module:function` of the user's.
        input_shape: of one row, told to a factory that asks.
        num_outputs: told to a factory that asks.
    """

    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    factory: str | None = None
    input_shape: tuple[int, ...]
    num_outputs: int

    def build(self, seed: int = 0) -> nn.Module:
        """The network, drawn under `seed`."""
        if self.factory is None:
            assert self.name is not None
            return models.make(self.name, **self.arguments, seed=seed)
        made = imported(self.factory)
        offered = {"input_shape": self.input_shape, "num_outputs": self.num_outputs, "seed": seed}
        given = {name: value for name, value in offered.items() if name in inspect.signature(made).parameters}
        try:
            with seeds.forked(seed, "compare", "network"):
                network = made(**given)
        except Exception as error:  # the factory may raise anything
            told = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "nothing"
            raise ConfigError(
                f"{self.factory} must return a network when called with {told}, but raised {type(error).__name__}: "
                f"{error}; it may ask for {', '.join(offered)}, and anything else it takes needs a default"
            ) from error
        if not isinstance(network, nn.Module):
            raise ConfigError(f"{self.factory} must return an nn.Module, got {type(network).__name__}")
        return network

    @property
    def title(self) -> str:
        """The network in a few words."""
        if self.factory is not None:
            return self.factory
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.arguments.items())})"


def imported(path: str) -> Callable[..., Any]:
    """The function behind `package.module:function`, looked for in the present folder too."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"a network of your own is named like package.module:factory, got {path!r}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = import_module(module_name)
    except Exception as error:  # a module of the user's own may raise anything
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"cannot import {module_name!r} of --model {path}: {told}; correct or rename it") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
        raise ConfigError(f"{module_name} has no function {name!r}; it has {known or 'none'}")
    return function


def suited(data: Data, num_outputs: int, model: str | None) -> Network:
    """The network for a data set.

    Args:
        data: what it reads.
        num_outputs: what it answers.
        model: a factory of the user's own; None chooses a perceptron for tables, LeNet for images, an LSTM for
            sequences.
    """
    inputs = data.train.inputs
    common: dict[str, Any] = {"input_shape": tuple(inputs.shape[1:]), "num_outputs": num_outputs}
    if model is not None:
        return Network(factory=model, **common)
    if not inputs.is_floating_point():
        words = 1 + max(int(part.inputs.max()) for part in (data.train, data.test))
        arguments: dict[str, Any] = {"num_classes": num_outputs, "vocabulary": words}
        return Network(name="imdb_lstm", arguments=arguments, **common)
    if inputs.ndim == 3:
        arguments = {"num_features": inputs.shape[-1], "num_classes": num_outputs}
        return Network(name="clinical_lstm", arguments=arguments, **common)
    if inputs.ndim == 4 and inputs.shape[-1] == inputs.shape[-2] >= 8:
        sizes = {"in_channels": inputs.shape[1], "image_size": inputs.shape[-1]}
        arguments = {"num_classes": num_outputs, "channels": [16, 32], "dense": [128], **sizes}
        return Network(name="lenet", arguments=arguments, **common)
    features = inputs[0].numel()
    arguments = {"in_features": features, "hidden": [128, 128], "num_classes": num_outputs}
    return Network(name="mlp", arguments=arguments, **common)
