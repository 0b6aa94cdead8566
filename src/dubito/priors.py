"""Priors of weights: their standard deviations, and where they are centred."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from . import storage
from .errors import ConfigError, NetworkError, require_positive, unknown_name
from .hints import Checked


@dataclass(frozen=True, kw_only=True)
class He(Checked):
    """Standard deviations scaled to a layer's fan-in: N(0, gain² · 2 / fan_in), N(0, 1) for vectors.

    [k-tied Normal, Eq. 9; biases keep a standard Normal, as its appendix B does]

    Args:
        gain: multiplies the standard deviations of weights.
    """

    gain: float = 1.0

    def __post_init__(self) -> None:
        require_positive(gain=self.gain)

    def std(self, parameter: Tensor) -> float:
        """The prior's standard deviation for one parameter."""
        if parameter.ndim < 2:
            return 1.0
        fan_in, _ = nn.init._calculate_fan_in_and_fan_out(parameter)
        return self.gain * (2.0 / fan_in) ** 0.5


#: A Normal prior around 0: one standard deviation for all weights, or one scaled per layer.
PriorStd: TypeAlias = float | He


def check_prior_std(value: PriorStd) -> None:
    """Refuse what is neither a positive number nor `He()`."""
    if isinstance(value, He):
        return
    if isinstance(value, type | str):
        raise ConfigError(f"prior_std must be a number above 0 or He(), got {value!r}")
    require_positive(prior_std=value)


def prior_std_of(value: PriorStd, parameter: Tensor) -> float:
    """The prior's standard deviation for one parameter."""
    return value.std(parameter) if isinstance(value, He) else float(value)


def normal_penalty(parameters: Iterable[Tensor], prior_std: float) -> Tensor:
    """−log N(w | 0, prior_std²) up to its constant, summed: Σ w² / 2s²."""
    return torch.stack([parameter.square().sum() for parameter in parameters]).sum() / (2 * prior_std**2)


@dataclass(frozen=True)
class Around(Checked):
    """A Normal prior around the weights of a network, such as the pretrained ones: N(w₀, std²).

    Args:
        network: whose trainable parameters are the centre, as they are now, or all where none are trainable. The
            setting keeps their name alone, a sha256: files hold no centre, and the network given to `dubito.load`
            brings it.
        std: one standard deviation, `He()`, or one of these for each group of parameters, by a pattern of their names:
            `{"*lora_A*": 0.1, "*": 0.01}`; the first that matches counts.
    """

    network: nn.Module | str
    std: PriorStd | Mapping[str, PriorStd] = field(kw_only=True, hash=False)

    def __post_init__(self) -> None:
        for value in self.std.values() if isinstance(self.std, Mapping) else [self.std]:
            check_prior_std(value)
        centre: dict[str, Tensor] = {}
        if isinstance(self.network, nn.Module):
            named = dict(self.network.named_parameters())
            if not named:
                raise NetworkError("network must have parameters to be a prior's centre, got none")
            chosen = {name: p for name, p in named.items() if p.requires_grad} or named
            centre = {name: parameter.detach().clone() for name, parameter in chosen.items()}
            object.__setattr__(self, "network", storage.checksum(centre))
        object.__setattr__(self, "_centre", centre)

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # it never changes

    def known(self, network: nn.Module, names: Collection[str]) -> "Around":
        """The prior of a file with its centre, where that is a network's; else itself.

        Args:
            network: that may be the centre.
            names: of the parameters of the centre.
        """
        weights = {name: p.detach().clone() for name, p in network.named_parameters() if name in names}
        if storage.checksum(weights) == self.network:
            object.__setattr__(self, "_centre", weights)
        return self

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Refuse to be the prior of parameters that the centre lacks, and patterns that no parameter has."""
        for name, parameter in weights.items():
            self.group(name)
            if self.centre(name, parameter).shape != parameter.shape:
                raise ConfigError(
                    f"the network of Around must be like the one that is fitted, but {name!r} is "
                    f"{tuple(self.centre(name, parameter).shape)} there and {tuple(parameter.shape)} here"
                )
        patterns = self.std if isinstance(self.std, Mapping) else ()
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in weights):
                raise unknown_name("pattern of parameters", pattern, weights)

    def group(self, name: str) -> PriorStd:
        """The setting of the group that a parameter is in."""
        if not isinstance(self.std, Mapping):
            return self.std
        for pattern, std in self.std.items():
            if fnmatchcase(name, pattern):
                return std
        raise ConfigError(f"std names no group for {name!r}, got {list(self.std)}; add '*' for all others")

    def centre(self, name: str, like: Tensor) -> Tensor:
        """The centre of one parameter, on its device and in its dtype."""
        held: dict[str, Tensor] = self._centre  # pyright: ignore[reportAttributeAccessIssue]
        if not held:
            raise ConfigError(
                f"this prior comes from a file and knows its centre by name alone, {str(self.network)[:16]}: load with "
                "the network that it was made of, or give Around(network, std=...) anew"
            )
        if name not in held:
            raise ConfigError(f"the network of Around has no trainable parameter {name!r}; thaw it there")
        if (held[name].device, held[name].dtype) != (like.device, like.dtype):
            held[name] = held[name].to(like.device, like.dtype)  # once
        return held[name]

    def precision(self, name: str, parameter: Tensor) -> float:
        """One over the prior's variance for one parameter."""
        return prior_std_of(self.group(name), parameter) ** -2

    def penalty(self, weights: Mapping[str, Tensor]) -> Tensor:
        """−log N(w | w₀, std²) up to its constant, summed over parameters by name: Σ (w − w₀)² / 2s²."""
        terms = [
            (weight - self.centre(name, weight)).square().sum() * (self.precision(name, weight) / 2)
            for name, weight in weights.items()
        ]
        return torch.stack(terms).sum()


def require_one_prior(prior: Around | None, other: object, default: object, name: str) -> None:
    """Refuse a prior beside a setting that means another."""
    if prior is not None and other != default:
        raise ConfigError(f"give prior=Around(...) or {name}={other!r}, not both: each is the whole prior")
