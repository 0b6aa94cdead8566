"""Shared weights and biases, and K components of Normal factors on the inputs of layers."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...layers.factors import Factor, NodeFactors
from ...networks import with_flags, with_weights
from ...node_factors import NodePosterior
from ...posterior import ShapeRule, Streams


class ImplicitPosterior(NodePosterior):
    """W diag(z) with z from one of K Normals per layer   [implicit, Eq. 11, 18, 19 with the sum that is meant].

    `tensors` holds `input_mean` and `input_raw_std`, [K, nodes]; with factors on biases also `bias_mean` and
    `bias_raw_std`, [K] by the bias's name; and the number of rows seen in training, by which components take turns.
    """

    def shapes(self) -> dict[str, ShapeRule]:
        count, keys = self.num_components, ("bias_mean", "bias_raw_std")
        rules = {key: rule for key, rule in super().shapes().items() if key != "biases"}
        rules |= {key: lambda name, _: (count,) for key in keys if self.method.bias_factors}
        return {**rules, "statistics": lambda name, _: ()}

    def bias_draws(self, components: Tensor, streams: Streams) -> dict[str, Tensor]:
        stds, weights = self.stds(), self.weights()
        drawn = {}
        for name in self.varied_biases:
            bias = weights[name]
            like: dict[str, Any] = {"dtype": bias.dtype, "device": bias.device}
            noise = torch.stack([torch.randn((), generator=stream, **like) for stream in streams])
            factors = torch.addcmul(self.group("bias_mean")[name][components], stds["bias", name][components], noise)
            drawn[name] = factors.unsqueeze(1) * bias
        return drawn

    @property
    def varied_biases(self) -> tuple[str, ...]:
        return self._names("bias_mean")

    def fold(self, index: int | Literal["mean"] = 0, *, seed: int = 0) -> nn.Module:
        """A plain network like the user's, in evaluation mode.

        Args:
            index: the number of the draw of `seed` to put in; "mean" puts in the mean factors of all components.
            seed: of the draws.
        """
        if index != "mean":
            return super().fold(index, seed=seed)
        with torch.no_grad():
            weights = self.weights()
            for name in self.uses:
                mean = self.group("input_mean")[name].mean(0, keepdim=True)
                weights[name] = self.folded(name, weights[name], NodeFactors(Factor(mean)))
            for name in self.varied_biases:
                weights[name] = weights[name] * self.group("bias_mean")[name].mean()
            return with_flags(with_weights(self.network, weights), self.trainable)

    def mixture(self, stds: Any = None) -> tuple[Tensor, Tensor]:
        """Locations and standard deviations of all factors, [K, nodes of the network]."""
        stds = self.stds() if stds is None else stds
        means = [self.group(f"{side}_mean")[name].flatten(1) if side == "input" else
                 self.group(f"{side}_mean")[name].unsqueeze(1) for side, name in stds]  # fmt: skip
        return torch.cat(means, 1), torch.cat([std.view(len(std), -1) for std in stds.values()], 1)

    def holds(self, name: str) -> str:
        if name in self.varied_biases:
            return f"{self.num_components} × Normal on the bias"
        return super().holds(name)
