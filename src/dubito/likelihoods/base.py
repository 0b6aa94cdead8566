"""What every likelihood is: frozen settings, and the built module that judges outputs."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, NetworkError
from ..hints import Checked
from ..inputs import RowNumbers, weighted
from ..prediction import Prediction
from .moments import Targets

#: Numbers of outputs that are judged together, over draws: they stay in cache.
STACKED = 16_384


class Likelihood(Checked, ABC):
    """Settings of a likelihood."""

    @abstractmethod
    def build(self, example_outputs: Tensor | None, example_targets: Targets | None = None) -> "BuiltLikelihood":
        """The module for outputs of this shape; targets, where given, tell a good start for learned noise."""


class BuiltLikelihood(nn.Module, ABC):
    """Judges outputs: log-densities, draws of targets, curvature, predictions.

    `draw` is the number of the posterior draw behind the outputs: noise may differ between components.
    """

    def __init__(self, settings: Likelihood) -> None:
        super().__init__()
        self.settings = settings

    @abstractmethod
    def check_outputs(self, outputs: Tensor) -> None:
        """Refuse outputs of a shape this likelihood cannot judge."""

    @abstractmethod
    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        """The targets in the form `log_prob` takes, or an error that says what is wrong with which row.

        Numbers are looked at where they lie on the host; targets of a device are trusted, since asking it takes long.
        """

    def warn(self, outputs: Tensor, targets: Tensor) -> None:
        """Warn of outputs and targets before a fit that are allowed, and hardly meant."""

    #: Whether some targets may say nothing: `observed` then tells which do.
    ignores: bool = False

    def observed(self, targets: Tensor) -> Tensor | None:
        """Where checked targets say something, in their shape; None where all of them do."""
        return None

    def standardised(self, targets: Tensor) -> Tensor:
        """Targets in the units of the outputs."""
        return targets

    def restored(self, outputs: Tensor) -> Tensor:
        """Outputs in the units of the targets, [..., B, ...]."""
        return outputs

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        """Log-density of each row's target, summed over event axes, [B]."""

    def mean_nll(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean over rows of the negative log-density, each times its weight: what training minimises."""
        return -weighted(self.log_prob(outputs, targets), weights).mean()

    def row_weights(self, targets: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Weights of training rows that follow from their targets, [B] in this dtype, or None."""
        return None

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None, draw: int = 0) -> Tensor:
        """Targets drawn from the likelihood, one per row."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=outputs.device)
        return self.sample_with(outputs, noise, draw)

    @abstractmethod
    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        """Targets drawn with given standard Normal noise of the outputs' shape."""

    @abstractmethod
    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        """R with R Rᵀ the Fisher information of the outputs, [B, …, C, C]: one block per position of C coupled outputs.

        For classes, Normal noise and counts it is ∂²(−log p)/∂f∂fᵀ too; a likelihood of the user's own knows no other
        and takes it at the `targets`.
        """

    def single_block(self, outputs: Tensor) -> bool:
        """Whether all outputs of a row are one block of `hessian_root`."""
        return self.hessian_root(outputs[:1]).ndim == 3

    def joined(self, members: Sequence["BuiltLikelihood"]) -> "BuiltLikelihood":
        """One likelihood in which draw s has the noise that member s mod K learned; `self` is the first of them."""
        return self

    def component(self, index: int, count: int) -> "BuiltLikelihood":
        """The likelihood of component `index` of `count`, whose draws are every `count`-th; its noise is fixed."""
        return self

    @property
    def learns(self) -> bool:
        """Whether it has numbers of its own to learn."""
        return next(self.parameters(), None) is not None

    @abstractmethod
    def predictive(self, draws: Iterable[Tensor]) -> Prediction:
        """The prediction from outputs per draw, each [B, ...], read some at a time."""


def stacks(draws: Iterable[Tensor]) -> Iterator[Tensor]:
    """Outputs [s, B, ...] of some draws at a time, as many as stay in cache, in at least single precision."""
    if isinstance(draws, Tensor):  # stacked as they came
        if torch.compiler.is_compiling() or draws.numel() <= STACKED:  # tracers cannot count rows
            yield at_least_float(draws)
            return
        yield from at_least_float(draws).split(max(1, STACKED // max(1, draws[0].numel())))
        return
    waiting: list[Tensor] = []
    for outputs in draws:
        waiting.append(at_least_float(outputs))
        if (len(waiting) + 1) * outputs.numel() > STACKED:
            yield _stacked(waiting)
            waiting = []
    if waiting:
        yield _stacked(waiting)


def _stacked(draws: list[Tensor]) -> Tensor:
    return draws[0].unsqueeze(0) if len(draws) == 1 else torch.stack(draws)


def stacked(draws: Iterable[Tensor]) -> Tensor:
    """Outputs of all draws, [S, B, ...], in at least single precision."""
    return at_least_float(draws if isinstance(draws, Tensor) else torch.stack([*draws]))


def at_least_float(outputs: Tensor) -> Tensor:
    """Outputs in at least single precision, in which probabilities are computed."""
    return outputs.float() if outputs.dtype in (torch.float16, torch.bfloat16) else outputs


def real_outputs(name: str, outputs: Tensor) -> None:
    """Refuse outputs that are no real numbers."""
    if outputs.ndim < 1 or not outputs.is_floating_point():
        raise NetworkError(f"{name} needs real outputs [B, ...], got {outputs.dtype}, {tuple(outputs.shape)}")


def settings_of(value: Any) -> Likelihood:
    """The likelihood settings, or an error where something else was given."""
    if isinstance(value, Likelihood):
        return value
    raise ConfigError(
        f"the likelihood must be an instance such as Categorical() or Gaussian(), got {value!r}"
        + ("; give an instance: add ()" if isinstance(value, type) else "")
    )
