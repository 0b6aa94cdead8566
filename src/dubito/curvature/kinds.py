"""Which curvature is meant: gradients at drawn labels, at all outputs, or at the data's own labels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError, require_count
from ..hints import Checked
from ..likelihoods import BuiltLikelihood

#: The most outputs of a row that each get a backward pass.
MOST_OUTPUTS = 1024
#: Outputs of a row up to which the exact matrix is the usual choice: there it takes twice the time of `USUAL_DRAWS`.
EXACT_OUTPUTS, USUAL_DRAWS = 32, 10
#: Numbers of the roots of Hessians that are kept at a time.
ROOTS = 1 << 24


class Curvature(Checked, ABC):
    """A sum of squares: the curvature of a row is E[δ δᵀ] over gradients δ with respect to the weights."""

    @abstractmethod
    def seeds(
        self, likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor, noise: Callable[[int], Tensor]
    ) -> Iterator[tuple[float, Tensor]]:
        """Pairs of a weight and a gradient at the outputs, to be sent back through the network.

        `noise(number)` gives the rows' standard Normal noise for draw `number` of their labels.
        """


@dataclass(frozen=True, kw_only=True)
class Fisher(Curvature):
    """Labels drawn from the model itself: unbiased for the generalised Gauss-Newton matrix.

    Args:
        draws: labels per row.
    """

    draws: int = 1

    def __post_init__(self) -> None:
        require_count(draws=self.draws)

    def seeds(
        self, likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor, noise: Callable[[int], Tensor]
    ) -> Iterator[tuple[float, Tensor]]:
        for number in range(self.draws):
            drawn = likelihood.sample_with(outputs, noise(number))
            seen = likelihood.observed(targets)
            drawn = drawn if seen is None else drawn.where(seen, targets)
            yield 1 / self.draws, output_gradient(likelihood, outputs, drawn)


@dataclass(frozen=True, kw_only=True)
class GGN(Curvature):
    """The generalised Gauss-Newton matrix, from the Fisher information of the outputs: a backward pass per output."""

    def seeds(
        self, likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor, noise: Callable[[int], Tensor]
    ) -> Iterator[tuple[float, Tensor]]:
        count = outputs[0].numel()
        if count > MOST_OUTPUTS or not likelihood.single_block(outputs):
            raise ConfigError(
                f"GGN() takes one backward pass per output, too many for outputs {tuple(outputs.shape)}; "
                "use Fisher(draws=...) for dense outputs"
            )
        # [B, C, C], as many of its columns at a time as fit
        rows, columns = max(1, ROOTS // count**2), max(1, ROOTS // outputs.numel())
        for first in range(0, count, columns):
            part = slice(first, first + columns)
            pieces = zip(outputs.split(rows), targets.split(rows), strict=True)
            roots = [likelihood.hessian_root(some, targets=truth)[..., part] for some, truth in pieces]
            for column in torch.cat(roots).unbind(-1):
                yield 1.0, column.reshape(outputs.shape)


@dataclass(frozen=True, kw_only=True)
class Empirical(Curvature):
    """Gradients at the data's own labels: cheap, but not the curvature of the model."""

    def seeds(
        self, likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor, noise: Callable[[int], Tensor]
    ) -> Iterator[tuple[float, Tensor]]:
        yield 1.0, output_gradient(likelihood, outputs, targets)


def output_gradient(likelihood: BuiltLikelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """∂(−Σ_i log p(y_i | f_i)) / ∂f, row by row."""
    with torch.enable_grad():
        leaf = outputs.detach().requires_grad_()
        log_prob = likelihood.log_prob(leaf, targets)
        (gradient,) = torch.autograd.grad(log_prob, leaf, torch.full_like(log_prob, -1.0))
    return gradient


def usual_curvature(likelihood: BuiltLikelihood, outputs: Tensor) -> Curvature:
    """The exact matrix where a row has few outputs, else labels drawn from the model.

    Args:
        likelihood: that judges the outputs.
        outputs: of a row or more.
    """
    few = outputs[0].numel() <= EXACT_OUTPUTS and likelihood.single_block(outputs)
    return GGN() if few else Fisher(draws=USUAL_DRAWS)
