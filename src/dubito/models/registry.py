"""Networks by name, so that one can be stored as a name and its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from dubito.errors import ConfigError, unknown_name

from .densenet import densenet121, densenet161
from .plain import lenet, mlp, vgg, vgg16
from .recurrent import clinical_lstm, imdb_lstm
from .residual import resnet18, resnet50, resnet152, tfp_resnet18, wide_resnet

FACTORIES: dict[str, Callable[..., nn.Module]] = {
    factory.__name__: factory
    for factory in (
        clinical_lstm,
        densenet121,
        densenet161,
        imdb_lstm,
        lenet,
        mlp,
        resnet18,
        resnet50,
        resnet152,
        tfp_resnet18,
        vgg,
        vgg16,
        wide_resnet,
    )
}


def names() -> list[str]:
    """The names `make` knows, in order of the alphabet."""
    return sorted(FACTORIES)


def make(name: str, **arguments: Any) -> nn.Module:
    """The network `name`; arguments are those of the function of that name, all by keyword.

    All arguments are numbers, truth values, strings or sequences of them, so they can be kept as JSON.
    """
    if name not in FACTORIES:
        raise unknown_name("network", name, FACTORIES)
    signature = inspect.signature(FACTORIES[name])
    try:
        signature.bind(**arguments)
    except TypeError as error:
        known = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise ConfigError(f"{name} takes ({known}), got {arguments}: {error}; correct the arguments") from None
    return FACTORIES[name](**arguments)
