"""The variance of logits in every form of prediction, against closed forms of one linear layer."""

import pytest
import torch
from torch import Tensor, nn

from dubito import Bernoulli, Categorical, MeanField, Rank1, Training
from dubito.calibration.tempered import TemperedBernoulli, TemperedCategorical
from dubito.weight_normals.scales import OwnScale

TRAINING = Training(iterations=20, batch_size=20, lr=1e-2)
DRAWS = 6000
#: Five standard errors of a variance by so many draws, √(2 / S) of it, less where several logits are averaged.
CLOSE = {"rtol": 5 * (2 / DRAWS) ** 0.5, "atol": 0.0}


def rows(count: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed))


X, LABELS = rows(40, 3), torch.arange(40) % 4


@pytest.fixture(scope="module")
def mean_field():
    return MeanField().fit(nn.Linear(3, 4), (X, LABELS), Categorical(), training=TRAINING)


def logit_variances(posterior) -> Tensor:
    """Σ_j σ_cj² x_j² + σ_c² of the logits of one linear layer, which are independent, [B, C]."""
    std = {name: OwnScale(posterior.group("raw_std")[name]).std for name in ("weight", "bias")}
    return X.square() @ std["weight"].square().mT + std["bias"].square()


@pytest.mark.parametrize("form", ["sampled", "marginal"])
def test_one_layer_has_it_in_closed_form(mean_field, form: str) -> None:
    options = {"marginal": True} if form == "marginal" else {}
    found = mean_field.predict(X, DRAWS, **options).function_variance
    truth = (1 - 1 / 4) * logit_variances(mean_field).mean(1)  # the mean logit takes a quarter of each
    torch.testing.assert_close(found, truth, **CLOSE)
    part = mean_field.predict(X, DRAWS, **options)[3:7]
    assert part.function_variance.equal(found[3:7])


def test_draws_made_once_say_the_same(mean_field) -> None:
    fixed, drawn = mean_field.sampled(9, seed=3), mean_field.predict(X, 9, seed=3)
    for found in (fixed.predict(X).function_variance, fixed.as_module()(X)["function_variance"]):
        torch.testing.assert_close(found, drawn.function_variance)
    pieces = mean_field.predict(X, 9, seed=3, max_rows=7).function_variance
    torch.testing.assert_close(pieces, drawn.function_variance)


def test_rows_with_factors_of_their_own_are_distributed_alike() -> None:
    posterior = Rank1(components=1).fit(nn.Linear(3, 4), (X, LABELS), Categorical(), training=TRAINING)
    shared, apart = (posterior.predict(X, 4000, per_example=flag).function_variance for flag in (False, True))
    torch.testing.assert_close(apart, shared, rtol=0.3, atol=0.0)  # products of Normals have heavy tails


@pytest.mark.parametrize("outputs", [1, 2])
def test_tempered_draws_are_divided(mean_field, outputs: int) -> None:
    yes = (X[:, :outputs] > 0).float()
    binary = MeanField().fit(nn.Linear(3, outputs), (X, yes), Bernoulli(), training=TRAINING)
    for posterior, tempered in (
        (mean_field, TemperedCategorical(temperature=3.0)),
        (binary, TemperedBernoulli(temperature=3.0)),
    ):
        plain, likelihood = posterior.predict(X, 8).function_variance, posterior.likelihood
        posterior.likelihood = tempered.build(None)
        try:
            module = posterior.sampled(8).as_module()(X)
            torch.testing.assert_close(posterior.predict(X, 8).function_variance, plain / 9)
            torch.testing.assert_close(module["function_variance"], plain / 9)
        finally:
            posterior.likelihood = likelihood
