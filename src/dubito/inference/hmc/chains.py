"""Chains: each run by Pyro, kept as it finishes, and how far they agree."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from ... import seeds
from ...errors import StorageError, require_extra
from ...fitting import Prepared
from ...storage.schema import Count, conform
from ...training import RunFacts, checkpoint, told
from .target import Target

if TYPE_CHECKING:
    from .method import HMC

#: The most weights whose correlations the chains learn in their warm-up.
MOST_DENSE = 300


class ChainsContent(TypedDict):
    """What a checkpoint holds beside the draws of finished chains."""

    fingerprint: dict[str, Any]
    divergent: list[Count]


def finished_chains(method: "HMC", target: Target, prepared: Prepared) -> tuple[Tensor, int]:
    """Draws of all chains [chains, S, P], and how many of their transitions diverged.

    Chains do not depend on each other, so those a checkpoint holds are not run again.
    """
    path, seed = prepared.run.checkpoint, prepared.run.seed
    expected = checkpoint.of_fit(method, prepared)
    draws, divergent = [], []

    def keep() -> None:
        if path is not None:
            tensors = {f"chain/{number}": chain_draws for number, chain_draws in enumerate(draws)}
            checkpoint.save(path, tensors, {"fingerprint": expected, "divergent": divergent})

    stored = None if path is None else checkpoint.load(path, expected)
    if stored is None:
        keep()  # what cannot be written is found before work starts
    else:
        tensors, content = stored
        with checkpoint.altered(path):
            conform(content, ChainsContent, "its content")
            numbers = range(len(content["divergent"]))
            form = (method.num_samples, len(target.prior_std)), target.like.dtype
            checkpoint.check_forms(tensors, {f"chain/{number}": form for number in numbers}, "the chains")
            if len(numbers) > method.chains:
                raise StorageError(f"it holds {len(numbers)} chains of {method.chains}")
        divergent += content["divergent"]
        draws += [tensors[f"chain/{number}"].to(target.like.device) for number in numbers]
    length = method.warmup + method.num_samples
    facts = RunFacts(title="HMC", total=method.chains * length, done=len(draws) * length)
    with told(facts, prepared.run.progress, prepared.run.callbacks) as watching:
        while len(draws) < method.chains:
            number = len(draws)

            def made(done: int, first: int = number * length, chain: int = number + 1) -> None:
                watching.step(first + done, {"chain": chain})

            chain_draws, bad = run_chain(method, target, number, seed, made)
            draws.append(chain_draws)
            divergent.append(bad)
            keep()
    return torch.stack(draws), sum(divergent)


def run_chain(method: "HMC", target: Target, number: int, seed: int, told: Callable[[int], None]) -> tuple[Tensor, int]:
    """Draws [S, P] of one chain, and how many of its transitions diverged.

    Args:
        method: its settings.
        target: what to draw from.
        number: of the chain.
        seed: of all chains.
        told: is called with the number of draws made so far, those of the warm-up included.
    """
    infer = require_extra("pyro.infer", "reference", "HMC")
    # Few weights are strongly correlated, and their whole covariance is cheap to learn.
    dense = len(target.prior_std) <= MOST_DENSE
    options: dict[str, Any] = {"target_accept_prob": method.target_acceptance, "full_mass": dense}

    def potential(values: dict[str, Tensor]) -> Tensor:
        return target.energy(values["weights"])

    def hook(kernel: Any, values: Any, stage: str, index: int) -> None:
        told(index + 1 if stage.startswith("Warmup") else method.warmup + index + 1)

    kernel = (
        infer.NUTS(potential_fn=potential, max_tree_depth=method.tree_depth, **options)
        if method.trajectory is None
        else infer.HMC(potential_fn=potential, trajectory_length=method.trajectory, **options)
    )
    device = target.like.device
    start = target.start(seeds.generator(seed, "start", number, device=device))
    with seeds.forked(seed, "chain", number, device=device):  # Pyro draws from the global state
        chain = infer.MCMC(
            kernel,
            num_samples=method.num_samples,
            warmup_steps=method.warmup,
            initial_params={"weights": start},
            hook_fn=hook,
            disable_progbar=True,
        )
        chain.run()
    divergences = chain.diagnostics().get("divergences", {})
    draws = chain.get_samples()["weights"].detach()
    return draws.to(target.like.dtype), sum(len(numbers) for numbers in divergences.values())


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
