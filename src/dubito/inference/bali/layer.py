"""One layer's inference: moving sums of products in, a matrix-normal inverse-Wishart posterior out.

Everything has an axis of K matrices first: the groups of a layer, or those of several replicas. Matrices stand as
PyTorch's weights do, outputs × inputs [K, m, n], the transposes of the paper's.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import TrainingError

#: What is tried where a factorisation fails, in units of the dtype's eps times the mean of the diagonal.
JITTERS = (10.0, 1e3, 1e5)
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

    def diagonal(self, inputs: int) -> Tensor:
        """The diagonal of the prior's part of the joint matrix, [K, n + m]."""
        first = self.floor.new_full((len(self.floor), inputs), self.precision)
        return torch.cat([first, self.floor * self.data[:, None]], 1)

    def denominator(self) -> Tensor:
        """The denominator u + D_y + 1 of Eq. 21, where u = N_eff, [K]."""
        return self.data + self.floor.shape[1] + 1


@dataclass(kw_only=True, eq=False)
class Layer:
    """What is known of one layer.

    Attributes:
        name: of the block, for messages.
        prior: see there.
        sums: moving averages of [X Y]ᵀ[X Y] per case, Ψ / N_eff of Eq. 17, [K, n + m, n + m], without the block
            above the diagonal; their bias is not corrected.
        squares: Ψ^gg of Eq. 19, of the mean squared gradients, [K, m]; likewise.
        mean: M, [K, m, n].
        before: M of the step before, for momentum.
        input_tril: L with L Lᵀ = R⁻¹, [K, n, n].
        output_tril: C with C Cᵀ = Σ, the mode of q(Σ), [K, m, m].
        jitters: how often a factorisation needed a jitter.
    """

    name: str
    prior: Prior
    sums: Tensor
    squares: Tensor
    mean: Tensor
    before: Tensor
    input_tril: Tensor
    output_tril: Tensor
    jitters: int = 0

    @classmethod
    def start(cls, name: str, prior: Prior, mean: Tensor) -> "Layer":
        """The layer before any data: weights `mean` [K, m, n], and the prior around them."""
        count, outputs, inputs = mean.shape
        wide, high = (torch.eye(size, dtype=mean.dtype, device=mean.device) for size in (inputs, outputs))
        least = torch.finfo(mean.dtype).eps
        return cls(
            name=name,
            prior=prior,
            sums=mean.new_zeros(count, inputs + outputs, inputs + outputs),
            squares=mean.new_zeros(count, outputs),
            mean=mean.clone(),
            before=mean.clone(),
            input_tril=math.sqrt(prior.precision) * wide.repeat(count, 1, 1),
            output_tril=high * prior.floor.clamp(min=least).sqrt()[:, :, None],
        )

    # -- one step ----------------------------------------------------------------------------------------------

    def see_targets(self, gram: Tensor, cases: float, rate: float) -> None:
        """Take in [X Y]ᵀ[X Y] of true targets, summed over `cases`, at the rate β; see `see_gradients`."""
        n = self.mean.shape[2]
        self._take_in(gram[:, :n, :n], gram[:, :n, n:].mT, gram[:, n:, n:], cases, rate)

    def see_gradients(
        self,
        gram: Tensor,
        cases: float,
        rate: float,
        correction: float,
        *,
        weights: Tensor,
        step_size: float,
        momentum: float = 0.0,
    ) -> None:
        """Take in [X G]ᵀ[X G] or [X E G]ᵀ[X E G] for pseudo-targets Y = X Wᵀ + E + α G / √(Ψ^gg / b).

        Nothing but sums of products is needed: those with Y follow from these by a linear map (Eqs. 20 and 64).

        Args:
            gram: with G the gradients of the log-likelihood and E noise on the outputs, where there is any; only
                blocks on and above the diagonal are read.
            cases: rows times positions, over which was summed.
            rate: β of this step.
            correction: b of this step.
            weights: W of the forward pass, or its mean where E is given, [K, m, n].
            step_size: α.
            momentum: μ; pseudo-targets go on by μ X (M − M_before)ᵀ.
        """
        _, m, n = weights.shape
        noisy = gram.shape[-1] == n + 2 * m
        last = n + m if noisy else n
        squares = gram[:, last:, last:].diagonal(0, 1, 2)
        self.squares.mul_(1 - rate).add_(squares, alpha=rate / cases)  # Eq. 19
        factor = step_size * (self.squares / correction + TINY).rsqrt()  # Eq. 20
        if momentum:
            weights = weights + momentum * (self.mean - self.before)
        # Y = X Wᵀ + F with F = (E +) G diag(α / √…); sums with F first, then those with Y
        xx, fx = gram[:, :n, :n], gram[:, :n, last:].mT * factor[:, :, None]
        ff = gram[:, last:, last:] * (factor[:, :, None] * factor[:, None])
        if noisy:
            fx = fx + gram[:, :n, n:last].mT
            cross = gram[:, n:last, last:] * factor[:, None]
            ff = ff + gram[:, n:last, n:last] + cross + cross.mT
        yx = torch.baddbmm(fx, weights, xx)  # YᵀX = W XᵀX + FᵀX
        # YᵀY = YᵀX Wᵀ + (FᵀX Wᵀ)ᵀ + FᵀF, made symmetric where products round differently
        half = torch.bmm((yx + fx).div_(2), weights.mT)
        self._take_in(xx, yx, ff.add_(half).add_(half.mT), cases, rate)

    def _take_in(self, xx: Tensor, yx: Tensor, yy: Tensor, cases: float, rate: float) -> None:
        """Eq. 17, N_eff left for `joint`; a factorisation reads nothing above the diagonal."""
        n = xx.shape[-1]
        for part, new in (
            (self.sums[:, :n, :n], xx),
            (self.sums[:, n:, :n], yx),
            (self.sums[:, n:, n:], yy),
        ):
            part.mul_(1 - rate).add_(new, alpha=rate / cases)

    def joint(self, prior: Prior, correction: float) -> Tensor:
        """J = [[R⁻¹, Ψ_xy], [·, U_0 + Ψ_yy]] under a prior, from the averages."""
        joint = self.sums * (prior.data / correction)[:, None, None]
        joint.diagonal(0, 1, 2).add_(prior.diagonal(self.mean.shape[2]))
        return joint

    def infer(self, correction: float, step: int) -> None:
        """The posterior of Eq. 16 by one factorisation of the joint matrix.

        J = L Lᵀ gives L₁₁L₁₁ᵀ = R⁻¹, Mᵀ = L₁₁⁻ᵀ L₂₁ᵀ and L₂₂L₂₂ᵀ = U, without the subtraction of Eq. 16c.
        """
        n = self.mean.shape[2]
        factor = self._factor(self.joint(self.prior, correction), step)
        self.before.copy_(self.mean)
        first = factor[:, :n, :n]
        self.mean.copy_(torch.linalg.solve_triangular(first, factor[:, n:, :n], upper=False, left=False))
        self.input_tril.copy_(first)
        scale = self.prior.denominator().rsqrt()[:, None, None]
        self.output_tril.copy_(factor[:, n:, n:]).mul_(scale)  # Eq. 21

    def _factor(self, joint: Tensor, step: int) -> Tensor:
        factor, info = torch.linalg.cholesky_ex(joint)
        if not info.any():
            return factor
        if not joint.isfinite().all():
            raise TrainingError(
                f"the sums of products of {self.name!r} became NaN or infinite at step {step}; lower step_size "
                "or update_rate, or standardise the data"
            )
        diagonal = joint.diagonal(0, 1, 2)
        unit = torch.finfo(joint.dtype).eps * diagonal.mean(1, keepdim=True)
        for times in JITTERS:
            diagonal.add_(times * unit)
            self.jitters += 1
            factor, info = torch.linalg.cholesky_ex(joint)
            if not info.any():
                return factor
        raise TrainingError(
            f"the joint matrix of {self.name!r} is not positive definite at step {step}, even with "
            f"{JITTERS[-1] * float(unit.max()):.2g} on its diagonal; raise hidden_floor or output_floor, or take a "
            "larger batch_size"
        )


def placed(mean: Tensor, input_tril: Tensor, output_root: Tensor, noise: Tensor) -> Tensor:
    """W = M + C A L⁻¹ [K, m, n] for unit noise A, where L Lᵀ = R⁻¹ and C Cᵀ = Σ; Eq. 22 with the + M it omits."""
    return mean + torch.linalg.solve_triangular(input_tril, output_root @ noise, upper=False, left=False)
