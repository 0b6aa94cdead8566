"""A posterior cut down to draws made once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Self

import torch
from torch import Tensor

from ..draws import Draws, LinearisedDraws, MaskDraws, PredictiveModule
from ..errors import ConfigError
from ..inputs import Inputs, checked_inputs
from ..layers.declared import stored_uses
from ..prediction import Prediction, PredictionOptions
from .base import CENTRAL, Posterior
from .stored import SampledDetails, ShapeRule


class SampledPosterior(Posterior):
    """Draws of another posterior, made once: finitely many atoms, equally likely, whatever seed is asked for.

    The network holds the centre of that posterior, `tensors` what differs between draws, and `details["sampled"]` what
    they are.
    """

    details_type = SampledDetails

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_atoms = self.num_samples = self.details["sampled"]["count"]
        self.scalable = self.details.get("scalable", False)  # files of earlier versions hold no centres
        self._together: tuple[float, Draws] | None = None

    def shapes(self) -> dict[str, ShapeRule]:
        facts = self.details["sampled"]
        Draws.kinds[facts["kind"]]  # a kind that is known
        uses, rules, count = stored_uses(dict(facts)), {}, self.num_samples
        for key in self.tensors:
            side = key.removeprefix(CENTRAL)
            if side in ("input_factors", "output_factors"):
                attribute = side.replace("factors", "shape")
                rules[key] = lambda name, tensor, side=attribute: getattr(uses[name], side)
            elif side in ("draws", "deviations", "statistics", "biases"):
                rules[key] = self.stacked_like_weights()
        return {key: _stacked(rule, None if key.startswith(CENTRAL) else count) for key, rule in rules.items()}

    @property
    def linearised(self) -> bool:
        """Whether the draws are those of the network as linear in its weights."""
        return self.details["sampled"]["kind"] == LinearisedDraws.kind

    @property
    def together(self) -> Draws:
        """All draws, ready to run."""
        latest, scale = self._together, self.scale  # read once: other threads may replace it
        if latest is None or latest[0] != scale:
            facts = self.details["sampled"]
            kind = Draws.kinds[facts["kind"]]
            if scale != 1 and kind is MaskDraws:
                facts = {**facts, "scale": scale * facts.get("scale", 1.0)}
            draws = kind(self.network, self._moved(scale), facts, self.survey, self._ways)
            self._together = latest = scale, draws
        return latest[1]

    @torch.no_grad()
    def _moved(self, scale: float) -> dict[str, dict[str, Tensor]]:
        """What differs between draws, its deviations from the centre times a scale."""
        weights = self.weights()

        def moved(key: str, name: str, stack: Tensor) -> Tensor:
            if scale == 1:
                return stack
            if key in ("draws", "deviations"):
                return torch.lerp(weights[name], stack, scale) if key == "draws" else stack * scale
            means = self.group(CENTRAL + key)[name]
            return torch.lerp(means[torch.arange(len(stack), device=stack.device) % len(means)], stack, scale)

        groups = {key: self.group(key).items() for key in self._keys()}
        return {key: {name: moved(key, name, t.detach()) for name, t in group} for key, group in groups.items()}

    def _keys(self) -> list[str]:
        return [key for key in self.tensors if not key.startswith(CENTRAL)]

    def _centres(self, draws: Draws) -> Mapping[str, Mapping[str, Tensor]]:
        return {key: dict(self.group(key).items()) for key in self.tensors if key.startswith(CENTRAL)}

    def as_module(self, inputs: Inputs = None) -> PredictiveModule:
        """A module from inputs to a dict of mean and uncertainties, which `torch.export.export` can trace.

        Args:
            inputs: some rows like those that it will read, without which linearised draws and masks of dropout layers
                cannot be traced.
        """
        rows = None if inputs is None else checked_inputs(inputs, self.together.like)
        return PredictiveModule(self.together, self.likelihood, rows)

    def draws(self, indices: range, seed: int) -> Draws:
        return self.together.part(indices)

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.weights() | self.together.weights(index % self.num_samples)

    def predictor(self, options: PredictionOptions) -> Callable[[Inputs], Prediction]:
        self._linearises(options.linearised)
        if options.marginal or options.per_example:
            raise ConfigError(f"draws made once are functions of all rows, got {options.form}=True; leave it out")
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
        words = [key.replace("_", " ") for key in self._keys() if name in self.group(key)]
        return f"{self.num_samples} {' and '.join(words)}" if words else super().holds(name)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self._together = None  # moved
        return super()._apply(*args, **kwargs)


def _stacked(rule: ShapeRule, count: int | None) -> ShapeRule:
    """The rule of stacks of `count` such tensors, or of as many as there are."""
    return lambda name, tensor: (len(tensor) if count is None else count, *rule(name, tensor))
