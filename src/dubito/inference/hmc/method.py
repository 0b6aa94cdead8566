"""HMC as a method: chains from draws of the prior, compared by what they answer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError, require_count, require_fraction, require_positive, warn
from ...fitting import Prepared
from ...method import Method
from ...priors import PriorStd, check_prior_std
from ...training import Training
from .chains import diagnostics, finished_chains
from .posterior import HMCPosterior
from .target import Target


@dataclass(frozen=True, kw_only=True)
class HMC(Method):
    """Draws from the exact posterior under a Normal prior, for small networks and data in memory.

    With a checkpoint, chains that have finished are kept there, and the same call goes on with the next.

    Args:
        num_samples: draws of each chain that are kept, after warm-up.
        warmup: draws before them, in which step sizes and scales are found.
        chains: independent chains, each from its own draw of the prior.
        prior_std: standard deviation of the prior around 0 on all weights, or `He()`.
        trajectory: length of the trajectories; None lets them go on until they turn back (NUTS).
        tree_depth: NUTS doubles a trajectory at most so many times: 2^tree_depth gradients per draw.
        target_acceptance: acceptance rate that the step size is tuned for.
        thin: keep every so many draws.
    """

    num_samples: int = 500
    warmup: int = 500
    chains: int = 4
    prior_std: PriorStd = 1.0
    trajectory: float | None = None
    tree_depth: int = 8
    target_acceptance: float = 0.8
    thin: int = 1

    posterior_type = HMCPosterior

    def __post_init__(self) -> None:
        require_count(num_samples=self.num_samples, warmup=self.warmup, chains=self.chains, thin=self.thin)
        require_count(4, num_samples=self.num_samples)
        require_count(tree_depth=self.tree_depth)
        if self.num_samples // self.thin < 4:
            raise ConfigError(f"num_samples over thin must leave at least 4 draws, got {self.num_samples // self.thin}")
        check_prior_std(self.prior_std)
        if self.trajectory is not None:
            require_positive(trajectory=self.trajectory)
        require_fraction(zero=False, target_acceptance=self.target_acceptance)

    def fit_prepared(self, prepared: Prepared, training: Training | None) -> HMCPosterior:
        if training is not None:
            raise ConfigError("HMC draws from the posterior and trains nothing; leave training= out")
        target = Target(prepared, self.prior_std)
        chains, divergent = finished_chains(self, target, prepared)
        thinned = chains[:, :: self.thin]  # [chains, S, P]
        r_hat, worth = diagnostics(target.answers(thinned.flatten(0, 1)).unflatten(0, thinned.shape[:2]))
        posterior = self._posterior(
            target,
            thinned.transpose(0, 1).flatten(0, 1),  # the chains in turn
            prepared,
            {"r_hat": _written(r_hat), "effective_sample_size": _written(worth), "divergent": divergent},
        )
        complaints = posterior.complaints()
        if complaints:
            warn(f"the chains have not converged: {'; '.join(complaints)}; reference() will refuse them")
        return posterior

    def _posterior(
        self, target: Target, draws: Tensor, prepared: Prepared, diagnosed: dict[str, float | None]
    ) -> HMCPosterior:
        """The posterior of the draws [S, P], around the likeliest of them."""
        with torch.no_grad():
            energies = torch.stack([target.energy(draw) for draw in draws])
            for name, value in target.named(draws[energies.argmin()]).items():
                target.parameters[name].copy_(value)
        posterior = HMCPosterior(
            prepared.network,
            prepared.likelihood,
            method=self,
            tensors={"draws": {name: values.clone() for name, values in target.named(draws).items()}},
            details={"draws": len(draws), "chains": self.chains, **diagnosed},
        )
        return posterior.finished()


def _written(value: float) -> float | None:
    """As JSON can hold it: without bound is None."""
    return value if math.isfinite(value) else None
