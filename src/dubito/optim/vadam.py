"""Vadam: Adam whose gradients are taken at perturbed weights [Khan et al. 2018]."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .noisy import NoisyOptimizer, damping


class Vadam(NoisyOptimizer):
    """Algorithm 3 of BALI's appendix with the rows of a batch counted; its λ is our 1 / prior_std².

    f_t = β₂ᵗ f_0 + s_t with s_t = β₂ s_(t−1) + (1 − β₂) B ḡ_t² and s_0 = 0. Draws have f_t. Steps have the mean of what
    was seen, s_t / (1 − β₂ᵗ): the correction is for the part that started at 0, where the paper's f_t / (1 − β₂ᵗ)
    multiplies f_0 too, by 1 / (1 − β₂) at first.

    Args:
        params: parameters, or groups of them.
        num_data: N, the number of training rows, or the sum of their weights.
        lr: α.
        betas: decay rates of the momentum and of the mean squared gradient f.
        prior_std: of the Normal prior around 0.
        kl_weight: below 1 the posterior is colder; 1 is the paper's.
        initial_std: standard deviations to start from.
        count_rows: take in B ḡ² instead of the square of the batch's mean gradient ḡ, which is B times too small.
        correct_start: have f_t / (1 − β₂ᵗ) in steps, as printed for f_0 = 0.
        seed: of the draws.
    """

    recommended_lr = 5e-3

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: float,
        lr: float = recommended_lr,
        betas: tuple[float, float] = (0.9, 0.999),
        prior_std: float = 1.0,
        kl_weight: float = 1.0,
        initial_std: float = 0.05,
        count_rows: bool = True,
        correct_start: bool = False,
        seed: int = 0,
    ) -> None:
        settings = {"num_data": num_data, "seed": seed, "lr": lr, "prior_std": prior_std, "initial_std": initial_std}
        more = {"betas": tuple(betas), "count_rows": count_rows, "correct_start": correct_start}
        super().__init__(params, **settings, **more, kl_weight=kl_weight)

    def fisher(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """β₂ᵗ f_0 + s_t."""
        state = self.state[p]
        start = max(0.0, self.initial_fisher(group)) * group["betas"][1] ** state.get("step", 0)
        return state["squares"] + start if "squares" in state else torch.full_like(p, start)

    def move(self, p: Tensor, slope: Tensor, group: dict[str, Any], rows: float) -> None:
        state, (beta1, beta2), gamma = self.state[p], group["betas"], damping(group)
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        squares = state.setdefault("squares", torch.zeros_like(p))
        state["step"] = state.get("step", 0) + 1
        momentum.lerp_(slope - gamma * p, 1 - beta1)  # lines 6 and 7, the prior at the mean
        squares.lerp_(slope.square() * rows, 1 - beta2)  # line 8, with B
        seen = self.fisher(p, group) if group["correct_start"] else squares
        root = (seen / (1 - beta2 ** state["step"]) + gamma).sqrt_()  # lines 10 and 11
        p.addcdiv_(momentum, root, value=group["lr"] / (1 - beta1 ** state["step"]))  # lines 9 and 11
