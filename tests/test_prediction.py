"""Predictions against torch.distributions, SciPy and brute force."""

import itertools
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Bernoulli as BernoulliTruth
from torch.distributions import Categorical as CategoricalTruth
from torch.distributions import Independent, MixtureSameFamily, MultivariateNormal, Normal

from dubito import Bernoulli, Categorical, ConfigError, DataError, Gaussian
from dubito.prediction import BernoulliPrediction, CategoricalPrediction, Prediction, RealPrediction

BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
DTYPES = st.sampled_from([torch.float32, torch.float64])


def normal(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def classes(logits: Tensor, class_axis: int = 1) -> CategoricalPrediction:
    """The prediction from logits per draw, [S, B, ...]."""
    return Categorical(class_axis=class_axis).build(None).predictive(iter(logits))  # pyright: ignore


def binary(logits: Tensor) -> BernoulliPrediction:
    return Bernoulli().build(None).predictive(iter(logits))  # pyright: ignore


def real(means: Tensor, std: Tensor | float = 1.0) -> RealPrediction:
    """The mixture of Normals with these means [S, B, ...] and noise, one number or [K, outputs]."""
    likelihood = Gaussian().build(means[0]).with_noise(std=torch.as_tensor(std, dtype=means.dtype))
    return likelihood.predictive(iter(means))


def mixture(components) -> MixtureSameFamily:
    """The equal mixture over the last batch axis."""
    return MixtureSameFamily(CategoricalTruth(logits=torch.zeros(components.batch_shape)), components)


def centred_variance(values: Tensor, class_axis: int) -> Tensor:
    """Of stacked draws: the variance of logits less their mean over classes, the mean over classes."""
    centred = values.double() - values.double().mean(class_axis + 1, keepdim=True)
    return centred.var(0, correction=0).mean(class_axis)


@pytest.mark.parametrize("at_once", [1, 7, 10**6])  # one by one, in unequal stacks, all together
@pytest.mark.parametrize("shape", [(20, 3, 4), (20, 3, 4, 5)])
def test_draws_are_judged_together_or_one_by_one(monkeypatch, at_once: int, shape: tuple[int, ...]):
    monkeypatch.setattr("dubito.likelihoods.base.STACKED", at_once * math.prod(shape[1:]))
    values = 5 * normal(*shape)
    for draws in (values, iter(values)):
        some = Categorical().build(None).predictive(draws)  # pyright: ignore
        probs = values.softmax(2)
        torch.testing.assert_close(some.probs, probs.mean(0))
        torch.testing.assert_close(some.aleatoric, torch.special.entr(probs).sum(2).mean(0))
        torch.testing.assert_close(some.function_variance, centred_variance(values, 1))
        both = Bernoulli().build(None).predictive(iter(values) if draws is not values else draws)  # pyright: ignore
        yes = values.sigmoid()
        torch.testing.assert_close(both.probs, yes.mean(0))
        torch.testing.assert_close(both.log_complements.exp(), (1 - yes).mean(0))
        entropies = torch.special.entr(yes) + torch.special.entr(1 - yes)
        torch.testing.assert_close(both.aleatoric, entropies.mean(0))
        torch.testing.assert_close(both.function_variance, values.var(0, correction=0))
        assert both.sample_logits is not None and both.sample_logits.equal(values)


# -- classes -----------------------------------------------------------------------------------------------


@st.composite
def logits(draw) -> Tensor:
    """Logits [S, B, C], from calm to extreme."""
    shape = tuple(draw(st.integers(low, high)) for low, high in ((1, 40), (1, 3), (2, 6)))
    scale = draw(st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e4]))
    return normal(*shape, dtype=draw(DTYPES), seed=draw(st.integers(0, 1000))) * scale


@settings(deadline=None)
@given(logits())
def test_doubt_about_classes_splits_in_two(values: Tensor):
    prediction = classes(values)
    probs = values.double().softmax(-1).numpy()
    atol = 1e-12 if values.dtype == torch.float64 else 2e-6
    total = scipy.stats.entropy(probs.mean(0), axis=-1)
    aleatoric = scipy.stats.entropy(probs, axis=-1).mean(0)
    # The mutual information is the mean divergence of a draw from the mean.
    epistemic = scipy.stats.entropy(probs, probs.mean(0)[None].repeat(len(probs), 0), axis=-1).mean(0)
    for name, expected in {"total": total, "aleatoric": aleatoric, "epistemic": epistemic}.items():
        quantity = getattr(prediction, name)
        assert quantity.dtype == values.dtype
        assert (quantity >= 0).all(), name
        np.testing.assert_allclose(quantity.double().numpy(), expected, rtol=0, atol=atol, err_msg=name)
    torch.testing.assert_close(prediction.total, prediction.aleatoric + prediction.epistemic, rtol=0, atol=atol)
    np.testing.assert_allclose(prediction.probs.double().numpy(), probs.mean(0), rtol=0, atol=atol)
    assert (prediction.probs <= 1).all() and (prediction.confidence <= 1).all()
    np.testing.assert_array_equal(prediction.confidence.numpy(), prediction.probs.numpy().max(-1))
    assert torch.equal(prediction.probs.gather(1, prediction.labels[:, None])[:, 0], prediction.confidence)


@settings(deadline=None)
@given(logits())
def test_doubt_about_yes_and_no_is_that_of_two_classes(values: Tensor):
    """A Bernoulli is a Categorical with logits (0, f)."""
    flat = values[..., 0]
    ours, truth = binary(flat), classes(torch.stack([torch.zeros_like(flat), flat], -1))
    atol = 1e-12 if values.dtype == torch.float64 else 2e-6
    for name in ("total", "aleatoric", "epistemic", "confidence"):
        quantity = getattr(ours, name)
        assert (quantity >= 0).all(), name
        torch.testing.assert_close(quantity, getattr(truth, name), rtol=0, atol=atol)
    torch.testing.assert_close(ours.probs, truth.probs[:, 1], rtol=0, atol=atol)
    assert (ours.probs <= 1).all() and (ours.confidence <= 1).all()
    apart = (truth.probs[:, 1] - 0.5).abs() > atol
    assert torch.equal(ours.labels[apart], truth.labels[apart])


@pytest.mark.parametrize("at_once", [1, 3, 10**6])
@pytest.mark.parametrize("size", [1.0, 1e3])
@pytest.mark.parametrize("common", [0.0, 300.0])
def test_the_variance_of_large_logits_has_its_digits(monkeypatch, at_once: int, size: float, common: float):
    """A thousand draws apart by a thousandth, float32: neither the logits' size nor what they share is in the way."""
    monkeypatch.setattr("dubito.likelihoods.base.STACKED", at_once * 12)
    apart = 1e-3 * torch.arange(-4, 5).repeat(112)[:1000]
    values = (size * normal(1, 3, 4) + apart[:, None, None] * normal(1, 3, 4, seed=1)).float()
    values = values + (common * normal(1000, 3, 1, seed=2)).float()
    # A thousand sums one after the other round as often; centring rounds at the size of what is taken away.
    rtol = 2e-3 if common else 2e-4
    truth = centred_variance(values, 1)
    torch.testing.assert_close(classes(values).function_variance.double(), truth, rtol=rtol, atol=0)
    plain = values.double().var(0, correction=0)
    torch.testing.assert_close(binary(values).function_variance.double(), plain, rtol=2e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_draws_have_no_function_variance(dtype: torch.dtype):
    values = (1e3 * normal(1, 5, 4)).to(dtype)
    for draws in (1, 2, 37, 1000):
        for prediction in (classes(values.expand(draws, 5, 4)), binary(values.expand(draws, 5, 4))):
            assert prediction.function_variance.equal(torch.zeros_like(prediction.aleatoric))


def test_an_outlying_first_draw_costs_few_digits():
    values = 1e-3 * normal(1000, 5, 4).float()
    values[0] += 1e3 * normal(5, 4).float()
    truth = centred_variance(values, 1)
    torch.testing.assert_close(classes(values).function_variance.double(), truth, rtol=1e-3, atol=0)


@pytest.mark.parametrize("draws", [1, 7, 32, 37, 40, 1000])
def test_certain_draws_leave_no_doubt(draws: int):
    """Accumulated rounding must not push probabilities over 1 nor entropies below 0."""
    for prediction in (
        classes(torch.tensor([[30.0, 0.0, 0.0]]).expand(draws, 1, 3)),
        binary(torch.full((draws, 1), 30.0)),
    ):
        assert 0 <= prediction.total < 1e-6
        assert prediction.confidence <= 1


def test_one_draw_is_all_aleatoric():
    for prediction in (classes(normal(1, 9, 4)), binary(normal(1, 9, 4))):
        assert torch.equal(prediction.epistemic, torch.zeros_like(prediction.epistemic))
        assert torch.equal(prediction.total, prediction.aleatoric)
    prediction = real(normal(1, 9, 2), 0.3)
    assert torch.equal(prediction.epistemic, torch.zeros(9, 2, dtype=torch.float64))


@BOTH
def test_a_class_that_is_absent(dtype: torch.dtype):
    """Logits of −1e4, and of −∞ as masks have them."""
    values = normal(5, 4, 3, dtype=dtype)
    for floor in (-1e4, -math.inf):
        values[..., 2] = floor
        prediction = classes(values)
        two = classes(values[..., :2])
        torch.testing.assert_close(prediction.probs[:, :2], two.probs)
        torch.testing.assert_close(prediction.total, two.total)
        torch.testing.assert_close(prediction.epistemic, two.epistemic)
        assert (prediction.log_prob(torch.full((4,), 2)) < -9e3).all()
        assert not prediction.sets(0.999)[:, 2].any()


@BOTH
def test_class_log_prob_is_that_of_the_mixture(dtype: torch.dtype):
    values = normal(6, 5, 3, dtype=dtype) * 3
    targets = torch.tensor([0, 2, 1, 1, 0])
    expected = CategoricalTruth(logits=values.double()).probs.mean(0)[torch.arange(5), targets].log()
    torch.testing.assert_close(classes(values).log_prob(targets).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(classes(values).log_prob(targets.numpy()), classes(values).log_prob(targets))


def test_extreme_log_probs_do_not_underflow():
    values = torch.tensor([[[0.0, 1e4]], [[0.0, 2e4]]])
    expected = -1e4 - math.log(2)  # log ½(e^-1e4 + e^-2e4)
    assert classes(values).log_prob(torch.tensor([0])).item() == pytest.approx(expected, abs=1e-3)
    flat = torch.tensor([[1e4], [2e4]])
    assert binary(flat).log_prob(torch.tensor([0])).item() == pytest.approx(expected, abs=1e-3)


@BOTH
@pytest.mark.parametrize(("shape", "axis"), [((6, 5, 3, 2, 4), 1), ((6, 5, 7, 3), -1), ((6, 5, 7, 3), 2)])
def test_dense_classes(shape, axis: int, dtype: torch.dtype):
    """A row of positions has one joint density: a mixture over draws of products over positions."""
    values = normal(*shape, dtype=dtype)
    last = values.movedim(axis + 1 if axis > 0 else axis, -1)
    truth = CategoricalTruth(logits=last)
    targets = last.mean(0).argmin(-1)
    prediction = classes(values, axis)
    assert prediction.probs.shape == shape[1:]
    assert prediction.labels.shape == prediction.total.shape == targets.shape
    torch.testing.assert_close(prediction.probs.movedim(axis, -1), truth.probs.mean(0))
    torch.testing.assert_close(prediction.aleatoric, truth.entropy().mean(0))
    joint = truth.log_prob(targets).flatten(2).sum(2)  # [S, B]
    torch.testing.assert_close(prediction.log_prob(targets), joint.logsumexp(0) - math.log(6))
    assert torch.equal(prediction.labels, truth.probs.mean(0).argmax(-1))
    inside = prediction.sets(0.8)
    assert inside.shape == shape[1:]
    mass = (prediction.probs * inside).sum(axis)
    assert (mass >= 0.8 - 1e-6).all()
    assert torch.equal(prediction[2:4].log_prob(targets[2:4]), prediction.log_prob(targets)[2:4])


@BOTH
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3), (6, 5, 2, 3, 2)])
def test_yes_and_no_of_every_shape(shape, dtype: torch.dtype):
    values = normal(*shape, dtype=dtype)
    targets = (normal(*shape[1:], seed=3) > 0).long()
    prediction = binary(values)
    truth = BernoulliTruth(logits=values)
    torch.testing.assert_close(prediction.probs, truth.probs.mean(0))
    torch.testing.assert_close(prediction.aleatoric, truth.entropy().mean(0))
    torch.testing.assert_close(prediction.total, BernoulliTruth(probs=truth.probs.mean(0)).entropy())
    joint = truth.log_prob(targets.to(dtype)).reshape(6, 5, -1).sum(2)
    torch.testing.assert_close(prediction.log_prob(targets), joint.logsumexp(0) - math.log(6))
    assert torch.equal(prediction.log_prob(targets.bool()), prediction.log_prob(targets))
    assert prediction.sets(0.9).shape == (*shape[1:], 2)


def test_many_labels_are_judged_together():
    """Two labels that always agree: the joint is not the product of the marginals."""
    values = torch.tensor([[[20.0, 20.0]], [[-20.0, -20.0]]])
    both, one = (binary(values).log_prob(torch.tensor([[1, 1]])), binary(values).log_prob(torch.tensor([[1, 0]])))
    assert both.item() == pytest.approx(math.log(0.5), abs=1e-5)
    assert one.item() < -15


def assert_smallest(probs: np.ndarray, chosen: np.ndarray, level: float) -> None:
    """No other set of classes that holds the level is smaller, by trying all sets."""
    every = [
        list(some) for size in range(1, len(probs) + 1) for some in itertools.combinations(range(len(probs)), size)
    ]
    masses = {tuple(some): probs[some].sum() for some in every}
    if any(abs(mass - level) < 1e-9 for mass in masses.values()):
        return  # a matter of rounding
    assert chosen.sum() == min(len(some) for some, mass in masses.items() if mass >= level or len(some) == len(probs))
    assert probs[chosen].sum() >= level
    assert probs[chosen].min() >= probs[~chosen].max(initial=0)


@settings(deadline=None, max_examples=60)
@given(logits(), st.floats(0.01, 0.99))
def test_prediction_sets_are_the_smallest(values: Tensor, level: float):
    prediction = classes(values.double())
    inside = prediction.sets(level).numpy()
    for probs, chosen in zip(prediction.probs.numpy(), inside, strict=True):
        assert_smallest(probs, chosen, level)
    assert inside[np.arange(len(inside)), prediction.labels.numpy()].all()
    pair = binary(values[..., 0].double())
    both = torch.stack([1 - pair.probs, pair.probs], -1).numpy()
    for probs, chosen in zip(both, pair.sets(level).numpy(), strict=True):
        assert_smallest(probs, chosen, level)


@BOTH
def test_prediction_sets_at_their_edges(dtype: torch.dtype):
    probs = torch.tensor([[0.5, 0.3, 0.2]], dtype=dtype)
    prediction = classes(probs.log()[None])
    for level, size in ((0.01, 1), (0.5, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 3)):
        assert prediction.sets(level).sum() == size, level
    even = binary(torch.zeros(1, 1, dtype=dtype))
    assert even.sets(0.4).tolist() == [[True, False]]  # one of two equals is enough
    assert even.sets(0.6).tolist() == [[True, True]]
    equal = classes(torch.zeros(1, 1, 4, dtype=dtype))
    assert equal.sets(0.5).tolist() == [[True, True, False, False]]
    for level in (0, 1.5, -1, "0.9", float("nan")):
        for prediction in (equal, even):
            with pytest.raises(ConfigError, match="level must be a number in"):
                prediction.sets(level)


@pytest.mark.parametrize(
    ("prediction", "targets", "message"),
    [
        (classes(normal(2, 4, 3)), torch.tensor([0, 1, 3, 0]), "class numbers below 3"),
        (classes(normal(2, 4, 3)), torch.tensor([0, -1, 1, 0]), "class numbers below 3"),
        (classes(normal(2, 4, 3)), torch.zeros(4), "class numbers"),
        (classes(normal(2, 4, 3)), torch.tensor([0, 1]), r"shape \(4,\), got \(2,\)"),
        (classes(normal(2, 4, 3, 5)), torch.zeros(4, 3).long(), r"shape \(4, 5\)"),
        (binary(normal(2, 4)), torch.tensor([0, 1, 2, 0]), "must be 0 or 1, got 2 at row 2"),
        (binary(normal(2, 4)), torch.tensor([0, 1, 0.5, 0]), "got 0.5 at row 2"),
        (binary(normal(2, 4, 3)), torch.zeros(4), r"shape \(4, 3\), got \(4,\)"),
        (real(normal(2, 4, 3)), torch.zeros(4), r"shape \(4, 3\), got \(4,\)"),
        (real(normal(2, 4)), torch.zeros(4, 2), r"shape \(4,\), got \(4, 2\)"),
    ],
)
def test_targets_that_do_not_fit(prediction: Prediction, targets: Tensor, message: str):
    with pytest.raises(DataError, match=message):
        prediction.log_prob(targets)


# -- reals -------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("shape", [(8, 5), (8, 5, 1), (8, 5, 3), (8, 5, 2, 3, 2), (1, 5, 3), (8, 1, 3)])
def test_real_moments_and_density_are_those_of_the_mixture(shape, dtype: torch.dtype):
    means = normal(*shape, dtype=dtype)
    prediction = real(means, 0.7)
    truth = mixture(Normal(means.double().movedim(0, -1), 0.7))  # of each output on its own
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(prediction.mean.double(), truth.mean, **tolerance)
    torch.testing.assert_close(prediction.std.double() ** 2, truth.variance, **tolerance)
    torch.testing.assert_close(prediction.aleatoric + prediction.epistemic, prediction.std**2)
    torch.testing.assert_close(prediction.aleatoric.double(), torch.full(shape[1:], 0.49).double(), **tolerance)
    assert prediction.mean.dtype == prediction.std.dtype == dtype

    targets = normal(*shape[1:], dtype=dtype, seed=5)
    joint = mixture(Independent(Normal(means.double().transpose(0, 1), 0.7), len(shape) - 2))
    expected = joint.log_prob(targets.double())
    torch.testing.assert_close(prediction.log_prob(targets).double(), expected, **tolerance)
    assert torch.equal(prediction.log_prob(targets.numpy()), prediction.log_prob(targets))


@BOTH
@pytest.mark.parametrize("draws", [1, 2, 3, 7])
def test_noise_of_components_goes_round(draws: int, dtype: torch.dtype):
    means, targets = normal(draws, 4, 2, dtype=dtype), normal(4, 2, dtype=dtype, seed=1)
    stds = torch.tensor([[0.1, 1.0], [0.5, 2.0], [3.0, 0.2]], dtype=dtype)
    prediction = real(means, stds)
    scales = torch.stack([stds[draw % 3] for draw in range(draws)])[:, None].expand_as(means)
    rows = Normal(means, scales).log_prob(targets).sum(2)
    torch.testing.assert_close(prediction.log_prob(targets), rows.logsumexp(0) - math.log(draws))
    torch.testing.assert_close(prediction.aleatoric, (scales**2).mean(0))
    torch.testing.assert_close(prediction[1:3].aleatoric, (scales**2).mean(0)[1:3])


@BOTH
@pytest.mark.parametrize("components", [1, 2])
def test_full_covariances(components: int, dtype: torch.dtype):
    means, targets = normal(4, 5, 2, dtype=dtype), normal(5, 2, dtype=dtype, seed=1)
    full = torch.tensor([[[2.0, 0.9], [0.9, 1.0]], [[0.5, -0.2], [-0.2, 0.3]]], dtype=dtype)[:components]
    likelihood = Gaussian().build(means[0]).with_noise(covariance=full if components > 1 else full[0])
    prediction = likelihood.predictive(iter(means))
    each = torch.stack([full[draw % components] for draw in range(4)])[:, None].expand(4, 5, 2, 2)
    truth = mixture(MultivariateNormal(means.double().transpose(0, 1), each.double().transpose(0, 1)))
    torch.testing.assert_close(
        prediction.log_prob(targets).double(), truth.log_prob(targets.double()), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(prediction.std.double() ** 2, truth.variance, rtol=1e-5, atol=1e-5)
    part = prediction[torch.tensor([3, 1])]
    torch.testing.assert_close(part.log_prob(targets[[3, 1]]), prediction.log_prob(targets)[[3, 1]])
    torch.testing.assert_close(prediction.to(torch.float64).log_prob(targets).to(dtype), prediction.log_prob(targets))


def by_brentq(means: np.ndarray, stds: np.ndarray, q: float) -> float:
    """The quantile of a mixture of Normals, from the nearer tail, by SciPy alone."""

    def excess(y: float) -> float:
        tail = scipy.stats.norm.cdf if q <= 0.5 else scipy.stats.norm.sf
        return tail(y, means, stds).mean() - min(q, 1 - q)

    own = scipy.stats.norm.ppf(q, means, stds)
    low, high = own.min() - 1e-9 - 1e-9 * abs(own.min()), own.max() + 1e-9 + 1e-9 * abs(own.max())
    return scipy.optimize.brentq(excess, low, high, xtol=1e-14, rtol=1e-15, maxiter=1000)


LEVELS = (1e-9, 1e-4, 0.025, 0.3, 0.5, 0.77, 0.975, 0.9999, 1 - 1e-9)


@BOTH
@pytest.mark.parametrize("q", LEVELS)
def test_quantiles_are_roots_of_the_mixture(q: float, dtype: torch.dtype):
    means = normal(6, 4, 2, dtype=dtype) * 2
    stds = torch.tensor([[0.1, 1.0], [0.5, 3.0], [2.0, 0.01]], dtype=dtype)
    prediction = real(means, stds)
    found = prediction.quantile(q)
    assert found.shape == (4, 2) and found.dtype == dtype
    scales = prediction.variances.sqrt().expand_as(means).double().numpy()
    for row, output in itertools.product(range(4), range(2)):
        expected = by_brentq(means.double().numpy()[:, row, output], scales[:, row, output], q)
        # An error of eps in the level moves the quantile by eps · level / density, a few eps for these mixtures.
        tolerance = 2e-6 if dtype == torch.float32 else 1e-13
        assert found[row, output].item() == pytest.approx(expected, rel=tolerance, abs=tolerance), (row, output)


@BOTH
def test_quantiles_of_components_far_apart(dtype: torch.dtype):
    """The bracket is a million standard deviations wide; the answer is still exact to its narrow component."""
    means = torch.tensor([0.0, 0.0, 0.0, 1e3], dtype=dtype).reshape(4, 1, 1)
    prediction = real(means, 1e-3)
    for q, expected in ((0.375, 0.0), (0.75 * 0.975, 1.959964e-3), (0.75 * 0.025, -1.959964e-3)):
        assert prediction.quantile(q).item() == pytest.approx(expected, abs=1e-8)


@BOTH
@pytest.mark.parametrize("q", [1e-12, 1e-6, 0.2, 0.5, 0.9, 1 - 1e-6])
def test_the_quantile_of_one_draw_is_the_normals_own(q: float, dtype: torch.dtype):
    means = normal(1, 5, dtype=dtype)
    expected = scipy.stats.norm.ppf(q, means[0].double().numpy(), 0.3)
    np.testing.assert_allclose(real(means, 0.3).quantile(q).double().numpy(), expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.001, 0.999), min_size=2, max_size=6), st.integers(0, 1000), DTYPES)
def test_quantiles_never_fall(levels: list[float], seed: int, dtype: torch.dtype):
    prediction = real(normal(5, 3, 2, dtype=dtype, seed=seed), normal(5, 2, dtype=dtype, seed=seed).abs() + 0.01)
    values = prediction.quantile(torch.tensor(sorted(levels), dtype=torch.float64))
    assert values.shape == (len(levels), 3, 2)
    assert (values.diff(dim=0) >= -8 * torch.finfo(dtype).eps * values.abs().max()).all()  # but for rounding
    assert torch.equal(values[1], prediction.quantile(sorted(levels)[1]))


def test_quantile_levels_keep_their_axes():
    prediction = real(normal(5, 3))
    assert prediction.quantile(torch.tensor([[0.1, 0.5], [0.2, 0.9]])).shape == (2, 2, 3)
    assert prediction.quantile(torch.tensor([0.1])).shape == (1, 3)
    for q in (0, 1, -0.1, 1.1, float("nan"), torch.tensor([0.5, 1.0])):
        with pytest.raises(ConfigError, match=r"strictly between 0 and 1|q must be a number"):
            prediction.quantile(q)


@BOTH
@pytest.mark.parametrize("level", [0.05, 0.5, 0.9, 0.95, 0.999])
def test_intervals_hold_their_level(level: float, dtype: torch.dtype):
    means = normal(9, 4, 2, dtype=dtype) * 3
    lower, upper = real(means, 0.4).interval(level)
    cdf = [Normal(means.double(), 0.4).cdf(bound.double()).mean(0) for bound in (lower, upper)]
    torch.testing.assert_close(cdf[1] - cdf[0], torch.full((4, 2), level).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(cdf[0], torch.full((4, 2), (1 - level) / 2).double(), rtol=0, atol=1e-5)
    for wrong in (0, 1, 1.2, "0.9"):
        with pytest.raises(ConfigError, match="level must be a number in"):
            real(means).interval(wrong)


def test_intervals_are_of_the_mixture_and_not_of_its_moments():
    means = torch.tensor([-10.0, 10.0]).reshape(2, 1).double()
    lower, upper = real(means, 0.1).interval(0.5)
    assert (lower.item(), upper.item()) == (pytest.approx(-10.0, abs=1e-6), pytest.approx(10.0, abs=1e-6))


# -- original units ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("kind", ["std", "covariance"])
def test_rescaling_is_a_change_of_variables(kind: str, dtype: torch.dtype):
    means = normal(5, 4, 2, dtype=dtype)
    likelihood = Gaussian().build(means[0])
    noise = {"std": torch.tensor([0.3, 2.0]), "covariance": torch.tensor([[1.0, 0.5], [0.5, 2.0]])}[kind].to(dtype)
    prediction = likelihood.with_noise(**{kind: noise}).predictive(iter(means))
    targets = normal(4, 2, dtype=dtype, seed=1)
    for shift, scale in ((np.array([100.0, -3.0]), [10.0, 0.5]), (5, 2), (torch.tensor([1.0]), 3.0)):
        scaled = prediction.rescaled(shift, scale)
        shifts, scales = (torch.as_tensor(value, dtype=dtype).expand(2) for value in (shift, scale))
        # log p(a + s·y) = log p(y) − Σ log s
        expected = prediction.log_prob(targets) - scales.log().sum()
        rtol = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
        torch.testing.assert_close(scaled.log_prob(shifts + scales * targets), expected, **rtol)
        torch.testing.assert_close(scaled.mean, shifts + scales * prediction.mean)
        torch.testing.assert_close(scaled.std, scales * prediction.std, **rtol)
        torch.testing.assert_close(scaled.quantile(0.9), shifts + scales * prediction.quantile(0.9), **rtol)
    assert torch.equal(prediction.means, means)  # the prediction itself stays


def test_rescaling_of_one_output_and_of_images():
    one = real(normal(3, 4)).rescaled(np.array([2.0]), np.array([3.0]))
    torch.testing.assert_close(one.mean, 2 + 3 * normal(3, 4).mean(0))
    scales = torch.tensor([2.0, 5.0]).reshape(2, 1, 1)
    image = real(normal(3, 4, 2, 3, 3), 0.5).rescaled(0, scales)
    torch.testing.assert_close(image.std, real(normal(3, 4, 2, 3, 3), 0.5).std * scales.double())


@pytest.mark.parametrize(
    ("shift", "scale", "message"),
    [
        (0, 0, "scale must be above 0"),
        (0, [1.0, -1.0], "scale must be above 0"),
        (0, float("nan"), "scale must be finite"),
        (0, float("inf"), "scale must be finite"),
        (float("nan"), 1, "shift must be finite"),
        ([0.0, 1.0, 2.0], 1, r"shift must be one number or fit a row's outputs \(2,\), got \(3,\)"),
        (0, torch.ones(4, 1), r"scale must be one number or fit .* got \(4, 1\)"),
    ],
)
def test_units_that_are_refused(shift, scale, message: str):
    with pytest.raises(ConfigError, match=message):
        real(normal(3, 4, 2)).rescaled(shift, scale)


def test_units_never_broadcast_over_rows():
    with pytest.raises(ConfigError, match=r"fit a row's outputs \(\), got \(4,\)"):
        real(normal(3, 4)).rescaled(0, torch.ones(4))


# -- rows, devices, arrays, tables -------------------------------------------------------------------------

EXAMPLES = {
    "classes": classes(normal(4, 6, 3)),
    "dense classes": classes(normal(4, 6, 3, 2)),
    "one class axis last": classes(normal(4, 6, 5, 3), -1),
    "binary": binary(normal(4, 6)),
    "many labels": binary(normal(4, 6, 3)),
    "real": real(normal(4, 6)),
    "reals": real(normal(4, 6, 2), torch.tensor([0.1, 2.0]).double()),
    "components": real(normal(4, 6, 2), normal(2, 2).abs()),
    "covariance": Gaussian(covariance=((1.0, 0.5), (0.5, 2.0))).build(normal(6, 2)).predictive(iter(normal(4, 6, 2))),
}
every_kind = pytest.mark.parametrize("kind", EXAMPLES)


def targets_of(prediction: Prediction) -> Tensor:
    return prediction.labels if hasattr(prediction, "labels") else prediction.mean + 0.1  # pyright: ignore


def assert_rows(part: Prediction, whole: Prediction, rows: list[int]) -> None:
    """The part says of its rows what the whole says of them."""
    assert len(part) == len(rows) and type(part) is type(whole)
    for name in whole.columns:
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[rows])
    torch.testing.assert_close(part.log_prob(targets_of(whole)[rows]), whole.log_prob(targets_of(whole))[rows])


@every_kind
@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (2, [2]),
        (-1, [5]),
        (-6, [0]),
        (np.int64(3), [3]),
        (torch.tensor(4), [4]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        ([4, 0, 4], [4, 0, 4]),
        (np.array([5, 1]), [5, 1]),
        (torch.tensor([True, False, False, True, False, False]), [0, 3]),
        (np.array([False, True, False, True, False, False]), [1, 3]),
        (torch.tensor([1, 5]), [1, 5]),
    ],
)
def test_rows_are_indexed(kind: str, index, rows: list[int]):
    assert_rows(EXAMPLES[kind][index], EXAMPLES[kind], rows)


@every_kind
def test_rows_end_where_they_end(kind: str):
    prediction = EXAMPLES[kind]
    assert len(list(prediction)) == len(prediction) == 6
    for index in (6, -7, np.int64(6)):
        with pytest.raises(IndexError, match="of a prediction with 6 rows"):
            prediction[index]
    nothing = prediction[torch.zeros(6, dtype=torch.bool)]
    assert len(nothing) == 0
    if isinstance(nothing, RealPrediction):
        assert nothing.quantile(0.5).shape[0] == 0


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(sorted(EXAMPLES)), st.lists(st.integers(0, 6), max_size=3))
def test_parts_make_the_whole_again(kind: str, cuts: list[int]):
    whole = EXAMPLES[kind]
    edges = [0, *sorted(cuts), 6]
    parts = [whole[start:stop] for start, stop in itertools.pairwise(edges) if stop > start]
    assert_rows(type(whole).cat(parts), whole, list(range(6)))


@every_kind
def test_predictions_move(kind: str):
    prediction = EXAMPLES[kind].to(torch.float32)
    for name in prediction.columns:
        quantity = getattr(prediction, name)
        assert quantity.dtype == (torch.int64 if name == "labels" else torch.float32)
        torch.testing.assert_close(quantity.double(), getattr(EXAMPLES[kind], name).double(), rtol=1e-5, atol=1e-6)
    assert prediction.to("cpu", torch.float64).log_prob(targets_of(prediction)).dtype == torch.float64


@every_kind
def test_predictions_become_arrays(kind: str):
    prediction = EXAMPLES[kind]
    arrays = prediction.to_numpy()
    assert tuple(arrays) == prediction.columns
    for name, array in arrays.items():
        assert isinstance(array, np.ndarray) and len(array) == 6
        np.testing.assert_array_equal(array, getattr(prediction, name).numpy())


def test_predictions_become_tables():
    table = EXAMPLES["classes"].to_pandas()
    assert list(table) == [
        "labels", "confidence", "total", "aleatoric", "epistemic", "function_variance",
        "probs_0", "probs_1", "probs_2",
    ]  # fmt: skip
    np.testing.assert_array_equal(table["probs_2"], EXAMPLES["classes"].probs[:, 2].numpy())
    assert list(real(normal(4, 6, 1)).to_pandas()) == ["mean", "std", "aleatoric_std", "epistemic_std"]
    assert list(EXAMPLES["reals"].to_pandas())[:3] == ["mean_0", "mean_1", "std_0"]
    assert EXAMPLES["many labels"].to_pandas().shape == (6, 7 * 3)
    with pytest.raises(DataError, match=r"at most one axis of outputs, but .* use to_numpy"):
        EXAMPLES["one class axis last"].to_pandas()


def test_the_two_parts_of_uncertainty_are_shown_in_the_targets_units():
    # Two draws ±3 around the mean and noise of variance 16: std² = 5² = 4² + 3²; the second target is in thousandths.
    means = torch.tensor([[[2.0, 0.002]], [[8.0, 0.008]]], dtype=torch.float64)
    prediction = RealPrediction(means, torch.tensor([[[16.0, 16e-6]]], dtype=torch.float64))
    unit = torch.tensor([[1.0, 1e-3]], dtype=torch.float64)
    for name, expected in {"mean": 5, "std": 5, "aleatoric_std": 4, "epistemic_std": 3}.items():
        torch.testing.assert_close(getattr(prediction, name), expected * unit, rtol=1e-14, atol=0)
    torch.testing.assert_close(prediction.aleatoric, 16 * unit**2, rtol=1e-14, atol=0)  # variances stay
    torch.testing.assert_close(prediction.epistemic, 9 * unit**2, rtol=1e-14, atol=0)
    table = prediction.to_pandas()
    assert {name: float(table[name][0]) for name in table} == pytest.approx(
        {
            "mean_0": 5, "mean_1": 5e-3, "std_0": 5, "std_1": 5e-3,
            "aleatoric_std_0": 4, "aleatoric_std_1": 4e-3, "epistemic_std_0": 3, "epistemic_std_1": 3e-3,
        }, rel=1e-14,
    )  # fmt: skip
    metres = prediction.rescaled(1.0, (10.0, 1000.0)).to_numpy()  # each target keeps its unit
    np.testing.assert_allclose(metres["aleatoric_std"], [[40, 4]], rtol=1e-14)
    np.testing.assert_allclose(metres["epistemic_std"], [[30, 3]], rtol=1e-14)


def test_predictions_are_frozen():
    with pytest.raises(AttributeError):
        EXAMPLES["real"].means = normal(4, 6)  # pyright: ignore


def test_half_precision_outputs_are_judged_in_single():
    for dtype in (torch.float16, torch.bfloat16):
        for make, shape in ((classes, (2, 3, 4)), (binary, (2, 3))):
            half = normal(*shape).to(dtype)
            torch.testing.assert_close(make(half).probs, make(half.float()).probs, rtol=1e-6, atol=0)
        half = normal(2, 3, 1).to(dtype)
        found = Gaussian(std=0.5).build(half[0]).predictive(iter(half))
        expected = (0.25 + half.float().var(0, unbiased=False)).sqrt()
        torch.testing.assert_close(found.std, expected, rtol=1e-6, atol=0)


def test_rows_in_reverse_half_precision_and_units_beyond_the_dtype() -> None:
    prediction = RealPrediction(torch.arange(3.0).view(1, 3, 1), torch.ones(1, 3, 1))
    assert prediction[::-1].mean.flatten().tolist() == [2, 1, 0]
    assert prediction[2:0:-1].mean.flatten().tolist() == [2, 1]
    halved = prediction.to(torch.bfloat16)
    assert halved.to_numpy()["mean"].dtype == np.float32 and "RealPrediction" in repr(halved)
    for scale in (1e-25, 1e20):
        with pytest.raises(ConfigError, match="float64"):
            prediction.rescaled(0, scale)
        assert prediction.to(torch.float64).rescaled(0, scale).interval()[0].isfinite().all()
