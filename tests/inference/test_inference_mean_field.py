"""Mean field: draws, divergence and gradients against torch.distributions, Monte Carlo and closed forms."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from dubito import Categorical, ConfigError, Gaussian, He, MeanField, NetworkError, Training, UnknownNameError
from dubito.objective import Objective


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(count: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def prior(std: float) -> Normal:
    return Normal(torch.zeros((), dtype=torch.float64), torch.tensor(std, dtype=torch.float64))


def scattered(built: Objective) -> dict[str, tuple[Tensor, Tensor]]:
    """Give every weight a standard deviation of its own; returns means and deviations by name."""
    found, weights = {}, built.draft.weights()
    with torch.no_grad():
        for number, (name, raw_std) in enumerate(built.draft.group("raw_std").items()):
            raw_std.copy_(normal(*raw_std.shape, seed=number).to(raw_std) - 1)
            found[name] = weights[name].detach(), torch.log1p(raw_std.exp())
    return found


class Sequence(nn.Module):
    """Embedding, recurrent layers, attention and batch norm in one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.lstm = nn.LSTM(6, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.lstm(self.embedding(ids))[0]
        return self.head(self.norm(self.attention(hidden, hidden, hidden)[0].mean(1)))


class Aliased(nn.Module):
    """One module under two names, and another with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied, self.head = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.again, self.tied.weight = self.first, self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tied(torch.tanh(self.again(torch.tanh(self.first(inputs)))))))


def parametrised() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(5, 3))
    )


# -- draws ----------------------------------------------------------------------------------------------------


def test_draws_have_the_means_and_deviations_they_should() -> None:
    built = MeanField().build(mlp(), Categorical(), num_data=10)
    expected = scattered(built)
    posterior, count = built.posterior(), 4000
    draws = [posterior.draw(i, posterior.generator(0, i)) for i in range(count)]
    assert set(draws[0]) == set(expected)
    flat = torch.stack([torch.cat([draw[name].flatten() for name in expected]) for draw in draws])
    mean = torch.cat([mean.flatten() for mean, _ in expected.values()])
    std = torch.cat([std.flatten() for _, std in expected.values()])
    standard = (flat - mean) / std
    # Means have deviation 1/√n, variances √(2/n), correlations 1/√n; 43 weights make some 900 pairs.
    assert standard.mean(0).abs().max() < 5 / count**0.5
    assert (standard.var(0) - 1).abs().max() < 5 * (2 / count) ** 0.5
    correlations = torch.corrcoef(standard.T) - torch.eye(len(mean))
    assert correlations.abs().max() < 5 / count**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_start_with_the_initial_std(dtype: torch.dtype) -> None:
    for initial_std in (1e-4, 0.05, 3.0):
        built = MeanField(initial_std=initial_std).build(mlp().to(dtype), Categorical(), num_data=10)
        for _, raw_std in built.draft.group("raw_std").items():
            assert raw_std.dtype == dtype
            torch.testing.assert_close(F.softplus(raw_std), torch.full_like(raw_std, initial_std))


def test_layers_and_seeds_start_with_noise_of_their_own() -> None:
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).double()
    method, still = MeanField(initial_std=0.02, initial_spread=0.3), Training(epochs=1, lr=1e-12)

    def logs(seed: int) -> dict[str, Tensor]:
        fitted = method.fit(net, (normal(8, 40), labels(8)), Categorical(), training=still, seed=seed)
        return {name: F.softplus(raw).log() for name, raw in fitted.group("raw_std").items()}

    first, other = logs(0), logs(1)
    for values in (first["0.weight"], first["1.weight"], other["0.weight"]):
        assert abs(values.mean() - math.log(0.02)) < 5 * 0.3 / 40
        assert values.std().item() == pytest.approx(0.3, rel=0.1)
        skewness = ((values - values.mean()) / values.std()).pow(3).mean()
        assert abs(skewness) < 5 * (6 / 1600) ** 0.5  # the logarithms are Normal, not the deviations themselves
    for one, two in ((first["0.weight"], first["1.weight"]), (first["0.weight"], other["0.weight"])):
        assert abs(torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1]) < 5 / 40


@pytest.mark.parametrize("make", [Sequence, Aliased, parametrised])
def test_any_module_draws_folds_and_stays_itself(make: Callable[[], nn.Module]) -> None:
    inputs = torch.randint(7, (6, 5)) if make is Sequence else normal(6, 4)
    built = MeanField(initial_std=0.3).build(make().double(), Categorical(), num_data=6)
    parameters = dict(built.draft.network.named_parameters())
    for _ in range(2):
        built.loss(inputs, labels(6), generator=torch.Generator().manual_seed(0)).total.backward()
    after = dict(built.draft.network.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())
    posterior = built.posterior()
    outputs = posterior.sample_outputs(inputs, 5)
    assert len(outputs.unique(dim=0)) == 5
    for index in range(5):
        torch.testing.assert_close(posterior.fold(index)(inputs), outputs[index], rtol=1e-10, atol=1e-12)


def test_zero_noise_keeps_the_networks_outputs() -> None:
    network, ids = Sequence().double().eval(), torch.randint(7, (6, 5))
    posterior = MeanField(initial_std=1e-14).build(network, Categorical(), num_data=6).posterior()
    torch.testing.assert_close(posterior.sample_outputs(ids, 1)[0], network(ids), rtol=1e-9, atol=1e-9)


# -- divergence -------------------------------------------------------------------------------------------------


def fan_in(parameter: Tensor) -> int:
    """Inputs that one output sums over."""
    return math.prod(parameter.shape[1:])


@pytest.mark.parametrize("prior_std", [1.0, 0.2, He(), He(gain=0.5)], ids=str)
@pytest.mark.parametrize("make", [mlp, Sequence, Aliased, lambda: nn.Conv2d(4, 6, (3, 2), groups=2)])
def test_divergence_against_torch_distributions(make, prior_std: float | He) -> None:
    built = MeanField(prior_std=prior_std).build(make().double(), Categorical(), num_data=10)
    expected = 0.0
    for mean, std in scattered(built).values():
        scale = prior_std
        if isinstance(prior_std, He):
            scale = prior_std.gain * (2 / fan_in(mean)) ** 0.5 if mean.ndim > 1 else 1.0
        expected += kl_divergence(Normal(mean, std), prior(scale)).sum()
    torch.testing.assert_close(built.kl(), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("prior_std", [0.7, He()], ids=str)
def test_divergence_against_monte_carlo(prior_std: float | He) -> None:
    built = MeanField(prior_std=prior_std).build(nn.Linear(3, 2).double(), Categorical(), num_data=10)
    terms, count = 0.0, 20_000
    for name, (mean, std) in scattered(built).items():
        scale = prior_std if isinstance(prior_std, float) else ((2 / 3) ** 0.5 if name == "weight" else 1.0)
        draws = mean + std * normal(count, *mean.shape, seed=17)
        ratio = Normal(mean, std).log_prob(draws) - prior(scale).log_prob(draws)
        terms = terms + ratio.flatten(1).sum(1)
    assert built.kl().item() == pytest.approx(terms.mean().item(), abs=5 * terms.std().item() / count**0.5)


def test_divergence_is_of_no_batch_and_adds_up_over_layers() -> None:
    layer = nn.Linear(4, 4).double()
    one = MeanField().build(nn.Sequential(copy.deepcopy(layer)), Categorical(), num_data=10)
    three = MeanField().build(nn.Sequential(*(copy.deepcopy(layer) for _ in range(3))), Categorical(), num_data=10)
    kls = [built.loss(normal(rows, 4), labels(rows, 4)).kl for built in (one, three) for rows in (1, 7, 64)]
    torch.testing.assert_close(torch.stack(kls[:3]), kls[0].expand(3), rtol=0, atol=0)
    torch.testing.assert_close(torch.stack(kls[3:]), 3 * kls[0].expand(3), rtol=1e-12, atol=0)


def test_gradients_are_finite_where_all_means_are_zero() -> None:
    network = mlp()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    built = MeanField().build(network, Categorical(), num_data=10)
    built.kl().backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in built.draft.network.parameters())
    assert all(p.grad.isfinite().all() for p in built.draft.tensors.parameters())


# -- loss -------------------------------------------------------------------------------------------------------


def test_loss_and_gradients_are_those_of_the_reparameterised_draw() -> None:
    network, inputs, targets = mlp(), normal(6, 4), labels(6)
    built = MeanField(prior_std=0.5).build(network, Categorical(), num_data=40)
    scattered(built)
    loss = built.loss(inputs, targets, kl_weight=0.3, generator=torch.Generator().manual_seed(3))
    loss.total.backward()

    means = {name: p.detach().clone().requires_grad_() for name, p in network.named_parameters()}
    raw = {n: p.detach().clone().requires_grad_() for n, p in built.draft.group("raw_std").items()}
    generator = torch.Generator().manual_seed(3)
    noise = {n: torch.randn(m.shape, generator=generator, dtype=torch.float64) for n, m in means.items()}
    stds = {name: torch.log1p(value.exp()) for name, value in raw.items()}
    drawn = {name: means[name] + stds[name] * noise[name] for name in means}
    nll = F.cross_entropy(functional_call(network, drawn, (inputs,)), targets)
    kl = sum(kl_divergence(Normal(means[n], stds[n]), prior(0.5)).sum() for n in means)
    (nll + 0.3 * kl / 40).backward()
    torch.testing.assert_close(loss.nll, nll)
    torch.testing.assert_close(loss.kl, kl)
    torch.testing.assert_close(loss.total, nll + 0.3 * kl / 40)
    for name, parameter in built.draft.network.named_parameters():
        torch.testing.assert_close(parameter.grad, means[name].grad)
        torch.testing.assert_close(built.draft.group("raw_std")[name].grad, raw[name].grad)


def test_the_optimum_is_that_of_bayesian_linear_regression() -> None:
    # For y = Xw + noise the best mean field has the exact posterior mean and the inverse of the exact
    # precision's diagonal: there, and not at another width, the expected gradient vanishes.
    rows, noise_std, prior_std = 30, 0.5, 0.8
    inputs, truth = normal(rows, 3) * torch.tensor([1.0, 0.5, 2.0]), torch.tensor([[1.0, -2.0, 0.5]]).double()
    targets = inputs @ truth.T + noise_std * normal(rows, 1, seed=1)
    precision = inputs.T @ inputs / noise_std**2 + torch.eye(3) / prior_std**2
    mean = torch.linalg.solve(precision, inputs.T @ targets / noise_std**2).T
    built = MeanField(prior_std=prior_std).build(
        nn.Linear(3, 1, bias=False).double(), Gaussian(std=noise_std), num_data=rows
    )
    raw_std = built.draft.group("raw_std")["weight"]

    def scores(widen: float) -> Tensor:
        with torch.no_grad():
            built.draft.network.weight.copy_(mean)
            raw_std.copy_(torch.log(torch.expm1(widen * precision.diagonal().rsqrt()))[None])
        gradients = []
        for seed in range(300):
            loss = built.loss(inputs, targets, generator=torch.Generator().manual_seed(seed))
            gradients.append(torch.cat(torch.autograd.grad(loss.total, (built.draft.network.weight, raw_std))))
        each = torch.stack(gradients)
        return each.mean(0) / (each.std(0) / 300**0.5)

    assert scores(1.0).abs().max() < 4.5
    assert scores(1.6)[1].min() > 5  # too wide: the loss falls as the widths shrink
    assert scores(0.6)[1].max() < -5


# -- which parameters -------------------------------------------------------------------------------------------


def test_frozen_parameters_stay_points_and_as_they_were() -> None:
    network = mlp()
    network[0].weight.requires_grad_(False)
    frozen = network[0].weight.clone()
    built = MeanField(initial_std=0.1).build(network, Categorical(), num_data=10)
    optimizer = torch.optim.Adam(built.parameter_groups(lr=0.1))
    for seed in range(3):
        optimizer.zero_grad()
        built.loss(normal(6, 4), labels(6), generator=torch.Generator().manual_seed(seed)).total.backward()
        optimizer.step()
    posterior = built.posterior()
    assert posterior.holds("0.weight") == "point (frozen: requires_grad=False)"
    assert posterior.holds("0.bias") == "Normal, own std"
    assert torch.equal(posterior.draw(0, None)["0.weight"], frozen)
    assert not torch.equal(posterior.weights()["0.bias"], network[0].bias)
    folded = posterior.fold()
    assert [name for name, p in folded.named_parameters() if not p.requires_grad] == ["0.weight"]


SUBSETS = {
    "a module": ["2"],
    "parameters": ["2.weight", "2.bias"],
    "a predicate": lambda name, parameter: name.startswith("2") and parameter.ndim <= 2,
}


@pytest.mark.parametrize("name", SUBSETS)
def test_subsets_get_distributions_and_the_rest_are_trained_points(name: str) -> None:
    network = mlp()
    built = MeanField(subset=SUBSETS[name]).build(network, Categorical(), num_data=10)
    assert set(built.draft.group("raw_std").names) == {"2.weight", "2.bias"}
    expected = sum(kl_divergence(Normal(p, 0.01), prior(1.0)).sum() for p in network[2].parameters())
    torch.testing.assert_close(built.kl(), expected)
    optimizer = torch.optim.SGD(built.parameter_groups(lr=0.1))
    built.loss(normal(6, 4), labels(6)).total.backward()
    optimizer.step()
    posterior = built.posterior()
    assert not torch.equal(posterior.weights()["0.weight"], network[0].weight)
    first, second = (posterior.draw(i, posterior.generator(0, i)) for i in range(2))
    assert torch.equal(first["0.weight"], second["0.weight"])
    assert not torch.equal(first["2.weight"], second["2.weight"])
    assert posterior.method.subset == ("2.weight", "2.bias")  # names, which a file can hold


def test_refusals() -> None:
    with pytest.raises(UnknownNameError, match="unknown parameter or module 'head'"):
        MeanField(subset=["head"]).build(mlp(), Categorical(), num_data=10)
    with pytest.raises(ConfigError, match="subset must pick at least one"):
        MeanField(subset=lambda name, parameter: False).build(mlp(), Categorical(), num_data=10)
    with pytest.raises(NetworkError, match="all have requires_grad=False"):
        MeanField().build(mlp().requires_grad_(False), Categorical(), num_data=10)
    with pytest.raises(ConfigError, match="prior_std must be a number above 0 or He"):
        MeanField(prior_std=He)  # pyright: ignore
    for settings in ({"prior_std": 0.0}, {"prior_std": -1.0}, {"initial_std": 0.0}, {"initial_std": math.inf}):
        with pytest.raises(ConfigError, match=f"{next(iter(settings))} must be a finite number above 0"):
            MeanField(**settings)
    with pytest.raises(ConfigError, match="gain must be a finite number above 0"):
        He(gain=0)
