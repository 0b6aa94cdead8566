"""Likelihoods of one's own: a log-density, and the rest by autograd and by draws."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from ..inputs import RowNumbers
from ..prediction import OutputPrediction
from .base import BuiltLikelihood, Likelihood, real_outputs, stacked


class OwnLikelihood(Likelihood):
    """A likelihood that knows its log-density alone; subclass it as a frozen dataclass.

    Curvature comes from autograd at the data's targets, in the space of the outputs, without the directions in which
    a Hessian bends the other way. `sample` is optional, for `Fisher` curvature; so is `mean`, what to predict.
    """

    @abstractmethod
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Log-density of each row's target, [B], from outputs [B, ...]; differentiable twice."""

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Targets drawn from standard Normal noise of the outputs' shape."""
        raise ConfigError(
            f"{type(self).__name__} draws no targets, which Fisher() curvature needs; take GGN() or Empirical(), or "
            "give it a method sample(outputs, noise)"
        )

    def mean(self, outputs: Tensor) -> Tensor:
        """What is predicted from outputs [..., B, ...] of a draw: the outputs themselves."""
        return outputs

    def build(self, example_outputs: Tensor | None, example_targets: Any = None) -> "OwnBuiltLikelihood":
        return OwnBuiltLikelihood(self)


class OwnBuiltLikelihood(BuiltLikelihood):
    """See `OwnLikelihood`."""

    settings: OwnLikelihood

    def check_outputs(self, outputs: Tensor) -> None:
        real_outputs(type(self.settings).__name__, outputs)

    def check_targets(self, outputs: Tensor, targets: Tensor, rows: RowNumbers = 0) -> Tensor:
        return targets.to(outputs.device)

    def log_prob(self, outputs: Tensor, targets: Tensor, draw: int = 0) -> Tensor:
        log_prob = self.settings.log_prob(outputs, targets)
        if not isinstance(log_prob, Tensor) or log_prob.shape != outputs.shape[:1]:
            got = list(log_prob.shape) if isinstance(log_prob, Tensor) else type(log_prob).__name__
            raise ConfigError(
                f"log_prob of {type(self.settings).__name__} must give one number per row, [{len(outputs)}], got "
                f"{got}; sum over the outputs of a row"
            )
        return log_prob

    def sample_with(self, outputs: Tensor, noise: Tensor, draw: int = 0) -> Tensor:
        return self.settings.sample(outputs.detach(), noise)

    def single_block(self, outputs: Tensor) -> bool:
        return outputs.ndim <= 2

    def hessian_root(self, outputs: Tensor, draw: int = 0, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            raise ConfigError(f"the curvature of {type(self.settings).__name__} is taken at targets, got none")
        rows = outputs.detach().reshape(len(outputs), -1)

        def loss(flat: Tensor) -> Tensor:
            return -self.log_prob(flat.reshape(outputs.shape), targets).sum()

        with torch.enable_grad():
            leaf = rows.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
            columns = [  # rows do not touch, so that a sum over them has each row's second derivatives
                torch.autograd.grad(part.sum(), leaf, retain_graph=True, allow_unused=True)[0]
                if part.requires_grad
                else None
                for part in gradient.unbind(1)
            ]
        hessian = torch.stack([torch.zeros_like(rows) if column is None else column for column in columns], -1)
        values, vectors = torch.linalg.eigh((hessian + hessian.mT) / 2)
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)

    def predictive(self, draws: Iterable[Tensor]) -> OutputPrediction:
        outputs = stacked(draws)
        return OutputPrediction(outputs, self.settings)
