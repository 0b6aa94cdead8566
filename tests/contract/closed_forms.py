"""What methods converge to in the regression of `problem.py`, derived from mathematics and not from the library."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .problem import FEATURES, OUTPUTS, PROBLEM, ROWS, Moments, flat, flat_square, matrix_of

# -- points ----------------------------------------------------------------------------------------------------


def point(mean: Tensor) -> Moments:
    return Moments(mean, torch.zeros(len(mean), len(mean), dtype=torch.float64))


def optimum() -> Moments:
    """All mass on the most probable weights."""
    return point(PROBLEM.posterior.mean)


def least_squares() -> Moments:
    """All mass on the likeliest weights, where the prior is flat."""
    return point(PROBLEM.least_squares)


DESCENT_RATE, DESCENT_STEPS, SNAPSHOTS = 0.02, 40, 10


def iterates() -> Tensor:
    """Weights after steps 22, 24, ..., 40 of gradient descent on all rows, [10, P].

    On a quadratic the way is known: w_t = w* + (I − η P / N)^t (w_0 − w*).
    """
    start = torch.nn.utils.parameters_to_vector(PROBLEM.network().parameters()).detach()
    best, size = PROBLEM.posterior.mean, len(start)
    shrink = torch.eye(size, dtype=torch.float64) - DESCENT_RATE / ROWS * PROBLEM.precision
    powers = [torch.linalg.matrix_power(shrink, step) for step in range(22, DESCENT_STEPS + 1, 2)]
    return torch.stack([best + power @ (start - best) for power in powers])


def averaged_iterates() -> Moments:
    return point(iterates().mean(0))


SWAG_RANK = 4


def swag_of_iterates() -> Moments:
    """½ (diag(variance) + D Dᵀ / (K − 1)), D the last K deviations from the running mean [Maddox et al. 2019]."""
    way = iterates()
    running = way.cumsum(0) / torch.arange(1, len(way) + 1, dtype=torch.float64)[:, None]
    deviations = (way - running)[-SWAG_RANK:]
    low_rank = deviations.T @ deviations / (SWAG_RANK - 1)
    return Moments(way.mean(0), 0.5 * (torch.diag(way.var(0, unbiased=False)) + low_rank))


# -- Normals of independent weights ----------------------------------------------------------------------------


def mean_field() -> Moments:
    """KL(q ‖ p) is least at the posterior's mean, with variances one over the diagonal of its precision."""
    return Moments(PROBLEM.posterior.mean, torch.diag(1 / PROBLEM.precision.diagonal()))


def tied_mean_field() -> Moments:
    """As mean field with σ_oj = u_o v_j for the weight: Σ ½ P_jj σ_j² − log σ_j at its least, by brute force."""
    diagonal = PROBLEM.precision.diagonal()

    def variances(logs: Tensor) -> Tensor:
        u, v = logs.split([OUTPUTS, FEATURES])
        return torch.cat([(2 * (u[:, None] + v)).exp().flatten(), 1 / diagonal[OUTPUTS * FEATURES :]])

    def loss(logs: Tensor) -> Tensor:
        return 0.5 * (diagonal * variances(logs) - variances(logs).log()).sum()

    best = least(loss, torch.full((OUTPUTS + FEATURES,), -1.0, dtype=torch.float64))
    return Moments(PROBLEM.posterior.mean, torch.diag(variances(best)))


def laplace_diagonal() -> Moments:
    """The curvature of a regression is the posterior's precision, of which the diagonal is kept."""
    return mean_field()


INF_RANK = 3


def laplace_inf() -> Moments:
    """N (V Λ Vᵀ + D) + τ: some Kronecker eigenvectors, and D that keeps the diagonal exact [Lee et al. 2020, Eq. 3].

    Kept are the rows and columns of eigenvalues that hold the K largest (their Algorithm 1).
    """
    gradient_values, gradient_vectors = torch.linalg.eigh(torch.diag(PROBLEM.stds**-2))
    input_values, input_vectors = torch.linalg.eigh(PROBLEM.gram)
    values = gradient_values[:, None] * input_values
    kept = values >= values.flatten().topk(INF_RANK).values[-1]
    rows, columns = kept.any(1), kept.any(0)
    vectors = torch.kron(gradient_vectors[:, rows].contiguous(), input_vectors[:, columns].contiguous())
    low_rank = flat_square((vectors * values[rows][:, columns].flatten()) @ vectors.T)
    correction = PROBLEM.data_precision.diagonal() - low_rank.diagonal()
    precision = low_rank + torch.diag(correction + 1 / PROBLEM.prior_std**2)
    return Moments(PROBLEM.posterior.mean, torch.linalg.inv(precision))


# -- factors on nodes ------------------------------------------------------------------------------------------

DROPOUT_RATE = 0.3


def dropout() -> Moments:
    """W diag(z) with z_j = 0 or 1 / (1 − p), around the optimum of the expected loss.

    E z = 1 and Var z = p / (1 − p), so the expected loss adds p / (1 − p) · Σ_i x_ij² W_oj² / 2σ_o² to the ridge's,
    and Cov(w_oj, w_kj) = W_oj W_kj p / (1 − p). Biases are not dropped.
    """
    odds = DROPOUT_RATE / (1 - DROPOUT_RATE)
    extra = PROBLEM.data_precision.diagonal().clone() * odds
    extra[OUTPUTS * FEATURES :] = 0
    mean = torch.linalg.solve(PROBLEM.precision + torch.diag(extra), PROBLEM.projected)
    return input_factors(matrix_of(mean)[:, :-1], torch.full((FEATURES,), odds, dtype=torch.float64), mean)


def input_factors(weight: Tensor, variances: Tensor, mean: Tensor) -> Moments:
    """Moments of weights whose columns are multiplied by factors with these variances."""
    size = OUTPUTS * FEATURES
    shared = weight[:, :, None, None] * weight * torch.diag(variances)[None, :, None, :]
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    covariance[:size, :size] = shared.reshape(size, size)
    return Moments(mean, covariance)


FACTOR_STD = 0.2


def factor_divergence(mean: Tensor, variance: Tensor) -> Tensor:
    """KL(N(mean, variance) ‖ N(1, FACTOR_STD²)), summed."""
    ratio = variance / FACTOR_STD**2
    return 0.5 * (ratio - ratio.log() - 1 + ((mean - 1) / FACTOR_STD) ** 2).sum()


def squared_errors(mean: Tensor, covariance: Tensor) -> Tensor:
    """E −log p(y | w) up to its constant, for weights with these moments."""
    distance = mean - PROBLEM.least_squares
    second = covariance + distance[:, None] * distance
    return 0.5 * (PROBLEM.data_precision * second).sum()


def rank1_moments(unknown: Tensor) -> tuple[Moments, Tensor]:
    """Moments of W ∘ r sᵀ for Normal r and s, and the divergence of r and s from their priors."""
    weight, bias, r, s, log_r, log_s = unknown.split(
        [OUTPUTS * FEATURES, OUTPUTS, OUTPUTS, FEATURES, OUTPUTS, FEATURES]
    )
    weight, var_r, var_s = weight.view(OUTPUTS, FEATURES), (2 * log_r).exp(), (2 * log_s).exp()
    mean = weight * r[:, None] * s
    # E[w_oj w_pk] = W_oj W_pk E[r_o r_p] E[s_j s_k]
    second_r, second_s = r[:, None] * r + torch.diag(var_r), s[:, None] * s + torch.diag(var_s)
    size = OUTPUTS * FEATURES
    second = (weight[:, :, None, None] * weight * second_r[:, None, :, None] * second_s[None, :, None, :]).reshape(
        size, size
    )
    covariance = second - mean.flatten()[:, None] * mean.flatten()
    whole = nn.functional.pad(covariance, (0, OUTPUTS, 0, OUTPUTS))
    divergence = factor_divergence(r, var_r) + factor_divergence(s, var_s)
    return Moments(torch.cat([mean.flatten(), bias]), whole), divergence


def rank1() -> Moments:
    """The least of E −log p(y | w) + KL over W, b and the laws of r and s, all moments in closed form.

    Components that share W all reach it, so that the mixture is one of them.
    """

    def loss(unknown: Tensor) -> Tensor:
        moments, divergence = rank1_moments(unknown)
        return squared_errors(moments.mean, moments.covariance) + divergence

    count = OUTPUTS + FEATURES
    ones = torch.ones(count, dtype=torch.float64)
    best = least(loss, torch.cat([PROBLEM.least_squares, ones, -3 * ones]))
    return rank1_moments(best)[0]


def rank1_beside() -> Moments:
    """As `rank1`, with biases N(m, v) of the prior N(0, τ²) beside the factors: the law of all is their product."""

    def moments(unknown: Tensor) -> tuple[Moments, Tensor]:
        *others, logs = unknown.split([len(unknown) - OUTPUTS, OUTPUTS])
        product, divergence = rank1_moments(others[0])
        variance, ratio = (2 * logs).exp(), (2 * logs).exp() / PROBLEM.prior_std**2
        bias = product.mean[-OUTPUTS:]
        beside = 0.5 * (ratio - ratio.log() - 1 + (bias / PROBLEM.prior_std) ** 2).sum()
        both = product.covariance + torch.diag(nn.functional.pad(variance, (OUTPUTS * FEATURES, 0)))
        return Moments(product.mean, both), divergence + beside

    def loss(unknown: Tensor) -> Tensor:
        product, divergence = moments(unknown)
        return squared_errors(product.mean, product.covariance) + divergence

    ones = torch.ones(OUTPUTS + FEATURES, dtype=torch.float64)
    best = least(loss, torch.cat([PROBLEM.least_squares, ones, -3 * ones, -2 * ones[:OUTPUTS]]))
    return moments(best)[0]


IMPLICIT_COMPONENTS = 2


def implicit() -> Moments:
    """The least of the mean over components of E −log p(y | w), and the divergence of their mean.

    Weights are W diag(z_k), the components z_k ~ N(μ_k, σ_k²) alike at the optimum, so that the mean of K of them
    has the variance σ² / K   [Trinh et al. 2020, Eq. 22-24].
    """

    def moments(unknown: Tensor) -> tuple[Moments, Tensor, Tensor]:
        weight, bias, means, logs = unknown.split([OUTPUTS * FEATURES, OUTPUTS, FEATURES, FEATURES])
        weight, variances = weight.view(OUTPUTS, FEATURES), (2 * logs).exp()
        mean = torch.cat([(weight * means).flatten(), bias])
        return input_factors(weight, variances, mean), means, variances

    def loss(unknown: Tensor) -> Tensor:
        found, means, variances = moments(unknown)
        return squared_errors(found.mean, found.covariance) + factor_divergence(means, variances / IMPLICIT_COMPONENTS)

    ones = torch.ones(FEATURES, dtype=torch.float64)
    return moments(least(loss, torch.cat([PROBLEM.least_squares, ones, -3 * ones])))[0]


def least(loss: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where a smooth function is least, by L-BFGS in double precision; with curvatures of 1 and more to 1e-5."""
    unknown = start.clone().requires_grad_()
    search = torch.optim.LBFGS(
        [unknown], max_iter=2000, tolerance_grad=1e-10, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        value = loss(unknown)
        value.backward()
        return value

    search.step(closure)  # pyright: ignore[reportArgumentType]
    slope = torch.autograd.grad(loss(unknown), unknown)[0]
    assert slope.abs().max() < 1e-5, slope
    return unknown.detach()


# -- natural gradients -----------------------------------------------------------------------------------------


def fixed_point(update: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Where x = update(x), by halfway steps in the logarithm."""
    current = start
    for _ in range(500):
        following = (current * update(current)).sqrt()
        if torch.allclose(following, current, rtol=1e-12, atol=0):
            return following
        current = following
    raise AssertionError(f"no fixed point: {current} goes to {update(current)}")


def tempered_mean(weight: float) -> Tensor:
    """Where the gradients of the likelihood and of `weight` times the log-prior cancel: both act at the mean."""
    eye = torch.eye(len(PROBLEM.precision), dtype=torch.float64)
    return torch.linalg.solve(PROBLEM.data_precision + weight / PROBLEM.prior_std**2 * eye, PROBLEM.projected)


def batch_squares(weight: float) -> Moments:
    """w ~ N(μ, λ/N diag(f + γ)⁻¹) with f the mean of B times the batch's squared mean gradient, γ = λ / (N τ²).

    All rows are one batch here, so the gradient at a draw is −H (w − w_LS) / N with H the likelihood's precision:
    f = ((H (μ − w_LS))² + H² v) / N where v are the variances. A diagonal H at λ = 1 has its fixed point at H / N.
    """
    hessian, mean = PROBLEM.data_precision, tempered_mean(weight)
    bias = (hessian @ (mean - PROBLEM.least_squares)) ** 2 / ROWS
    gamma = weight / (ROWS * PROBLEM.prior_std**2)

    def update(variances: Tensor) -> Tensor:
        fisher = bias + hessian**2 @ variances / ROWS
        return weight / (ROWS * (fisher + gamma))

    return Moments(mean, torch.diag(fixed_point(update, 1 / PROBLEM.precision.diagonal())))


def row_squares(weight: float) -> Moments:
    """w ~ N(μ, 1/N diag(f + γ)⁻¹) with λ f the mean over rows of their own squared gradients, averaged over draws.

    ∂ log p(y_i | w) / ∂w_oj = x_ij (y_io − f_io) / σ_o², and E (y_io − f_io)² = residual² + x_iᵀ V_o x_i. What was
    seen is forgotten at λ times the rate at which new squares come in   [BALI, Alg. 4].
    """
    mean, gamma = tempered_mean(weight), weight / (ROWS * PROBLEM.prior_std**2)
    residuals = PROBLEM.targets - PROBLEM.design @ matrix_of(mean).T
    squares = PROBLEM.design**2

    def update(variances: Tensor) -> Tensor:
        expected = residuals**2 + squares @ matrix_of(variances).T  # [N, m]
        fisher = flat((expected / PROBLEM.stds**4).T @ squares / ROWS) / weight
        return 1 / (ROWS * (fisher + gamma))

    return Moments(mean, torch.diag(fixed_point(update, 1 / PROBLEM.precision.diagonal())))


def noisy_kfac(weight: float) -> Moments:
    """MN(M, λ/N R, Σ) with R⁻¹ = A + π √γ I and Σ⁻¹ = G + √γ / π I   [BALI, Alg. 5 with λ/N in the draw].

    A is the mean of x xᵀ, G that of g gᵀ for the outputs' gradients g = (y − f) / σ² at draws, in which
    E (y − f)(y − f)ᵀ = r rᵀ + (λ/N xᵀ R x) Σ; π² is the ratio of their mean traces, γ = λ / (N τ²).
    """
    mean, root = tempered_mean(weight), (weight / (ROWS * PROBLEM.prior_std**2)) ** 0.5
    residuals = PROBLEM.targets - PROBLEM.design @ matrix_of(mean).T
    inputs, scatter = PROBLEM.gram / ROWS, residuals.T @ residuals / ROWS
    scale = torch.diag(PROBLEM.stds**-2)
    outputs = scale @ scatter @ scale
    for _ in range(500):
        balance = (inputs.diagonal().mean() / outputs.diagonal().mean()).sqrt()
        columns = torch.linalg.inv(inputs + balance * root * torch.eye(FEATURES + 1, dtype=torch.float64))
        rows = torch.linalg.inv(outputs + root / balance * torch.eye(OUTPUTS, dtype=torch.float64))
        following = scale @ (scatter + weight / ROWS * (inputs * columns).sum() * rows) @ scale
        if torch.allclose(following, outputs, rtol=1e-12, atol=0):
            covariance = torch.kron(rows.contiguous(), (weight / ROWS * columns).contiguous())
            return Moments(mean, flat_square(covariance))
        outputs = following
    raise AssertionError(f"no fixed point: {outputs}")


# -- BALI ------------------------------------------------------------------------------------------------------

BALI_PRIOR, BALI_FLOOR = 5.0, 0.01


def bali() -> Moments:
    """The conjugate regression with unknown noise: W ~ MN(M, R, Σ) at the mode Σ = U / (N + m + 1).

    R⁻¹ = I / σ_r² + XᵀX, M = R XᵀY and U = U_0 + YᵀY − Mᵀ R⁻¹ M   [Kurle et al. 2024, Eq. 16 and 21]; the given noise
    is not used, for the layer infers its own.
    """
    row_precision = PROBLEM.gram + torch.eye(FEATURES + 1, dtype=torch.float64) / BALI_PRIOR
    mean = torch.linalg.solve(row_precision, PROBLEM.design.T @ PROBLEM.targets)
    floor = torch.diag(BALI_FLOOR * PROBLEM.targets.var(0, unbiased=False) * ROWS)
    scatter = floor + PROBLEM.targets.T @ PROBLEM.targets - mean.T @ row_precision @ mean
    covariance = torch.kron((scatter / (ROWS + OUTPUTS + 1)).contiguous(), torch.linalg.inv(row_precision).contiguous())
    return Moments(flat(mean.T), flat_square(covariance))
