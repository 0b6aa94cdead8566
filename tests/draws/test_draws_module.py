"""The module of draws made once: what `predict` says, from threads, and in exported programs."""

import pytest
import torch
from torch import Tensor, nn

from dubito import (
    Bernoulli,
    Categorical,
    DeepEnsemble,
    Gaussian,
    Laplace,
    MCDropout,
    MeanField,
    NetworkError,
    Rank1,
    Training,
)

QUICK = Training(epochs=2, batch_size=16, lr=1e-2)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
quiet = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def convolutional() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 3)
        return nn.Sequential(*layers)


X = rows(24, 4)
CASES = {
    "classes": (Categorical(), torch.arange(24) % 3, 3),
    "yes or no": (Bernoulli(), (torch.arange(24) % 2).float()[:, None].expand(24, 2), 2),
    "reals": (Gaussian(), rows(24, 2, seed=1), 2),
    "correlated reals": (Gaussian(covariance=((1.0, 0.5), (0.5, 2.0))), rows(24, 2, seed=1), 2),
}
NAMES = {
    "classes": ["probs", "total", "aleatoric", "epistemic"],
    "reals": ["mean", "std", "aleatoric_std", "epistemic_std"],
}


@pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", [Rank1(components=2), DeepEnsemble(members=3), Laplace(linearised=True)])
def test_it_says_what_the_prediction_says(method, name: str) -> None:
    likelihood, targets, outputs = CASES[name]
    posterior = method.fit(dense(outputs), (X, targets), likelihood, training=QUICK)
    fixed = posterior.sampled(6)
    module, prediction, drawn = (fixed.as_module(), fixed.predict(X), fixed.sample_outputs(X, fixed.num_samples))
    answer = module(X)
    names = NAMES["classes" if name in ("classes", "yes or no") else "reals"]
    for key in names:
        torch.testing.assert_close(answer.pop(key), getattr(prediction, key), **CLOSE)
    if "mean" in names:
        lower, upper = prediction.interval(0.95)
        torch.testing.assert_close(answer.pop("lower"), lower, **CLOSE)
        torch.testing.assert_close(answer.pop("upper"), upper, **CLOSE)
    else:
        variance = drawn.var(0, correction=0)
        if name == "classes":  # of logits up to a constant of the row, the mean over classes
            variance = torch.stack([draw - draw.mean(1, keepdim=True) for draw in drawn]).var(0, correction=0).mean(1)
        torch.testing.assert_close(answer["function_variance"], variance, **CLOSE)
        torch.testing.assert_close(answer.pop("function_variance"), prediction.function_variance, **CLOSE)
    assert not answer


EXPORTED = {
    "stacked weights": (MeanField(), dense, X),
    "stacked kernels": (MeanField(), convolutional, rows(24, 1, 6, 6)),
    "factors": (Rank1(components=2), convolutional, rows(24, 1, 6, 6)),
    "masks on nodes": (MCDropout(rate=0.5), dense, X),
    "members": (DeepEnsemble(members=2), convolutional, rows(24, 1, 6, 6)),
}


@quiet
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_programs_take_any_number_of_rows(name: str) -> None:
    method, make, x = EXPORTED[name]
    fixed = method.fit(make(), (x, torch.arange(24) % 3), Categorical(), training=QUICK).sampled(4, seed=2)
    module = fixed.as_module()
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        program = torch.export.export(module, (x[:5],), dynamic_shapes=dynamic, strict=False).module()
        for count in (5, 1, 24):
            answer, prediction = program(x[:count]), fixed.predict(x[:count])
            for key in NAMES["classes"]:
                torch.testing.assert_close(answer[key], getattr(prediction, key), **CLOSE)


@quiet
def test_exported_reals_have_their_interval() -> None:
    likelihood, targets, outputs = CASES["reals"]
    fixed = Rank1(components=2).fit(dense(outputs), (X, targets), likelihood, training=QUICK).sampled(4)
    with torch.no_grad():
        dynamic = ({0: torch.export.Dim.DYNAMIC},)
        program = torch.export.export(fixed.as_module(), (X[:5],), dynamic_shapes=dynamic, strict=False).module()
        answer, (lower, upper) = program(X), fixed.predict(X).interval()
    torch.testing.assert_close(answer["lower"], lower, **CLOSE)
    torch.testing.assert_close(answer["upper"], upper, **CLOSE)


@quiet
def test_what_cannot_be_traced_is_refused_in_words() -> None:
    fixed = Laplace(linearised=True).fit(dense(), (X, torch.arange(24) % 3), Categorical()).sampled(4)
    with pytest.raises(NetworkError, match="linearised=False"):
        torch.export.export(fixed.as_module(), (X[:5],), strict=False)
