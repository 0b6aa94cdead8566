"""What every method makes of a regression whose posterior is known, and the judge of its draws.

`DECLARED` says for every method what it converges to in the regression of `problem.py`, as mean and covariance of its
draws, and how closely it must come: the posterior itself, or the optimum of the method's own family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from dubito import (
    BALI,
    EFB,
    HMC,
    INF,
    KFAC,
    MAP,
    SWA,
    SWAG,
    VOGN,
    BatchEnsemble,
    DeepEnsemble,
    Diagonal,
    Gaussian,
    Implicit,
    KTied,
    Laplace,
    MCDropout,
    MeanField,
    NoisyAdam,
    NoisyKFAC,
    Rank1,
    Training,
    Vadam,
)
from dubito.node_factors.laws import Normal
from dubito.posterior import Posterior
from dubito.training import SGD, Cosine

from . import closed_forms as forms
from .problem import FEATURES, PROBLEM, ROWS, Moments

# -- what is declared ------------------------------------------------------------------------------------------


def steps(iterations: int, lr: float, **options: Any) -> Training:
    """Steps on all rows whose rate falls to 0, so that the noise of gradients dies out."""
    return Training(iterations=iterations, batch_size=ROWS, lr=lr, schedule=Cosine(), **options)


DESCENT = Training(iterations=forms.DESCENT_STEPS, batch_size=ROWS, lr=forms.DESCENT_RATE, optimizer=SGD())


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a method converges to in the problem.

    Attributes:
        method: its settings for the problem.
        expected: mean and covariance of its draws.
        why: the same in words.
        training: how it is trained; None where it is not.
        bias: how far training may leave the mean from the expected one, in standard deviations (those of the
            posterior where a parameter is a point); beside it five standard errors of the draws.
        spread: the same for covariances, as a share of √(C_ii C_jj).
        network: makes the network.
    """

    method: Any
    expected: Callable[[], Moments]
    why: str
    training: Training | None = None
    bias: float = 0.0
    spread: float = 0.0
    network: Callable[[], nn.Module] = field(default=PROBLEM.network)


def behind_fixed_features() -> nn.Module:
    """The layer behind one that changes nothing and is not trained: dropout leaves the first layer alone."""
    first = nn.Linear(FEATURES, FEATURES, bias=False).double()
    with torch.no_grad():
        first.weight.copy_(torch.eye(FEATURES))
    return nn.Sequential(first.requires_grad_(False), PROBLEM.network())


def at_the_optimum() -> nn.Module:
    return PROBLEM.network(PROBLEM.posterior.mean)


STD, PRECISION = PROBLEM.prior_std, PROBLEM.prior_std**-2
#: Rounding alone separates what is solved in closed form from the same in closed form.
ROUNDING = 1e-8


def laplace(structure: Any, expected: Callable[[], Moments], why: str) -> Declared:
    return Declared(
        # The curvature is exact by default: there is one output.
        method=Laplace(structure=structure, prior_precision=PRECISION),
        expected=expected,
        why=why,
        network=at_the_optimum,
        bias=ROUNDING,
        spread=ROUNDING,
    )


# Tolerances of 0.15: what the noise of gradients leaves after 2,000 steps, or moving averages of squares never lose.
#: The weight λ of the divergence where a method has one: other than 1, so that it is seen.
TEMPERED = 0.5
#: Momentum ends at the optimum of a quadratic to rounding.
MOMENTUM = Training(iterations=400, batch_size=ROWS, lr=0.05, optimizer=SGD(momentum=0.9, nesterov=True))

DECLARED: Mapping[str, Declared] = {
    "map": Declared(
        method=MAP(prior_std=STD),
        expected=forms.optimum,
        why="a point at the most probable weights",
        training=MOMENTUM,
        bias=ROUNDING,
    ),
    "mc-dropout": Declared(
        method=MCDropout(rate=forms.DROPOUT_RATE, prior_std=STD),
        expected=forms.dropout,
        why="Bernoulli factors around the optimum of the loss they are trained with",
        training=steps(2000, 0.02),
        network=behind_fixed_features,
        bias=0.15,
        spread=0.1,
    ),
    "deep-ensemble": Declared(
        method=DeepEnsemble(members=3, prior_std=STD),
        expected=forms.optimum,
        why="a convex loss has one optimum, which all members find",
        training=MOMENTUM,
        bias=ROUNDING,
    ),
    "swa": Declared(
        method=SWA(prior_std=STD, snapshots=forms.SNAPSHOTS),
        expected=forms.averaged_iterates,
        why="the mean of the iterates of gradient descent, which are known on a quadratic",
        training=DESCENT,
        bias=ROUNDING,
    ),
    "swag": Declared(
        method=SWAG(prior_std=STD, snapshots=forms.SNAPSHOTS, rank=forms.SWAG_RANK),
        expected=forms.swag_of_iterates,
        why="moments of the iterates of gradient descent, which are known on a quadratic",
        training=DESCENT,
        bias=ROUNDING,
        spread=ROUNDING,
    ),
    "mean-field": Declared(
        method=MeanField(prior_std=STD, initial_std=0.05),
        expected=forms.mean_field,
        why="variances one over the diagonal of the precision",
        training=steps(2000, 0.01),
        bias=0.15,
        spread=0.15,
    ),
    "k-tied": Declared(
        method=KTied(rank=1, prior_std=STD, initial_std=0.05, tied=("weight",)),
        expected=forms.tied_mean_field,
        why="the best standard deviations that are products of a row's and a column's",
        training=steps(2000, 0.01),
        bias=0.15,
        spread=0.15,
    ),
    "batch-ensemble": Declared(
        method=BatchEnsemble(components=2),
        expected=forms.least_squares,
        why="its prior is flat and every member can be any matrix, so all are the least squares",
        training=steps(1500, 0.05),
        bias=ROUNDING,
    ),
    "rank1": Declared(
        method=Rank1(components=2, family=Normal(prior_mean=1.0, prior_std=forms.FACTOR_STD), initial_rate=0.01),
        expected=forms.rank1,
        why="the optimum of the evidence bound over points W, b and Normal factors on both sides",
        training=steps(2000, 0.02),
        bias=0.15,
        spread=0.15,
    ),
    "rank1-beside": Declared(
        method=Rank1(
            components=2,
            family=Normal(prior_mean=1.0, prior_std=forms.FACTOR_STD),
            initial_rate=0.01,
            beside=MeanField(prior_std=STD, initial_std=0.05, subset=("bias",)),
        ),
        expected=forms.rank1_beside,
        why="the optimum of the evidence bound over points W, Normal factors on both sides and Normal biases",
        training=steps(2000, 0.02),
        bias=0.15,
        spread=0.15,
    ),
    "implicit": Declared(
        method=Implicit(
            components=forms.IMPLICIT_COMPONENTS, prior_std=forms.FACTOR_STD, mean_std=0.1, noise_samples=2
        ),
        expected=forms.implicit,
        why="the optimum of the evidence bound over points W, b and Normal factors on the inputs",
        training=steps(2000, 0.02),
        bias=0.15,
        spread=0.15,
    ),
    "bali": Declared(
        method=BALI(
            prior_scale=forms.BALI_PRIOR, output_floor=forms.BALI_FLOOR, effective_data=float(ROWS), update_rate=1.0
        ),
        expected=forms.bali,
        why="the conjugate regression with unknown noise, at the mode of the noise",
        training=Training(iterations=3, batch_size=ROWS),
        bias=ROUNDING,
        spread=ROUNDING,
    ),
    "noisy-adam": Declared(
        method=NoisyAdam(prior_std=STD, initial_std=0.1, kl_weight=TEMPERED),
        expected=partial(forms.batch_squares, TEMPERED),
        why="squares of the batch's mean gradient, times its rows, in place of the Fisher information",
        training=steps(4000, 0.1),
        bias=0.15,
        spread=0.15,
    ),
    "vadam": Declared(
        method=Vadam(prior_std=STD, initial_std=0.1, betas=(0.9, 0.998)),
        expected=partial(forms.batch_squares, 1.0),
        why="squares of the batch's mean gradient, times its rows, in place of the Fisher information",
        training=steps(4000, 0.05),
        bias=0.15,
        spread=0.15,
    ),
    "vogn": Declared(
        method=VOGN(prior_std=STD, betas=(0.9, 0.01), kl_weight=TEMPERED),
        expected=partial(forms.row_squares, TEMPERED),
        why="squares of each row's gradient at draws in place of the Fisher information",
        training=steps(1500, 0.03),
        bias=0.15,
        spread=0.1,
    ),
    "noisy-kfac": Declared(
        method=NoisyKFAC(prior_std=STD, kl_weight=TEMPERED),
        expected=partial(forms.noisy_kfac, TEMPERED),
        why="the empirical Fisher at draws, a Kronecker product, with factored damping for the prior",
        training=steps(1500, 0.05),
        bias=0.15,
        spread=0.15,
    ),
    "laplace-diag": laplace(Diagonal(), forms.laplace_diagonal, "the diagonal of the precision"),
    "laplace-kfac": laplace(KFAC(), lambda: PROBLEM.posterior, "the posterior: the precision is a Kronecker product"),
    "laplace-efb": laplace(EFB(), lambda: PROBLEM.posterior, "the posterior: the precision has Kronecker eigenvectors"),
    "laplace-inf": laplace(
        INF(rank=forms.INF_RANK), forms.laplace_inf, "some eigenvectors of the precision and its exact diagonal"
    ),
    "hmc": Declared(
        method=HMC(prior_std=STD, num_samples=500, warmup=100, chains=2),
        expected=lambda: PROBLEM.posterior,
        why="the posterior itself",
        # Draws of a chain hang together: 5 standard errors are those of independent draws.
        bias=0.1,
        spread=0.1,
    ),
}


# -- fits and their draws --------------------------------------------------------------------------------------

#: Draws of a posterior with infinitely many: the standard error of a variance is 2 % of it.
NUM_DRAWS = 4000
#: What draws may be off by, in standard errors of their mean, beside what is declared.
STANDARD_ERRORS = 5


@cache
def fitted(name: str) -> Posterior:
    """The posterior of a declared method."""
    declared = DECLARED[name]
    return declared.method.fit(
        declared.network(),
        (PROBLEM.inputs, PROBLEM.targets),
        Gaussian(std=PROBLEM.noise),
        training=declared.training,
        seed=1,
    )


@cache
def drawn(name: str) -> Tensor:
    """Draws as vectors of the trained parameters, [S, P]; each atom once where there are finitely many."""
    posterior = fitted(name)
    names = [parameter for parameter in posterior.weights() if parameter in posterior.trainable]
    draws = (posterior.draw(index, posterior.generator(0, index)) for index in range(posterior.num_atoms or NUM_DRAWS))
    return torch.stack([torch.cat([weights[name].flatten() for name in names]) for weights in draws])


def refusal(draws: Tensor, declared: Declared) -> str | None:
    """Why draws [S, P] do not have the declared mean and covariance; None where they have."""
    expected = declared.expected()
    stds = expected.covariance.diagonal().sqrt()
    # A parameter that is a point is measured in the posterior's standard deviations.
    unit = torch.where(stds > 0, stds, PROBLEM.posterior.covariance.diagonal().sqrt())
    centred = draws - draws.mean(0)
    products = centred[:, :, None] * centred[:, None]
    # Points that are off by b from the optimum are off by at most 2b from each other.
    share = torch.where(stds[:, None] * stds > 0, declared.spread, 4 * declared.bias**2)
    for what, off, allowed, sample in (
        ("means", draws.mean(0) - expected.mean, declared.bias * unit, draws),
        ("covariances", products.mean(0) - expected.covariance, share * unit[:, None] * unit, products),
    ):
        allowed = allowed + STANDARD_ERRORS * sample.std(0, unbiased=False) / len(draws) ** 0.5
        if (off.abs() > allowed).any():
            return f"{what} are off by {off.tolist()}, at most {allowed.tolist()} is allowed ({declared.why})"
    return None
