"""What a fit warns of at its end: standard deviations that never moved, and noise that drowns the network."""

import math

import torch
from torch import Tensor

from .errors import warn
from .fitting import Prepared
from .inputs import Batch
from .likelihoods import BernoulliLikelihood, BuiltLikelihood, CategoricalLikelihood, GaussianLikelihood
from .posterior import Posterior
from .sources import OrderedSource, Source

#: Shorter runs are taken for trials, and fewer rows tell nothing: nothing is said.
LEAST_STEPS, LEAST_ROWS = 200, 32
#: Standard deviations that moved by less than this in the median, in logarithms, never left their start.
LEAST_MOVE = 0.02
#: Standard deviations of each tensor that are compared, training rows that are judged, and draws that judge them.
COMPARED, ROWS, DRAWS = 1000, 128, 8
#: Noise that costs fewer nats is no matter, nor is more where draws gain this share of it on a constant prediction.
LEAST_COST, GAINED = 0.25, 0.1


@torch.no_grad()
def check_noise(posterior: Posterior, start: Tensor | None, prepared: Prepared) -> None:
    """Warn of what is wrong with the standard deviations of a posterior, if it has some, at the end of its fit.

    Args:
        posterior: whose run has ended.
        start: `logarithms` of its draft.
        prepared: the fit's ingredients.
    """
    steps = int(posterior.history[-1]["step"]) if posterior.history else 0
    if posterior.scalable and steps >= LEAST_STEPS:
        for sentence in filter(None, (unmoved(posterior, start, steps), drowned(posterior, prepared.source))):
            warn(f"{type(posterior.method).__name__}: {sentence}")


def unmoved(posterior: Posterior, start: Tensor | None, steps: int) -> str | None:
    """What is wrong where standard deviations stand where they began, and no limit holds them there."""
    end, limit = logarithms(posterior), getattr(posterior.method, "max_std", None)
    if start is None or end is None or (end - start).abs().median() >= LEAST_MOVE:
        return None
    if limit is not None and end.median() > math.log(limit) - LEAST_MOVE:
        return None
    return (
        f"the standard deviations never left their start (median {end.median().exp():.2g}), so they do not tell what "
        f"the data say: the run was too short for them ({steps} steps, or fewer if it was stopped early), or their "
        "rate too low; train longer, raise Training(variational_lr=...), or start elsewhere (`initial_std`, "
        "`initial_rate`)"
    )


def drowned(posterior: Posterior, source: Source) -> str | None:
    """What is wrong where training rows are on average no likelier under a draw than under a constant prediction.

    A network that learned nothing because of its noise, but whose centre is no better, cannot be told from rows with
    nothing to learn, and passes.
    """
    if not isinstance(source, OrderedSource) or source.num_data < LEAST_ROWS:
        return None
    count = min(ROWS, source.num_data)
    (batch,) = source.read([torch.arange(count) * source.num_data // count])
    assert batch is not None
    constant = constant_nll(posterior.likelihood, batch.targets)
    noisy, centre = (mean_nll(view, batch) for view in (posterior, posterior._view(0.0)))
    cost = noisy - centre
    if not cost > LEAST_COST or constant - noisy >= GAINED * cost:
        return None
    return (
        f"the noise is larger than this network can average out: training rows have an NLL of {noisy:.3g} under it, "
        f"{constant:.3g} under a constant prediction, {centre:.3g} under the posterior's centre; start with less "
        "noise (`initial_std`, `initial_rate`), lower the KL's weight (Training(kl=...)), train longer, or take "
        "posterior.scaled(s) with s below 1"
    )


def logarithms(posterior: Posterior) -> Tensor | None:
    """Logarithms of some standard deviations of every tensor; None where a posterior lists none."""
    stds = [std.detach().flatten() for std in posterior.standard_deviations()]
    return torch.cat([std[:: max(1, len(std) // COMPARED)] for std in stds]).log() if stds else None


def mean_nll(posterior: Posterior, batch: Batch) -> float:
    """The NLL of rows under a draw, on average over draws: the evidence bound's first term, not the mixture's NLL."""
    predictions = map(posterior.likelihood.predictive, posterior.sample_outputs(batch.inputs, DRAWS).split(1))
    return -float(torch.stack([judged.log_prob(batch.targets).mean() for judged in predictions]).mean())


def constant_nll(likelihood: BuiltLikelihood, targets: Tensor) -> float:
    """The NLL of the best constant prediction per output: the entropy of the targets."""
    if isinstance(likelihood, CategoricalLikelihood):
        counts = torch.bincount(targets.flatten())
        return float(torch.special.entr(counts / counts.sum()).sum()) * targets[0].numel()
    flat = targets.reshape(len(targets), -1).float()
    if isinstance(likelihood, GaussianLikelihood):
        # ½ log(2πe s²) of a Gaussian with the targets' own mean and variance
        return float((flat.std(0, unbiased=False).log() + 0.5 * math.log(2 * math.pi * math.e)).sum())
    if not isinstance(likelihood, BernoulliLikelihood):
        return math.inf  # no formula gives it
    rate = flat.mean(0)
    return float((torch.special.entr(rate) + torch.special.entr(1 - rate)).sum())
