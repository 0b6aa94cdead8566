"""Assumed-density filtering: gradients of the log evidence of rows move the moments [Hernández-Lobato & Adams 2015]."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from .moments import Gamma, LayerMoments, matched, propagated


class FilterContent(TypedDict):
    """What a checkpoint holds beside the filter's state."""

    fingerprint: dict[str, Any]
    history: list[dict[str, float]]


class Filter:
    """The state of assumed-density filtering, of one network or of several side by side.

    Args:
        means: of the weights, by layer, [..., m, n]; the leading axes count networks.
        noise: the distribution of the noise's precision.
        prior: that of λ.
    """

    def __init__(self, means: Sequence[Tensor], noise: Gamma, prior: Gamma) -> None:
        lead = means[0].shape[:-2]
        self.noise, self.prior = (
            Gamma(*(torch.as_tensor(value).to(means[0]).expand(lead) for value in gamma)) for gamma in (noise, prior)
        )
        variance = self.prior.variances()[0][..., None, None]
        self.layers = [(mean, (variance / mean.shape[-1]).expand_as(mean).clone()) for mean in means]
        count = sum(mean.shape[-2:].numel() for mean in means)
        # What each weight's factor of the prior adds: to its precision, and to shape and rate of λ
        self._precisions = (1 / self.prior.variances()[0]).expand(count, *lead).clone()
        self._gammas = means[0].new_zeros(count, 2, *lead)

    def state(self) -> dict[str, Tensor]:
        """All that later rows depend on."""
        return {
            **{f"mean/{number}": mean.detach() for number, (mean, _) in enumerate(self.layers)},
            **{f"variance/{number}": variance.detach() for number, (_, variance) in enumerate(self.layers)},
            "noise": torch.stack(tuple(self.noise)),
            "prior": torch.stack(tuple(self.prior)),
            "precisions": self._precisions,
            "gammas": self._gammas,
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state."""
        state = {name: tensor.to(self.layers[0][0].device) for name, tensor in state.items()}
        self.layers = [(state[f"mean/{number}"], state[f"variance/{number}"]) for number in range(len(self.layers))]
        self.noise, self.prior = (Gamma(*state[name].unbind()) for name in ("noise", "prior"))
        self._precisions, self._gammas = state["precisions"], state["gammas"]

    def take_in(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Take in a row [..., 1, n] with its target [..., 1]; the logarithm of its evidence [...]."""
        layers = [(mean.requires_grad_(), variance.requires_grad_()) for mean, variance in self.layers]
        with torch.enable_grad():
            mean, variance = propagated(inputs, layers)
            totals = variance[..., 0, 0] + torch.stack(self.noise.variances())
            logs = -0.5 * ((2 * math.pi * totals).log() + (target[..., 0] - mean[..., 0, 0]).square() / totals)
            gradients = torch.autograd.grad(logs[0].sum(), [moment for layer in layers for moment in layer])
        with torch.no_grad():
            pairs = zip(gradients[::2], gradients[1::2], strict=True)
            self.layers = [filtered(*layer, *pair) for layer, pair in zip(layers, pairs, strict=True)]
            new = matched(self.noise, *logs.detach().diff(dim=0).exp())
            valid = (new.shape > 1) & (new.rate > 0) & new.shape.isfinite() & new.rate.isfinite()
            self.noise = Gamma(*(torch.where(valid, *pair) for pair in zip(new, self.noise, strict=True)))
        return logs[0].detach()

    def refresh(self) -> None:
        """Take every weight's factor N(0, 1/λ) of the prior out and in again, one after the other."""
        like, lead, place, refreshed = self.layers[0][0], self.noise.shape.shape, 0, []
        arrays = (self._precisions, self._gammas, *self.prior)
        precisions, gammas, shape, rate = (values.cpu().numpy().copy() for values in arrays)  # small steps, many
        prior = Gamma(shape, rate)
        for mean, variance in self.layers:
            scale, count = mean.shape[-1], mean.shape[-2:].numel()  # in the units where all layers share one λ
            both = torch.stack([mean.detach() * scale**0.5, variance.detach() * scale])
            moments = both.flatten(-2).movedim(-1, 0).cpu().numpy().copy()
            for number, at in enumerate(range(place, place + count)):
                moments[number], precisions[at], gammas[at], prior = _refreshed(
                    moments[number], precisions[at], gammas[at], prior
                )
            place += count
            back = torch.from_numpy(moments).to(like).movedim(0, -1).reshape(2, *lead, *mean.shape[-2:])
            refreshed.append((back[0] / scale**0.5, back[1] / scale))
        self.layers, self.prior = refreshed, Gamma(*(torch.as_tensor(value).to(like) for value in prior))
        self._precisions, self._gammas = torch.from_numpy(precisions).to(like), torch.from_numpy(gammas).to(like)


def _refreshed(moments: np.ndarray, precision: Any, part: np.ndarray, prior: Gamma) -> tuple[Any, Any, Any, Gamma]:
    """Moments of one weight, and its factor; where the rest without the factor is no distribution, nothing changes."""
    mean, variance = moments
    with np.errstate(all="ignore"):
        rest, gamma = 1 / variance - precision, Gamma(prior.shape - part[0], prior.rate - part[1])
        centre, variances = mean / variance / rest, gamma.variances()
        logs = [-0.5 * (np.log(total) + centre**2 / total) for total in (1 / rest + other for other in variances)]
        new = matched(gamma, np.exp(logs[1] - logs[0]), np.exp(logs[2] - logs[1]))
        valid = (rest >= 1e-6) & (gamma.shape > 1) & (gamma.rate > 0) & (new.shape > 1) & (new.rate > 0)
        factor = 1 / variances[0]
        whole = rest + factor
        return (
            np.where(valid, (rest * centre / whole, 1 / whole), moments),
            np.where(valid, factor, precision),
            np.where(valid, (new.shape - gamma.shape, new.rate - gamma.rate), part),
            Gamma(np.where(valid, new.shape, prior.shape), np.where(valid, new.rate, prior.rate)),
        )


def filtered(mean: Tensor, variance: Tensor, by_mean: Tensor, by_variance: Tensor) -> LayerMoments:
    """Moments after a factor, from the gradients of the logarithm of its evidence; those that are none stay."""
    new_mean = mean + variance * by_mean
    new_variance = variance - variance.square() * (by_mean.square() - 2 * by_variance)
    valid = new_mean.isfinite() & new_variance.isfinite() & (new_variance > 1e-100)
    return torch.where(valid, new_mean, mean.detach()), torch.where(valid, new_variance, variance.detach())
