"""Warnings at the end of a fit: standard deviations that never moved, and noise that drowns the network."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dubito import (
    BALI,
    MAP,
    Bernoulli,
    Categorical,
    DubitoWarning,
    Gaussian,
    Implicit,
    KTied,
    MCDropout,
    MeanField,
    NoisyKFAC,
    Rank1,
    Training,
    Vadam,
    factors,
)
from dubito.fitting import prepare
from dubito.method import Method
from dubito.noise_check import constant_nll, drowned

LONG = Training(iterations=200, batch_size=64, lr=5e-3)


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))


def table(rows: int = 128) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] > 0).long()


def told(method: Method, training: Training, data: Any = None, model: nn.Module | None = None) -> list[str]:
    """What a fit warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.fit(model or net(), data or table(), Categorical(), training=training)
    assert all(item.category is DubitoWarning for item in caught)
    return [str(item.message) for item in caught]


def trained() -> nn.Module:
    return MAP().fit(net(), table(), Categorical(), training=LONG).network.requires_grad_()


HEALTHY = {
    "mean field": MeanField(),
    "k-tied": KTied(),
    "rank-1": Rank1(components=2),
    "implicit": Implicit(components=2),
    "Vadam": Vadam(),
    "Noisy K-FAC": NoisyKFAC(),
    "MC dropout": MCDropout(),
    "BALI": BALI(effective_data=1.0),
}


@pytest.mark.parametrize("method", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_fit_says_nothing(method: Method) -> None:
    assert told(method, LONG) == []


STUCK = {
    "mean field": MeanField(),
    "k-tied": KTied(),
    "rank-1": Rank1(components=2),
    "implicit": Implicit(components=2),
}


@pytest.mark.parametrize("method", STUCK.values(), ids=STUCK)
def test_standard_deviations_that_never_moved_are_named_with_the_remedy(method: Method) -> None:
    slow = Training(iterations=200, batch_size=64, lr=5e-3, variational_lr=2e-5)
    (sentence,) = told(method, slow)
    assert sentence.startswith(type(method).__name__)
    assert "never left their start" in sentence and "variational_lr" in sentence and "200 steps" in sentence
    short = Training(iterations=199, batch_size=64, lr=5e-3, variational_lr=2e-5)
    assert told(method, short) == []


def test_standard_deviations_at_their_limit_may_stay() -> None:
    slow = Training(iterations=200, batch_size=64, lr=5e-3, variational_lr=2e-5)
    assert told(MeanField(initial_std=0.01, max_std=0.01), slow) == []


DROWNING = {
    "mean field": MeanField(initial_std=3.0, prior_std=3.0),
    "Vadam": Vadam(initial_std=3.0, prior_std=3.0, count_rows=False),
    "rank-1": Rank1(components=2, family=factors.Normal(prior_std=10.0), initial_rate=0.99, bound=None),
}


@pytest.mark.parametrize("method", DROWNING.values(), ids=DROWNING)
def test_noise_that_drowns_a_trained_network_is_named_with_the_remedy(method: Method) -> None:
    gentle = Training(iterations=200, batch_size=64, lr=1e-4, variational_lr=1e-3)
    sentences = told(method, gentle, model=trained())
    (sentence,) = [item for item in sentences if "never left" not in item]
    assert "larger than this network can average out" in sentence and "scaled(s)" in sentence


def test_rows_without_anything_to_learn_are_no_reason() -> None:
    x, _ = table()
    coins = torch.randint(2, (len(x),), generator=torch.Generator().manual_seed(2))
    assert told(MeanField(), Training(iterations=200, batch_size=64, lr=1e-3), (x, coins)) == []


def test_figures_are_those_of_the_rows() -> None:
    """The NLL under noise is the mean over draws on evenly spread rows, the centre's that of the means."""
    x, y = table(300)
    posterior = MeanField(initial_std=2.0).fit(net(), (x, y), Categorical(), training=Training(iterations=1, lr=1e-9))
    rows = torch.arange(128) * 300 // 128
    labels = y[rows]
    outputs = posterior.sample_outputs(x[rows], 8)
    expected = nn.functional.cross_entropy(outputs.flatten(0, 1), labels.repeat(8))
    share = labels.float().mean()
    entropy = -(share * share.log() + (1 - share) * (1 - share).log())
    with torch.no_grad():
        centre = nn.functional.cross_entropy(posterior.network(x[rows]), labels)
    sentence = drowned(posterior, prepare(net(), (x, y), Categorical()).source)
    assert sentence is not None
    for value in (expected, entropy, centre):
        assert f"{value:.3g}" in sentence


def test_the_constant_prediction_is_the_best_one() -> None:
    """Against the likelihoods themselves, with the outputs that are best for all rows alike."""
    stream = torch.Generator().manual_seed(3)
    reals = torch.randn(50, 2, generator=stream) * torch.tensor([1.0, 3.0]) + 5
    built = Gaussian(std=tuple(reals.std(0, unbiased=False).tolist())).build(reals)
    expected = -built.log_prob(reals.mean(0).expand_as(reals), reals).mean()
    assert constant_nll(built, reals) == pytest.approx(float(expected), rel=1e-5)
    labels = torch.randint(3, (50, 4), generator=stream)
    logits = (torch.bincount(labels.flatten()) / 200).log()[None, :, None].expand(50, 3, 4)
    judge = Categorical().build(logits)
    assert constant_nll(judge, labels) == pytest.approx(float(-judge.log_prob(logits, labels).mean()), rel=1e-5)
    yes = (torch.rand(50, 2, generator=stream) < torch.tensor([0.2, 0.6])).float()
    odds = torch.logit(yes.mean(0)).expand_as(yes)
    coin = Bernoulli().build(odds)
    assert constant_nll(coin, yes) == pytest.approx(float(-coin.log_prob(odds, yes).mean()), rel=1e-5)


def test_posteriors_without_standard_deviations_list_none() -> None:
    assert not MAP().fit(net(), table(), Categorical(), training=Training(iterations=1)).standard_deviations()
