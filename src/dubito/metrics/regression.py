"""How good predictions of real numbers are, from their mean alone or from a whole Gaussian mixture.

A posterior's prediction is the mixture 1/S Σ_s N(means[s], stds[s]²) of its S draws. Several outputs, [B, C]
or more axes, are allowed everywhere: the likelihood is that of the outputs together, every other metric
averages over them.
"""

import math

import torch
from torch import Tensor

from dubito.errors import DataError
from dubito.hints import checked

from ._checks import finite, same_shape


def rmse(targets: Tensor, mean: Tensor) -> float:
    """Root of the mean squared error over all entries of `mean` and `targets`, of one shape [B, ...]."""
    from torchmetrics.functional.regression import mean_squared_error

    targets, mean = _pair(targets, mean)
    return float(mean_squared_error(mean, targets, squared=False))


def mae(targets: Tensor, mean: Tensor) -> float:
    """Mean absolute error over all entries of `mean` and `targets`, of one shape [B, ...]."""
    from torchmetrics.functional.regression import mean_absolute_error

    targets, mean = _pair(targets, mean)
    return float(mean_absolute_error(mean, targets))


def mixture_log_prob_per_example(targets: Tensor, means: Tensor, stds: Tensor) -> Tensor:
    """Log-density of each target under its Gaussian mixture, in nats, [B].

    Args:
        targets: Real numbers [B, ...]; further axes are outputs, independent given s, of one joint density.
        means: Means of the S equally weighted components, [S, B, ...].
        stds: Standard deviations above 0, broadcast to the shape of `means`.
    """
    targets, means, stds = _mixture(targets, means, stds)
    if stds.min() <= 0:
        raise DataError(f"stds must be above 0 for a density, got a least value of {float(stds.min()):.6g}")
    log_probs = torch.distributions.Normal(means, stds, validate_args=False).log_prob(targets)  # [S, B, ...]
    joint = log_probs.reshape(*means.shape[:2], -1).sum(-1)  # [S, B]
    # log p(y_b) = logsumexp_s Σ_c log N(y_bc; m_sbc, σ_sbc²) - log S
    return joint.logsumexp(0) - math.log(len(means))


def mixture_log_prob(targets: Tensor, means: Tensor, stds: Tensor) -> float:
    """Mean of `mixture_log_prob_per_example`: the log-likelihood of Gaussian mixtures, in nats."""
    return float(mixture_log_prob_per_example(targets, means, stds).mean())


@checked
def crps_mixture_per_example(
    targets: Tensor, means: Tensor, stds: Tensor, weights: tuple[float, ...] | None = None
) -> Tensor:
    """Continuous ranked probability score of each example's Gaussian mixture, averaged over outputs, [B].

    Args:
        targets: Real numbers [B, ...].
        means: Means of the S equally weighted components, [S, B, ...].
        stds: Standard deviations, broadcast to the shape of `means`; with 0 the components are points, and
            the score is that of an ensemble of S numbers.
        weights: K that sum to 1, where not all components count alike: component s has a share of number s mod K.
    """
    targets, means, stds = _mixture(targets, means, stds)
    if stds.min() < 0:
        raise DataError(f"stds must be at least 0, got a least value of {float(stds.min()):.6g}")
    variances = stds.square()
    # torchmetrics has the CRPS of points alone; this is that of the mixture itself:
    # CRPS = Σ_s w_s A(y - m_s, σ_s²) - ½ Σ_s Σ_t w_s w_t A(m_s - m_t, σ_s² + σ_t²)   [Grimit et al. 2006]
    spread = torch.zeros_like(means[0])
    if weights and (len(means) % len(weights) or min(weights) < 0):
        raise DataError(f"weights must be at least 0, and divide {len(means)} components evenly, got {weights}")
    shares = means.new_tensor(weights or (1.0,))
    times = len(means) // len(shares)
    shares = (shares.repeat(times) / times).reshape(-1, *[1] * (means.ndim - 1))
    for s in range(len(means)):  # one s at a time holds at most S·B numbers, not S²·B
        distance = _expected_distance(means[s] - means[s:], variances[s] + variances[s:])
        distance = distance * shares[s:]
        spread += shares[s] * (2 * distance.sum(0) - distance[0])  # t > s stands for t < s too, t = s once
    score = (shares * _expected_distance(targets - means, variances)).sum(0) - spread / 2
    return score.reshape(len(targets), -1).mean(1)


def crps_mixture(targets: Tensor, means: Tensor, stds: Tensor) -> float:
    """Mean of `crps_mixture_per_example`: the exact CRPS of Gaussian mixtures, in the unit of the targets."""
    return float(crps_mixture_per_example(targets, means, stds).mean())


def crps_gaussian(targets: Tensor, mean: Tensor, std: Tensor) -> float:
    """Mean exact CRPS of Gaussian predictions: the mixture of a single component.

    Args:
        targets: Real numbers [B, ...].
        mean: Predicted means, of the same shape.
        std: Standard deviations of at least 0, broadcast to that shape.
    """
    mean = finite("mean", mean)
    same_shape("mean", mean, "targets", finite("targets", targets))
    return crps_mixture(targets, mean[None], std)


def _expected_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """A(m, v) = E|X| for X ~ N(m, v)."""
    std = variance.sqrt()
    ratio = mean / std
    # A(m, σ²) = 2 σ φ(m/σ) + m (2 Φ(m/σ) - 1), and 2 Φ(z) - 1 = erf(z/√2);   A(m, 0) = |m|
    density = (-ratio.square() / 2).exp() / math.sqrt(2 * math.pi)
    distance = 2 * std * density + mean * torch.erf(ratio / math.sqrt(2))
    return torch.where(variance > 0, distance, mean.abs())


def _pair(targets: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    mean, targets = finite("mean", mean), finite("targets", targets)
    same_shape("mean", mean, "targets", targets)
    return targets.to(mean.device).flatten(), mean.flatten()


def _mixture(targets: Tensor, means: Tensor, stds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    targets, means, stds = finite("targets", targets), finite("means", means), finite("stds", stds)
    if targets.ndim < 1 or means.shape[1:] != targets.shape:
        raise DataError(
            f"means must have shape [S, B, ...] for targets of shape [B, ...], got {list(means.shape)} for "
            f"{list(targets.shape)}; a single prediction is means[None]"
        )
    try:
        stds = stds.to(means.device).broadcast_to(means.shape)
    except RuntimeError:
        raise DataError(
            f"stds must broadcast to the shape of means, {list(means.shape)}, got {list(stds.shape)}"
        ) from None
    dtype = torch.promote_types(torch.promote_types(targets.dtype, means.dtype), stds.dtype)
    return targets.to(means.device, dtype), means.to(dtype), stds.to(dtype)
