"""Posteriors of draws made once: what they keep, how they run, and what they refuse."""

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

import dubito
from dubito import (
    HMC,
    KFAC,
    SWAG,
    Categorical,
    ConfigError,
    DeepEnsemble,
    Diagonal,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
)
from dubito.draws import Draws
from dubito.posterior import Posterior, SampledPosterior

QUICK = Training(epochs=2, batch_size=16, lr=1e-2)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seeded(make) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def dense() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))


def labels(count: int) -> Tensor:
    return torch.arange(count) % 3


X, Y = rows(24, 4), labels(24)


def fit(method, net: nn.Module | None = None) -> Posterior:
    return method.fit(net or dense(), (X, Y), Categorical(), training=QUICK)


class Centred(nn.Module):
    """Rows touch: each is judged beside the mean of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.head(torch.tanh(self.body(x)))
        return outputs - outputs.mean(0) + x[:, :3]


class Noisy(nn.Module):
    """Draws from the global generator in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden + 0.1 * torch.randn_like(hidden))


class Einsum(nn.Module):
    """A product that no rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(rows(8, 4)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(torch.einsum("bi,oi->bo", x, self.weight)))


def dropping() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)))


CASES = {
    "rows touch": (MeanField(), Centred, 1),
    "factors where rows touch": (Rank1(components=2), Centred, -1),
    "noise of its own": (MeanField(), Noisy, -1),
    "no rule": (MeanField(), Einsum, 1),
    "dropout layers": (MCDropout(rate=None), dropping, -1),
    "batch norm statistics": (
        DeepEnsemble(members=3),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        0,
    ),
}


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_network_predicts_what_its_draws_do_one_by_one(name: str) -> None:
    method, make, way = CASES[name]
    posterior = fit(method, seeded(make))
    count = posterior.num_atoms or 4
    truth = torch.stack(list(posterior._outputs(X, count, 5, 1024, keep_graph=True))).detach()  # never in a tile
    assert len({tuple(draw.flatten().tolist()) for draw in truth}) == count
    fixed = posterior.sampled(4, seed=5)
    torch.testing.assert_close(fixed.predict(X).probs, truth.softmax(-1).mean(0), **CLOSE)
    torch.testing.assert_close(posterior.predict(X, 4, seed=5).probs, truth.softmax(-1).mean(0), **CLOSE)
    assert fixed._ways[fixed.together.kind] == way
    torch.testing.assert_close(posterior.function(1, 5)(X), truth[1], **CLOSE)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_chains_of_hmc_are_kept_once() -> None:
    pytest.importorskip("pyro")
    posterior = HMC(num_samples=4, warmup=2, chains=2).fit(dense(), (X, Y), Categorical())
    fixed = posterior.sampled(32)
    assert fixed.num_samples == posterior.num_atoms == 8
    assert torch.equal(fixed.predict(X).probs, fixed.predict(X, 2, seed=9).probs)
    torch.testing.assert_close(fixed.predict(X).probs, posterior.predict(X).probs, **CLOSE)


def test_rows_decide_between_one_pass_and_a_loop() -> None:
    passes = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(len(x))
            return super().forward(x)

    posterior = fit(MeanField(), seeded(lambda: nn.Sequential(Watched(4, 8), nn.Tanh(), nn.Linear(8, 3))))
    fixed, many = posterior.sampled(6), rows(256, 4)
    fixed.predict(X)  # the trial
    for count, expected in ((5, [30]), (256, [256] * 6)):
        passes.clear()
        fixed.predict(many[:count])
        assert passes == expected
    passes.clear()
    fixed.predict(many[:9], max_rows=5)
    assert passes == [5, 4] * 6
    factors = fit(Rank1(components=2), nn.Sequential(Watched(4, 8), nn.Tanh(), nn.Linear(8, 3))).sampled(40)
    factors.predict(X)
    for count, expected in ((100, [4000]), (200, [4000, 4000]), (2049, [1025] * 2 * 40)):
        passes.clear()
        factors.predict(rows(count, 4), max_rows=1025)
        assert sorted(set(passes)) == sorted({*expected, *([1024] if count == 2049 else [])})


def test_factors_are_kept_and_not_weights() -> None:
    net = seeded(
        lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    )
    data = rows(16, 256), labels(16)
    posterior = Rank1().fit(net, data, Categorical(), training=QUICK)
    weights = sum(p.numel() for p in net.parameters()) * 4
    fixed = posterior.sampled(32)
    assert fixed.nbytes < 1.25 * posterior.nbytes
    drawn = 256 + 512 + 512 + 512 + 512 + 3 + (512 + 512 + 3)  # both sides of every weight, and biases
    assert fixed.nbytes == weights + (32 + 4) * 4 * drawn  # and the means of 4 components, for `scaled`
    assert MeanField().fit(net, data, Categorical(), training=QUICK).sampled(32).nbytes == 33 * weights
    assert "32 input factors and output factors" in str(fixed.summary())


@pytest.mark.parametrize("method", [MeanField(), Rank1(components=2), Laplace(structure=KFAC(), linearised=True)])
def test_it_is_a_posterior_like_any_other(method, tmp_path) -> None:
    posterior = fit(method)
    fixed = posterior.sampled(4, seed=2)
    assert isinstance(fixed, SampledPosterior)
    probs = fixed.predict(X).probs
    fixed.save(tmp_path / "fixed.safetensors")
    again = dubito.load(tmp_path / "fixed.safetensors", dense())
    assert isinstance(again, SampledPosterior) and again.linearised is fixed.linearised
    assert again.nbytes == fixed.nbytes and again.num_samples == 4
    torch.testing.assert_close(again.predict(X).probs, probs, **CLOSE)
    for other in (copy.deepcopy(fixed), fixed.sampled(9, seed=8)):
        torch.testing.assert_close(other.predict(X).probs, probs, **CLOSE)
    scores = fixed.evaluate((X, Y))
    assert scores["accuracy"] == pytest.approx(float((probs.argmax(1) == Y).float().mean()))
    outputs = fixed.sample_outputs(X, 6)
    assert torch.equal(outputs[4:], outputs[:2]) and torch.equal(fixed.sample_outputs(X, 2), outputs[:2])
    double = copy.deepcopy(fixed).double()
    assert double.predict(X).probs.dtype == torch.float64
    torch.testing.assert_close(double.predict(X).probs.float(), probs, **CLOSE)
    with torch.no_grad():  # it shares no memory with the posterior it was made of
        for parameter in posterior.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(fixed.predict(X).probs, probs, **CLOSE)


@pytest.mark.parametrize("method", [MeanField(), Rank1(components=2), Laplace(structure=KFAC(), linearised=True)])
def test_precision_and_inference_mode_reach_the_pass(method) -> None:
    posterior = fit(method)
    fixed = posterior.sampled(4)
    with torch.inference_mode():
        first = fixed.predict(X).probs  # the first pass is made here
    probs = fixed.predict(X).probs
    assert torch.equal(first, probs)
    low = fixed.predict(X, precision="bf16").probs
    assert 1e-5 < (low - probs).abs().max() < 0.02
    if not fixed.linearised:
        torch.testing.assert_close(low, posterior.predict(X, 4, precision="bf16").probs, rtol=0, atol=0.02)


def test_forms_that_draws_do_not_have_are_refused() -> None:
    fixed = fit(MeanField()).sampled(2)
    with pytest.raises(ConfigError, match="functions of all rows"):
        fixed.predict(X, marginal=True)
    with pytest.raises(ConfigError, match="draws are of weights"):
        fixed.predict(X, linearised=True)
    with pytest.raises(ConfigError, match="linearised=True is for posteriors of Laplace"):
        fit(MeanField()).sampled(2, linearised=True)
    linear = fit(Laplace(structure=Diagonal())).sampled(2, linearised=True)
    assert linear.predict(X, linearised=True).probs.shape == (24, 3)
    with pytest.raises(ConfigError, match="draws are linearised"):
        linear.function(linearised=False)
    with pytest.raises(ConfigError, match="no network with other weights"):
        linear.fold()
    with pytest.raises(ConfigError):
        fixed.sampled(0)


@pytest.mark.parametrize("linearised", [False, True])
def test_functions_are_differentiable_in_their_inputs(linearised: bool) -> None:
    posterior = fit(Laplace(structure=KFAC())).double()
    function, x = posterior.function(3, 7, linearised=linearised), X[:2].double().requires_grad_()
    outputs = posterior.sample_outputs(X[:2], 5, seed=7, linearised=linearised)
    torch.testing.assert_close(function(X[:2]).detach(), outputs[3])
    (gradient,) = torch.autograd.grad(function(x)[:, 1].sum(), x)
    step = 1e-5 * rows(2, 4, seed=4).double()
    ahead, behind = (function(x.detach() + sign * step)[:, 1].sum() for sign in (1, -1))
    torch.testing.assert_close((gradient * step).sum(), (ahead - behind).detach() / 2, rtol=1e-6, atol=0)
    kept = posterior.sample_outputs(x, 4, seed=7, linearised=linearised, keep_graph=True)
    torch.testing.assert_close(torch.autograd.grad(kept[3, :, 1].sum(), x)[0], gradient)


@pytest.mark.parametrize(
    "method", [MeanField(), Rank1(components=2), SWAG(), Laplace(structure=KFAC(), linearised=True)]
)
def test_eight_threads_are_one(method) -> None:
    posterior = fit(method)
    fixed = posterior.sampled(4)
    truth = [fixed.predict(X[: 1 + job]).probs for job in range(4)]
    fixed = posterior.sampled(4)  # not tried yet
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(8) as threads:
            module = fixed.as_module()
            found = list(threads.map(lambda job: fixed.predict(X[: 1 + job % 4]).probs, range(32)))
            served = list(threads.map(lambda job: module(X[: 1 + job % 4])["probs"], range(32)))
    finally:
        sys.setswitchinterval(interval)
    for results in (found, served):
        assert all(torch.equal(probs, truth[job % 4]) for job, probs in enumerate(results))


def test_kinds_are_known_by_their_names() -> None:
    assert set(Draws.kinds) == {"weights", "factors", "masks", "linearised"}
