"""Hamiltonian Monte Carlo of many chains at once, for networks of one hidden layer: a step is a few tensor products.

`dubito.HMC` runs its chains one after the other, at .9 CPU-milliseconds a gradient on yacht's rows and 50 units; here a
gradient of one chain costs .17. Step size and scales are found in the warm-up, scales from the draws of all chains.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dubito.data import Part

#: An energy that grew by more than this was not followed: the trajectory diverged.
DIVERGED = 1000.0


@dataclass(frozen=True, kw_only=True)
class Chains:
    """How chains are run.

    Args:
        chains: how many, each from its own draw of the prior.
        warmup: draws before those that are kept.
        draws: of each chain after it.
        trajectory: mean length, where the scales are those of the posterior; single ones go from a half to one and a
            half of it, so that none comes back to where it began by the same period.
        most_steps: the most steps of a trajectory.
        target_acceptance: that the step size is tuned for.
    """

    chains: int = 8
    warmup: int = 300
    draws: int = 600
    trajectory: float = 1.5
    most_steps: int = 128
    target_acceptance: float = 0.8


class Run(NamedTuple):
    """What chains gave.

    Attributes:
        draws: [chains, S, P].
        acceptance: mean rate after the warm-up.
        divergent: trajectories that diverged after it.
        gradients: of each chain, in all.
    """

    draws: Tensor
    acceptance: float
    divergent: int
    gradients: int


class Network:
    """One hidden layer of rectified units with all weights in a vector, ordered as `mlp` has its parameters.

    Args:
        inputs: of the network.
        hidden: its units.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        self.inputs, self.hidden = inputs, hidden
        self.sizes = [hidden * inputs, hidden, hidden, 1]

    def functions(self, weights: Tensor, rows: Tensor) -> Tensor:
        """What each vector [C, P] answers for rows [B, D], as [C, B]."""
        first, bias, last, shift = weights.split(self.sizes, -1)
        first = first.unflatten(-1, (self.hidden, self.inputs)).transpose(1, 2)  # [C, D, H]
        hidden = torch.baddbmm(bias[:, None], rows.expand(len(weights), -1, -1), first).relu()
        return torch.baddbmm(shift[:, None], hidden, last[..., None])[..., 0]

    def energies(self, weights: Tensor, rows: Part, noise: float, prior_std: float) -> Tensor:
        """−log p(D | w) − log p(w) of each vector, without its constant, [C]."""
        errors = (self.functions(weights, rows.inputs) - rows.targets[:, 0]) / noise
        return 0.5 * errors.square().sum(1) + 0.5 * (weights / prior_std).square().sum(1)


def run_chains(
    energies: Callable[[Tensor], Tensor], start: Tensor, settings: Chains, generator: torch.Generator
) -> Run:
    """Draws from exp(−energy).

    Args:
        energies: of vectors [C, P], as [C].
        start: of the chains, [C, P].
        settings: how they are run.
        generator: of everything random.
    """

    def measured(weights: Tensor) -> tuple[Tensor, Tensor]:
        weights = weights.detach().requires_grad_()
        energy = energies(weights)
        (gradient,) = torch.autograd.grad(energy.sum(), weights)
        return energy.detach(), gradient

    scales, tuning = torch.ones_like(start[0]), StepSize(0.01, settings.target_acceptance)
    windows = [settings.warmup // 8, settings.warmup // 4, settings.warmup // 2, 3 * settings.warmup // 4]
    position, (energy, gradient) = start, measured(start)
    draws, window, rates, divergent, gradients = [], [], 0.0, 0, 0
    for number in range(settings.warmup + settings.draws):
        warming = number < settings.warmup
        length = settings.trajectory * (0.5 + float(torch.rand((), generator=generator)))
        # scales of 1 are not yet those of the posterior, and the first trajectories need not be long
        most = 16 if number < windows[0] else settings.most_steps
        steps = max(1, min(most, round(length / tuning.step)))
        momentum = _normal(start, generator)
        before = energy + 0.5 * momentum.square().sum(1)
        moved, slope, after = position, gradient, energy
        momentum = momentum - 0.5 * tuning.step * scales * slope
        for _ in range(steps):
            moved = moved + tuning.step * scales * momentum
            after, slope = measured(moved)
            momentum = momentum - tuning.step * scales * slope
        momentum = momentum + 0.5 * tuning.step * scales * slope
        change = (after + 0.5 * momentum.square().sum(1) - before).nan_to_num(nan=math.inf)
        chance = (-change).clamp(max=0).exp()
        taken = torch.rand(chance.shape, generator=generator, dtype=chance.dtype) < chance
        position = torch.where(taken[:, None], moved, position)
        gradient = torch.where(taken[:, None], slope, gradient)
        energy = torch.where(taken, after, energy)
        gradients += steps
        if warming:
            tuning.adapt(float(chance.mean()))
            window.append(position)
            if number in windows:
                scales = torch.cat(window[len(window) // 3 :]).std(0).clamp(min=1e-6)
                window, tuning = [], StepSize(tuning.step, settings.target_acceptance)
            if number == settings.warmup - 1:
                tuning.settle()
        else:
            rates, divergent = rates + float(chance.mean()), divergent + int((change > DIVERGED).sum())
            draws.append(position)
    return Run(torch.stack(draws, 1), rates / settings.draws, divergent, gradients)


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


class StepSize:
    """A step size that learns from acceptance rates, by dual averaging [Hoffman and Gelman 2014].

    Args:
        first: where it starts.
        target: the acceptance rate to reach.
    """

    def __init__(self, first: float, target: float) -> None:
        self.step, self.target, self.centre = first, target, math.log(10 * first)
        self.count, self.error, self.mean = 0, 0.0, 0.0

    def adapt(self, rate: float) -> None:
        """The next step size, after a rate."""
        self.count += 1
        weight = 1 / (self.count + 10)
        self.error = (1 - weight) * self.error + weight * (self.target - rate)
        logarithm = self.centre - math.sqrt(self.count) / 0.05 * self.error
        share = self.count**-0.75
        self.mean = share * logarithm + (1 - share) * self.mean
        self.step = math.exp(logarithm)

    def settle(self) -> None:
        """Take the mean of what was learnt."""
        self.step = math.exp(self.mean)
