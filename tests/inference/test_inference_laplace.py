"""Laplace: posterior variances against closed forms, which parameters it covers, and what it says about the rest."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, IterableDataset

from dubito import (
    EFB,
    GGN,
    INF,
    KFAC,
    MAP,
    Bernoulli,
    Categorical,
    ConfigError,
    DataError,
    Diagonal,
    DubitoWarning,
    Empirical,
    Fisher,
    Gaussian,
    Laplace,
    NetworkError,
    Training,
    UnknownNameError,
    last_layer,
)
from dubito.inference.laplace import method as laplace_method

# Networks here start from random weights: Laplace rightly says that they have not learned anything.
pytestmark = pytest.mark.filterwarnings("ignore:the network is no better than a constant:dubito.DubitoWarning")

QUICK = Training(epochs=2, batch_size=8, lr=1e-2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))


def mlp(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, outputs)).double()


def curvature_of(posterior) -> dict[str, Tensor]:
    """N · Φ of every covered parameter, by its name."""
    found = {}
    for block in posterior.blocks.values():
        found |= block.tensors(posterior.num_data * posterior.block_tensors(block)["diagonal"].detach())
    return found


# -- variances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("curvature", [GGN(), Fisher(), Empirical()], ids=str)
def test_draws_have_variance_one_over_curvature_and_prior(curvature) -> None:
    network, inputs, precision = nn.Linear(3, 2).double(), normal(20, 3), 2.5
    posterior = Laplace(structure=Diagonal(), prior_precision=precision, curvature=curvature).fit(
        network, (inputs, labels(20, 2)), Categorical()
    )
    kept = curvature_of(posterior)
    if isinstance(curvature, GGN):
        probs = network(inputs).softmax(-1)
        hessian = (probs * (1 - probs)).detach()  # −∂² log p / ∂f_c² = p_c (1 − p_c)
        torch.testing.assert_close(kept["weight"], hessian.T @ inputs.square(), rtol=1e-12, atol=0)
        torch.testing.assert_close(kept["bias"], hessian.sum(0), rtol=1e-12, atol=0)
    count = 5000
    draws = [posterior.draw(i, posterior.generator(0, i)) for i in range(count)]
    flat = torch.stack([torch.cat([draw["weight"].flatten(), draw["bias"]]) for draw in draws])
    mean = torch.cat([network.weight.flatten(), network.bias]).detach()
    expected = 1 / (torch.cat([kept["weight"].flatten(), kept["bias"]]) + precision)
    standard = (flat - mean) / expected.sqrt()
    assert standard.mean(0).abs().max() < 4.5 / count**0.5
    assert (standard.var(0) - 1).abs().max() < 4.5 * (2 / count) ** 0.5
    assert (torch.corrcoef(standard.T) - torch.eye(8)).abs().max() < 4.5 / count**0.5


def test_linear_regression_has_the_diagonal_of_the_exact_precision() -> None:
    inputs, noise_std, precision = normal(30, 3), 0.5, 4.0
    posterior = Laplace(structure=Diagonal(), prior_precision=precision, curvature=GGN()).fit(
        nn.Linear(3, 1, bias=False).double(), (inputs, normal(30, 1, seed=1)), Gaussian(std=noise_std)
    )
    exact = inputs.T @ inputs / noise_std**2 + precision * torch.eye(3)
    kept = curvature_of(posterior)["weight"]
    torch.testing.assert_close(kept[0] + precision, exact.diagonal(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_batches_and_loaders_do_not_matter(batch_size: int) -> None:
    network, data = mlp(), (normal(20, 4), labels(20))
    whole = curvature_of(
        Laplace(structure=Diagonal(), curvature=Fisher(), batch_size=20).fit(network, data, Categorical())
    )
    dataset = list(zip(*data, strict=True))
    loader = DataLoader(dataset, batch_size=batch_size)  # pyright: ignore
    for fitted in (
        Laplace(structure=Diagonal(), curvature=Fisher(), batch_size=batch_size).fit(network, data, Categorical()),
        Laplace(structure=Diagonal(), curvature=Fisher()).fit(network, loader, Categorical()),
    ):
        for name, value in curvature_of(fitted).items():
            torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-14)


def test_num_data_scales_the_curvature_to_what_it_stands_for() -> None:
    network, data = mlp(), (normal(20, 4), labels(20))
    plain, ten = (
        Laplace(structure=Diagonal(), curvature=GGN()).fit(network, data, Categorical(), num_data=n)
        for n in (None, 200)
    )
    for name, value in curvature_of(plain).items():
        torch.testing.assert_close(curvature_of(ten)[name], 10 * value)


def test_rows_of_a_stream_are_counted_as_they_come() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            yield from zip(normal(20, 4), labels(20), strict=True)

    whole = Laplace(structure=Diagonal(), curvature=GGN()).fit(
        network := mlp(), (normal(20, 4), labels(20)), Categorical()
    )
    stream = Laplace(structure=Diagonal(), curvature=GGN()).fit(network, Stream(), Categorical(), num_data=20)
    for name, value in curvature_of(whole).items():
        torch.testing.assert_close(curvature_of(stream)[name], value)


def test_zero_curvature_leaves_the_prior() -> None:
    network = mlp()
    with torch.no_grad():
        network[0].bias.fill_(-100.0)  # no unit ever fires
    posterior = Laplace(structure=Diagonal(), prior_precision=4.0).fit(
        network, (normal(20, 4), labels(20)), Categorical()
    )
    curvature = curvature_of(posterior)
    assert torch.equal(curvature["0.weight"], torch.zeros(6, 4).double())
    noise = torch.stack([posterior.draw(i, posterior.generator(0, i))["0.weight"] for i in range(2000)])
    assert (noise - network[0].weight).std().item() == pytest.approx(0.5, rel=0.02)


# -- noise of the likelihood --------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [1, 2])
def test_learned_noise_is_that_of_the_residuals(outputs: int) -> None:
    network, inputs = mlp(outputs), normal(50, 4)
    targets = network(inputs).detach() + torch.tensor([0.3, 2.0]).double()[:outputs] * normal(50, outputs, seed=1)
    posterior = Laplace(structure=Diagonal(), curvature=GGN(), batch_size=7).fit(network, (inputs, targets), Gaussian())
    std = (targets - network(inputs)).square().mean(0).sqrt().detach()
    torch.testing.assert_close(posterior.likelihood.std(), std)
    fixed = Laplace(structure=Diagonal(), curvature=GGN()).fit(
        network, (inputs, targets), Gaussian(std=tuple(std.tolist()))
    )
    for name, value in curvature_of(fixed).items():
        torch.testing.assert_close(curvature_of(posterior)[name], value)


def test_residual_noise_of_vectors_and_images() -> None:
    inputs = normal(12, 2, 4, 4)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(32, 1), nn.Flatten(0)).double()
    targets = flat(inputs).detach() + 0.7
    posterior = Laplace(structure=Diagonal()).fit(flat, (inputs, targets), Gaussian())
    torch.testing.assert_close(posterior.likelihood.std(), torch.tensor(0.7).double())
    image = nn.Conv2d(2, 3, 1).double()
    offsets = torch.tensor([0.5, 1.0, 2.0]).double()[:, None, None]
    posterior = Laplace(structure=Diagonal()).fit(image, (inputs, image(inputs).detach() + offsets), Gaussian())
    torch.testing.assert_close(posterior.likelihood.std(), offsets)


def test_a_perfect_fit_is_predicted_as_it_is() -> None:
    network, inputs = mlp(1), normal(20, 4)
    targets = network(inputs).detach()
    posterior = Laplace(structure=Diagonal(), curvature=GGN()).fit(network, (inputs, targets), Gaussian())
    least = torch.finfo(torch.float64).eps  # noise of 0 would have no density
    torch.testing.assert_close(posterior.likelihood.std(), torch.full((1,), least).double())
    prediction = posterior.predict(inputs, linearised=True)
    torch.testing.assert_close(prediction.mean, targets)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(targets, least**2))
    # Σ_i J_ij² σ_j² = σ² for every weight that the outputs depend on, as the prior is nothing beside such data.
    slopes = [torch.autograd.grad(network(row), list(network.parameters())) for row in inputs]
    used = sum(int((torch.stack(own) != 0).any(0).sum()) for own in zip(*slopes, strict=True))
    torch.testing.assert_close(prediction.epistemic.sum() / least**2, torch.tensor(float(used)).double())


def test_given_noise_is_kept() -> None:
    posterior = Laplace(structure=Diagonal()).fit(mlp(2), (normal(20, 4), normal(20, 2)), Gaussian(std=0.25))
    assert posterior.likelihood.std().item() == 0.25


# -- networks that have not learned anything ------------------------------------------------------------------------


UNTRAINED = "the network is no better than a constant: the log-likelihood of a row is"
CONSTANTS = {
    "classes": (Categorical(), 3, labels(20)),
    "yes or no": (Bernoulli(), 1, labels(20, 2)),
    "many yes or no": (Bernoulli(), 2, labels(20, 2)[:, None].repeat(1, 2)),
    "reals": (Gaussian(), 2, normal(20, 2, seed=3) * torch.tensor([1.0, 10.0]) + 100),
    "given noise": (Gaussian(std=0.5), 2, normal(20, 2, seed=3) + 5),
}


@pytest.mark.filterwarnings("default::dubito.DubitoWarning")
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_network_no_better_than_a_constant_gets_a_warning(name: str, recwarn: pytest.WarningsRecorder) -> None:
    likelihood, outputs, targets = CONSTANTS[name]
    # The best constant itself: frequencies of classes, means of reals.
    best = {
        "classes": lambda: torch.bincount(targets).double().log(),
        "yes or no": lambda: targets.double().mean(0, keepdim=True).logit(),
        "many yes or no": lambda: targets.double().mean(0).logit(),
    }.get(name, lambda: targets.mean(0))()
    network = nn.Sequential(nn.Linear(4, outputs)).double()
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].bias.copy_(best)
    inputs = normal(20, 4)
    with pytest.warns(DubitoWarning, match=UNTRAINED) as caught:
        Laplace(structure=Diagonal(), batch_size=6).fit(network, (inputs, targets), likelihood)
    assert caught[0].filename == __file__
    # One input that tells a little about the targets makes the network better than any constant.
    value = targets.double() if targets.ndim == 1 else targets[:, 0].double()
    inputs[:, 0] = value - value.mean()
    with torch.no_grad():
        network[0].weight[-1 if name == "classes" else 0, 0] = 1e-3
    recwarn.clear()
    Laplace(structure=Diagonal(), batch_size=6).fit(network, (inputs, targets), likelihood)
    assert not [entry for entry in recwarn.list if UNTRAINED in str(entry.message)]


# -- the network as given, or its MAP first -----------------------------------------------------------------------


def test_the_network_is_taken_as_given() -> None:
    network = mlp()
    posterior = Laplace(structure=Diagonal()).fit(network, (normal(20, 4), labels(20)), Categorical())
    for name, value in posterior.weights().items():
        assert torch.equal(value, network.get_parameter(name))
        assert value is not network.get_parameter(name)
    assert posterior.history == []
    assert all(p.requires_grad and p.grad is None for p in network.parameters())
    assert network.training


def test_training_fits_the_map_under_the_same_prior_first() -> None:
    network, data = mlp(), (normal(20, 4), labels(20))
    network[0].bias.requires_grad_(False)
    point = MAP(prior_std=0.5).fit(network, data, Categorical(), training=QUICK, seed=3)
    posterior = Laplace(structure=Diagonal(), prior_precision=4.0, curvature=GGN()).fit(
        network, data, Categorical(), training=QUICK, seed=3
    )
    for name, value in posterior.weights().items():
        assert torch.equal(value, point.weights()[name])
    assert [entry["loss"] for entry in posterior.history] == [entry["loss"] for entry in point.history]
    after = Laplace(structure=Diagonal(), prior_precision=4.0, curvature=GGN()).fit(point.fold(), data, Categorical())
    for name, value in curvature_of(after).items():
        torch.testing.assert_close(curvature_of(posterior)[name], value)
    assert [name for name, p in posterior.fold().named_parameters() if not p.requires_grad] == ["0.bias"]
    assert not any(p.requires_grad for p in posterior.parameters())


def test_training_learns_the_noise_too() -> None:
    data = (normal(20, 4), 3 * normal(20, 1, seed=1))
    network = mlp(1)
    point = MAP(prior_std=1.0).fit(network, data, Gaussian(), training=QUICK)
    posterior = Laplace(structure=Diagonal()).fit(network, data, Gaussian(), training=QUICK)
    assert torch.equal(posterior.likelihood.std(), point.likelihood.std())


# -- which parameters ---------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(5, 4), nn.LSTM(4, 6, batch_first=True)
        self.norm, self.body, self.head = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu_(self.body(self.norm(self.lstm(self.embedding(ids))[0][:, -1]))))


IDS = torch.randint(5, (20, 3), generator=torch.Generator().manual_seed(0))


def covered(posterior) -> set[str]:
    return {name for block in posterior.blocks.values() for name in block.parameters}


def parametrised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3)))


def test_parameters_left_out_are_named_in_a_warning_at_the_users_line() -> None:
    with pytest.warns(DubitoWarning, match="stay point estimates") as caught:
        posterior = Laplace(structure=Diagonal()).fit(parametrised(), (normal(20, 4), labels(20)), Categorical())
    (warning,) = [one for one in caught if "stay point" in str(one.message)]
    left = set(posterior.weights()) - covered(posterior)
    assert left == {"2.parametrizations.weight.original0", "2.parametrizations.weight.original1"}
    assert all(f"{name}: a parametrisation computes the weight from it" in str(warning.message) for name in left)
    assert warning.filename == __file__
    assert {name for name in posterior.weights() if posterior.holds(name).startswith("point (")} == left
    first, second = (posterior.draw(i, posterior.generator(0, i)) for i in range(2))
    assert {name for name in first if first[name] is second[name]} == left  # the posterior's own, not copies


@pytest.mark.parametrize("structure", [KFAC(), EFB(), INF(rank=0.1)], ids=str)
def test_parameters_without_factors_keep_their_diagonal_and_the_summary_says_so(structure) -> None:
    posterior = Laplace(structure=structure).fit(Mixed(), (IDS, labels(20)), Categorical())
    assert covered(posterior) == set(posterior.weights())
    kinds = {row.name: row.holds for row in posterior.summary().rows}
    alone = {name for name, kind in kinds.items() if kind == "diagonal: no Kronecker factors"}
    assert alone == {"embedding.weight", "norm.weight", "norm.bias"}
    assert kinds["body.bias"] == "in the block of body.weight"
    assert kinds["lstm.weight_ih_l0"].startswith(structure.title)
    for name in alone:
        block = posterior.blocks[name]
        torch.testing.assert_close(
            posterior.block(name).variance,
            1 / (20 * posterior.block_tensors(block)["diagonal"][0] + posterior.prior_precision),
        )


SUBSETS = {
    "modules": (["body", "head"], {"body.weight", "body.bias", "head.weight", "head.bias"}),
    "parameters": (["body.bias", "head.weight"], {"body.bias", "head.weight"}),
    "a predicate": (lambda name, p: name.startswith("head") and p.ndim == 2, {"head.weight"}),
    "the last layer": (last_layer, {"head.weight", "head.bias"}),
}


@pytest.mark.parametrize("name", SUBSETS)
def test_subsets_are_covered_in_silence(name: str) -> None:
    subset, expected = SUBSETS[name]
    network = Mixed()
    posterior = Laplace(structure=Diagonal(), subset=subset).fit(network, (IDS, labels(20)), Categorical())
    assert covered(posterior) == expected
    assert set(posterior.method.subset) == expected
    whole = Laplace(structure=Diagonal()).fit(network, (IDS, labels(20)), Categorical())
    for key, value in curvature_of(posterior).items():
        torch.testing.assert_close(value, curvature_of(whole)[key])
    first, second = (posterior.draw(i, posterior.generator(0, i)) for i in range(2))
    assert {key for key in first if not torch.equal(first[key], second[key])} == expected


def test_the_last_layer_is_the_last_that_is_called() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(5, 3), nn.Linear(4, 5)
            self.scale = nn.Parameter(torch.ones(5))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(torch.tanh(self.first(inputs)) * self.scale)

    network = Backwards().double()
    posterior = Laplace(structure=Diagonal(), subset=last_layer).fit(
        network, (normal(20, 4), labels(20)), Categorical()
    )
    assert posterior.method.subset == ("last.weight", "last.bias") and list(posterior.blocks) == ["last"]
    network.last.requires_grad_(False)
    posterior = Laplace(structure=Diagonal(), subset=last_layer).fit(
        network, (normal(20, 4), labels(20)), Categorical()
    )
    assert list(posterior.blocks) == ["first"]


def test_frozen_parameters_are_points() -> None:
    network = mlp()
    network[0].weight.requires_grad_(False)
    posterior = Laplace(structure=Diagonal()).fit(network, (normal(20, 4), labels(20)), Categorical())
    assert covered(posterior) == {"0.bias", "2.weight", "2.bias"}


def test_shared_modules_and_convolutions_are_covered_without_a_warning() -> None:
    layer = nn.Linear(6, 6)
    network = nn.Sequential(
        nn.Conv2d(1, 2, 2, groups=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 6), layer, nn.Tanh(),
        layer, nn.Linear(6, 3),
    )  # fmt: skip
    posterior = Laplace(structure=Diagonal()).fit(network, (normal(20, 1, 3, 3), labels(20)), Categorical())
    assert covered(posterior) == set(posterior.weights())
    outputs = posterior.sample_outputs(normal(5, 1, 3, 3), 3, linearised=False)
    for index in range(3):
        torch.testing.assert_close(posterior.fold(index)(normal(5, 1, 3, 3).float()), outputs[index])


# -- refusals -----------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    for settings, message in (
        ({"prior_precision": 0.0}, "prior_precision must be a finite number above 0"),
        ({"prior_precision": -1.0}, "prior_precision must be a finite number above 0"),
        ({"structure": "diagonal"}, r"structure must be Diagonal\(\)"),
        ({"structure": Diagonal}, r"structure must be Diagonal\(\)"),
        ({"curvature": "ggn"}, r"curvature must be Fisher\(\), GGN\(\) or Empirical\(\)"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=message):
            Laplace(**settings)
    for settings, message in (
        ({"rank": 0}, "rank must be a whole number of at least 1, got 0"),
        ({"rank": 0.0}, "rank as a float is a fraction"),
        ({"rank": 1.5}, "rank as a float is a fraction"),
        ({"max_rank": 0}, "max_rank must be a whole number"),
        ({"guard": "hope"}, "unknown guard 'hope'"),
        ({"selection": "all"}, "unknown selection 'all'"),
    ):
        with pytest.raises(ConfigError, match=message):
            INF(**settings)
    data = (normal(20, 4), labels(20))
    with pytest.raises(UnknownNameError, match="unknown parameter or module 'head'"):
        Laplace(subset=["head"]).fit(mlp(), data, Categorical())
    with pytest.raises(NetworkError, match="all have requires_grad=False"):
        Laplace().fit(mlp().requires_grad_(False), data, Categorical())
    with pytest.raises(NetworkError, match="needs a layer with a rule, got none"):
        Laplace(subset=["2.parametrizations"]).fit(parametrised(), data, Categorical())
    network = mlp()
    with torch.no_grad():
        network[0].weight[0, 0] = torch.nan
    with pytest.raises(NetworkError, match=r"parameter '0.weight' holds NaN"):
        Laplace().fit(network, data, Categorical())
    posterior = Laplace(structure=Diagonal()).fit(mlp(), data, Categorical())
    for linearised in (False, True):
        with pytest.raises(DataError, match="the network cannot read inputs of shape"):
            posterior.predict(normal(5, 3), linearised=linearised)
    for more in ((normal(5, 3), labels(5)), (normal(5, 4), labels(5, 9))):
        with pytest.raises(DataError):
            posterior.update(more)
    with pytest.raises(UnknownNameError, match=r"unknown block 'fc1'\. Known: 0, 2"):
        posterior.block("fc1")


def test_impossible_curvatures_are_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("training started")

    monkeypatch.setattr(laplace_method.MAP, "fit_prepared", never)
    data = (normal(20, 1, 3, 3), torch.zeros(20, 3, 3, dtype=torch.long))
    with pytest.raises(ConfigError, match="use Fisher"):
        Laplace(curvature=GGN()).fit(nn.Conv2d(1, 2, 1).double(), data, Categorical(), training=QUICK)


@pytest.mark.parametrize("curvature", [GGN(), Fisher(draws=2), Empirical()], ids=str)
@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Categorical(), 3, labels(20)),
        (Bernoulli(), 2, labels(20, 2)[:, None].repeat(1, 2)),
        (Bernoulli(), 1, labels(20, 2)),
        (Gaussian(), 2, normal(20, 2)),
        (Gaussian(covariance=((1.0, 0.2), (0.2, 0.5))), 2, normal(20, 2)),
    ],
    ids=["classes", "many yes or no", "yes or no", "reals", "full covariance"],
)
def test_every_likelihood_with_every_curvature(likelihood, outputs: int, targets: Tensor, curvature) -> None:
    network, data = mlp(outputs).float(), (normal(20, 4), targets)
    method = Laplace(structure=Diagonal(), curvature=curvature, prior_precision=2.0)
    posterior = method.fit(network, data, likelihood)
    wide = replace(method, prior_precision=0.5).fit(network, data, likelihood)
    weights = posterior.weights()
    first, second = posterior.draw(0, posterior.generator(0, 0)), wide.draw(0, wide.generator(0, 0))
    for name, kept in curvature_of(posterior).items():
        assert kept.isfinite().all() and (kept >= 0).all() and kept.sum() > 0
        torch.testing.assert_close(curvature_of(wide)[name], kept)  # the prior is no part of it
        ratio = (second[name] - weights[name]) / (first[name] - weights[name])
        # Differences of weights lose digits where the noise is small.
        torch.testing.assert_close(ratio, ((kept + 2) / (kept + 0.5)).sqrt(), rtol=1e-3, atol=1e-3)
    assert posterior.predict(normal(5, 4), 4).log_prob(targets[:5]).isfinite().all()
