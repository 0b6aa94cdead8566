"""Vadam: Adam whose gradients are taken at perturbed weights [Khan et al. 2018]."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .noisy import NoisyOptimizer


class Vadam(NoisyOptimizer):
    """Algorithm 3 of BALI's appendix with the rows of a batch counted; its λ is the prior's precision, 1 / prior_std².

    f_t = β₂ᵗ f_0 + (1 − β₂) Σ_s β₂^(t−s) B ḡ_s² is a mean whose weights add up to 1, since f_0 is not 0: there is no
    bias to correct, and a step is divided by the root of the f that draws have.

    Args:
        params: parameters, or groups of them.
        num_data: N, the number of training rows.
        lr: α.
        betas: decay rates of the momentum and of the mean squared gradient f.
        prior_std: of the Normal prior around 0.
        initial_std: standard deviations to start from.
        count_rows: take in B ḡ² instead of the square of the batch's mean gradient ḡ, which is B times too small.
        bias_correction: divide f by 1 − β₂ᵗ in steps, as printed for a start at 0.
        seed: of the draws.
    """

    recommended_lr = 5e-3

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: int,
        lr: float = recommended_lr,
        betas: tuple[float, float] = (0.9, 0.999),
        prior_std: float = 1.0,
        initial_std: float = 0.05,
        count_rows: bool = True,
        bias_correction: bool = False,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "prior_std": prior_std,
            "kl_weight": 1.0,
            "initial_std": initial_std,
            "count_rows": count_rows,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, num_data=num_data, seed=seed)

    def initial_fisher(self, group: dict[str, Any]) -> float:
        return 1 / (group["num_data"] * group["initial_std"] ** 2) - prior_share(group)

    def precision(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        # w ~ N(μ, 1/N diag(f + γ_in)⁻¹)   [Alg. 3, line 5]
        return (self.fisher(p, group) + prior_share(group)) * group["num_data"]

    def move(self, p: Tensor, slope: Tensor, group: dict[str, Any], rows: int) -> None:
        state, (beta1, beta2), gamma = self.state[p], group["betas"], prior_share(group)
        fisher = self.fisher(p, group)
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        state["step"] = state.get("step", 0) + 1
        momentum.lerp_(slope - gamma * p, 1 - beta1)  # lines 6 and 7, the prior at the mean
        fisher.lerp_(slope.square() * rows, 1 - beta2)  # line 8, with B
        weight = 1 - beta2 ** state["step"] if group["bias_correction"] else 1.0  # line 10, for f_0 = 0
        root = (fisher / weight + gamma).sqrt_()  # line 11
        p.addcdiv_(momentum, root, value=group["lr"] / (1 - beta1 ** state["step"]))  # lines 9 and 11


def prior_share(group: dict[str, Any]) -> float:
    """γ_in = λ / N, with λ the prior's precision."""
    return 1 / (group["num_data"] * group["prior_std"] ** 2)
