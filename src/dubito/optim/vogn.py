"""VOGN: a diagonal Gaussian from the squares of each row's own gradient [Khan et al. 2018, Osawa et al. 2019]."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import require_count, require_positive
from .noisy import NoisyOptimizer


class VOGN(NoisyOptimizer):
    """Algorithm 4 of BALI's appendix.

    The rows' own gradients are read from layers as they are called inside `sampled`, a layer at a time; rows stand
    on the first axis of layers' inputs. For parameters of other modules (recurrent ones, bare tensors) B times the
    square of the batch's mean gradient stands in.

    Args:
        params: parameters, or groups of them.
        num_data: N, the number of training rows, or the sum of their weights.
        lr: α.
        betas: β_1 of the momentum, and β_2, the rate at which new squares are taken in.
        prior_std: √η, of the Normal prior around 0.
        kl_weight: λ_T, the final weight of the prior and of forgetting.
        kl_start: λ_0, from which λ moves in a straight line; None starts at `kl_weight`.
        kl_steps: T_λ, over so many steps.
        extrinsic_damping: γ_ex.
        initial_std: standard deviations to start from.
        seed: of the draws.
    """

    watches = True
    recommended_lr = 1e-2
    sums = ("squares", "rows")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: float,
        lr: float = recommended_lr,
        betas: tuple[float, float] = (0.9, 0.001),
        prior_std: float = 1.0,
        kl_weight: float = 1.0,
        kl_start: float | None = None,
        kl_steps: int = 0,
        extrinsic_damping: float = 0.0,
        initial_std: float = 0.05,
        seed: int = 0,
    ) -> None:
        start = kl_weight if kl_start is None else kl_start
        settings = {"num_data": num_data, "seed": seed, "lr": lr, "prior_std": prior_std, "initial_std": initial_std}
        more = {"betas": tuple(betas), "kl_weight": kl_weight, "extrinsic_damping": extrinsic_damping}
        now = start if kl_steps else kl_weight
        super().__init__(params, **settings, **more, kl_start=start, kl_steps=kl_steps, kl_now=now, steps=0)

    @classmethod
    def check(cls, settings: dict[str, Any]) -> None:
        super().check(settings)
        require_count(0, kl_steps=settings["kl_steps"])
        if settings["kl_start"] is not None:
            require_positive(kl_start=settings["kl_start"])

    def initial_fisher(self, group: dict[str, Any]) -> float:
        return 1 / (group["num_data"] * group["initial_std"] ** 2) - self.shift(group)

    def shift(self, group: dict[str, Any]) -> float:
        """γ_in(λ) + γ_ex."""
        return prior_share(group) + group["extrinsic_damping"]

    def precision(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        # w ~ N(μ, 1/N diag(f + γ_in(λ) + γ_ex)⁻¹)   [Alg. 4, line 5]
        return (self.fisher(p, group) + self.shift(group)) * group["num_data"]

    def look(self) -> None:
        for _, p in self.parameters():
            squares = self.watch.squares(p)
            if squares is not None:
                self.add(p, squares=squares, rows=squares.new_full((), float(self.watch.rows)))

    def move(self, p: Tensor, slope: Tensor, group: dict[str, Any], rows: float) -> None:
        state, (beta1, beta2) = self.state[p], group["betas"]
        fisher = self.fisher(p, group)
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        # Sums of (g_i / B)² over B rows, so that B times them is the mean of squares.
        squares = state.pop("squares") * state.pop("rows") if "squares" in state else slope.square() * rows
        momentum.mul_(beta1).add_(slope - prior_share(group) * p)  # lines 6 and 7
        fisher.mul_(1 - group["kl_now"] * beta2).add_(squares, alpha=beta2)  # line 8, a mean over rows
        p.addcdiv_(momentum, fisher + self.shift(group), value=group["lr"])  # line 9

    def advance(self) -> None:
        for group in self.param_groups:  # line 10
            group["steps"] += 1
            way = min(1.0, group["steps"] / group["kl_steps"]) if group["kl_steps"] else 1.0
            group["kl_now"] = group["kl_start"] + way * (group["kl_weight"] - group["kl_start"])


def prior_share(group: dict[str, Any]) -> float:
    """γ_in(λ) = λ / (N η)."""
    return group["kl_now"] / (group["num_data"] * group["prior_std"] ** 2)
