"""The loss of the implicit network: rows divided among the components, S draws of noise per row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError, NetworkError
from ...inputs import Batch, Inputs, rows_of, take
from ...layers.factors import Factor, Factors, NodeFactors
from ...layers.passes import asked
from ...node_factors import Arrangement, Drawn, NodeObjective, Stds, halved
from ...node_factors.laws import Normal
from ...training import GradientStepper, Plan, Processes, Stepper, StepRecord, Training
from .posterior import ImplicitPosterior

#: The rows seen in training, among what a posterior stores.
ROWS = "rows seen"


@dataclass(frozen=True)
class DividedNoise(Drawn):
    """Noise of a batch.

    Attributes:
        start: the component of the first row; the others follow in turn.
        noise: by parameter: [S, n, nodes]; [S, K, nodes] where the rows of a component share it.
        bias_noise: by bias: [S, n].
    """

    start: int
    noise: dict[str, Tensor]
    bias_noise: dict[str, Tensor]


class CountingStepper(GradientStepper):
    """Counts the rows of every step in all processes, also in one that had none of its last pass."""

    objective: "ImplicitObjective"

    def step(self, number: int, passes: Sequence[Batch | None], rows: int, stop: bool) -> StepRecord:
        before = self.objective.rows_seen
        record = super().step(number, passes, rows, stop)
        self.objective.rows_seen = before + rows
        return record


class ImplicitObjective(NodeObjective):
    """The negative evidence bound; a pass is one of the S draws   [implicit, Eq. 16, Algorithm 1].

    Row after row the components take turns, from batch to batch: over an epoch, or any number of rows, all see
    the same number to within one.

    Args:
        draft: the posterior under training.
        noise_samples: S.
        mixture_mean: take the divergence of the components' mean instead of the mean of the divergences.
        arrangement: of the S draws.
        num_data: the number of training rows.
        modes: modules by name that stay in evaluation mode while training.
    """

    embeddings = False
    draft: ImplicitPosterior  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        draft: ImplicitPosterior,
        *,
        noise_samples: int,
        mixture_mean: bool,
        arrangement: Arrangement,
        num_data: float,
        modes: Mapping[str, bool] | None = None,
    ) -> None:
        self.noise_samples, self.mixture_mean = noise_samples, mixture_mean
        self._count: tuple[int, int] | None = None
        super().__init__(draft, arrangement=arrangement, num_data=num_data, modes=modes)

    @property
    def rows_seen(self) -> int:
        """Rows seen in training, as the posterior stores them; its tensor is read where others have changed it."""
        stored = self.draft.group("statistics")[ROWS]
        if self._count is None or self._count[1] != stored._version:
            self._count = int(stored), stored._version
        return self._count[0]

    @rows_seen.setter
    def rows_seen(self, rows: int) -> None:
        stored = self.draft.group("statistics")[ROWS]
        self._count = rows, stored.fill_(rows)._version

    @property
    def passes(self) -> int:
        return self.noise_samples

    def bind(self, inputs: Inputs) -> None:
        super().bind(inputs)
        shared = sorted(self.draft.shared)
        if shared and self.draft.method.bias_factors:
            raise NetworkError(
                f"bias_factors need layers with an axis of rows, which these have not: {shared}; leave them off"
            )

    def stepper(self, training: Training, plan: Plan, processes: Processes, seed: int) -> Stepper:
        asked = training.batch_size or 128
        if self.draft.num_components > asked:
            raise ConfigError(
                f"components must be at most the batch size, got {self.draft.num_components} and {asked}; "
                "raise batch_size or lower components"
            )
        return CountingStepper(self, training, plan, processes, seed)

    def drawn(self, batch: Batch, generator: torch.Generator | None) -> DividedNoise:
        draft, rows = self.draft, rows_of(batch.inputs)
        total, passes = batch.total or rows, self.passes
        chosen = slice(batch.first, batch.first + rows)
        shared, weights, half = draft.shared, draft.weights(), -(-total // 2)
        noise: dict[str, Tensor] = {}
        for name, use in draft.uses.items():
            weight = weights[name]
            shape = (passes, draft.num_components if name in shared else half, *use.input_shape)
            drawn = torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)
            noise[name] = drawn if name in shared else halved(drawn, chosen, generator, axis=1)[0]
        bias_noise = {}
        if draft.method.bias_factors:
            for name, mean in draft.group("bias_mean").items():
                shape = (passes, total)
                drawn = torch.randn(shape, generator=generator, dtype=mean.dtype, device=mean.device)
                bias_noise[name] = drawn[:, chosen]
        start = (self.rows_seen + batch.first) % draft.num_components
        return DividedNoise(draft.stds(), start, noise, bias_noise)

    def batch_loss(self, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        loss = super().batch_loss(batch, *args, **kwargs)
        self.rows_seen += batch.total or rows_of(batch.inputs)
        return loss

    def factors(self, name: str, chosen: slice, drawn: Any) -> NodeFactors:
        mean = self.draft.group("input_mean")[name]
        std, noise = drawn.stds["input", name], drawn.noise[name][chosen]
        return NodeFactors(Factor(in_turn(mean, std, noise, drawn.start), given=True))

    def biases(self, chosen: slice, drawn: Any) -> dict[str, Tensor]:
        weights, biases = self.draft.weights(), {}
        for name, noise in drawn.bias_noise.items():
            mean, std = self.draft.group("bias_mean")[name], drawn.stds["bias", name]
            factors = in_turn(mean.unsqueeze(1), std.unsqueeze(1), noise[chosen].unsqueeze(-1), drawn.start)
            biases[name] = factors * weights[name]
        return biases

    def one_pass(self, index: int, batch: Batch, drawn: Drawn) -> Tensor:
        assert isinstance(drawn, DividedNoise)
        if not self.draft.shared:
            return super().one_pass(index, batch, drawn)
        # Factors that rows share are put into weights, so each component's rows go through the network apart.
        components, rows = self.draft.num_components, rows_of(batch.inputs)
        outputs, places = [], []
        for turn in range(min(components, rows)):
            chosen = torch.arange(turn, rows, components, device=batch.targets.device)
            component = (drawn.start + turn) % components
            outputs.append(self._component_pass(index, component, chosen, batch, drawn))
            places.append(chosen)
        return torch.cat(outputs)[torch.cat(places).argsort()]

    def _component_pass(self, index: int, component: int, rows: Tensor, batch: Batch, drawn: DividedNoise) -> Tensor:
        """Outputs of some rows, which belong to one component."""
        draft, weights = self.draft, self.weights(drawn)
        per_row: dict[str, NodeFactors] = {}
        for name in draft.uses:
            mean, std = draft.group("input_mean")[name][component], drawn.stds["input", name][component]
            noise = drawn.noise[name][index]
            if name in draft.shared:
                values = torch.addcmul(mean, std, noise[component]).unsqueeze(0)
                weights[name] = draft.folded(name, weights[name], NodeFactors(Factor(values)))
            else:
                values = torch.addcmul(mean, std, noise[rows]).unsqueeze(0)
                per_row[name] = NodeFactors(Factor(values, given=True))
        context = Factors(per_row, passes=1, rows=len(rows))
        lease = asked(draft.network, context, context.names, weights, training=self.modes)
        return lease.outputs(take(batch.inputs, rows))

    def divergence(self, stds: Stds) -> Tensor:
        means, deviations = self.draft.mixture(stds)
        family: Normal = self.draft.method.families[0]
        if not self.mixture_mean:
            return family.kl(means, deviations).sum() / len(means)
        # μ̂ = 1/K Σ μ_k and σ̂² = 1/K² Σ σ_k²   [implicit, Eq. 22-24]
        deviation = deviations.square().sum(0).sqrt() / len(means)
        return family.kl(means.mean(0), deviation).sum()


def in_turn(mean: Tensor, std: Tensor, noise: Tensor, start: int) -> Tensor:
    """mean_k + std_k · noise with component k = (start + b) mod K for row b: [S, n, nodes].

    Args:
        mean: [K, nodes].
        std: likewise.
        noise: [S, n, nodes].
        start: the component of the first row.
    """
    components, rows = len(mean), noise.shape[1]
    missing = -rows % components
    if missing:
        noise = torch.cat([noise, noise.new_zeros(len(noise), missing, *noise.shape[2:])], 1)
    rounds = noise.unflatten(1, (-1, components))
    values = torch.addcmul(mean.roll(-start, 0), std.roll(-start, 0), rounds).flatten(1, 2)
    return values[:, :rows] if missing else values
