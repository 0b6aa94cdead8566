"""Prior standard deviations of weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .errors import ConfigError, require_positive
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
