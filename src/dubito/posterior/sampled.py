"""A posterior cut down to draws made once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor

from ..draws import Draws, LinearisedDraws, PredictiveModule
from ..errors import ConfigError
from ..inputs import Inputs, checked_inputs
from ..prediction import Prediction, PredictionOptions
from .base import Posterior


class SampledPosterior(Posterior):
    """Draws of another posterior, made once: finitely many atoms, equally likely, whatever seed is asked for.

    The network holds the centre of that posterior, `tensors` what differs between draws, and `details["sampled"]` what
    they are.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_atoms = self.num_samples = self.details["sampled"]["count"]
        self._together: Draws | None = None

    @property
    def linearised(self) -> bool:
        """Whether the draws are those of the network as linear in its weights."""
        return self.details["sampled"]["kind"] == LinearisedDraws.kind

    @property
    def together(self) -> Draws:
        """All draws, ready to run."""
        draws = self._together
        if draws is None:
            groups = {key: self.group(key).items() for key in self.tensors}
            tensors = {key: {name: t.detach() for name, t in group} for key, group in groups.items()}
            facts = self.details["sampled"]
            draws = Draws.kinds[facts["kind"]](self.network, tensors, facts, self.survey, self._ways)
            self._together = draws
        return draws

    def as_module(self) -> PredictiveModule:
        """A module from inputs to a dict of mean and uncertainties, which `torch.export.export` can trace."""
        return PredictiveModule(self.together, self.likelihood)

    def draws(self, indices: range, seed: int) -> Draws:
        return self.together.part(indices)

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights() | self.together.weights(index % self.num_samples)

    def predictor(self, options: PredictionOptions) -> Callable[[Inputs], Prediction]:
        self._linearises(options.linearised)
        if options.marginal or options.per_example:
            raise ConfigError(
                f"draws made once are functions of all rows, got {options.form}=True; leave it out"
            )
        return super().predictor(replace(options, linearised=None))

    def _linearises(self, linearised: bool | None) -> bool:
        if linearised not in (None, self.linearised):
            kind = "linearised" if self.linearised else "of weights"
            raise ConfigError(
                f"these draws are {kind}, got linearised={linearised!r}; leave it out, or make others: "
                f"sampled(..., linearised={linearised!r})"
            )
        return False  # they are what they are

    def _outputs(
        self, inputs: Inputs, num_samples: int, seed: int, max_rows: int, keep_graph: bool = False
    ) -> Iterable[Tensor]:
        draws = self.together
        outputs = draws.outputs(checked_inputs(inputs, draws.like), max_rows, keep_graph=keep_graph)
        if num_samples == self.num_samples:
            return outputs
        return outputs[:num_samples] if isinstance(outputs, Tensor) else islice(outputs, num_samples)

    def holds(self, name: str) -> str:
        words = [key.replace("_", " ") for key in self.tensors if name in self.group(key)]
        return f"{self.num_samples} {' and '.join(words)}" if words else super().holds(name)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._together = None  # moved
        return super()._apply(*args, **kwargs)
