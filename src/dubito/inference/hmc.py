"""Hamiltonian Monte Carlo for small networks: draws from the posterior itself, to judge others by [Neal 1996].

Chains are run by Pyro (the extra `reference`). Weights can be exchanged and signs flipped without changing the
function, so what must agree between chains is not the weights but what they answer on the training rows.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import seeds
from ..errors import (
    ConfigError,
    DubitoWarning,
    TrainingError,
    require_count,
    require_fraction,
    require_positive,
)
from ..inputs import Inputs, Place, map_tensors, take
from ..likelihoods import BuiltLikelihood, CategoricalLikelihood, GaussianLikelihood
from ..method import Method, Prepared
from ..networks import resolve, run, trainable
from ..posterior import Posterior
from ..priors import PriorStd, check_prior_std, prior_std_of
from ..training import Training

#: Chains agree where R-hat is at most the first and together are worth at least the second in independent draws.
MOST_R_HAT, LEAST_DRAWS = 1.05, 100.0
#: The most transitions that may diverge, as a share of the draws: a hint at regions the chains cannot enter.
MOST_DIVERGENT = 0.01
#: The most weights, and the training rows on whose outputs chains are compared.
MOST_WEIGHTS, COMPARED = 10_000, 64
#: The most weights whose correlations the chains learn in their warm-up.
MOST_DENSE = 300


class HMCPosterior(Posterior):
    """Equally likely draws of several chains; the network holds the likeliest of them.

    `details` holds the number of chains and their diagnostics: the largest R-hat and the least effective sample size
    over outputs, and the number of divergent transitions.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_atoms = self.details["draws"]

    def draw(self, index: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        assert self.num_atoms is not None
        kept = self.group("draws")
        return self.weights() | {name: draws[index % self.num_atoms] for name, draws in kept.items()}

    @property
    def r_hat(self) -> float:
        """The largest ratio of the spread over all chains to that within them, 1 where they agree."""
        return _read(self.details["r_hat"])

    @property
    def effective_sample_size(self) -> float:
        """What all draws together are worth in independent ones, for the output for which it is least."""
        return _read(self.details["effective_sample_size"])

    @property
    def converged(self) -> bool:
        """Whether the chains agree, are long enough, and hardly ever diverged."""
        return not self._complaints()

    def reference(self) -> "HMCPosterior":
        """This posterior, to be taken for the truth; refused where its chains have not converged."""
        complaints = self._complaints()
        if complaints:
            raise TrainingError(
                f"these chains are no reference: {'; '.join(complaints)}; give more warmup and num_samples, several "
                "chains, or a smaller network"
            )
        return self

    def _complaints(self) -> list[str]:
        found = []
        if self.details["chains"] < 2:
            found.append("a single chain cannot show that it has converged")
        if not self.r_hat <= MOST_R_HAT:
            found.append(f"R-hat is {self.r_hat:.3g}, at most {MOST_R_HAT:g} is needed")
        if not self.effective_sample_size >= LEAST_DRAWS:
            found.append(
                f"the effective sample size is {self.effective_sample_size:.3g}, at least {LEAST_DRAWS:g} is needed"
            )
        divergent, made = self.details["divergent"], self.details["chains"] * self.method.num_samples
        if divergent > MOST_DIVERGENT * made:
            found.append(f"{divergent} of {made} transitions diverged, at most {MOST_DIVERGENT:.0%} may")
        return found

    def holds(self, name: str) -> str:
        if name not in self.group("draws"):
            return "point"
        return f"{self.num_atoms} draws of {self.details['chains']} chains"


@dataclass(frozen=True, kw_only=True)
class HMC(Method):
    """Draws from the exact posterior under a Normal prior, for small networks and data in memory.

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
            raise ConfigError(
                f"num_samples over thin must leave at least 4 draws, got {self.num_samples // self.thin}"
            )
        check_prior_std(self.prior_std)
        if self.trajectory is not None:
            require_positive(trajectory=self.trajectory)
        require_fraction(zero=False, target_acceptance=self.target_acceptance)

    def _fit(self, prepared: Prepared, training: Training | None) -> HMCPosterior:
        if training is not None:
            raise ConfigError("HMC draws from the posterior and trains nothing; leave training= out")
        if prepared.run.checkpoint is not None:
            raise ConfigError("HMC keeps no checkpoint; leave checkpoint= out")
        target = Target(prepared, self.prior_std)
        chains, divergent = [], 0
        for number in range(self.chains):
            draws, own = self._chain(target, number, prepared.run.seed)
            chains.append(draws)
            divergent += own
        kept = torch.stack(chains)[:, :: self.thin]  # [chains, S, P]
        r_hat, worth = diagnostics(target.answers(kept.flatten(0, 1)).unflatten(0, kept.shape[:2]))
        draws = kept.transpose(0, 1).flatten(0, 1)  # the chains in turn
        energies = torch.stack([target.energy(draw) for draw in draws])
        posterior = self._around(target, draws, draws[energies.argmin()], prepared, r_hat, worth, divergent)
        complaints = posterior._complaints()
        if complaints:
            warnings.warn(
                f"the chains have not converged: {'; '.join(complaints)}; reference() will refuse them",
                DubitoWarning,
                stacklevel=4,
            )
        return posterior

    def _chain(self, target: "Target", number: int, seed: int) -> tuple[Tensor, int]:
        """Draws [S, P] of one chain, and how many of its transitions diverged."""
        try:
            from pyro.infer import HMC as PyroHMC
            from pyro.infer import MCMC, NUTS
        except ImportError as error:
            raise ConfigError("HMC needs Pyro; install it with: pip install dubito[reference]") from error
        # Few weights are strongly correlated, and their whole covariance is cheap to learn.
        dense = len(target.prior_std) <= MOST_DENSE
        options: dict[str, Any] = {"target_accept_prob": self.target_acceptance, "full_mass": dense}

        def potential(values: dict[str, Tensor]) -> Tensor:
            return target.energy(values["weights"])

        kernel = (
            NUTS(potential_fn=potential, max_tree_depth=self.tree_depth, **options)
            if self.trajectory is None
            else PyroHMC(potential_fn=potential, trajectory_length=self.trajectory, **options)
        )
        start = target.start(seeds.generator(seed, "start", number, device=target.place.device))
        with seeds.forked(
            seed, "chain", number, device=target.place.device
        ):  # Pyro draws from the global state
            chain = MCMC(
                kernel,
                num_samples=self.num_samples,
                warmup_steps=self.warmup,
                initial_params={"weights": start},
                disable_progbar=True,
            )
            chain.run()
        found = chain.diagnostics().get("divergences", {})
        draws = chain.get_samples()["weights"].detach()
        return draws.to(target.place.dtype), sum(len(own) for own in found.values())

    def _around(
        self,
        target: "Target",
        draws: Tensor,
        likeliest: Tensor,
        prepared: Prepared,
        r_hat: float,
        worth: float,
        divergent: int,
    ) -> HMCPosterior:
        with torch.no_grad():
            for name, value in target.named(likeliest).items():
                target.parameters[name].copy_(value)
        posterior = HMCPosterior(
            prepared.network,
            prepared.likelihood,
            method=self,
            structure={"draws": {name: own.clone() for name, own in target.named(draws).items()}},
            details={
                "draws": len(draws),
                "chains": self.chains,
                "r_hat": _written(r_hat),
                "effective_sample_size": _written(worth),
                "divergent": divergent,
            },
        )
        return posterior.finished()


class Target:
    """The posterior's energy −log p(D | w) − log p(w), as a function of all trained weights in one vector."""

    def __init__(self, prepared: Prepared, prior_std: PriorStd) -> None:
        self.network, self.likelihood = prepared.network, prepared.likelihood
        resolve(None, self.network)  # refuses a network whose parameters are all frozen
        if isinstance(self.likelihood, GaussianLikelihood) and self.likelihood.raw_std is not None:
            raise ConfigError("HMC needs known noise; give it as Gaussian(std=...)")
        self.parameters: dict[str, nn.Parameter] = trainable(self.network)
        self.place = Place.of(self.network)
        self.sizes = [parameter.numel() for parameter in self.parameters.values()]
        if sum(self.sizes) > MOST_WEIGHTS:
            raise ConfigError(
                f"HMC is for networks of at most {MOST_WEIGHTS} weights, got {sum(self.sizes)}; freeze some, or take "
                "another method"
            )
        stds = [
            parameter.new_full((parameter.numel(),), prior_std_of(prior_std, parameter))
            for parameter in self.parameters.values()
        ]
        self.prior_std = torch.cat(stds).detach()
        batches = list(prepared.source.batches(1024))
        self.inputs = _joined([batch.inputs for batch in batches])
        self.targets = torch.cat([batch.targets for batch in batches])

    def start(self, generator: torch.Generator) -> Tensor:
        """A draw from the prior."""
        return self.prior_std * torch.randn(
            self.prior_std.shape, generator=generator, dtype=self.place.dtype, device=self.place.device
        )

    def named(self, weights: Tensor) -> dict[str, Tensor]:
        """The vector(s) [..., P] as parameters [..., *shape] by name."""
        pieces = weights.split(self.sizes, -1)
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        return {
            name: piece.reshape(*weights.shape[:-1], *shape)
            for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    def outputs(self, weights: Tensor, inputs: Inputs) -> Tensor:
        """What the network answers with these weights."""
        return run(self.network, self.named(weights), inputs)

    def energy(self, weights: Tensor) -> Tensor:
        """−log p(D | w) − log p(w), without its constant."""
        fit = self.likelihood.log_prob(self.outputs(weights, self.inputs), self.targets).sum()
        return 0.5 * (weights / self.prior_std).square().sum() - fit

    @torch.no_grad()
    def answers(self, draws: Tensor) -> Tensor:
        """What each draw [S, P] says of the first training rows, [S, Q]: reals, logits, or log-probabilities."""
        inputs = take(self.inputs, slice(COMPARED))
        return torch.stack([_comparable(self.likelihood, self.outputs(draw, inputs)) for draw in draws])


def _comparable(likelihood: BuiltLikelihood, outputs: Tensor) -> Tensor:
    if isinstance(likelihood, CategoricalLikelihood):  # a constant on all logits changes nothing
        outputs = outputs.log_softmax(likelihood.settings.class_axis)
    return outputs.reshape(-1)


def _joined(pieces: list[Inputs]) -> Inputs:
    """Inputs of several batches as one."""
    if len(pieces) == 1:
        return pieces[0]
    collected: list[list[Tensor]] = []
    for piece in pieces:
        own: list[Tensor] = []
        map_tensors(_kept_in(own), piece)
        collected.append(own)
    whole = iter([torch.cat(parts) for parts in zip(*collected, strict=True)])
    return map_tensors(lambda _: next(whole), pieces[0])


def _kept_in(store: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def keep(tensor: Tensor) -> Tensor:
        store.append(tensor)
        return tensor

    return keep


def diagnostics(values: Tensor) -> tuple[float, float]:
    """The largest split R-hat and the least effective sample size over quantities [chains, S, Q].

    A quantity that never moves counts as having no independent draw at all, and R-hat without bound.
    """
    from pyro.ops.stats import effective_sample_size, split_gelman_rubin

    values = values.double()
    if bool((values.flatten(0, 1).std(0) == 0).any()) or not values.isfinite().all():
        return math.inf, 0.0
    r_hat = split_gelman_rubin(values, chain_dim=0, sample_dim=1)
    worth = effective_sample_size(values, chain_dim=0, sample_dim=1)
    return float(r_hat.nan_to_num(nan=math.inf).max()), float(worth.nan_to_num(nan=0.0).min())


def _written(value: float) -> float | None:
    """As JSON can hold it: without bound is None."""
    return value if math.isfinite(value) else None


def _read(value: float | None) -> float:
    return math.inf if value is None else value
