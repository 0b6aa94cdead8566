"""Noisy K-FAC: a matrix normal for every layer by natural gradients [Zhang et al. 2018]."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..errors import require_fraction
from .noisy import NoisyOptimizer, damping

#: A weight's factors, their versions and damping, and the roots that were computed from them.
KnownRoots: TypeAlias = tuple[Tensor, Tensor, tuple[int, int, float], tuple[Tensor, Tensor]]


class NoisyKFAC(NoisyOptimizer):
    """Algorithm 5 of BALI's appendix, with λ/N in the draw and π the balance of the factors' mean traces.

    Layers that multiply their inputs by a weight get Kronecker factors, bias included; other parameters get a
    diagonal, from B times the square of the batch's mean gradient.

    The factors' averages start at c π I and c / π I, with the π of the first step and c so that weights have the
    standard deviation `initial_std`. As printed (`initial_std=None`) they start at 0 without a correction: the first
    draw is the mean, and those of the next 1/β steps are up to 1/β times too wide.

    Args:
        params: parameters, or groups of them; a layer's weight and bias belong in one group.
        num_data: N, the number of training rows, or the sum of their weights.
        lr: α.
        beta: rate of the factors' moving averages.
        prior_std: √η, of the Normal prior around 0.
        kl_weight: λ; below 1 the posterior is colder.
        initial_std: standard deviations to start from, the prior's at most; None starts averages at 0.
        seed: of the draws.
    """

    watches = True
    recommended_lr = 2e-2
    sums = ("seen_inputs", "seen_outputs", "seen_rows")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        num_data: float,
        lr: float = recommended_lr,
        beta: float = 0.05,
        prior_std: float = 1.0,
        kl_weight: float = 1.0,
        initial_std: float | None = 0.05,
        seed: int = 0,
    ) -> None:
        settings = {"num_data": num_data, "seed": seed, "lr": lr, "prior_std": prior_std, "initial_std": initial_std}
        super().__init__(params, **settings, beta=beta, kl_weight=kl_weight)

    def _begin(self) -> None:
        super()._begin()
        self._known: dict[int, KnownRoots] = {}

    @classmethod
    def check(cls, settings: dict[str, Any]) -> None:
        super().check({name: value for name, value in settings.items() if (name, value) != ("initial_std", None)})
        require_fraction(zero=False, one=True, beta=settings["beta"])

    @property
    def _all(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def moving(self) -> list[tuple[dict[str, Any], Tensor]]:
        held = self._held()
        return [(group, p) for group, p in self.parameters() if id(p) not in held]

    def _bias(self, p: Tensor) -> Tensor | None:
        """The bias that is the last column of a weight with factors."""
        index = self.state[p].get("bias", -1)
        return None if index < 0 else self._all[index]

    def _held(self) -> set[int]:
        """The biases that belong to a weight."""
        parameters = self._all
        places = (self.state[p].get("bias", -1) for p in parameters if p.requires_grad)
        return {id(parameters[place]) for place in places if place >= 0}

    def initial_fisher(self, group: dict[str, Any]) -> float:
        return 0.0 if group["initial_std"] is None else super().initial_fisher(group)

    def std(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        if "fisher" in self.state[p] or group["initial_std"] is None:
            return super().std(p, group)
        return torch.full_like(p, min(group["initial_std"], group["prior_std"]))  # before any step

    # -- the factors ---------------------------------------------------------------------------------------------

    def look(self) -> None:
        places = {id(p): index for index, p in enumerate(self._all)}
        for _, p in self.parameters():
            factors = self.watch.factors(p)
            if factors is not None:
                rows = factors[0].new_full((), float(self.watch.rows))
                self.add(p, seen_inputs=factors[0], seen_outputs=factors[1], seen_rows=rows)
                self.state[p]["bias"] = places.get(id(self.watch.biases.get(id(p))), -1)
                self.state[p]["turned"] = self.watch.turned(p)

    def matrix(self, p: Tensor, values: Tensor, bias_values: Tensor | None) -> Tensor:
        """A weight's values, with its bias's as the last column, as matrices [G, m, n]."""
        groups, m = len(self.state[p]["inputs"]), self.state[p]["outputs"].shape[-1]
        matrices = (values.mT if self._turned(p) else values).reshape(groups, m, -1)
        if bias_values is None:
            return matrices
        return torch.cat([matrices, bias_values.reshape(groups, m, 1)], -1)

    def _turned(self, p: Tensor) -> bool:
        """Whether a weight is stored as inputs × outputs."""
        return bool(self.state[p].get("turned", False))

    def roots(self, p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Cholesky factors of R⁻¹ = π √γ_in I + Ψ^xx and of Σ⁻¹ = √γ_in / π I + Ψ^gg (lines 10 and 11).

        They are computed once until the factors move; a matrix without a root gives NaN.
        """
        inputs, outputs, root = self.state[p]["inputs"], self.state[p]["outputs"], damping(group) ** 0.5
        known, facts = self._known.get(id(p)), (inputs._version, outputs._version, root)
        if known is None or known[0] is not inputs or known[1] is not outputs or known[2] != facts:
            known = self._known[id(p)] = inputs, outputs, facts, self._roots(inputs, outputs, root)
        return known[3]

    def _first_factors(self, means: tuple[Tensor, Tensor], group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Averages to start from, whose draws have the standard deviation `initial_std`; 0 without one."""
        gamma = damping(group)
        scale = (max(0.0, self.initial_fisher(group)) + gamma) ** 0.5 - gamma**0.5  # c
        balance = _balance(*means)[:, None, None]
        eyes = [torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device) for mean in means]
        return scale * balance * eyes[0], scale / balance * eyes[1]

    def _roots(self, inputs: Tensor, outputs: Tensor, root: float) -> tuple[Tensor, Tensor]:
        balance = _balance(inputs, outputs)
        first, second = inputs.clone(), outputs.clone()
        first.diagonal(0, 1, 2).add_((balance * root)[:, None])
        second.diagonal(0, 1, 2).add_((root / balance)[:, None])
        return _root(first), _root(second)

    # -- draws and steps -----------------------------------------------------------------------------------------

    def draw_all(self, generator: torch.Generator) -> None:
        for _, p in self.parameters():
            bias = self._bias(p)
            if bias is not None and not bias.requires_grad:  # frozen since: the factors begin anew without it
                for key in ("inputs", "outputs", "bias"):
                    self.state[p].pop(key, None)
        for group, p in self.moving():
            if "inputs" in self.state[p]:
                self._draw_block(p, group, generator)
            elif "fisher" in self.state[p] or group["initial_std"] is not None:
                for parameter in (p, self._bias(p)):
                    if parameter is not None:
                        parameter.add_(self.noise(parameter, group, generator))

    def _draw_block(self, p: Tensor, group: dict[str, Any], generator: torch.Generator) -> None:
        bias = self._bias(p)
        right, left = self.roots(p, group)
        like = self.matrix(p, p, bias)
        unit = torch.randn(like.shape, generator=generator, dtype=p.dtype, device=p.device)
        # W ~ MN(M, (λ/N) R, Σ): with L Lᵀ = R⁻¹ and C Cᵀ = Σ⁻¹, √(λ/N) C⁻ᵀ A L⁻¹ for outputs × inputs
        drawn = torch.linalg.solve_triangular(right, unit, upper=False, left=False)
        drawn = torch.linalg.solve_triangular(left, drawn.mT, upper=False, left=False).mT
        self._add(p, bias, drawn * (group["kl_weight"] / group["num_data"]) ** 0.5)

    def _add(self, p: Tensor, bias: Tensor | None, values: Tensor) -> None:
        weight, last = values.split([values.shape[-1] - (bias is not None), int(bias is not None)], -1)
        p.add_(weight[0].mT if self._turned(p) else weight.reshape(p.shape))
        if bias is not None:
            bias.add_(last.reshape(bias.shape))

    def move(self, p: Tensor, slope: Tensor, group: dict[str, Any], rows: float) -> None:
        if "seen_rows" in self.state[p]:
            self._move_block(p, group)
            return
        fisher, gamma = self.fisher(p, group), damping(group)
        fisher.lerp_(slope.square() * rows, group["beta"])
        p.addcdiv_(slope - gamma * self.state[p]["drawn"], fisher + gamma, value=group["lr"])

    def _move_block(self, p: Tensor, group: dict[str, Any]) -> None:
        state, gamma, beta = self.state[p], damping(group), group["beta"]
        rows = state.pop("seen_rows")
        # Gradients are those of a mean over the rows: sums of (g / B)(g / B)ᵀ, times B, are the mean of g gᵀ.
        means = state.pop("seen_inputs") / rows, state.pop("seen_outputs") * rows
        if "inputs" not in state:
            state["inputs"], state["outputs"] = self._first_factors(means, group)
        state["inputs"].lerp_(means[0], beta)  # line 8
        state["outputs"].lerp_(means[1], beta)  # line 9
        bias = self._bias(p)
        assert p.grad is not None
        slopes = bias if bias is None else torch.zeros_like(bias) if bias.grad is None else -bias.grad
        slope = self.matrix(p, -p.grad, slopes)
        held = self.matrix(p, state["drawn"], None if bias is None else self.state[bias]["drawn"])
        right, left = self.roots(p, group)
        whole = slope - gamma * held  # line 12
        moved = _solved(_solved(whole, right).mT, left).mT  # Σ G R, as outputs × inputs
        self._add(p, bias, group["lr"] * moved)  # line 13


def _balance(inputs: Tensor, outputs: Tensor) -> Tensor:
    """π, the root of the ratio of mean traces, [G]; 1 where a factor is 0."""
    first, second = (factor.diagonal(0, 1, 2).mean(-1) for factor in (inputs, outputs))
    balance = (first / second.clamp(min=torch.finfo(inputs.dtype).tiny)).sqrt()
    return torch.where((first > 0) & (second > 0), balance, torch.ones_like(balance))


def _root(matrices: Tensor) -> Tensor:
    """Cholesky factors, without a look at the device: NaN where there is none, and the next loss says so."""
    factors, info = torch.linalg.cholesky_ex(matrices)
    return factors.add_(torch.where(info > 0, torch.nan, 0.0)[:, None, None].to(factors))


def _solved(matrices: Tensor, root: Tensor) -> Tensor:
    """X (L Lᵀ)⁻¹; a solve from the right is twice as fast as one from the left."""
    half = torch.linalg.solve_triangular(root.mT, matrices, upper=True, left=False)
    return torch.linalg.solve_triangular(root, half, upper=False, left=False)
