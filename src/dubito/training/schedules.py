"""Learning-rate schedules: a factor on the rate as a function of the run's progress from 0 to 1."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..errors import ConfigError, require_fraction, require_positive
from ..hints import Checked


class Schedule(Checked, ABC):
    """A factor on the learning rate."""

    @abstractmethod
    def factor(self, progress: float) -> float:
        """The factor at `progress`, the share of the run's steps already made."""


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The same rate throughout."""

    def factor(self, progress: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `final`.

    Args:
        final: the factor at the end.
    """

    final: float = 0.0

    def __post_init__(self) -> None:
        require_fraction(one=True, final=self.final)

    def factor(self, progress: float) -> float:
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Step(Schedule):
    """The rate is multiplied by `by` at each milestone.

    Args:
        at: milestones as shares of the run, rising.
        by: the factor each of them adds.
    """

    at: tuple[float, ...] = (0.6, 0.8)
    by: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", tuple(self.at))
        for share in self.at:
            require_fraction(at=share)
        if list(self.at) != sorted(self.at):
            raise ConfigError(f"at must rise, got {self.at}")
        require_positive(by=self.by)

    def factor(self, progress: float) -> float:
        return self.by ** sum(progress >= share for share in self.at)


@dataclass(frozen=True, kw_only=True)
class Linear(Schedule):
    """1 until `start`, then a straight line down to `final` at `end`, and `final` from there on.

    Args:
        start: where the fall begins, as a share of the run.
        end: where it ends.
        final: the factor from there on.
    """

    start: float = 0.0
    end: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        require_fraction(one=True, start=self.start, end=self.end, final=self.final)
        if self.end <= self.start:
            raise ConfigError(f"end must lie after start, got start={self.start} and end={self.end}")

    def factor(self, progress: float) -> float:
        way = min(max((progress - self.start) / (self.end - self.start), 0.0), 1.0)
        return 1 + (self.final - 1) * way
