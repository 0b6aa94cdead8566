"""`scaled` multiplies the standard deviations of every registered method that has some, wherever draws are made."""

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

import dubito
from dubito import (
    HMC,
    SWAG,
    Categorical,
    ConfigError,
    DubitoWarning,
    Gaussian,
    Implicit,
    Laplace,
    MCDropout,
    MeanField,
    Rank1,
    Training,
    factors,
)
from dubito.inputs import call, take
from dubito.method import Method
from dubito.networks import duplicate
from dubito.node_factors.posterior import SIDES
from dubito.posterior import Posterior

from .cases import METHODS, Case, fitted, make, rows
from .test_threads import same_from_threads

pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")
SEED = 3
POINTS = ("map", "swa", "deep-ensemble", "batch-ensemble")
SCALED = [method for method in METHODS if method not in POINTS]
NODES = ("mc-dropout", "rank1", "rank1-beside", "implicit")
LAPLACE = [method for method in SCALED if method.startswith("laplace")]
every_method = pytest.mark.parametrize("method", SCALED)
QUICK = Training(epochs=2, batch_size=8)


def quietly(method: Method, net: nn.Module, data: tuple[Tensor, Tensor], likelihood: Any) -> Posterior:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)
        return method.fit(net, data, likelihood, training=QUICK)


def drawn(posterior: Posterior, index: int) -> dict[str, Tensor]:
    return posterior.draw(index, posterior.generator(SEED, index))


def written_out(posterior: Posterior, case: Case, count: int) -> Tensor:
    """The outputs of draws, one network of weights after the other, [S, B, C]."""
    buffers, outputs = dict(posterior.network.named_buffers()), []
    for index in range(count):
        weights = {**buffers, **drawn(posterior, index)}
        outputs.append(call(lambda *a, w=weights, **k: functional_call(posterior.network, w, a, k), case.inputs))
    return torch.stack(outputs).detach()


def same(one: Posterior, other: Posterior, inputs: object) -> bool:
    predictions = [posterior.predict(inputs, 4, seed=1) for posterior in (one, other)]
    return all(torch.equal(*(getattr(p, name) for p in predictions)) for name in ("probs", "aleatoric", "epistemic"))


def test_the_list_is_that_of_the_methods():
    assert {method for method in METHODS if fitted(method)[0].scalable} == set(SCALED)


# -- the draws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [method for method in SCALED if method not in NODES])
@pytest.mark.parametrize("network", ["mlp", "convolutional"])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_weights_move_along_a_line_from_the_centre(method: str, network: str, scale: float):
    posterior, _ = fitted(method, network)
    scaled, centre = posterior.scaled(scale), posterior.weights()
    for index in range(3):
        before, after = drawn(posterior, index), drawn(scaled, index)
        assert any(not torch.equal(before[name], centre[name]) for name in centre)
        for name, mean in centre.items():
            change = scale * (before[name] - mean)
            atol = 1e-6 * float(1 + change.abs().max())  # roundings of the largest weights
            torch.testing.assert_close(after[name], mean + change, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("method", NODES)
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_factors_move_around_the_means_of_their_components(method: str, scale: float):
    posterior, _ = fitted(method)
    before, after = (p.draws(range(6), SEED).tensors for p in (posterior, posterior.scaled(scale)))
    for side in SIDES:
        for name, values in before.get(f"{side}_factors", {}).items():
            means = torch.ones_like(values)
            if method != "mc-dropout":
                means = posterior.group(f"{side}_mean")[name][torch.arange(6) % posterior.num_components]
            assert not torch.equal(values, means)
            truth = means + scale * (values - means)
            torch.testing.assert_close(after[f"{side}_factors"][name], truth, rtol=1e-5, atol=1e-6)
    for name, biases in before.get("biases", {}).items():
        if method in ("rank1", "rank1-beside"):  # points, one for each component
            assert torch.equal(after["biases"][name], biases)
    for name, weights in before.get("draws", {}).items():
        truth = torch.lerp(posterior.weights()[name], weights, scale)
        torch.testing.assert_close(after["draws"][name], truth, rtol=1e-5, atol=1e-6)


FAMILIES = [factors.Normal(), factors.Cauchy(), factors.LogNormal(), factors.HalfCauchy(), factors.InverseGamma()]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_every_family_of_factors(family: factors.Normal):
    """Positive factors move by their logarithms; all of them before they are bounded."""
    case, bound = make("mlp"), 1.3
    posterior = quietly(
        Rank1(family=family, components=2, bound=bound), case.net, (case.inputs, case.targets), Categorical()
    )
    scale, count = 3.0, 8
    after = posterior.scaled(scale).draws(range(count), SEED).tensors
    wide = 0
    for name in posterior.uses:
        for index in range(count):
            generator, noises = posterior.generator(SEED, index), {}
            for other in posterior.uses:  # the stream goes through all weights
                noises[other] = posterior.noise(other, (1,), generator, posterior.weights()[other])
            for side, noise in zip(SIDES, noises[name], strict=True):
                mean, raw = (posterior.group(f"{side}_{key}")[name][index % 2] for key in ("mean", "raw_std"))
                value = mean + scale * F.softplus(raw) * noise[0]
                truth = value.exp().clamp(max=bound) if family.positive else value.clamp(-bound, bound)
                wide += int((truth.abs() == bound).sum())
                torch.testing.assert_close(after[f"{side}_factors"][name][index], truth)
    assert wide or family.light


class Dropping(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.body, self.drop, self.head = nn.Linear(4, 9), drop, nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.body(x))))


@pytest.mark.parametrize("drop", [nn.Dropout(0.4), nn.AlphaDropout(0.3)], ids=["dropout", "alpha"])
def test_masks_of_the_networks_own_dropout_layers(drop: nn.Module):
    """1 + s (mask − 1) before a linear layer moves the outputs along a line from those in evaluation mode."""
    case = make("mlp")
    posterior = quietly(MCDropout(rate=None), Dropping(drop), (case.inputs, case.targets), Categorical())
    centre, before = posterior.network(case.inputs).detach(), posterior.sample_outputs(case.inputs, 4)
    for scale in (0.0, 0.3, 3.0):
        scaled, truth = posterior.scaled(scale), centre + scale * (before - centre)
        kept = posterior.sampled(4).scaled(scale)
        answers = [
            scaled.sample_outputs(case.inputs, 4),
            torch.stack([scaled.function(index)(case.inputs) for index in range(4)]),
            torch.stack([scaled.fold(index)(case.inputs) for index in range(4)]),
            *(p.sample_outputs(case.inputs, 4) for p in (scaled.sampled(4), kept, kept.sampled(4))),
        ]
        for answer in answers:
            torch.testing.assert_close(answer, truth)


def test_the_covariance_of_draws_is_that_of_the_block_times_the_square():
    posterior, _ = fitted("laplace-kfac")
    scale, count, block = 0.5, 4000, posterior.blocks["2"]
    drawer = posterior.scaled(scale).drawer()
    draws = torch.stack(
        [
            torch.cat([tensors[block.weight], tensors[block.bias][:, None]], 1).flatten()
            for tensors in (drawer(index, posterior.generator(0, index)) for index in range(count))
        ]
    ).double()
    truth = scale**2 * posterior.block("2").covariance_matrix.double()
    variance = truth.diagonal()
    error = ((variance[:, None] * variance + truth**2) / count).sqrt()
    assert ((draws.T.cov() - truth).abs() < 5.5 * error).all()  # 1,485 pairs: 5.5 errors once in 17,000 tests


# -- everything that draws ---------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("network", ["mlp", "convolutional"])
def test_all_ways_to_draw_give_the_same_functions(method: str, network: str):
    posterior, case = fitted(method, network)
    scaled = posterior.scaled(0.3)
    count = -(-4 // scaled.num_components) * scaled.num_components
    truth = written_out(scaled, case, count)
    close = {"rtol": 1e-5, "atol": 1e-5}
    assert not torch.allclose(truth, written_out(posterior, case, count), **close)
    few, draws = take(case.inputs, slice(2)), {"linearised": False} if method in LAPLACE else {}
    answers = {
        "all rows": scaled.sample_outputs(case.inputs, count, seed=SEED, **draws),
        "few rows": scaled.sample_outputs(few, count, seed=SEED, **draws),
        "functions": torch.stack([scaled.function(index, SEED, **draws)(case.inputs) for index in range(count)]),
        "folded": torch.stack([call(scaled.fold(index, seed=SEED), case.inputs) for index in range(count)]).detach(),
        "sampled": scaled.sampled(count, seed=SEED, **draws).sample_outputs(case.inputs, count),
        "scaled afterwards": posterior.sampled(count, seed=SEED, **draws)
        .scaled(0.3)
        .sample_outputs(case.inputs, count),
        "sampled twice": posterior.sampled(count, seed=SEED, **draws)
        .scaled(0.3)
        .sampled(count)
        .sample_outputs(case.inputs, count),
    }
    for name, outputs in answers.items():
        wanted = truth[:, :2] if name == "few rows" else truth
        torch.testing.assert_close(outputs, wanted, msg=lambda text, name=name: f"{name}: {text}", **close)
    module = posterior.sampled(count, seed=SEED, **draws).scaled(0.3).as_module()
    probs = truth.softmax(-1).mean(0)
    torch.testing.assert_close(module(case.inputs)["probs"], probs, **close)
    prediction = scaled.predict(case.inputs, count, seed=SEED, **draws)
    torch.testing.assert_close(prediction.probs, probs, **close)


@every_method
def test_zero_is_the_centre(method: str):
    posterior, case = fitted(method)
    centre = posterior.scaled(0)
    outputs = [posterior.network(case.inputs).detach()]
    if method in ("rank1", "rank1-beside", "implicit"):  # W ∘ r sᵀ with the mean factors of every component
        outputs = []
        for index in range(posterior.num_components):
            weights = posterior.weights()
            for name in posterior.uses:
                for side, axis in zip(SIDES, (0, 1), strict=True):
                    if f"{side}_mean" in posterior.tensors:
                        mean = posterior.group(f"{side}_mean")[name][index]
                        weights[name] = weights[name] * mean.unsqueeze(axis)
            for name, others in posterior.other_biases.items():
                weights[name] = others[index - 1] if index else weights[name]
            outputs.append(functional_call(posterior.network, weights, (case.inputs,)))
    truth = posterior.likelihood.predictive(outputs)
    forms = [{}]
    forms += [{form: True} for form in ("linearised", "marginal", "per_example") if centre.has_form(form)]
    for form in forms:
        prediction = centre.predict(case.inputs, 8, **form)
        torch.testing.assert_close(prediction.probs, truth.probs)
        torch.testing.assert_close(prediction.epistemic, truth.epistemic, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["marginal", "per_example"])
def test_noise_of_single_rows_moves_the_outputs_of_one_layer_along_a_line(form: str):
    """One layer's outputs are linear in noise on its outputs, and in factors on its inputs."""
    method = {"marginal": MeanField(initial_std=0.2), "per_example": Implicit(components=2)}[form]
    data = rows((24, 4)), rows((24, 2), 1)
    posterior = quietly(method, nn.Linear(4, 2), data, Gaussian())
    centre, before, after = (posterior.scaled(scale).predict(data[0], 6, **{form: True}).means for scale in (0, 1, 0.3))
    assert (before - centre).abs().max() > 1e-3
    torch.testing.assert_close(after, centre + 0.3 * (before - centre), rtol=1e-4, atol=1e-5)


# -- Laplace in closed form --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", LAPLACE)
def test_closed_forms_have_the_covariance_times_the_square(method: str):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    data = rows((30, 4)).double(), rows((30, 2), 1).double()
    posterior = quietly(METHODS[method], net, data, Gaussian())
    scale, x = 0.3, data[0][:5]
    scaled = posterior.scaled(scale)
    close = {"rtol": 1e-10, "atol": 1e-14}
    before, after = (p.predict(x, linearised=True) for p in (posterior, scaled))
    assert torch.equal(before.mean, after.mean)
    torch.testing.assert_close(after.mean_covariances, scale**2 * before.mean_covariances, **close)
    torch.testing.assert_close(after.epistemic, scale**2 * before.epistemic, **close)
    torch.testing.assert_close(scaled.joint(x).covariance, scale**2 * posterior.joint(x).covariance, **close)
    for name in posterior.blocks:
        wide, narrow = posterior.block(name), scaled.block(name)
        torch.testing.assert_close(narrow.variance, scale**2 * wide.variance, rtol=1e-8, atol=1e-14)
        truth = scale**2 * wide.covariance_matrix
        torch.testing.assert_close(narrow.covariance_matrix, truth, rtol=1e-8, atol=1e-14)
    centre = posterior.network(x).detach()
    drawn_before, drawn_after = (p.sample_outputs(x, 3, linearised=True) - centre for p in (posterior, scaled))
    torch.testing.assert_close(drawn_after, scale * drawn_before, rtol=1e-8, atol=1e-12)
    kept = posterior.sampled(3, linearised=True).scaled(scale)
    torch.testing.assert_close(kept.sample_outputs(x, 3) - centre, drawn_after, rtol=1e-8, atol=1e-12)
    # They judge the model, which has no scale.
    assert scaled.log_marginal_likelihood() == posterior.log_marginal_likelihood()
    tuned = scaled.tuned()
    assert tuned.prior_precision == posterior.tuned().prior_precision and tuned.scale == scale
    with pytest.raises(ConfigError, match="no density"):
        posterior.scaled(0).block("0")


# -- the scale itself --------------------------------------------------------------------------------------------


@every_method
def test_scales_multiply_and_the_posterior_stays_as_it_was(method: str, tmp_path):
    posterior, case = fitted(method)
    details, state = dict(posterior.details), {k: v.clone() for k, v in posterior.state_dict().items()}
    half = posterior.scaled(0.5)
    assert (posterior.scale, half.scale, half.scaled(0.5).scale) == (1.0, 0.5, 0.25)
    whole = half.scaled(2)
    assert whole.scale == 1.0 and "scale" not in whole.details
    assert same(whole, posterior, case.inputs) and same(posterior.scaled(1), posterior, case.inputs)
    assert not same(half, posterior, case.inputs)
    assert half.scaled(0).scaled(7).scale == 0

    half.save(tmp_path / "half.safetensors")
    loaded = dubito.load(tmp_path / "half.safetensors", make("mlp").net)
    for other in (loaded, pickle.loads(pickle.dumps(half)), duplicate(half)):
        assert other.scale == 0.5 and same(other, half, case.inputs)
    kept = posterior.sampled(4).scaled(0.5)
    kept.save(tmp_path / "kept.safetensors")
    loaded = dubito.load(tmp_path / "kept.safetensors", make("mlp").net)
    assert loaded.scale == 0.5 and same(loaded, kept, case.inputs)
    assert same(loaded.scaled(2), posterior.sampled(4), case.inputs)

    with torch.no_grad():
        for parameter in half.parameters():
            parameter.zero_()
    assert posterior.details == details
    assert all(torch.equal(value, state[name]) for name, value in posterior.state_dict().items())
    half.load_state_dict(state)
    assert same(half, posterior.scaled(0.5), case.inputs)


@pytest.mark.parametrize("method", ["rank1", "laplace-inf", "mean-field"])
def test_threads_may_ask_for_both(method: str):
    posterior, case = fitted(method)
    posteriors = [posterior, posterior.scaled(0.3), posterior._view(3), posterior._view(0.3)]
    same_from_threads(lambda job: posteriors[job].predict(take(case.inputs, slice(job, job + 3)), 4), 16)
    kept = posterior.sampled(4, linearised=False if method in LAPLACE else None)
    posteriors = [kept, kept.scaled(0.3), kept._view(3), kept._view(0.3)]
    same_from_threads(lambda job: posteriors[job].predict(take(case.inputs, slice(job, job + 3))), 16)


def test_divergences_are_those_of_the_scaled_posterior():
    for method in ("mean-field", "k-tied"):
        posterior, _ = fitted(method)
        weights = posterior.weights()
        truth = sum(
            kl_divergence(
                Normal(weights[name].double(), 0.3 * posterior.weight_scale(name).std.double()),
                Normal(0.0, posterior.method.prior_std),
            ).sum()
            for name in posterior.random
        )
        torch.testing.assert_close(posterior.scaled(0.3).kl().double(), truth, rtol=1e-5, atol=0)
        assert posterior.scaled(0).kl() == torch.inf


def test_truncation_and_scale_commute():
    posterior, _ = fitted("mean-field")
    first, last = posterior.scaled(0.3).tied(2), posterior.tied(2).scaled(0.3)
    for name in posterior.random:
        assert torch.equal(first.weight_scale(name).std, last.weight_scale(name).std)
    spectra = [p.spectrum()["0.weight"] for p in (posterior, posterior.scaled(0))]
    assert torch.equal(spectra[0].std, spectra[1].std)  # shares of variance, which a scale leaves


# -- refusals ----------------------------------------------------------------------------------------------------


def test_posteriors_without_standard_deviations_refuse():
    case = make("mlp")
    data = case.inputs, case.targets
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DubitoWarning)  # of chains as short as these
        chains = HMC(num_samples=4, warmup=2, chains=1).fit(case.net, data, Categorical())
    posteriors = [fitted(method)[0] for method in METHODS if method not in SCALED]
    posteriors += [chains, fitted("deep-ensemble")[0].sampled(4)]
    assert len(posteriors) == 6
    for posterior in posteriors:
        assert not posterior.scalable
        with pytest.raises(ConfigError, match=f"{type(posterior.method).__name__}.*none; .*such as Laplace"):
            posterior.scaled(0.3)


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf"), "1", True, None])
def test_scales_that_are_none(scale: object):
    with pytest.raises(ConfigError, match="scale must be a finite number of at least 0"):
        fitted("mean-field")[0].scaled(scale)  # pyright: ignore[reportArgumentType]


def test_refreshed_draws_are_scaled_before():
    """Batch norm's statistics are those of the draws as they are."""
    posterior, case = fitted("swag", "convolutional")
    data = case.inputs, case.targets
    refreshed = posterior.scaled(0.5).refreshed(data, num_samples=3)
    assert refreshed.scale == 0.5
    torch.testing.assert_close(
        drawn(refreshed, 1)["0.weight"], posterior.scaled(0.5).draw(1, posterior.generator(0, 1))["0.weight"]
    )
    for fixed in (refreshed, refreshed.sampled(3)):
        with pytest.raises(ConfigError, match=r"SWAG \(3 fixed draws\).*before refreshed"):
            fixed.scaled(2)
    assert SWAG().scale == 1.0  # the method's own setting, of the covariance
    assert isinstance(METHODS["laplace-kfac"], Laplace)
