"""Assumed-density filtering: gradients of the log evidence of rows move the moments [Hernández-Lobato & Adams 2015]."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from .moments import Gamma, LayerMoments, matched, propagated


class FilterContent(TypedDict):
    """What a checkpoint holds beside the filter's state."""

    fingerprint: dict[str, Any]
    history: list[dict[str, float]]


class Filter:
    """The state of assumed-density filtering.

    Args:
        means: of the weights, by layer, in the network's units.
        noise: the distribution of the noise's precision.
        prior: that of λ.
    """

    def __init__(self, means: Sequence[Tensor], noise: Gamma, prior: Gamma) -> None:
        self.noise = Gamma(*(means[0].new_tensor(value) for value in noise))
        self.prior = prior
        self.layers = [(mean, torch.full_like(mean, prior.variances()[0] / mean.shape[1])) for mean in means]
        count = sum(mean.numel() for mean in means)
        # What each weight's factor of the prior adds: to its precision, and to shape and rate of λ
        self._precisions = [1 / prior.variances()[0]] * count
        self._gammas = [Gamma(0.0, 0.0)] * count

    def state(self) -> dict[str, Tensor]:
        """All that later rows depend on."""
        like = self.layers[0][0].detach()
        return {
            **{f"mean/{number}": mean.detach() for number, (mean, _) in enumerate(self.layers)},
            **{f"variance/{number}": variance.detach() for number, (_, variance) in enumerate(self.layers)},
            "noise": torch.stack(tuple(self.noise)),
            "prior": like.new_tensor(self.prior),
            "precisions": like.new_tensor(self._precisions),
            "gammas": like.new_tensor(self._gammas),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        like = self.layers[0][0]
        state = {name: tensor.to(like.device) for name, tensor in state.items()}
        self.layers = [(state[f"mean/{number}"], state[f"variance/{number}"]) for number in range(len(self.layers))]
        self.noise, self.prior = Gamma(*state["noise"].unbind()), Gamma(*state["prior"].tolist())
        self._precisions = state["precisions"].tolist()
        self._gammas = [Gamma(*pair) for pair in state["gammas"].tolist()]

    def take_in(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Take in a row [1, n]; the logarithm of its evidence."""
        layers = [tuple(moment.requires_grad_() for moment in layer) for layer in self.layers]
        with torch.enable_grad():
            mean, variance = propagated(inputs, layers)  # pyright: ignore[reportArgumentType]
            totals = variance.squeeze(1) + torch.stack(self.noise.variances())
            logs = -0.5 * ((2 * math.pi * totals).log() + (target - mean.squeeze(1)).square() / totals)
            gradients = torch.autograd.grad(logs[0], [moment for layer in layers for moment in layer])
        with torch.no_grad():
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            self.layers = [filtered(*layer, *pair) for layer, pair in zip(layers, pairs, strict=True)]
            new = matched(self.noise, *logs.detach().diff().exp())
            valid = (new.shape > 1) & (new.rate > 0) & new.shape.isfinite() & new.rate.isfinite()
            self.noise = Gamma(*(torch.where(valid, *pair) for pair in zip(new, self.noise, strict=True)))
        return logs[0].detach()

    def refresh(self) -> None:
        """Take every weight's factor N(0, 1/λ) of the prior out and in again, one after the other."""
        place, refreshed = 0, []
        for mean, variance in self.layers:
            scale = mean.shape[1]  # in the units where all layers share one λ
            means = (mean.detach() * scale**0.5).flatten().tolist()
            variances = (variance.detach() * scale).flatten().tolist()
            for number, (centre, spread) in enumerate(zip(means, variances, strict=True)):
                means[number], variances[number] = self._refreshed(place, centre, spread)
                place += 1
            both = (mean.new_tensor(values).view(mean.shape) for values in (means, variances))
            refreshed.append(tuple(value / root for value, root in zip(both, (scale**0.5, scale), strict=True)))
        self.layers = refreshed

    def _refreshed(self, place: int, mean: float, variance: float) -> tuple[float, float]:
        """Mean and variance of one weight; where the rest without the factor is no distribution, nothing changes."""
        rest = 1 / variance - self._precisions[place]
        gamma = Gamma(*(whole - part for whole, part in zip(self.prior, self._gammas[place], strict=True)))
        if rest < 1e-6 or gamma.shape <= 1 or gamma.rate <= 0:
            return mean, variance
        spread, centre = 1 / rest, mean / variance / rest
        totals = [spread + other for other in gamma.variances()]
        logs = [-0.5 * (math.log(total) + centre**2 / total) for total in totals]
        new = matched(gamma, math.exp(logs[1] - logs[0]), math.exp(logs[2] - logs[1]))
        if not (new.shape > 1 and new.rate > 0):
            return mean, variance
        self._precisions[place] = 1 / gamma.variances()[0]
        self._gammas[place] = Gamma(new.shape - gamma.shape, new.rate - gamma.rate)
        self.prior = new
        precision = rest + self._precisions[place]
        return rest * centre / precision, 1 / precision


def filtered(mean: Tensor, variance: Tensor, by_mean: Tensor, by_variance: Tensor) -> LayerMoments:
    """Moments after a factor, from the gradients of the logarithm of its evidence; those that are none stay."""
    new_mean = mean + variance * by_mean
    new_variance = variance - variance.square() * (by_mean.square() - 2 * by_variance)
    valid = new_mean.isfinite() & new_variance.isfinite() & (new_variance > 1e-100)
    return torch.where(valid, new_mean, mean.detach()), torch.where(valid, new_variance, variance.detach())
