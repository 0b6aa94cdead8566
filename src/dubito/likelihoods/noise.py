"""What likelihoods with noise share: the units of real targets, and positive numbers per output, learned or fixed."""

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import ConfigError, NetworkError, require_positive
from .base import BuiltLikelihood, Likelihood
from .moments import Targets, WeightedTargets, moments, per_output


class RealLikelihood(BuiltLikelihood):
    """Judges real targets, perhaps in units of the training targets.

    Attributes:
        location: mean of the training targets per output where outputs and all noise are in their units, else None.
        scale: their standard deviation.
    """

    location: Tensor | None
    scale: Tensor | None

    def standardised(self, targets: Tensor) -> Tensor:
        if self.scale is None or self.location is None:
            return targets
        return (targets - self.location) / self.scale

    def restored(self, outputs: Tensor) -> Tensor:
        if self.scale is None or self.location is None:
            return outputs
        return outputs * self.scale + self.location

    @abstractmethod
    def with_noise_times(self, factor: float) -> "RealLikelihood":
        """The same likelihood with fixed noise, its standard deviations multiplied by `factor`."""

    def in_units(self, log_prob: Tensor, row: torch.Size) -> Tensor:
        """Log-densities [B] of standardised targets as those of the targets, rows of shape `row`: p(y) = p(z)/scale."""
        return log_prob if self.scale is None else log_prob - self.scale.log().expand(row).sum()


class NoiseNumbers(BuiltLikelihood):
    """Positive numbers per output: learned ones are softplus(raw) of the parameter `raw_<name>`, fixed ones buffers.

    Args:
        settings: what was asked for.
        num_components: K where fixed numbers have a leading axis of components, else 1: draw s uses number s mod K.
        tensors: numbers by name, raw ones as parameters under `raw_<name>`; None leaves one out.
    """

    #: Numbers that it always has, and those that it may have.
    needed: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def names_of(cls, settings: Likelihood) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Numbers that a likelihood of these settings always has, and those that it may have."""
        return cls.needed, cls.optional

    def __init__(self, settings: Likelihood, *, num_components: int = 1, **tensors: Any) -> None:
        super().__init__(settings)
        self.num_components = num_components
        for name, value in tensors.items():
            if name.startswith("raw_"):
                parameter = value if value is None or isinstance(value, nn.Parameter) else nn.Parameter(value)
                self.register_parameter(name, parameter)
            else:
                self.register_buffer(name, value)

    def number(self, name: str, outputs: Tensor, draw: int = 0) -> Tensor:
        """A number that meets outputs [B, ...]: positions after the output axis share it."""
        value = self.numbers(name)
        if self.num_components > 1:
            value = value[draw % self.num_components]
        return value.reshape(-1, *[1] * (outputs.ndim - 2)) if value.ndim == 1 and outputs.ndim > 1 else value

    def numbers(self, name: str) -> Tensor:
        """A number of all outputs, and of all components."""
        raw = getattr(self, f"raw_{name}", None)
        return F.softplus(raw) if raw is not None else getattr(self, name)

    def per_draw(self, name: str, outputs: Tensor, first: int = 0) -> Tensor:
        """A number for each of the draws, from number `first` on, behind outputs [S, B, ...], broadcastable to them."""
        count = 1 if self.num_components == 1 else len(outputs)
        values = [self.number(name, outputs[0], first + draw).detach().to(outputs) for draw in range(count)]
        return torch.stack([value.expand(outputs.shape[2:]) for value in values]).unsqueeze(1)

    def with_numbers(self, num_components: int = 1, **numbers: Tensor) -> Self:
        """The same likelihood with fixed numbers in place of those named, learned or not."""
        apart = copy.deepcopy(self)  # nothing is shared with what was given
        tensors: dict[str, Any] = {**dict(apart.named_parameters()), **dict(apart.named_buffers())}
        for name, value in numbers.items():
            tensors.pop(f"raw_{name}", None)
            tensors[name] = value.detach()
        return type(self)(self.settings, num_components=num_components, **tensors)

    def joined(self, members: Sequence[BuiltLikelihood]) -> BuiltLikelihood:
        """As in the base; numbers that were given to all members alike stay as they are."""
        count, (needed, _) = len(members), self.names_of(self.settings)
        parts = [member for member in members if isinstance(member, NoiseNumbers)]
        if count == 1 or not (needed and differ([[*part.parameters(), *part.buffers()] for part in parts])):
            return self
        draws = range(count * max(part.num_components for part in parts))
        stacks = {name: [parts[s % count]._at(name, s // count) for s in draws] for name in needed}
        return self.with_numbers(len(draws), **{name: torch.stack(stack) for name, stack in stacks.items()})

    def component(self, index: int, count: int) -> Self:
        places = range(index, max(count, self.num_components), count)
        stacks = {name: [self._at(name, s) for s in places] for name in self.names_of(self.settings)[0]}
        return self.with_numbers(
            len(places), **{name: torch.stack(s) if len(s) > 1 else s[0] for name, s in stacks.items()}
        )

    def _at(self, name: str, draw: int) -> Tensor:
        """A number of all outputs in one draw."""
        values = self.numbers(name).detach()
        return values if self.num_components == 1 else values[draw % self.num_components]


def differ(members: Sequence[Sequence[Tensor]]) -> bool:
    """Whether members have learned numbers, or others than the first."""
    learned = any(isinstance(tensor, nn.Parameter) for tensors in members for tensor in tensors)
    first, *others = members
    return learned or not all(all(map(torch.equal, first, other)) for other in others)


def inverse_softplus(value: Tensor) -> Tensor:
    """X with softplus(x) = value, stable for small and large values: log(eᵛ − 1) = v + log(1 − e⁻ᵛ).

    Above 20 PyTorch's softplus is the identity, and so is its inverse.
    """
    return torch.where(value > 20, value, value + torch.log(-torch.expm1(-value)))


def tails_of(noise: Tensor) -> tuple[Tensor, Tensor]:
    """Standard Normal noise as the probability of the nearer tail, in float64, and its side: −1 is the upper one."""
    return torch.special.ndtr(-noise.double().abs()), torch.where(noise > 0, -1, 1)


def noise_shape(outputs: Tensor) -> torch.Size:
    """One noise per output; positions after the output axis (an image's) share it."""
    return torch.Size([n if axis == 0 else 1 for axis, n in enumerate(outputs.shape[1:])])


def spread_of(targets: Tensor | WeightedTargets | None, like: Tensor, align: Any) -> Tensor:
    """Standard deviations of targets per output, for noise to start from; 1 where they do not vary, or are not known.

    Args:
        targets: of the rows at hand.
        like: as in `units_of`.
        align: as in `units_of`.
    """
    start = like.new_ones(noise_shape(like))
    values = targets.targets if isinstance(targets, WeightedTargets) else targets
    if values is None or len(values) < 2:
        return start
    flat = align(values, like.new_empty(len(values), *like.shape[1:])).detach()
    if isinstance(targets, WeightedTargets):
        spread = moments([WeightedTargets(flat, targets.weights)])[1]
    else:
        spread = per_output(flat).std(1)
    return torch.where(spread > 0, spread, 1.0).reshape(start.shape).to(like)


def units_of(targets: Targets, like: Tensor, align: Any) -> dict[str, Any]:
    """Location and scale of all training targets, per output.

    Args:
        targets: of all rows, whole or batch by batch.
        like: outputs that targets are aligned with, [B, ...].
        align: brings a batch of targets into the form of the outputs.
    """
    batches = [targets] if isinstance(targets, Tensor | WeightedTargets) else targets

    def aligned(part: Tensor | WeightedTargets) -> Tensor | WeightedTargets:
        if isinstance(part, WeightedTargets):
            return part._replace(targets=align(part.targets, like.new_empty(len(part.targets), *like.shape[1:])))
        return align(part, like.new_empty(len(part), *like.shape[1:]))

    values = moments(map(aligned, batches))
    location, scale = (value.reshape(noise_shape(like)).to(like) for value in values)
    return {"location": location, "scale": scale}


def checked_numbers(**numbers: Any) -> dict[str, float | tuple[float, ...] | None]:
    """Settings that are None, a positive number, or one per output, as plain numbers."""
    checked: dict[str, float | tuple[float, ...] | None] = {}
    for name, value in numbers.items():
        if isinstance(value, tuple | list):
            if not value:
                raise ConfigError(f"{name} must be a number, or one per output, got none")
            require_positive(**{f"{name}[{i}]": item for i, item in enumerate(value)})
            checked[name] = tuple(map(float, value))
        elif value is not None:
            require_positive(**{name: value})
            checked[name] = float(value)
        else:
            checked[name] = None
    return checked


def started(name: str, setting: float | tuple[float, ...] | None, start: Tensor) -> dict[str, Any]:
    """The tensor of a number: fixed as set, or learned from a start per output."""
    if setting is None:
        return {f"raw_{name}": nn.Parameter(inverse_softplus(start))}
    if isinstance(setting, tuple) and len(setting) not in (1, start.numel()):
        raise NetworkError(f"{name} has {len(setting)} numbers, but the network {start.numel()} outputs")
    return {name: torch.tensor(setting, dtype=torch.float64).to(start).expand(start.numel()).reshape(start.shape)}
