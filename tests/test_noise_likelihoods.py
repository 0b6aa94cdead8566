"""Likelihoods of heavy tails, predicted noise, counts and one's own, against SciPy, quadrature, sums and autograd."""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

import dubito
from dubito import (
    GGN,
    KFAC,
    ConfigError,
    DataError,
    DeepEnsemble,
    Empirical,
    HeteroscedasticGaussian,
    Laplace,
    NegativeBinomial,
    NetworkError,
    OwnLikelihood,
    Poisson,
    StudentT,
    Training,
)
from dubito.likelihoods import BuiltLikelihood, Likelihood
from dubito.prediction import CountPrediction, StudentTPrediction, count_log_prob, special, student_t_log_prob

SETTINGS = {
    "heteroscedastic": HeteroscedasticGaussian(),
    "student-t": StudentT(df=4.5, std=0.7),
    "poisson": Poisson(),
    "negative-binomial": NegativeBinomial(total_count=1.7),
}
ALL = pytest.mark.parametrize("name", SETTINGS)
COUNTS = ("poisson", "negative-binomial")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(name: str, rows: int = 6) -> tuple[BuiltLikelihood, Tensor]:
    """A likelihood of two targets a row, and outputs for it."""
    outputs = normal(rows, 4 if name == "heteroscedastic" else 2)
    return SETTINGS[name].build(outputs), outputs


def law(name: str, outputs: np.ndarray):
    """SciPy's distribution of the targets given outputs [..., C]."""
    if name == "heteroscedastic":
        mean, log_std = np.split(outputs, 2, -1)
        return scipy.stats.norm(mean, np.exp(log_std))
    if name == "student-t":
        return scipy.stats.t(4.5, outputs, 0.7 * math.sqrt(2.5 / 4.5))
    rate = np.exp(outputs)
    return scipy.stats.poisson(rate) if name == "poisson" else scipy.stats.nbinom(1.7, 1.7 / (1.7 + rate))


def density(name: str, outputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    known = law(name, outputs)
    return known.logpmf(targets) if name in COUNTS else known.logpdf(targets)


# -- densities, draws, information ---------------------------------------------------------------------------


@ALL
def test_log_prob(name: str):
    likelihood, outputs = built(name)
    targets = torch.as_tensor(law(name, outputs.numpy()).rvs(random_state=0), dtype=torch.float64)
    truth = density(name, outputs.numpy(), targets.numpy()).sum(-1)
    np.testing.assert_allclose(likelihood.log_prob(outputs, targets).numpy(), truth, rtol=1e-12, atol=1e-12)


@ALL
def test_samples_are_quantiles_of_their_noise(name: str):
    likelihood, outputs = built(name, rows=40)
    noise = normal(*outputs.shape, seed=1)
    drawn = likelihood.sample_with(outputs, noise).numpy()
    level = scipy.stats.norm.cdf(noise.numpy()[:, :2])
    np.testing.assert_allclose(drawn, law(name, outputs.numpy()).ppf(level), rtol=1e-9, atol=1e-9)


@ALL
def test_information_is_the_expected_square_of_scores(name: str):
    """E over targets of s sᵀ, scores s by autograd: by quadrature over levels of reals, by summation over counts."""
    likelihood, outputs = built(name, rows=1)
    outputs = outputs[:, ::2] if name == "heteroscedastic" else outputs[:, :1]  # one target
    likelihood = SETTINGS[name].build(outputs)
    known = law(name, outputs.numpy())
    if name in COUNTS:
        values = np.arange(0, 400.0)[:, None]
        weights = known.pmf(values)[:, 0]
    else:  # y = μ + σ sinh(u), so that heavy tails are short
        nodes, weights = np.polynomial.legendre.leggauss(2000)
        centre, width = known.mean(), known.std()
        values = centre + width * np.sinh(12 * nodes)[:, None]
        weights = weights * 12 * np.cosh(12 * nodes) * known.pdf(values)[:, 0] * width[0, 0]
    targets = torch.as_tensor(values)

    def log_prob(row: Tensor, target: Tensor) -> Tensor:
        return likelihood.log_prob(row.unsqueeze(0), target.unsqueeze(0))[0]

    scores = vmap(jacrev(log_prob), (None, 0))(outputs[0], targets).detach()
    truth = torch.einsum("n,ni,nj->ij", torch.as_tensor(weights), scores, scores)
    root = likelihood.hessian_root(outputs)[0]
    torch.testing.assert_close(root @ root.mT, truth, rtol=1e-8, atol=1e-8)


@ALL
def test_empirical_curvature_is_autograds(name: str):
    likelihood, outputs = built(name)
    targets = torch.as_tensor(law(name, outputs.numpy()).rvs(random_state=1), dtype=torch.float64)
    ((weight, gradient),) = Empirical().seeds(likelihood, outputs, targets, lambda _: normal(1))
    truth = vmap(jacrev(lambda row, target: -likelihood.log_prob(row[None], target[None])[0]))(outputs, targets)
    assert weight == 1
    torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-10)


# -- predictions ---------------------------------------------------------------------------------------------


def mixture(name: str, draws: int = 5, rows: int = 4):
    """A prediction of several draws, and SciPy's components [S, B, C]."""
    likelihood, _ = built(name)
    outputs = normal(draws, rows, 4 if name == "heteroscedastic" else 2, seed=3)
    return likelihood.predictive(outputs), law(name, outputs.numpy())


@ALL
def test_moments(name: str):
    prediction, known = mixture(name)
    means, variances = known.mean(), known.var()
    np.testing.assert_allclose(prediction.mean, means.mean(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(prediction.aleatoric, variances.mean(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.epistemic, means.var(0), rtol=1e-10)
    np.testing.assert_allclose(prediction.std.square(), variances.mean(0) + means.var(0), rtol=1e-10)


@ALL
@pytest.mark.parametrize("level", [1e-4, 0.05, 0.5, 0.9, 0.9999])
def test_quantiles_of_the_exact_mixture(name: str, level: float):
    prediction, known = mixture(name)
    values = prediction.quantile(level).numpy()
    if name in COUNTS:
        assert (values == values.round()).all()
        assert (known.cdf(values).mean(0) >= level).all()
        assert (known.cdf(values - 1).mean(0) < level).all()
    else:
        np.testing.assert_allclose(known.cdf(values).mean(0), level, rtol=1e-10)


@ALL
def test_log_prob_of_the_mixture(name: str):
    prediction, known = mixture(name)
    targets = known.rvs(random_state=0)[0]
    logs = (known.logpmf if name in COUNTS else known.logpdf)(targets).sum(-1)  # [S, B]
    truth = scipy.special.logsumexp(logs, 0) - math.log(len(logs))
    np.testing.assert_allclose(prediction.log_prob(torch.as_tensor(targets)), truth, rtol=1e-11, atol=1e-11)


@ALL
def test_crps(name: str):
    prediction, known = mixture(name)
    targets = known.rvs(random_state=1)[0] + np.array([[0], [0], [3], [40]])  # the last far outside
    if name in COUNTS:
        values = np.arange(0, 3000)[:, None, None, None]
        cdf = known.cdf(values).mean(1)
        truth = np.square(cdf - (values[:, 0] >= targets)).sum(0)
    else:
        nodes, weights = np.polynomial.legendre.leggauss(400)
        truth = 0.0
        for sign in (-1, 1):  # left and right of the target, as far as anything is left of the tails
            edges = [0, 0.01, 0.1, 1, 3, 10, 30, 100, 1000, 1e5]
            for low, high in pairwise(edges):
                points = (low + high) / 2 + (high - low) / 2 * nodes
                values = targets + sign * points[:, None, None]
                tail = (known.cdf if sign < 0 else known.sf)(values[:, None]).mean(1)
                truth = truth + (high - low) / 2 * np.einsum("n,nbc->bc", weights, np.square(tail))
    np.testing.assert_allclose(prediction.crps(torch.as_tensor(targets)), truth.mean(-1), rtol=3e-7)


def test_crps_of_large_counts_is_summed_in_strides():
    rates = torch.full((1, 1), 4e7, dtype=torch.float64)
    truth = dubito.metrics.crps_gaussian(torch.tensor([4e7 + 3e3]).double(), rates[0], rates[0].sqrt())
    score = CountPrediction(rates, rates).crps(torch.tensor([4e7 + 3e3]).double())
    assert float(score) == pytest.approx(truth, rel=1e-3)  # a Poisson of this rate is Normal


@pytest.mark.parametrize("rates", [(2.0, 5.0, 9.0), (1.0, 1.0, 20_000.0)], ids=["small", "some large"])
@pytest.mark.parametrize("weights", [None, (0.2, 0.5, 0.3)])
def test_crps_of_counts_heeds_weights_and_components_of_other_sizes(rates: tuple[float, ...], weights):
    means, count = torch.tensor(rates, dtype=torch.float64)[:, None], 3.0
    prediction = CountPrediction(
        means, means + means.square() / count, total_count=torch.full((1, 1), count).double(), weights=weights
    )
    values = np.arange(1_000_000 if max(rates) > 100 else 3000)
    laws = [scipy.stats.nbinom(count, count / (count + rate)) for rate in rates]
    below = np.average([law.cdf(values) for law in laws], axis=0, weights=weights)
    for target in (0.0, 4.0, 2500.0):
        truth = np.square(below - (values >= target)).sum()
        assert float(prediction.crps(torch.tensor([target]).double())) == pytest.approx(truth, rel=1e-3)


def test_tails_of_counts_end_when_only_rounding_is_left(monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(special, "_away", lambda value, away=special._away: calls.append(1) or away(value))
    generator = torch.Generator().manual_seed(0)
    for size, count in ((10, 1000.0), (1e4, 2.0), (1e6, 2.0)):
        rates = size * torch.rand(4000, generator=generator, dtype=torch.float64)
        values, total = (1.1 * rates[0]).floor(), torch.tensor(count).double()
        below, above = special.count_tails(values, rates, total)
        law = scipy.stats.nbinom(count, (count / (count + rates)).numpy())
        np.testing.assert_allclose(below, law.cdf(values), rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(above, law.sf(values), rtol=1e-8, atol=1e-9)
    assert len(calls) < 3 * 4 * 100


def test_rows_of_a_prediction_are_rows():
    for name in SETTINGS:
        prediction, _ = mixture(name)
        part = prediction[1:3]
        torch.testing.assert_close(part.quantile(0.3), prediction.quantile(0.3)[1:3])
        whole = type(prediction).cat([prediction[:1], prediction[1:]])
        torch.testing.assert_close(whole.interval(0.8), prediction.interval(0.8))
    with pytest.raises(ConfigError, match="counts have no other units"):
        mixture("poisson")[0].rescaled(0, 2)


# -- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StudentT(df=2), "above 2"),
        (lambda: StudentT(df="4"), "df must be"),
        (lambda: StudentT(std=-1), "std must be"),
        (lambda: StudentT(standardise=1), "standardise"),
        (lambda: NegativeBinomial(total_count=0), "total_count must be"),
        (lambda: NegativeBinomial(total_count=()), "one per output"),
        (lambda: HeteroscedasticGaussian(standardise="yes"), "standardise"),
    ],
)
def test_settings_are_checked(make, words: str):
    with pytest.raises(ConfigError, match=words):
        make()


def test_targets_and_outputs_are_checked():
    outputs = normal(3, 1)
    with pytest.raises(DataError, match=r"whole numbers from 0 on, got -1 at row 2"):
        Poisson().build(outputs).check_targets(outputs, torch.tensor([0.0, 3.0, -1.0]))
    with pytest.raises(DataError, match=r"got 0\.5 at row 1"):
        NegativeBinomial().build(outputs).check_targets(outputs, torch.tensor([0.0, 0.5, 1.0]))
    with pytest.raises(NetworkError, match="twice as many outputs"):
        HeteroscedasticGaussian().build(outputs).check_outputs(outputs)
    with pytest.raises(NetworkError, match="total_count is for"):
        NegativeBinomial(total_count=(1.0, 2.0)).build(normal(3, 2)).check_outputs(outputs)


@pytest.mark.parametrize("settings", [StudentT(standardise=True), HeteroscedasticGaussian(standardise=True)])
def test_standardised_targets_change_units_alone(settings: Likelihood):
    outputs = normal(50, 4 if isinstance(settings, HeteroscedasticGaussian) else 2)
    targets = normal(50, 2, seed=1)
    shift, scale = torch.tensor([1e6, -3.0]).double(), torch.tensor([1e5, 0.01]).double()
    plain, moved = settings.build(outputs, targets), settings.build(outputs, targets * scale + shift)
    change = plain.log_prob(outputs, targets) - moved.log_prob(outputs, targets * scale + shift)
    torch.testing.assert_close(change, scale.log().sum().expand(50), rtol=1e-7, atol=1e-7)
    one, other = plain.predictive(outputs[None]), moved.predictive(outputs[None])
    torch.testing.assert_close(other.quantile(0.9), one.quantile(0.9) * scale + shift, rtol=1e-9, atol=1e-9)


# -- with methods --------------------------------------------------------------------------------------------


def rows(name: str, count: int = 120) -> tuple[Tensor, Tensor]:
    inputs = normal(count, 2, seed=5)
    signal = inputs[:, :1] + 0.5 * inputs[:, 1:]
    outputs = torch.cat([signal, 0.3 * signal - 1], 1) if name == "heteroscedastic" else signal
    targets = torch.as_tensor(law(name, outputs.numpy()).rvs(random_state=2), dtype=torch.float64)
    return inputs.float(), targets.float()


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2 if name == "heteroscedastic" else 1))


LEARNED = {
    "heteroscedastic": HeteroscedasticGaussian(),
    "student-t": StudentT(),
    "poisson": Poisson(),
    "negative-binomial": NegativeBinomial(),
}


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@ALL
@pytest.mark.parametrize("method", dubito.methods())
def test_every_method(name: str, method: str, tmp_path):
    inputs, targets = rows(name)
    net, likelihood = network(name), LEARNED[name]
    posterior = dubito.methods()[method].fit(
        net, (inputs, targets), likelihood, training=Training(epochs=2, lr=1e-2), progress=False
    )
    prediction = posterior.predict(inputs[:4], 6, seed=1)
    lower, upper = prediction.interval(0.9)
    values = [prediction.mean, prediction.std, lower, upper, prediction.log_prob(targets[:4])]
    assert all(bool(value.isfinite().all()) for value in values)
    assert bool((lower < upper).all())
    posterior.save(tmp_path / "p.safetensors")
    loaded = dubito.load(tmp_path / "p.safetensors", net)
    torch.testing.assert_close(loaded.predict(inputs[:4], 6, seed=1).mean, prediction.mean, rtol=0, atol=0)
    assert type(loaded.likelihood) is type(posterior.likelihood)
    assert dict(loaded.likelihood.state_dict()).keys() == dict(posterior.likelihood.state_dict()).keys()
    answer = posterior.sampled(6, seed=1).as_module()(inputs[:4])
    torch.testing.assert_close(answer["mean"], posterior.sampled(6, seed=1).predict(inputs[:4]).mean)
    assert posterior.evaluate((inputs[:8], targets[:8]), num_samples=4)["crps"] > 0


def test_hmc_asks_for_known_noise():
    inputs, targets = rows("student-t")
    with pytest.raises(ConfigError, match="known noise"):
        dubito.HMC().fit(network("student-t"), (inputs, targets), StudentT())


def test_members_keep_their_noise():
    inputs, targets = rows("negative-binomial")
    posterior = DeepEnsemble(members=3).fit(
        network("negative-binomial"), (inputs, targets), NegativeBinomial(),
        training=Training(epochs=3, lr=0.05), progress=False,
    )  # fmt: skip
    totals = posterior.likelihood.total_count
    assert totals.shape == (3, 1) and len(set(totals.flatten().tolist())) == 3
    prediction = posterior.predict(inputs[:2], 6)
    torch.testing.assert_close(prediction.total_count[:, 0, 0], totals.flatten())


def test_numbers_are_fitted_around_a_trained_network():
    """Laplace after the fact: the most likely total_count given the network's rates, as SciPy finds it."""
    inputs, targets = rows("negative-binomial", 2000)
    net = nn.Linear(2, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, 0.5]]))
        net.bias.zero_()
    posterior = Laplace().fit(net, (inputs, targets), NegativeBinomial())
    rates = net(inputs).exp().detach().double().numpy()

    def loss(log_total: float) -> float:
        total = math.exp(log_total)
        return -scipy.stats.nbinom(total, total / (total + rates)).logpmf(targets.numpy()).sum()

    truth = math.exp(scipy.optimize.minimize_scalar(loss, (-1, 2)).x)
    assert float(posterior.likelihood.numbers("total_count")) == pytest.approx(truth, rel=1e-3)
    assert truth == pytest.approx(1.7, rel=0.15)


@ALL
def test_linearised_predictions_integrate_the_linear_network(name: str):
    """A network that is linear in its weights: the closed form's mixture is that of draws of the weights."""
    inputs, targets = rows(name)
    torch.manual_seed(0)
    net = nn.Linear(2, 2 if name == "heteroscedastic" else 1)
    settings = SETTINGS[name]
    posterior = Laplace(structure=KFAC(), prior_precision=3.0).fit(net, (inputs, targets), settings, progress=False)
    closed = posterior.predict(inputs[:5], 4000, linearised=True)
    drawn = posterior.predict(inputs[:5], 4000, linearised=False)
    for quantity in ("mean", "std"):
        torch.testing.assert_close(getattr(closed, quantity), getattr(drawn, quantity), rtol=0.05, atol=0.03)
    torch.testing.assert_close(
        posterior.predict(inputs[2:3], 4000).mean, closed.mean[2:3], rtol=1e-5, atol=1e-5
    )  # whatever rows stand beside


def test_a_noise_curve_is_recovered():
    inputs = torch.linspace(-2, 2, 2000).unsqueeze(1)
    curve = 0.2 + 0.3 * (inputs / 2).square()
    targets = torch.sin(2 * inputs) + curve * normal(2000, 1, seed=7).float()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    training = Training(iterations=1500, batch_size=128, lr=5e-3, schedule=dubito.training.Cosine())
    posterior = dubito.MAP().fit(net, (inputs, targets), HeteroscedasticGaussian(), training=training)
    learned = posterior.predict(inputs[100:-100:50]).aleatoric_std
    # The standard error of a local standard deviation from some 200 rows is 5 %.
    assert float((learned / curve[100:-100:50] - 1).abs().mean()) < 0.1


# -- likelihoods of one's own --------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnPoisson(OwnLikelihood):
    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets * outputs - outputs.exp() - torch.lgamma(targets + 1)).sum(1)


@dataclass(frozen=True)
class Gumbel(OwnLikelihood):
    """Two outputs that meet in one density: location and log-scale."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        z = (targets[:, 0] - outputs[:, 0]) / outputs[:, 1].exp()
        return -z - (-z).exp() - outputs[:, 1]

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs[..., :1] + 0.5772156649 * outputs[..., 1:].exp()


def test_own_likelihood_has_the_curvature_of_ours(tmp_path):
    inputs, targets = rows("poisson")
    net = network("poisson")
    ours, own = (
        Laplace(structure=KFAC(), curvature=GGN(), prior_precision=1.0, linearised=False).fit(
            net, (inputs, targets), settings
        )
        for settings in (Poisson(), OwnPoisson())
    )
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    own.save(tmp_path / "own.safetensors")
    loaded = dubito.load(tmp_path / "own.safetensors", net)
    assert loaded.likelihood.settings == OwnPoisson()
    prediction = loaded.predict(inputs[:5], 8)
    truth = ours.predict(inputs[:5], 8).log_prob(targets[:5])
    torch.testing.assert_close(prediction.log_prob(targets[:5]), truth, rtol=1e-4, atol=1e-4)
    assert own.evaluate((inputs, targets))["nll"] > 0


def test_own_hessian_without_its_negative_part():
    outputs, targets = normal(7, 2), normal(7, 1, seed=1) * 2
    likelihood = Gumbel().build(outputs)
    root = likelihood.hessian_root(outputs, targets=targets)
    truth = vmap(jacrev(jacrev(lambda row, y: -Gumbel().log_prob(row[None], y[None])[0])))(outputs, targets)
    values, vectors = torch.linalg.eigh(truth)
    assert float(values.min()) < 0  # there is something to leave out
    clamped = vectors @ values.clamp(min=0).diag_embed() @ vectors.mT
    torch.testing.assert_close(root @ root.mT, clamped, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::dubito.DubitoWarning")
@pytest.mark.parametrize("method", dubito.methods())
def test_own_likelihood_with_every_method(method: str):
    inputs, targets = rows("student-t")
    posterior = dubito.methods()[method].fit(
        network("heteroscedastic"), (inputs, targets), Gumbel(), training=Training(epochs=1), progress=False
    )
    prediction = posterior.predict(inputs[:3], 4)
    assert prediction.mean.shape == (3, 1) and bool(prediction.log_prob(targets[:3]).isfinite().all())


def test_own_likelihood_says_what_it_lacks():
    inputs, targets = rows("poisson")
    with pytest.raises(ConfigError, match="draws no targets"):
        Laplace(curvature=dubito.Fisher()).fit(network("poisson"), (inputs, targets), OwnPoisson())

    @dataclass(frozen=True)
    class Unsummed(OwnLikelihood):
        def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return -(outputs - targets).square()

    with pytest.raises(ConfigError, match=r"one number per row, \[\d+\], got \[\d+, 1\]"):
        dubito.MAP().fit(network("poisson"), (inputs, targets), Unsummed(), training=Training(epochs=1))


def test_predictions_are_of_their_kinds():
    assert isinstance(mixture("student-t")[0], StudentTPrediction)
    assert isinstance(mixture("poisson")[0], CountPrediction)


@pytest.mark.parametrize("total", [0.5, 29.0, 31.0, 1e3, 1e6])
def test_large_counts_of_failures_are_nearly_poisson_to_the_last_digit(total: float) -> None:
    rate, count = 5.0, 7
    truth = scipy.stats.nbinom.logpmf(count, total, total / (total + rate))
    means, counted = torch.full((1, 1), rate), torch.tensor([float(count)])
    many = torch.full((1, 1), total)
    prediction = CountPrediction(means, means + means.square() / total, total_count=many)
    assert float(prediction.log_prob(counted)) == pytest.approx(truth, abs=1e-6)
    assert float(count_log_prob(counted, means.log(), many)) == pytest.approx(truth, abs=1e-5)
    values = np.arange(2000)
    below = scipy.stats.nbinom.cdf(values, total, total / (total + rate))
    assert float(prediction.crps(counted)) == pytest.approx(((below - (values >= count)) ** 2).sum(), rel=1e-5)


@pytest.mark.parametrize("df", [3.0, 59.0, 61.0, 1e4, 1e6])
def test_many_degrees_of_freedom_are_nearly_normal_to_the_last_digit(df: float) -> None:
    ours = student_t_log_prob(torch.tensor(1.5), torch.tensor(1.0), torch.tensor(df))
    assert float(ours) == pytest.approx(scipy.stats.t.logpdf(1.5, df), abs=2e-6)


def test_large_counts_keep_their_digits() -> None:
    prediction = Poisson().build(torch.zeros(1, 1)).predictive(torch.full((1, 1, 1), math.log(1e6)))
    truth = scipy.stats.poisson.logpmf(1_000_500, float(prediction.means))
    assert float(prediction.log_prob(torch.tensor([[1_000_500.0]]))) == pytest.approx(truth, abs=1e-5)


def test_rates_that_vanish_are_no_rates() -> None:
    prediction = Poisson().build(torch.zeros(2, 1)).predictive(torch.full((1, 2, 1), -110.0))
    zero, one = prediction.log_prob(torch.tensor([[0.0], [1.0]])).tolist()
    assert abs(zero) < 1e-30 and -110 < one < -80
    assert float(prediction.crps(torch.zeros(2, 1)).abs().max()) < 1e-30


@pytest.mark.parametrize(
    "settings", [StudentT(std=(1.0, 2.0)), StudentT(df=(3.0, 4.0)), NegativeBinomial(total_count=(1.0, 2.0))]
)
def test_numbers_for_other_outputs_are_refused(settings: Likelihood) -> None:
    with pytest.raises(NetworkError, match="has 2 numbers, but the network 3 outputs"):
        settings.build(torch.zeros(4, 3))


def test_fixed_noise_shares_nothing_with_what_it_was_made_of() -> None:
    built = StudentT().build(torch.zeros(4, 2))
    made = built.with_noise_times(2.0)
    assert not {id(p) for p in built.parameters()} & {id(p) for p in made.parameters()}
    made.double()
    assert all(p.dtype == torch.float32 for p in built.parameters())
