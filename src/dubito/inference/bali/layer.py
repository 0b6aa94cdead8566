"""One layer's inference: moving sums of products in, a matrix-normal inverse-Wishart posterior out.

Everything has an axis of K matrices first: the groups of a layer, or those of several replicas. Matrices stand as
PyTorch's weights do, outputs × inputs [K, m, n], the transposes of the paper's.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import TrainingError
from ...layers.grams import add_gram
from ...sources import split

#: The jitter after a first factorisation that fails, how it grows with further ones, and the most of it, in units of
#: the dtype's eps times the mean of the diagonal.
JITTER, GROWTH, MOST_JITTER = 10.0, 100.0, 1e5
#: Rows of a triangular factor that are multiplied as one.
TALL = 128
#: Keeps the normalised gradient of a dead unit at 0; far below any gradient's square.
TINY = 1e-30


@dataclass(frozen=True, kw_only=True, eq=False)
class Prior:
    """The prior of one layer, of each of its K matrices; u_0 = 0 and M_0 = 0.

    With x unscaled, z = W x and the paper's x̃ = s x (Eq. 12), its W̃ is W / s and its R_0 = σ_r² I becomes
    s² σ_r² I: the scaling is a change of variables, and nothing but this.

    Attributes:
        precision: 1 / (s² σ_r²), the diagonal of R_0⁻¹.
        floor: the diagonal of U_0 per effective data point, [K, m].
        data: N_eff, [K].
    """

    precision: float
    floor: Tensor
    data: Tensor

    def denominator(self) -> Tensor:
        """The denominator u + D_y + 1 of Eq. 21, where u = N_eff, [K]."""
        return self.data + self.floor.shape[1] + 1

    @cached_property
    def least(self) -> Tensor:
        """The diagonal of U_0, [K, m]."""
        return self.floor * self.data[:, None]

    @cached_property
    def scale(self) -> Tensor:
        """From a root of U to one of Σ, [K, 1, 1]."""
        return self.denominator().rsqrt()[:, None, None]


@dataclass(kw_only=True, eq=False)
class Layer:
    """What is known of one layer.

    Attributes:
        name: of the block, for messages.
        prior: see there.
        sums: moving averages of [X Y]ᵀ[X Y] per case, Ψ / N_eff of Eq. 17, [K, n + m, n + m], without the block
            below the diagonal; their bias is not corrected.
        squares: Ψ^gg of Eq. 19, of the mean squared gradients, [K, m]; likewise.
        factor: the last factor of the joint matrix, [K, n + m, n + m]; see `infer`.
        mean: M, [K, m, n]; this and the roots are as of the last `settle`.
        before: M of the step before, for momentum.
        input_tril: L with L Lᵀ = R⁻¹, [K, n, n].
        output_tril: C with C Cᵀ = Σ, the mode of q(Σ), [K, m, m].
        jitter: what the next factorisation adds to the diagonal, [K]; NaN where no jitter helped.
        failures: how often a factorisation failed, [K].
        settled: whether the mean and the roots are those of the last factor.
    """

    name: str
    prior: Prior
    sums: Tensor
    squares: Tensor
    factor: Tensor
    mean: Tensor
    before: Tensor
    input_tril: Tensor
    output_tril: Tensor
    jitter: Tensor
    failures: Tensor
    settled: bool = True

    @classmethod
    def start(cls, name: str, prior: Prior, mean: Tensor) -> "Layer":
        """The layer before any data: weights `mean` [K, m, n], and the prior around them."""
        count, outputs, inputs = mean.shape
        wide, high = (torch.eye(size, dtype=mean.dtype, device=mean.device) for size in (inputs, outputs))
        root = math.sqrt(prior.precision)
        least = torch.finfo(mean.dtype).eps
        output_tril = high * prior.floor.clamp(min=least).sqrt()[:, :, None]
        factor = mean.new_zeros(count, inputs + outputs, inputs + outputs).mT  # column by column, as factorised
        factor[:, :inputs, :inputs] = root * wide
        factor[:, inputs:, :inputs] = root * mean
        factor[:, inputs:, inputs:] = output_tril / prior.scale
        return cls(
            name=name,
            prior=prior,
            sums=mean.new_zeros(factor.shape),
            squares=mean.new_zeros(count, outputs),
            factor=factor,
            mean=mean.clone(),
            before=mean.clone(),
            input_tril=root * wide.repeat(count, 1, 1),
            output_tril=output_tril,
            jitter=mean.new_zeros(count),
            failures=mean.new_zeros(count),
        )

    # -- one step ----------------------------------------------------------------------------------------------

    def see_cases(self, inputs: Tensor, targets: Tensor, rate: float) -> None:
        """Take in cases X [K, P, n] with targets Y [K, P, m] at the rate β (Eq. 17), N_eff left for `infer`."""
        joint = torch.cat([inputs, targets], -1)
        add_gram(self.sums, joint, rate / joint.shape[1], keep=1 - rate)

    def pseudo_targets(
        self, outputs: Tensor, gradients: Tensor, rate: float, correction: float, step_size: float
    ) -> Tensor:
        """Y = X Wᵀ (+ E) + α G / √(Ψ^gg / b) (Eqs. 20 and 64) of cases [K, P, m], the first being the outputs."""
        self.squares.lerp_(gradients.square().mean(1), rate)  # Eq. 19
        return torch.addcmul(outputs, gradients, self._rates(correction, step_size)[:, None])

    def see_targets(self, gram: Tensor, cases: float, rate: float) -> None:
        """Take in [X Y]ᵀ[X Y] of true targets, summed over `cases`, at the rate β; see `see_gradients`."""
        self.sums.mul_(1 - rate).add_(gram, alpha=rate / cases)

    def see_gradients(
        self, gram: Tensor, cases: float, rate: float, correction: float, *, weights: Tensor, step_size: float
    ) -> None:
        """Take in [X G]ᵀ[X G] or [X E G]ᵀ[X E G] for pseudo-targets Y = X Wᵀ + E + α G / √(Ψ^gg / b).

        Nothing but sums of products is needed, which passes and processes add up: those with Y follow from these by
        a linear map (Eqs. 20 and 64).

        Args:
            gram: with G the gradients of the log-likelihood and E noise on the outputs, where there is any; only
                blocks on and above the diagonal are read.
            cases: rows times positions, over which was summed.
            rate: β of this step.
            correction: b of this step.
            weights: W of the forward pass, or its mean where E is given, [K, m, n].
            step_size: α.
        """
        _, m, n = weights.shape
        noisy = gram.shape[-1] == n + 2 * m
        last = n + m if noisy else n
        squares = gram[:, last:, last:].diagonal(0, 1, 2)
        self.squares.lerp_(squares / cases, rate)  # Eq. 19
        factor = self._rates(correction, step_size)
        # Y = X Wᵀ + F with F = (E +) G diag(α / √…); sums with F first, then those with Y
        xx, xf = gram[:, :n, :n], gram[:, :n, last:] * factor[:, None]
        ff = gram[:, last:, last:] * (factor[:, :, None] * factor[:, None])
        if noisy:
            xf = xf + gram[:, :n, n:last]
            cross = gram[:, n:last, last:] * factor[:, None]
            ff = ff + gram[:, n:last, n:last] + cross + cross.mT
        xy = torch.baddbmm(xf, xx, weights.mT)  # XᵀY = XᵀX Wᵀ + XᵀF
        # YᵀY = W XᵀY + (W XᵀF)ᵀ + FᵀF, made symmetric where products round differently
        half = torch.bmm(weights, (xy + xf).div_(2))
        yy = ff.add_(half).add_(half.mT)
        for part, new in ((self.sums[:, :n, :n], xx), (self.sums[:, :n, n:], xy), (self.sums[:, n:, n:], yy)):
            part.mul_(1 - rate).add_(new, alpha=rate / cases)

    def _rates(self, correction: float, step_size: float) -> Tensor:
        """α / √(Ψ^gg / b) of Eq. 20, [K, m]."""
        return (self.squares / correction).add_(TINY).rsqrt_().mul_(step_size)

    def joint(self, correction: float) -> Tensor:
        """J = [[R⁻¹, Ψ_xy], [·, U_0 + Ψ_yy]] under the prior, from the averages; below the diagonal is nothing."""
        joint = self.sums * (self.prior.data[:, None, None] / correction)
        diagonal, n = joint.diagonal(0, 1, 2), self.mean.shape[2]
        diagonal[:, :n].add_(self.prior.precision)
        diagonal[:, n:].add_(self.prior.least)
        unit = diagonal.mean(1, keepdim=True) * torch.finfo(joint.dtype).eps
        diagonal.addcmul_(unit, self.jitter[:, None])
        return joint

    @property
    def below(self) -> Tensor:
        """L₂₁ of the last factor, M L₁₁."""
        n = self.mean.shape[2]
        return self.factor[:, n:, :n]

    def whitened(self, inputs: Tensor) -> Tensor:
        """V = X L₁₁⁻ᵀ of cases [K, P, n], with V Vᵀ = X R Xᵀ."""
        n = self.mean.shape[2]
        return torch.linalg.solve_triangular(self.factor[:, :n, :n].mT, inputs, upper=True, left=False)

    def move(self, white: Tensor, targets: Tensor, rate: float) -> None:
        """Move the mean by cases [K, P, ...] at the rate β / b as Eq. 74 does, R being that of the last factor.

        In place of R_t stands (R⁻¹ + c XᵀX)⁻¹ with c = β N_eff / (b P (1 − β / b)), which bounds the way along inputs
        that R has not seen; with V = X L₁₁⁻ᵀ and E = Y − X Mᵀ it is L₂₁ += c Eᵀ (1 + c V Vᵀ)⁻¹ V.
        """
        gain = (self.prior.data * (rate / (white.shape[1] * (1 - rate))))[:, None, None]
        inner = torch.bmm(white, white.mT).mul_(gain)
        inner.diagonal(0, 1, 2).add_(1)
        root = torch.linalg.cholesky_ex(inner)[0]
        gap = torch.cholesky_solve(torch.baddbmm(targets, white, self.below.mT, alpha=-1), root).mul_(gain)
        self.below.baddbmm_(gap.mT, white)
        self.settled = False

    def infer(self, correction: float) -> None:
        """The posterior of Eq. 16 by one factorisation of the joint matrix.

        J = L Lᵀ gives L₁₁L₁₁ᵀ = R⁻¹, Mᵀ = L₁₁⁻ᵀ L₂₁ᵀ and L₂₂L₂₂ᵀ = U, without the subtraction of Eq. 16c. Where it
        fails the last factor stays, and the next factorisation has a jitter on its diagonal: 10, 1e3 and 1e5 units of
        rounding, and half of it after each that succeeds. Nothing is read by the host; see `check`.
        """
        factor, info = torch.linalg.cholesky_ex(self.joint(correction).mT)
        failed = info > 0
        stays = failed.to(factor)
        self.failures.add_(stays)
        raised = (self.jitter * GROWTH).clamp_(JITTER, MOST_JITTER)
        raised.masked_fill_(self.jitter >= MOST_JITTER, torch.nan)  # no jitter helps: draws become NaN
        self.jitter = torch.where(failed, raised, self.jitter / 2)
        torch.lerp(factor, self.factor, stays[:, None, None], out=self.factor)  # one or the other
        self.settled = False

    def settle(self) -> None:
        """Bring the mean and the roots up to the last factor."""
        if self.settled:
            return
        n, self.settled = self.mean.shape[2], True
        first = self.factor[:, :n, :n]
        self.mean.copy_(torch.linalg.solve_triangular(first, self.below, upper=False, left=False))
        self.input_tril.copy_(first)
        self.output_tril.copy_(self.output_root())

    def output_root(self) -> Tensor:
        """C with C Cᵀ = Σ of the last factor (Eq. 21); NaN where no jitter helped."""
        n = self.mean.shape[2]
        return self.factor[:, n:, n:] * (self.prior.scale + 0 * self.jitter[:, None, None])

    def drawn(self, unit: Tensor, root: Tensor) -> Tensor:
        """W = M + C A L₁₁⁻¹ [K, m, n] of the last factor for unit noise A and a root C of Σ, by a single solve."""
        _, m, n = self.mean.shape
        unit, moved = unit.view_as(self.mean), torch.empty_like(self.mean)
        for rows in split(m, max(TALL, -(-m // 4))):  # C is triangular
            seen = slice(0, rows.stop)
            torch.baddbmm(self.below[:, rows], root[:, rows, seen], unit[:, seen], out=moved[:, rows])
        return torch.linalg.solve_triangular(self.factor[:, :n, :n], moved, upper=False, left=False)

    def check(self, step: int) -> None:
        """Refuse a layer whose factorisations have failed for good; reads its numbers."""
        if not self.sums.isfinite().all():
            raise TrainingError(
                f"the sums of products of {self.name!r} became NaN or infinite by step {step}; lower step_size "
                "or update_rate, or standardise the data"
            )
        if not self.jitter.isnan().any():
            return
        raise TrainingError(
            f"the joint matrix of {self.name!r} is not positive definite by step {step}, even with a jitter of "
            f"{MOST_JITTER * torch.finfo(self.sums.dtype).eps:.2g} of the mean of its diagonal; raise hidden_floor or "
            "output_floor, or take a larger batch_size"
        )


def placed(mean: Tensor, input_tril: Tensor, output_root: Tensor, noise: Tensor) -> Tensor:
    """W = M + C A L⁻¹ [K, m, n] for unit noise A, where L Lᵀ = R⁻¹ and C Cᵀ = Σ; Eq. 22 with the + M it omits."""
    return mean + torch.linalg.solve_triangular(input_tril, output_root @ noise, upper=False, left=False)
