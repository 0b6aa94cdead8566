"""Probabilistic backpropagation: moments against Monte Carlo, evidence and updates against quadrature and autograd."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal

from dubito import (
    PBP,
    Callback,
    Categorical,
    ConfigError,
    DataError,
    Gaussian,
    NetworkError,
    StorageError,
    Training,
    load,
)
from dubito.inference.pbp.filter import Filter, filtered
from dubito.inference.pbp.moments import Gamma, matched, propagated, rectified


def network(hidden: int = 8, inputs: int = 2, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def rows(count: int = 50, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    stream = torch.Generator().manual_seed(seed)
    inputs = 4 * torch.rand(count, 2, generator=stream) - 2
    return inputs, 5 + 10 * inputs[:, :1] * inputs[:, 1:] + torch.randn(count, 1, generator=stream)


@cache
def fitted(epochs: int = 4):
    return PBP(epochs=epochs).fit(network(), rows(), Gaussian(standardise=True))


# -- moments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean", [-40.0, -3.0, -0.2, 0.0, 0.7, 5.0])
def test_moments_of_relu_are_those_of_quadrature(mean: float) -> None:
    points, weights = (torch.as_tensor(values) for values in np.polynomial.legendre.leggauss(400))
    low, high = max(0.0, mean - 12 * 0.6), max(1.0, mean + 12 * 0.6)
    places = (high - low) / 2 * points + (high + low) / 2
    density = Normal(mean, torch.tensor(0.6, dtype=torch.float64)).log_prob(places).exp() * weights * (high - low) / 2
    first = float((density * places).sum())
    second = float((density * places.square()).sum())
    value, variance = rectified(
        torch.tensor(mean, dtype=torch.float64), torch.tensor(0.6, dtype=torch.float64).square()
    )
    assert float(value) == pytest.approx(first, rel=1e-9, abs=1e-300)
    assert float(variance) == pytest.approx(second - first**2, rel=1e-7, abs=1e-300)


def test_moments_of_a_network_are_those_of_its_draws_where_layers_stay_normal() -> None:
    # One hidden layer with many units: matching moments is exact for the first layer, its ReLU and the second layer.
    torch.manual_seed(0)
    layers = [
        (torch.randn(5, 3).double(), torch.rand(5, 3).double()),
        (torch.randn(2, 6).double(), torch.rand(2, 6).double()),
    ]
    inputs, count = torch.randn(4, 2).double(), 400_000
    mean, variance = propagated(inputs, layers)
    first, second = (m + v.sqrt() * torch.randn(count, *m.shape).double() for m, v in layers)
    hidden = (torch.cat([inputs, torch.ones(4, 1)], 1) @ first.mT).relu()
    outputs = torch.cat([hidden, torch.ones(count, 4, 1)], 2) @ second.mT
    error = (outputs.var(0) / count).sqrt()
    assert ((outputs.mean(0) - mean).abs() < 5 * error).all()
    # The variance, too, as hidden units of a row are independent given the row.
    assert torch.allclose(outputs.var(0), variance, rtol=0.03)


def test_without_variance_moments_are_the_network_itself() -> None:
    net = network().double()
    inputs = rows(5)[0].double()
    layers = [
        (
            torch.cat([layer.weight, layer.bias[:, None]], 1).detach(),
            torch.zeros(len(layer.weight), layer.in_features + 1).double(),
        )
        for layer in (net[0], net[2])
    ]
    mean, variance = propagated(inputs, layers)
    assert torch.allclose(mean, net(inputs))
    assert float(variance.detach().max()) < 1e-20


# -- updates ----------------------------------------------------------------------------------------------------------


def test_one_weight_is_updated_to_the_moments_of_the_exact_posterior() -> None:
    # y = w x + noise with a known precision: N(y | m x, x² v + 1/γ) has the conjugate update as its own.
    mean, variance, x, y, noise = (torch.tensor(value).double() for value in (0.4, 1.3, 0.8, 2.0, 0.5))
    mean.requires_grad_()
    variance.requires_grad_()
    evidence = Normal(mean * x, (variance * x**2 + noise).sqrt()).log_prob(y)
    gradients = torch.autograd.grad(evidence, [mean, variance])
    new_mean, new_variance = filtered(mean, variance, *gradients)
    precision = 1 / variance + x**2 / noise
    assert new_variance.item() == pytest.approx((1 / precision).item())
    assert new_mean.item() == pytest.approx(((mean / variance + x * y / noise) / precision).item())


def test_the_gamma_distribution_has_the_moments_of_the_exact_posterior() -> None:
    # Z(shape, rate) = ∫ N(y; 0, 1/γ) Gamma(γ) dγ is Student's t in closed form; its posterior is Gamma itself.
    shape, rate, y = 6.0, 3.0, 1.7

    def log_z(a: float) -> float:
        return (
            math.lgamma(a + 0.5) - math.lgamma(a) + a * math.log(rate)
            - (a + 0.5) * math.log(rate + y**2 / 2) - 0.5 * math.log(2 * math.pi)
        )  # fmt: skip

    logs = [log_z(shape + more) for more in (0, 1, 2)]
    new = matched(Gamma(shape, rate), math.exp(logs[1] - logs[0]), math.exp(logs[2] - logs[1]))
    assert new == pytest.approx((shape + 0.5, rate + y**2 / 2))


def test_a_row_moves_the_filter_by_the_gradients_of_its_evidence() -> None:
    torch.manual_seed(0)
    means = [torch.randn(3, 3).double(), torch.randn(1, 4).double()]
    state = Filter(means, Gamma(6.0, 4.0), Gamma(6.0, 6.0))
    before = [(mean.clone(), variance.clone()) for mean, variance in state.layers]
    assert float(before[0][1][0, 0]) == pytest.approx(6 / 5 / 3)  # the prior's, for 2 inputs and a bias
    row, target = torch.tensor([[0.3, -1.2]]).double(), torch.tensor([0.9]).double()

    def evidence(place: int, kind: int, change: float) -> float:
        layers = [[tensor.clone() for tensor in layer] for layer in before]
        layers[place][kind][0, 1] += change
        mean, variance = propagated(row, [(m, v) for m, v in layers])
        return float(Normal(mean, (variance + 4.0 / 5.0).sqrt()).log_prob(target))

    value = state.take_in(row, target)
    assert float(value) == pytest.approx(evidence(0, 0, 0.0))
    for place in (0, 1):
        by_mean, by_variance = ((evidence(place, kind, 1e-5) - evidence(place, kind, -1e-5)) / 2e-5 for kind in (0, 1))
        mean, variance = (float(tensor[0, 1]) for tensor in before[place])
        assert float(state.layers[place][0][0, 1]) == pytest.approx(mean + variance * by_mean, rel=1e-6)
        expected = variance - variance**2 * (by_mean**2 - 2 * by_variance)
        assert float(state.layers[place][1][0, 1]) == pytest.approx(expected, rel=1e-6)


def test_the_gamma_of_the_noise_matches_quadrature_of_its_approximate_evidence() -> None:
    # E[γ] and E[γ²] under Z as PBP approximates it: a Normal with the mean variance, for each of three shapes.
    state = Filter([torch.zeros(1, 2).double()], Gamma(6.0, 4.0), Gamma(6.0, 6.0))
    row, target = torch.tensor([[0.5]]).double(), torch.tensor([1.1]).double()
    variance = 6 / 5 / 2 * (0.25 + 1)
    densities = [
        math.exp(float(Normal(0.0, (variance + 4.0 / (5 + more)) ** 0.5).log_prob(target))) for more in range(3)
    ]
    state.take_in(row, target)
    shape, rate = (float(value) for value in state.noise)
    first = densities[1] / densities[0] * 6 / 4
    second = densities[2] / densities[0] * 6 * 7 / 16
    assert shape / rate == pytest.approx(first)
    assert shape * (shape + 1) / rate**2 == pytest.approx(second)


def test_a_refresh_of_the_prior_without_data_leaves_only_the_prior() -> None:
    state = Filter([torch.full((2, 3), 0.3).double()], Gamma(6.0, 6.0), Gamma(6.0, 6.0))
    state.layers = [(mean, variance / 2) for mean, variance in state.layers]  # as if data had said as much
    before = state.prior
    state.refresh()
    mean, variance = state.layers[0]
    # The first weight, in units where its prior is N(0, 1/λ): the rest N(2m, 2 · 6/5 · ½), times N(0, 6/5).
    spread = 2 * 6 / 5 / 2
    assert float(variance[0, 0]) * 3 == pytest.approx(1 / (1 / spread + 5 / 6))
    rest_mean = 2 * 0.3 * 3**0.5
    assert float(mean[0, 0]) * 3**0.5 == pytest.approx(rest_mean / spread / (1 / spread + 5 / 6))
    assert float(state.prior.shape) != float(before.shape)
    # Its λ is what moments of Z(shape) = N(rest mean; 0, spread + rate/(shape − 1)) give, weight after weight.
    gamma = Gamma(6.0, 6.0)
    densities = [
        math.exp(
            float(
                Normal(0.0, torch.tensor((spread + 6.0 / (5 + more)) ** 0.5).double()).log_prob(
                    torch.tensor(rest_mean).double()
                )
            )
        )
        for more in range(3)
    ]
    single = Filter([torch.full((1, 1), 0.3 * 3**0.5).double()], Gamma(6.0, 6.0), gamma)
    single.layers = [(m, v / 2) for m, v in single.layers]
    single.refresh()
    expected = matched(gamma, densities[1] / densities[0], densities[2] / densities[1])
    assert [*single.prior] == pytest.approx([*expected], rel=1e-5)
    precision = single._precisions[0]
    single.refresh()  # once more: the factor leaves before it comes back
    assert [*single.prior] == pytest.approx([*expected], rel=1e-5)
    assert single._precisions[0] == pytest.approx(precision)


def test_networks_side_by_side_are_filtered_as_alone() -> None:
    stream = torch.Generator().manual_seed(0)
    means = [torch.randn(3, *size, generator=stream).double() / 3 for size in ((4, 3), (1, 5))]
    rows_of = torch.randn(20, 3, 1, 2, generator=stream).double()
    targets_of = torch.randn(20, 3, 1, generator=stream).double()
    noise, prior = Gamma(6.0, torch.tensor([4.0, 5.0, 6.0])), Gamma(6.0, 6.0)
    together = Filter(means, noise, prior)
    alone = [Filter([mean[place] for mean in means], Gamma(6.0, 4.0 + place), prior) for place in range(3)]
    for _ in range(2):
        for row, target in zip(rows_of, targets_of, strict=True):
            values = together.take_in(row, target)
            singles = [state.take_in(row[place], target[place]) for place, state in enumerate(alone)]
            assert torch.allclose(values, torch.stack(singles), rtol=1e-9)
        together.refresh()
        for state in alone:
            state.refresh()
    for name, tensor in together.state().items():
        axis = {"precisions": 1, "gammas": 2, "noise": 1, "prior": 1}.get(name, 0)
        assert torch.allclose(tensor, torch.stack([state.state()[name] for state in alone], axis), rtol=1e-9), name


# -- the method -------------------------------------------------------------------------------------------------------


def test_it_learns_the_function_and_its_noise() -> None:
    posterior, (inputs, targets) = fitted(), rows(200, seed=1)
    # Targets have a standard deviation of 13; the noise has 1.
    assert posterior.evaluate((inputs, targets))["rmse"] < 7
    assert posterior.history[-1]["loss"] < posterior.history[0]["loss"]
    noise, scale = posterior.details["noise"], float(posterior.likelihood.scale)
    assert float(posterior.likelihood.std()) == pytest.approx(
        scale * (noise["rate"] / (noise["shape"] - 1)) ** 0.5, rel=1e-5
    )
    far = posterior.predict(torch.tensor([[30.0, -30.0]])).epistemic_std
    assert float(far) > 5 * float(posterior.predict(inputs).epistemic_std.mean())


def test_predictions_are_moments_and_draws_agree_with_them() -> None:
    posterior, (inputs, _) = fitted(), rows(20, seed=2)
    closed, drawn = posterior.predict(inputs), posterior.predict(inputs, 2000, linearised=False)
    error = drawn.epistemic_std / 2000**0.5
    assert ((closed.mean - drawn.mean).abs() < 5 * error).all()
    assert torch.allclose(closed.epistemic_std, drawn.epistemic_std, rtol=0.1)
    assert torch.allclose(closed.mean, posterior.predict(inputs, max_rows=3).mean)
    half = posterior.scaled(0.5).predict(inputs)
    assert (half.epistemic_std < closed.epistemic_std).all()
    assert float(posterior.scaled(0).predict(inputs).epistemic_std.max()) < 1e-5


def test_a_fit_repeats_itself_is_stored_and_leaves_the_network_alone(tmp_path) -> None:
    net, data = network(), rows(20)
    before = [parameter.clone() for parameter in net.parameters()]
    first, again, other = (PBP(epochs=1).fit(net, data, Gaussian(standardise=True), seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
    inputs = data[0]
    assert torch.equal(first.predict(inputs).std, again.predict(inputs).std)
    assert not torch.equal(first.predict(inputs).std, other.predict(inputs).std)
    first.save(tmp_path / "pbp.safetensors")
    read = load(tmp_path / "pbp.safetensors", network())
    assert torch.equal(read.predict(inputs).std, first.predict(inputs).std)
    assert float(read.kl()) == float(first.kl()) > 0


def test_an_interrupted_fit_goes_on_to_the_same_bits_and_callbacks_hear_of_it(tmp_path) -> None:
    class Stop(Callback):
        steps, epochs = 0, 0

        def on_step(self, run, step, terms) -> None:
            self.steps = step
            if step == 120:  # within the third pass over 50 rows
                raise KeyboardInterrupt

        def on_epoch(self, run, record) -> None:
            self.epochs += 1

    path, stop = tmp_path / "pbp", Stop()
    with pytest.raises(KeyboardInterrupt):
        PBP(epochs=4).fit(network(), rows(), Gaussian(standardise=True), checkpoint=path, callbacks=[stop])
    assert (stop.steps, stop.epochs) == (120, 2)
    seen: list[int] = []

    class Watch(Callback):
        def on_epoch(self, run, record) -> None:
            seen.append(record["epoch"])

    resumed = PBP(epochs=4).fit(network(), rows(), Gaussian(standardise=True), checkpoint=path, callbacks=[Watch()])
    assert seen == [3, 4]
    whole = fitted().state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in resumed.state_dict().items())
    assert resumed.details == fitted().details and resumed.history == fitted().history
    with pytest.raises(StorageError, match="epochs"):
        PBP(epochs=5).fit(network(), rows(), Gaussian(standardise=True), checkpoint=path)


def test_layers_without_bias_and_the_networks_own_start() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 4, bias=False), nn.ReLU(), nn.Linear(4, 1))
    inputs, targets = rows(10)
    posterior = PBP(epochs=1, initial_std=None).fit(net, (inputs.unsqueeze(1), targets), Gaussian(standardise=True))
    assert posterior.details["layers"] == [["1.weight", None], ["3.weight", "3.bias"]]
    assert posterior.predict(inputs.unsqueeze(1)).mean.shape == (10, 1)


class Hidden(nn.Module):
    """ReLU by a function of torch, in a module of one's own."""

    def __init__(self, activation) -> None:
        super().__init__()
        self.first, self.last, self.activation = nn.Linear(2, 4), nn.Linear(4, 1), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.activation(self.first(x)))


def test_any_module_that_answers_as_dense_layers_with_relu_do_is_treated() -> None:
    assert PBP(epochs=1).fit(Hidden(torch.relu), rows(8), Gaussian(standardise=True)).details["layers"][0] == [
        "first.weight",
        "first.bias",
    ]


FROZEN = network()
FROZEN[0].bias.requires_grad_(False)


@pytest.mark.parametrize(
    ("net", "match"),
    [
        (Hidden(torch.tanh), "dense layers with ReLU between them"),
        (Hidden(lambda x: nn.functional.leaky_relu(x, 0.01)), "dense layers with ReLU between them"),
        (nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)), "dense layers with ReLU"),
        (nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 1, 2), nn.Flatten()), "dense layers with ReLU"),
        (nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Linear(50, 1), nn.ReLU()), "dense layers with ReLU"),
        (nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1), nn.Hardtanh(-3, 3)), "dense layers with ReLU"),
        (nn.Sequential(nn.Linear(2, 6), nn.ReLU6(), nn.Linear(6, 1)), "dense layers with ReLU"),
        (FROZEN, "each used once and trained"),
        (network(outputs=2), "networks with one output, got 2"),
    ],
)
def test_other_networks_are_refused_with_the_reason(net: nn.Module, match: str) -> None:
    inputs, targets = rows(8)
    targets = targets.expand(-1, 2) if match.endswith("2") else targets
    with pytest.raises(NetworkError, match=match):
        PBP().fit(net, (inputs, targets), Gaussian(standardise=True))


def test_rows_of_several_positions_are_refused() -> None:
    with pytest.raises(NetworkError, match="dense layers with ReLU"):
        PBP().fit(network(), (torch.randn(8, 2, 2), torch.randn(8, 2, 1)), Gaussian())


@pytest.mark.filterwarnings("error")
def test_a_column_that_is_always_0_is_no_trouble() -> None:
    inputs, targets = rows(20)
    inputs[:, 1] = 0
    posterior = PBP(epochs=1).fit(network(), (inputs, targets), Gaussian(standardise=True))
    assert posterior.predict(inputs).mean.isfinite().all()


def test_what_is_cut_down_to_a_rank_predicts_in_closed_form_too(tmp_path) -> None:
    cut, inputs = fitted().tied(1), rows(5)[0]
    assert type(cut) is type(fitted()) and cut.kl() > 0
    cut.save(tmp_path / "cut")
    assert torch.equal(load(tmp_path / "cut", network()).predict(inputs).std, cut.predict(inputs).std)
    draws = cut.predict(inputs, 4000, linearised=False)
    torch.testing.assert_close(cut.predict(inputs).std, draws.std, rtol=0.05, atol=0)


def test_other_likelihoods_settings_and_data_are_refused_with_the_reason() -> None:
    inputs, targets = rows(8)
    with pytest.raises(ConfigError, match=r"8 rows.*leave num_data= out"):
        PBP().fit(network(), (inputs, targets), Gaussian(standardise=True), num_data=100)
    with pytest.raises(ConfigError, match="real targets whose noise is learned"):
        PBP().fit(network(outputs=3), (inputs, torch.zeros(8).long()), Categorical())
    with pytest.raises(ConfigError, match="real targets whose noise is learned"):
        PBP().fit(network(), (inputs, targets / 10), Gaussian(std=1.0))
    with pytest.raises(ConfigError, match="leave training= out"):
        PBP().fit(network(), (inputs, targets), Gaussian(standardise=True), training=Training(epochs=1))
    with pytest.raises(ConfigError, match="knows no weights"):
        PBP().fit(network(), (inputs, targets, torch.arange(8.0)), Gaussian(standardise=True))
    with pytest.raises(ConfigError, match="prior_shape must be above 1"):
        PBP(prior_shape=1.0)
    with pytest.raises(DataError, match="the network cannot read inputs"):
        fitted().predict(torch.zeros(3, 5))
