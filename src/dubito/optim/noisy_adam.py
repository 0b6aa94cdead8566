"""Noisy Adam: a diagonal Gaussian by natural gradients, in the manner of Adam [Zhang et al. 2018]."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .noisy import NoisyOptimizer, damping


class NoisyAdam(NoisyOptimizer):
    """Algorithm 2 of BALI's appendix, with the rows of a batch counted.

    Args:
        params: parameters, or groups of them.
        num_data: N, the number of training rows, or the sum of their weights.
        lr: α.
        betas: decay rates of the momentum and of the Fisher information's diagonal f.
        prior_std: √η, of the Normal prior around 0.
        kl_weight: λ; below 1 the posterior is colder.
        extrinsic_damping: γ_ex, added to the denominator alone.
        initial_std: standard deviations to start from.
        count_rows: take in B ḡ² instead of the square of the batch's mean gradient ḡ, which is B times too small.
        seed: of the draws.
    """

    recommended_lr = 3e-2

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: float,
        lr: float = recommended_lr,
        betas: tuple[float, float] = (0.9, 0.999),
        prior_std: float = 1.0,
        kl_weight: float = 1.0,
        extrinsic_damping: float = 0.0,
        initial_std: float = 0.05,
        count_rows: bool = True,
        seed: int = 0,
    ) -> None:
        settings = {"num_data": num_data, "seed": seed, "lr": lr, "prior_std": prior_std, "initial_std": initial_std}
        more = {"betas": tuple(betas), "kl_weight": kl_weight, "extrinsic_damping": extrinsic_damping}
        super().__init__(params, **settings, **more, count_rows=count_rows)

    def move(self, p: Tensor, slope: Tensor, group: dict[str, Any], rows: float) -> None:
        state, (beta1, beta2), gamma = self.state[p], group["betas"], damping(group)
        fisher = self.fisher(p, group)
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        state["step"] = state.get("step", 0) + 1
        momentum.lerp_(slope - gamma * state["drawn"], 1 - beta1)  # lines 6 and 7
        fisher.lerp_(slope.square() * rows, 1 - beta2)  # line 8, with B
        scale = group["lr"] / (1 - beta1 ** state["step"])  # line 9
        p.addcdiv_(momentum, fisher + (gamma + group["extrinsic_damping"]), value=scale)  # line 10
