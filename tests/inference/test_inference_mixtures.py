"""Mixtures of posteriors: closed forms by hand, draws by component, weights against grids, storage, sharing."""

import copy
import math
import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
from laplace_reference import dense_covariance, normal
from safetensors import safe_open
from torch import nn
from torch.distributions import Normal

import dubito
from dubito import (
    INF,
    KFAC,
    MAP,
    SWAG,
    BatchEnsemble,
    Bernoulli,
    Categorical,
    ConfigError,
    DeepEnsemble,
    Gaussian,
    Laplace,
    MCDropout,
    Poisson,
    Rank1,
    StorageError,
    StudentT,
    Training,
    last_layer,
    seeds,
)
from dubito.calibration import temperature_scaled
from dubito.export import served
from dubito.posterior.mixture import stacking_weights

QUICK = Training(epochs=12, batch_size=16, lr=2e-2)
INFS = Laplace(structure=INF(rank=6), prior_precision=2.0)
WEIGHTS = (0.5, 0.3, 0.2)


def net(outputs: int = 1) -> nn.Module:
    with seeds.forked(3):
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def reals():
    x = normal(48, 2, seed=4)
    return x, x[:, :1].sin() + 0.1 * normal(48, 1, seed=5)


def classes():
    x = normal(48, 2, seed=4)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0.3).long()


@cache
def fitted(kind: str, of=INFS):
    likelihood, data, outputs = {"reals": (Gaussian(), reals, 1), "classes": (Categorical(), classes, 3)}[kind]
    return DeepEnsemble(members=3, of=of).fit(net(outputs), data(), likelihood, training=QUICK)


def lines(*weights: list[float]) -> list[nn.Module]:
    networks = [nn.Linear(2, 1, bias=False).double() for _ in weights]
    for network, weight in zip(networks, weights, strict=True):
        network.weight.data = torch.tensor([weight], dtype=torch.float64)
    return networks


def weighted(mixture, weights=WEIGHTS):
    mixture = copy.deepcopy(mixture)
    mixture.details |= {"weighting": "stacking", "component_weights": list(weights)}
    return mixture


def averaged(values: list, weights=WEIGHTS):
    return sum(w * value for w, value in zip(weights, values, strict=True))


# -- predictions --------------------------------------------------------------------------------------------------


def test_reals_in_closed_form_are_the_mixture_of_the_components_normals():
    mixture, (x, y) = weighted(fitted("reals")), reals()
    means, stds, noises = [], [], []
    for part in mixture.components:
        covariance = dense_covariance(part, x)[range(48), 0, range(48), 0]
        noises.append(float(part.likelihood.std()) ** 2)
        means.append(part.network(x).detach())
        stds.append((covariance[:, None] + noises[-1]).sqrt())
    prediction = mixture.predict(x)
    mean = averaged(means)
    second = averaged([std**2 + m**2 for std, m in zip(stds, means, strict=True)])
    assert len(set(noises)) == 3  # each member learned its own
    torch.testing.assert_close(prediction.mean, mean, rtol=0, atol=1e-12)
    torch.testing.assert_close(prediction.std**2, second - mean**2, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(mean, averaged(noises)))
    laws = [Normal(m, s) for m, s in zip(means, stds, strict=True)]
    density = averaged([law.log_prob(y).exp() for law in laws])
    torch.testing.assert_close(prediction.log_prob(y), density.log()[:, 0], rtol=1e-9, atol=1e-9)
    lower = prediction.quantile(0.2)
    torch.testing.assert_close(averaged([law.cdf(lower) for law in laws]), torch.full_like(mean, 0.2))
    grid = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    below = averaged([law.cdf(grid) for law in laws])
    expected = torch.trapezoid((below - (y <= grid).double()) ** 2, grid)
    torch.testing.assert_close(prediction.crps(y), expected, rtol=1e-3, atol=1e-4)


def test_equal_weights_are_the_plain_mean():
    mixture, (x, _) = fitted("reals"), reals()
    parts = [part.predict(x) for part in mixture.components]
    prediction = mixture.predict(x)
    torch.testing.assert_close(prediction.mean, averaged([p.mean for p in parts], [1 / 3] * 3))
    within = averaged([p.std**2 for p in parts], [1 / 3] * 3)
    between = torch.stack([p.mean for p in parts]).var(0, unbiased=False)
    torch.testing.assert_close(prediction.std**2, within + between, rtol=1e-12, atol=1e-12)


def test_probabilities_in_closed_form_are_the_weighted_mean_and_function_variance_is_total():
    mixture, (x, y) = weighted(fitted("classes")), classes()
    parts = [part.predict(x) for part in mixture.components]
    prediction = mixture.predict(x)
    probs = averaged([part.probs for part in parts])
    torch.testing.assert_close(prediction.probs, probs, rtol=0, atol=1e-12)
    torch.testing.assert_close(prediction.log_prob(y), probs[range(48), y].log(), rtol=0, atol=1e-12)
    torch.testing.assert_close(prediction.aleatoric, averaged([part.aleatoric for part in parts]))
    total = -(probs * probs.log()).sum(1)
    torch.testing.assert_close(prediction.epistemic, (total - prediction.aleatoric).clamp(min=0))
    logits = [part.network(x).detach() for part in mixture.components]
    centred = [f - f.mean(1, keepdim=True) for f in logits]
    away = [(f - averaged(centred)).square().mean(1) for f in centred]
    centring = torch.eye(3, dtype=torch.float64) - 1 / 3
    within = []
    for part in mixture.components:
        dense = dense_covariance(part, x)[range(48), :, range(48), :]
        within.append((centring @ dense @ centring).diagonal(dim1=1, dim2=2).mean(1))
    torch.testing.assert_close(prediction.function_variance, averaged(within) + averaged(away))
    assert prediction.function_mean is None


@pytest.mark.parametrize("kind", ["reals", "classes"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_predictions_by_draws_average_the_draws_by_their_components_weights(kind, weights):
    mixture, (x, y) = fitted(kind, SWAG()), {"reals": reals, "classes": classes}[kind]()
    mixture = mixture if weights is None else weighted(mixture)
    outputs = mixture.sample_outputs(x, 12, seed=2)
    shares = torch.tensor(weights or [1 / 3] * 3, dtype=torch.float64).repeat(4).view(-1, 1, 1) / 4
    prediction = mixture.predict(x, 12, seed=2)
    if kind == "classes":
        torch.testing.assert_close(prediction.probs, (shares * outputs.softmax(-1)).sum(0))
        centred = outputs - outputs.mean(-1, keepdim=True)
        spread = (shares * (centred - (shares * centred).sum(0)) ** 2).sum(0).mean(-1)
        torch.testing.assert_close(prediction.function_variance, spread)
        return
    stds = torch.stack([mixture.likelihood.std(s) for s in range(12)]).unsqueeze(1).detach()
    density = (shares * Normal(outputs, stds).log_prob(y).exp()).sum(0)
    torch.testing.assert_close(prediction.log_prob(y), density.log()[:, 0])
    torch.testing.assert_close(prediction.mean, (shares * outputs).sum(0))


def test_weights_enter_counts_heavy_tails_and_yes_or_no():
    x, y = reals()
    counts = (y.abs() * 4).round()
    for likelihood, targets in ((Poisson(), counts), (StudentT(df=4.0), y), (Bernoulli(), (y > 0).double())):
        mixture = DeepEnsemble(members=3, of=MAP()).fit(net(), (x, targets), likelihood, training=QUICK)
        mixture = weighted(mixture)
        parts = [part.predict(x) for part in mixture.components]
        prediction = mixture.predict(x)
        density = averaged([part.log_prob(targets).exp() for part in parts])
        torch.testing.assert_close(prediction.log_prob(targets), density.log())
        if not isinstance(likelihood, Bernoulli):
            torch.testing.assert_close(prediction.mean, averaged([part.mean for part in parts]))
            below = averaged([part.tails(counts)[0] for part in parts])
            torch.testing.assert_close(prediction.tails(counts)[0], below)


def test_rows_of_several_positions_have_the_joint_density_of_the_mixture():
    x = normal(20, 2, 3)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    with seeds.forked(1):
        conv = nn.Sequential(nn.Conv1d(2, 3, 1)).double()
    mixture = DeepEnsemble(members=3, of=INFS).fit(conv, (x, y), Categorical(), training=QUICK)
    mixture = weighted(mixture)
    parts = [part.predict(x).log_probs for part in mixture.components]
    joint = averaged([p.gather(1, y.unsqueeze(1)).squeeze(1).sum(1).exp() for p in parts])
    torch.testing.assert_close(mixture.predict(x).log_prob(y), joint.log())


def test_other_forms_of_prediction_and_their_refusals_are_the_components():
    mixture, (x, _) = fitted("classes", Rank1(components=2)), classes()
    assert mixture.num_components == 6
    parts = [
        part.predict(x, 4, seed=seeds.derived(1, "component", k) if k else 1, per_example=True).probs
        for k, part in enumerate(mixture.components)
    ]
    torch.testing.assert_close(mixture.predict(x, 12, seed=1, per_example=True).probs, averaged(parts, [1 / 3] * 3))
    with pytest.raises(ConfigError, match="linearised=True is for posteriors of Laplace"):
        mixture.predict(x, linearised=True)


# -- draws --------------------------------------------------------------------------------------------------------


def test_draws_of_each_component_have_its_mean_and_covariance():
    x, y = reals()
    method = Laplace(structure=KFAC(), prior_precision=3.0)
    networks = lines([0.5, 0.0], [0.5, 0.0], [0.6, -0.1])
    mixture = method.around(DeepEnsemble.from_networks(networks, Gaussian(std=0.5)), (x, y))
    drawer, count = mixture.drawer(), 3000
    precision = x.T @ x / 0.25 + 3.0 * torch.eye(2).double()
    for k in range(3):
        indices = range(k, 3 * count, 3)
        draws = torch.stack([drawer(s, mixture.generator(0, s))["weight"].flatten() for s in indices])
        covariance = torch.linalg.inv(precision)
        error = draws.mean(0) - mixture.components[k].network.weight.flatten()
        assert (error.abs() < 4 * (covariance.diagonal() / count).sqrt()).all()
        torch.testing.assert_close(draws.T.cov(), covariance, rtol=0.15, atol=0.1 * float(covariance.max()))
    starts = [drawer(s, mixture.generator(0, s))["weight"] for s in range(2)]
    assert not torch.equal(*starts)  # equal components have noise of their own


@pytest.mark.parametrize("of", [INFS, SWAG(), Rank1(components=2), MCDropout()], ids=lambda of: type(of).__name__)
def test_draw_s_is_number_s_over_k_of_component_s_mod_k(of):
    mixture, (x, _) = fitted("classes", of), classes()
    outputs = mixture.sample_outputs(x, 7, seed=3, linearised=False)
    for s in range(7):
        k, place = s % 3, s // 3
        seed = seeds.derived(3, "component", k) if k else 3
        alone = mixture.components[k].sample_outputs(x, 4, seed=seed, linearised=False)[place]
        torch.testing.assert_close(outputs[s], alone)
        torch.testing.assert_close(mixture.function(s, 3, linearised=False)(x), alone)
    if not isinstance(of, MCDropout):
        torch.testing.assert_close(mixture.fold(4, seed=3)(x), outputs[4])


def test_equal_modes_collapse_to_the_one_posterior():
    x, y = reals()
    (linear,) = lines([0.5, 0.0])
    method = Laplace(structure=KFAC(), prior_precision=1.0)
    ensemble = DeepEnsemble.from_networks([linear] * 3, Gaussian(std=0.3))
    mixture, alone = method.around(ensemble, (x, y)), method.fit(linear, (x, y), Gaussian(std=0.3))
    for weighting in ("equal", "evidence", "stacking"):
        prediction, truth = mixture.weighted(weighting, (x, y)).predict(x), alone.predict(x)
        torch.testing.assert_close(prediction.mean, truth.mean, rtol=0, atol=1e-12)
        torch.testing.assert_close(prediction.std, truth.std, rtol=0, atol=1e-12)
        torch.testing.assert_close(prediction.log_prob(y), truth.log_prob(y), rtol=0, atol=1e-12)


# -- around fitted posteriors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [BatchEnsemble(components=2), Rank1(components=2), DeepEnsemble(members=2)])
def test_the_curvature_is_taken_at_each_component(method):
    x, y = classes()
    posterior = method.fit(net(3), (x, y), Categorical(), training=QUICK)
    mixture = INFS.around(posterior, (x, y), seed=4)
    centre = posterior.scaled(0) if posterior.scalable else posterior
    assert len(mixture.components) == 2
    for k, part in enumerate(mixture.components):
        alone = INFS.fit(centre.fold(k), (x, y), Categorical(), seed=4)
        torch.testing.assert_close(part.predict(x).log_probs, alone.predict(x).log_probs, rtol=0, atol=1e-12)
    assert not torch.equal(*(part.group("diagonal")["0.weight"] for part in mixture.components))


def test_around_keeps_each_components_noise_and_the_layers_that_are_asked_for():
    x, y = reals()
    ensemble = DeepEnsemble(members=2).fit(net(), (x, y), Gaussian(), training=QUICK)
    mixture = Laplace(subset=last_layer, prior_precision=1.0).around(ensemble, (x, y))
    for k, part in enumerate(mixture.components):
        assert torch.equal(part.likelihood.std(), ensemble.likelihood.std(k))
        assert [block.weight for block in part.blocks.values()] == ["2.weight"]
    draws = [mixture.draw(s, mixture.generator(0, s)) for s in (1, 3)]
    assert torch.equal(*(draw["0.weight"] for draw in draws))
    assert not torch.equal(*(draw["2.weight"] for draw in draws))


# -- weights --------------------------------------------------------------------------------------------------------


def test_stacking_weights_maximise_the_likelihood_on_the_simplex():
    owners = torch.tensor([0, 0, 0, 1, 1, 2])  # each row is likely under one component: the closed form is its share
    logs = torch.where(torch.arange(3).unsqueeze(1) == owners, 0.0, -60.0)
    assert stacking_weights(logs) == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=1e-6)
    logs = 2 * normal(3, 40, seed=8) - 300  # densities that underflow
    ticks = torch.linspace(0, 1, 201, dtype=torch.float64)
    grid = torch.stack([w.flatten() for w in torch.meshgrid(ticks, ticks, indexing="ij")], 1)
    grid = torch.cat([grid, 1 - grid.sum(1, keepdim=True)], 1)
    grid = grid[grid[:, 2] >= -1e-12].clamp(min=0)

    def value(weights):
        return (weights.log().unsqueeze(2) + logs).logsumexp(1).sum(1)

    found = torch.tensor([stacking_weights(logs)], dtype=torch.float64)
    assert float(value(found)) >= float(value(grid).max())
    torch.testing.assert_close(found[0], grid[value(grid).argmax()], rtol=0, atol=0.006)


def test_stacking_on_held_out_rows_beats_equal_weights_there_and_is_stored(tmp_path):
    x, y = classes()
    settings = DeepEnsemble(members=3, of=INFS, weights="stacking")
    mixture = settings.fit(net(3), (x, y), Categorical(), training=QUICK, validation=(x[:24], y[:24]))
    logs = torch.stack([part.predict(x[:24]).log_prob(y[:24]) for part in mixture.components])
    assert mixture.component_weights == pytest.approx(stacking_weights(logs))
    held = (x[:24], y[:24])
    assert mixture.evaluate(held)["nll"] <= mixture.weighted("equal").evaluate(held)["nll"]
    mixture.save(tmp_path / "m")
    again = dubito.load(tmp_path / "m", net(3))
    assert again.component_weights == mixture.component_weights
    assert torch.equal(again.predict(x).log_probs, mixture.predict(x).log_probs)
    assert "weighted by stacking" in repr(again.summary())
    with pytest.raises(ConfigError, match="validation=rows"):
        settings.fit(net(3), (x, y), Categorical(), training=QUICK)
    with pytest.raises(ConfigError, match="rows that were not trained on"):
        mixture.weighted("stacking")


def test_evidence_weights_are_the_softmax_of_the_dense_evidence():
    x, y = reals()
    networks = lines([0.3, 0.1], [0.6, 0.0], [0.5, -0.1])
    std, precision = 0.5, 2.0
    mixture = Laplace(structure=KFAC(), prior_precision=precision).around(
        DeepEnsemble.from_networks(networks, Gaussian(std=std)), (x, y)
    )
    logs = []
    for network in networks:
        w = network.weight.detach()
        hessian = x.T @ x / std**2 + precision * torch.eye(2).double()
        likelihood = Normal(x @ w.T, std).log_prob(y).sum()
        prior = Normal(0.0, precision**-0.5).log_prob(w).sum()
        logs.append(likelihood + prior - 0.5 * torch.logdet(hessian) + math.log(2 * math.pi))
    expected = torch.stack(logs).softmax(0).tolist()
    assert 0.01 < max(expected) < 0.99
    assert mixture.weighted("evidence").component_weights == pytest.approx(expected, rel=1e-6)


def test_weights_need_what_they_are_read_off():
    with pytest.raises(ConfigError, match="needs components with a marginal likelihood"):
        DeepEnsemble(of=SWAG(), weights="evidence")
    with pytest.raises(ConfigError, match="prior_std is for points"):
        DeepEnsemble(of=SWAG(), prior_std=1.0)
    with pytest.raises(ConfigError, match="a method of one mode"):
        DeepEnsemble(of=DeepEnsemble())
    with pytest.raises(ConfigError, match="weighting"):
        fitted("reals").weighted("even")


# -- storage, sizes, copies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [INFS, SWAG(), Rank1(components=2), MCDropout()], ids=lambda of: type(of).__name__)
def test_files_and_draws_made_once_answer_alike(of, tmp_path):
    mixture, (x, y) = fitted("classes", of), classes()
    mixture.save(tmp_path / "whole")
    again = dubito.load(tmp_path / "whole", net(3))
    truth = mixture.predict(x, 6, seed=1)
    assert torch.equal(again.predict(x, 6, seed=1).log_probs, truth.log_probs)
    assert again.nbytes == mixture.nbytes and again.method == mixture.method
    sampled = mixture.sampled(6, seed=1, linearised=False if of is INFS else None)
    by_draws = mixture.predict(x, 6, seed=1, linearised=False if of is INFS else None)
    sampled.save(tmp_path / "draws")
    for posterior in (sampled, dubito.load(tmp_path / "draws", net(3))):
        assert posterior.num_atoms == 6
        torch.testing.assert_close(posterior.predict(x).probs, by_draws.probs)
    assert mixture.evaluate((x, y))["nll"] == pytest.approx(again.evaluate((x, y))["nll"])
    pieces = [piece.probs for piece in mixture.predict_batches(x, 6, seed=1, max_rows=20)]
    torch.testing.assert_close(torch.cat(pieces), truth.probs)


def test_linearised_draws_stand_around_the_mode_of_their_component():
    mixture, (x, _) = fitted("reals"), reals()
    sampled = mixture.sampled(900, seed=1)
    truth, drawn = mixture.predict(x), sampled.predict(x)
    assert ((drawn.mean - truth.mean).abs() < 0.02 * truth.std + 4 * truth.epistemic_std / 900**0.5).all()
    torch.testing.assert_close(drawn.epistemic_std, truth.epistemic_std, rtol=0.15, atol=1e-3)
    torch.testing.assert_close(mixture.sample_outputs(x, 5)[4], mixture.function(4)(x))


def test_scaling_moves_draws_towards_the_mode_of_their_component():
    mixture, (x, _) = fitted("reals", SWAG()), reals()
    half = mixture.scaled(0.5)
    for s in range(4):
        centre = mixture.components[s % 3].weights()
        whole, moved = (m.draw(s, m.generator(0, s)) for m in (mixture, half))
        for name, mean in centre.items():
            torch.testing.assert_close(moved[name] - mean, 0.5 * (whole[name] - mean))
    closed = fitted("reals")
    means = torch.stack([part.network(x) for part in closed.components]).detach()
    torch.testing.assert_close(closed.scaled(0).predict(x).epistemic, means.var(0, unbiased=False))


def test_the_exported_mixture_answers_as_predict_does(tmp_path):
    mixture, (x, _) = weighted(fitted("classes", SWAG())), classes()
    mixture.export(tmp_path / "m.pt2", num_samples=3, seed=1, max_bytes=1 << 20)
    program = torch.export.load(tmp_path / "m.pt2").module()
    answer, truth = program(x), mixture.predict(x, 3, seed=1)
    for name in ("probs", "total", "aleatoric", "epistemic", "function_variance"):
        torch.testing.assert_close(answer[name], getattr(truth, name), msg=name)
    closed = Laplace(subset=last_layer, prior_precision=1.0).around(mixture, classes())
    options = {"seed": 0, "sampling": "fixed", "linearised": None, "max_bytes": 1 << 20}
    answer, truth = served(closed, x, 1, **options)(x), closed.predict(x)
    torch.testing.assert_close(answer["probs"], truth.probs)
    torch.testing.assert_close(answer["function_variance"], truth.function_variance)
    module = mixture.sampled(6, seed=1).as_module()
    torch.testing.assert_close(module(x)["probs"], mixture.predict(x, 6, seed=1).probs)
    with pytest.raises(ConfigError, match="draws made once"):
        mixture.as_module()


def test_a_shared_diagonal_is_the_mean_and_is_stored_once(tmp_path):
    mixture, (x, _) = fitted("reals"), reals()
    shared = mixture.shared("diagonal")
    sizes = {name: p.numel() for name, p in net().named_parameters()}
    assert mixture.nbytes - shared.nbytes == 2 * 8 * sum(sizes.values())
    for name in ("0.weight", "2.weight"):
        diagonals = [part.group("diagonal")[name] for part in mixture.components]
        for part in shared.components:
            torch.testing.assert_close(part.group("diagonal")[name], torch.stack(diagonals).mean(0))
    for part, truth in zip(shared.components, mixture.components, strict=True):
        covariance = dense_covariance(part, x)[range(48), 0, range(48), 0]
        torch.testing.assert_close(part.predict(x).epistemic[:, 0], covariance)
        assert not torch.allclose(part.predict(x).std, truth.predict(x).std, rtol=1e-6)
    shared.save(tmp_path / "shared")
    mixture.save(tmp_path / "apart")
    assert (tmp_path / "apart").stat().st_size - (tmp_path / "shared").stat().st_size > 2 * 8 * 21
    again = dubito.load(tmp_path / "shared", net())
    assert again.nbytes == shared.nbytes
    assert torch.equal(again.predict(x).std, shared.predict(x).std)
    with pytest.raises(ConfigError, match="group of tensors"):
        mixture.shared("diagonals")


def test_frozen_parameters_are_held_once(tmp_path):
    x, y = classes()
    frozen = net(3)
    frozen[0].requires_grad_(False)
    mixture = DeepEnsemble(members=3, of=SWAG(rank=2)).fit(frozen, (x, y), Categorical(), training=QUICK)
    whole = DeepEnsemble(members=3, of=SWAG(rank=2)).fit(net(3), (x, y), Categorical(), training=QUICK)
    assert len({id(part.network[0].weight) for part in mixture.components}) == 1
    assert torch.equal(mixture.network[0].weight, frozen[0].weight)
    rows = {row.name: row.num_parameters for row in mixture.summary().rows}
    assert rows["0.weight"] == 10 and rows["2.weight"] == 3 * 15 * 4
    assert sum(rows.values()) == mixture.num_parameters
    mixture.save(tmp_path / "m")
    again = dubito.load(tmp_path / "m", frozen)
    assert again.nbytes == mixture.nbytes < whole.nbytes
    assert torch.equal(again.predict(x).log_probs, mixture.predict(x).log_probs)


def test_an_altered_file_is_refused(tmp_path):
    mixture = weighted(fitted("reals"), (0.5, 0.3, 0.9))
    mixture.save(tmp_path / "m")
    with pytest.raises(StorageError, match="weights that sum to 1"):
        dubito.load(tmp_path / "m", net())


def test_a_temperature_reaches_every_component():
    x, y = classes()
    tempered = temperature_scaled(fitted("classes"), (x, y))
    temperature = tempered.likelihood.settings.temperature
    parts = []
    for part in fitted("classes").components:
        part = copy.deepcopy(part)
        part.likelihood = tempered.likelihood
        parts.append(part.predict(x).probs)
    torch.testing.assert_close(tempered.predict(x).probs, averaged(parts, [1 / 3] * 3))
    losses = {}
    for factor in (0.97, 1.0, 1.03):
        tempered.likelihood = type(tempered.likelihood)(
            type(tempered.likelihood.settings)(temperature=factor * temperature)
        )
        losses[factor] = tempered.evaluate((x, y))["nll"]
    assert min(losses, key=losses.get) == 1.0
    noisier = temperature_scaled(fitted("reals"), reals())
    stds = [float(noisier.likelihood.std(k) / fitted("reals").likelihood.std(k)) for k in range(3)]
    assert max(stds) == pytest.approx(min(stds)) and stds[0] != 1
    assert [float(part.likelihood.std()) for part in noisier.components] == pytest.approx(
        [float(noisier.likelihood.std(k)) for k in range(3)]
    )


def test_threads_share_a_mixture():
    mixture, (x, _) = copy.deepcopy(fitted("classes")), classes()
    truth, answers = fitted("classes").predict(x).probs, {}

    def predict(number):
        answers[number] = mixture.predict(x[number:]).probs

    threads = [threading.Thread(target=predict, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        torch.testing.assert_close(answers[number], truth[number:])


class Rows(torch.utils.data.Dataset):
    """Rows that are interrupted after so many were read."""

    def __init__(self, limit: int) -> None:
        self.rows, self.limit, self.read = classes(), limit, 0

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int):
        self.read += 1
        if self.read > self.limit:
            raise KeyboardInterrupt
        return tuple(part[index] for part in self.rows)


def test_an_interrupted_ensemble_goes_on_from_its_checkpoints(tmp_path):
    method, training = DeepEnsemble(members=2, of=SWAG(rank=2)), replace(QUICK, checkpoint_minutes=0)
    whole, rows = method.fit(net(3), classes(), Categorical(), training=training), Rows(48 * 22)
    given = {"likelihood": Categorical(), "training": training, "checkpoint": tmp_path / "c"}
    with pytest.raises(KeyboardInterrupt):  # in the middle of the second member
        method.fit(net(3), rows, **given)
    rest = Rows(10**9)
    resumed = method.fit(net(3), rest, **given)
    assert torch.equal(resumed.predict(rows.rows[0], 4).probs, whole.predict(rows.rows[0], 4).probs)
    assert rest.read < 48 * 12  # less than one member's run


@pytest.mark.filterwarnings("ignore:the network is no better than a constant")  # one epoch
@pytest.mark.parametrize("method", [INFS, Rank1(components=2)])
def test_components_share_a_frozen_base_and_files_leave_it_out(method, tmp_path) -> None:
    network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2), nn.Tanh(), nn.Linear(2, 3))
    for parameter in network[0].parameters():
        parameter.requires_grad_(False)
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    ensemble = DeepEnsemble(members=2, of=method)
    posterior = ensemble.fit(network, (x, torch.arange(12) % 3), Categorical(), training=Training(epochs=1))
    posterior.save(tmp_path / "mixture.safetensors")
    again = dubito.load(tmp_path / "mixture.safetensors", network)
    assert torch.equal(again.predict(x, 4).probs, posterior.predict(x, 4).probs)
    for mixture in (posterior, again):
        bases = {part.network[0].weight.data_ptr() for part in mixture.components}
        assert bases == {network[0].weight.data_ptr()}
    with safe_open(tmp_path / "mixture.safetensors", "pt") as file:
        assert not [name for name in file.keys() if ".network.0." in name]  # noqa: SIM118
    with torch.no_grad():
        network[0].weight.add_(1)
    with pytest.raises(StorageError, match="another base"):
        dubito.load(tmp_path / "mixture.safetensors", network)
