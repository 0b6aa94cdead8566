"""k-tied Normal posteriors: factors, divergence, settings, truncation, and the paper's parameter counts."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call
from torch.nn import functional as F

import dubito
from dubito import (
    Bernoulli,
    Categorical,
    ConfigError,
    DubitoWarning,
    Flipout,
    He,
    KTied,
    LocalReparameterised,
    MeanField,
    Training,
    UnknownNameError,
    models,
)
from dubito.weight_normals import NormalObjective, NormalPosterior


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def labels(count: int, classes: int = 3) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def prior(std: float) -> Normal:
    return Normal(torch.zeros((), dtype=torch.float64), torch.tensor(std, dtype=torch.float64))


def stds(draft: NormalPosterior) -> dict[str, Tensor]:
    """σ of every weight that has one, written out from the stored tensors."""
    found = {name: torch.log1p(raw.exp()) for name, raw in draft.group("raw_std").items()}
    for name, log_u in draft.group("log_u").items():
        product = torch.einsum("am,an->mn", log_u.exp(), draft.group("log_v")[name].exp())
        found[name] = product.view(draft.weights()[name].shape)
    return found


def scatter(draft: NormalPosterior) -> None:
    """Give every factor and standard deviation a value of its own."""
    with torch.no_grad():
        for number, tensor in enumerate(draft.tensors.parameters()):
            tensor.copy_(normal(*tensor.shape, seed=number) * 0.5 - 1)


class Sequence(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.recurrent = kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0][:, -1])


# -- the posterior ---------------------------------------------------------------------------------------------


def test_structure_holds_factors_for_matrices_and_stds_for_the_rest() -> None:
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 2))
    posterior = KTied(rank=2).build(network, Categorical(), num_data=10).posterior()
    shapes = {key: {n: tuple(t.shape) for n, t in posterior.group(key).items()} for key in posterior.tensors}
    assert shapes == {
        "raw_std": {"0.bias": (4,), "2.bias": (3,), "3.weight": (2, 3), "3.bias": (2,)},  # 2 does not exceed k
        "log_u": {"0.weight": (2, 4), "2.weight": (2, 3)},
        "log_v": {"0.weight": (2, 18), "2.weight": (2, 4)},
    }
    assert posterior.holds("0.weight") == "Normal, std of rank 2"
    assert posterior.holds("3.weight") == "Normal, own std"
    assert [row.num_parameters for row in posterior.summary().rows] == [72 + 44, 8, 12 + 14, 6, 12, 4]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_kernels_and_embeddings_are_tied(kind: type[nn.Module]) -> None:
    network, ids = Sequence(kind).double(), torch.randint(9, (6, 4))
    built = KTied(rank=2, initial_std=0.2).build(network, Categorical(), num_data=6)
    tied = {"embedding.weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "head.weight"}
    assert set(built.draft.group("log_u").names) == tied
    built.loss(ids, labels(6), generator=torch.Generator().manual_seed(0)).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.parameters())
    posterior = built.posterior()
    outputs = posterior.sample_outputs(ids, 4)
    assert len(outputs.unique(dim=0)) == 4
    for index in range(4):
        torch.testing.assert_close(posterior.fold(index)(ids), outputs[index], rtol=1e-10, atol=1e-12)


def test_draws_have_the_means_and_deviations_they_should() -> None:
    built = KTied(rank=2).build(nn.Conv2d(2, 4, 2).double(), Categorical(), num_data=10)
    scatter(built.draft)
    posterior, count = built.posterior(), 4000
    draws = [posterior.draw(i, posterior.generator(0, i)) for i in range(count)]
    for name, std in stds(built.draft).items():
        standard = (torch.stack([draw[name] for draw in draws]) - posterior.weights()[name]) / std.detach()
        assert standard.mean(0).abs().max() < 5 / count**0.5
        assert (standard.var(0) - 1).abs().max() < 5 * (2 / count) ** 0.5
        pairs = torch.corrcoef(standard.flatten(1).T) - torch.eye(std.numel())
        assert pairs.abs().max() < 5 / count**0.5


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_factors_start_around_the_initial_std(rank: int) -> None:
    network = nn.Linear(300, 200)
    built = KTied(rank=rank, initial_std=0.01).build(network, Categorical(), num_data=10)
    centre = 0.5 * (math.log(0.01) - math.log(rank))
    for key, size in (("log_u", 200), ("log_v", 300)):
        factors = built.draft.group(key)["weight"]
        assert factors.shape == (rank, size)
        count = factors.numel()
        assert abs(factors.mean().item() - centre) < 5 * 0.1 / count**0.5
        assert abs(factors.std().item() - 0.1) < 5 * 0.1 / (2 * count) ** 0.5
    # E[Σ_a u_a v_a] = σ E[exp(N(0, 0.1²))]² = σ exp(0.01)
    assert stds(built.draft)["weight"].mean().item() == pytest.approx(0.01 * math.exp(0.01), rel=0.03)
    assert stds(built.draft)["bias"].log().std().item() == pytest.approx(0.1, rel=0.3)
    again = KTied(rank=rank).build(network, Categorical(), num_data=10)
    assert torch.equal(again.draft.group("log_u")["weight"], built.draft.group("log_u")["weight"])


def test_mean_field_may_start_spread_out_too() -> None:
    built = MeanField(initial_std=0.02, initial_spread=0.1).build(nn.Linear(90, 70), Categorical(), num_data=10)
    std = F.softplus(built.draft.group("raw_std")["weight"]).log()
    assert std.mean().item() == pytest.approx(math.log(0.02), abs=5 * 0.1 / 6300**0.5)
    assert std.std().item() == pytest.approx(0.1, rel=0.05)


# -- divergence and loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior_std", [1.0, 0.2, He()], ids=str)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_divergence_against_torch_distributions(rank: int, prior_std: float | He) -> None:
    network = nn.Sequential(nn.Conv2d(4, 6, (3, 2), groups=2), nn.Flatten(), nn.Linear(6, 5)).double()
    built = KTied(rank=rank, prior_std=prior_std).build(network, Categorical(), num_data=10)
    scatter(built.draft)
    expected = torch.zeros((), dtype=torch.float64)
    for name, std in stds(built.draft).items():
        mean = built.draft.weights()[name]
        scale = prior_std
        if isinstance(prior_std, He):
            scale = (2 / math.prod(mean.shape[1:])) ** 0.5 if mean.ndim > 1 else 1.0
        expected = expected + kl_divergence(Normal(mean, std), prior(scale)).sum()
    torch.testing.assert_close(built.kl(), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(built.posterior().kl(), expected.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("max_std", [None, 100.0])
def test_loss_and_gradients_are_those_of_the_reparameterised_draw(max_std: float | None) -> None:
    network, inputs, targets = mlp(), normal(6, 4), labels(6)
    built = KTied(prior_std=0.5, max_std=max_std).build(network, Categorical(), num_data=40)
    scatter(built.draft)
    parameters = dict(built.draft.named_parameters())
    loss = built.loss(inputs, targets, kl_weight=0.3, generator=torch.Generator().manual_seed(3))
    ours = torch.autograd.grad(loss.total, list(parameters.values()))

    generator, weights = torch.Generator().manual_seed(3), built.draft.weights()
    noise = {n: torch.randn(w.shape, generator=generator, dtype=torch.float64) for n, w in weights.items()}
    spread = stds(built.draft)
    drawn = {name: weights[name] + spread[name] * noise[name] for name in weights}
    nll = F.cross_entropy(functional_call(network, drawn, (inputs,)), targets)
    kl = sum(kl_divergence(Normal(weights[n], spread[n]), prior(0.5)).sum() for n in weights)
    torch.testing.assert_close(loss.total, nll + 0.3 * kl / 40)
    expected = torch.autograd.grad(nll + 0.3 * kl / 40, list(parameters.values()))
    for name, mine, theirs in zip(parameters, ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


# -- which weights ---------------------------------------------------------------------------------------------


def test_what_is_tied_may_be_named_or_picked() -> None:
    def tied(**settings) -> set[str]:
        built = KTied(rank=2, **settings).build(mlp(), Categorical(), num_data=10)
        return set(built.draft.group("log_u").names)

    assert tied() == {"0.weight", "2.weight"}
    assert tied(tied=["2"]) == {"2.weight"}
    assert tied(tied=["0.weight"]) == {"0.weight"}
    assert tied(tied=lambda name, weight: weight.shape[1] == 4) == {"0.weight"}
    assert tied(subset=["2.weight", "0.bias"]) == {"2.weight"}
    built = KTied(subset=["2.weight", "0.bias"], tied=["2.weight"]).build(mlp(), Categorical(), num_data=10)
    assert set(built.draft.group("raw_std").names) == {"0.bias"}
    assert built.draft.holds("0.weight") == built.draft.holds("2.bias") == "point (not in the subset)"
    assert built.draft.method.tied == ("2.weight",) and built.draft.method.subset == ("0.bias", "2.weight")


def test_networks_without_a_large_enough_matrix_are_mean_field() -> None:
    network = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    built = KTied(rank=2).build(network, Bernoulli(), num_data=10)
    assert set(built.draft.group("raw_std").names) == set(dict(network.named_parameters()))
    assert built.loss(torch.zeros(3, 2), torch.ones(3)).total.isfinite()


def test_a_rank_above_a_matrixs_own_is_lowered_with_a_warning() -> None:
    with pytest.warns(
        DubitoWarning, match=r"2\.weight of shape \(3, 5\) is a matrix of rank 3 at most: .* instead of 4"
    ):
        built = KTied(rank=4, tied=lambda name, w: w.ndim > 1).build(mlp(), Categorical(), num_data=10)
    assert {n: len(t) for n, t in built.draft.group("log_u").items()} == {"0.weight": 4, "2.weight": 3}


def test_the_warning_points_at_the_users_call() -> None:
    data, training = (torch.zeros(6, 4), torch.arange(6) % 3), Training(iterations=1)
    with pytest.warns(DubitoWarning, match="at most") as caught:
        KTied(rank=4, tied=["2"]).fit(mlp(), data, Categorical(), training=training, progress=False)
        trained_mean_field().tied(rank=50, subset=["2.weight"])
    assert [warning.filename for warning in caught] == [__file__] * 2


def test_refusals() -> None:
    for rank in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="rank must be a whole number of at least 1"):
            KTied(rank=rank)
    for settings, message in (
        ({"prior_std": 0.0}, "prior_std must be a finite number above 0"),
        ({"prior_std": -1.0}, "prior_std must be a finite number above 0"),
        ({"initial_std": 0.0}, "initial_std must be a finite number above 0"),
        ({"initial_spread": -0.1}, "initial_spread must be a finite number of at least 0"),
        ({"max_std": 0.0}, "max_std must be a finite number above 0"),
        ({"max_std": 0.001}, "initial_std must be at most max_std, got 0.01 and 0.001"),
        ({"estimator": Flipout}, "estimator must be Reparameterised"),
        ({"estimator": "flipout"}, "estimator must be Reparameterised"),
    ):
        for method in (KTied, MeanField):
            with pytest.raises(ConfigError, match=message):
                method(**settings)
    with pytest.raises(ConfigError, match="match_rates must be True or False"):
        KTied(match_rates=1)  # pyright: ignore
    for tied, message in (
        (lambda name, weight: False, "the weights to tie must hold a matrix"),
        (["0.bias"], "the weights to tie must hold a matrix"),
        ("0.weight", "tied must be a function or a list"),
    ):
        with pytest.raises(ConfigError, match=message):
            KTied(tied=tied).build(mlp(), Categorical(), num_data=10)
    with pytest.raises(UnknownNameError, match="unknown parameter or module 'head'"):
        KTied(tied=["head"]).build(mlp(), Categorical(), num_data=10)


# -- training --------------------------------------------------------------------------------------------------


def test_factors_learn_at_half_the_rate_so_that_log_std_moves_as_in_mean_field() -> None:
    groups = KTied().build(mlp(), Categorical(), num_data=10).parameter_groups(0.1, variational_lr=0.02)
    assert [(group["name"], group["lr"], len(group["params"])) for group in groups] == [
        ("weights", 0.1, 4),
        ("variational", 0.02, 2),
        ("variational", 0.01, 4),
    ]
    whole = KTied(match_rates=False).build(mlp(), Categorical(), num_data=10).parameter_groups(0.1)
    assert [(group["lr"], len(group["params"])) for group in whole] == [(0.1, 4), (0.1, 6)]
    every = KTied(subset=["0.weight"]).build(mlp(), Categorical(), num_data=10).parameter_groups(0.1)
    assert [(group["lr"], len(group["params"])) for group in every] == [(0.1, 4), (0.05, 2)]

    def first_step(method: KTied | MeanField) -> Tensor:
        built = method.build(nn.Linear(6, 5), Categorical(), num_data=1)
        before = built.draft.weight_scale("weight").std.detach().log()
        optimizer = torch.optim.Adam(built.parameter_groups(1e-3))
        built.loss(normal(8, 6), labels(8, 5), generator=torch.Generator().manual_seed(0)).total.backward()
        optimizer.step()
        return (built.draft.weight_scale("weight").std.detach().log() - before).mean()

    # The divergence dominates: all of σ grows, by the rate in mean field and by twice the rate in two factors.
    torch.testing.assert_close(first_step(MeanField()), torch.tensor(1e-3), rtol=0.02, atol=0)
    torch.testing.assert_close(first_step(KTied()), torch.tensor(1e-3), rtol=0.02, atol=0)
    torch.testing.assert_close(first_step(KTied(match_rates=False)), torch.tensor(2e-3), rtol=0.02, atol=0)


@pytest.mark.parametrize("method", [KTied, MeanField])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_std_exceeds_the_largest_allowed(method: type[KTied] | type[MeanField], dtype: torch.dtype) -> None:
    rows = normal(40, 4, dtype=dtype), labels(40)
    settings = {"max_std": 0.02, "prior_std": 1.0, "initial_spread": 0.1}
    network = mlp().to(dtype)
    posterior = method(**settings).fit(network, rows, Categorical(), training=Training(epochs=20, lr=0.05))
    free = method(**{**settings, "max_std": None}).fit(
        network, rows, Categorical(), training=Training(epochs=20, lr=0.05)
    )
    for name in posterior.random:
        std = posterior.weight_scale(name).std
        assert std.max() <= 0.02 * (1 + 1e-5) < free.weight_scale(name).std.max()
        assert std.max() > 0.019  # held there, not pushed away from it


def test_training_improves_the_bound_and_settings_survive_storage(tmp_path) -> None:
    x = normal(200, 5, dtype=torch.float32)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    method = KTied(
        prior_std=He(), max_std=0.5, estimator=LocalReparameterised(layers=["0"]), tied=["0"], initial_std=0.05
    )
    posterior = method.fit(net, (x, y), Categorical(), training=Training(epochs=30, lr=1e-2))
    assert posterior.history[-1]["loss"] < 0.8 * posterior.history[0]["loss"]
    assert posterior.evaluate((x, y))["accuracy"] > 0.8
    assert posterior.holds("0.weight") == "Normal, std of rank 2, local reparameterisation"
    assert posterior.holds("2.weight") == "Normal, own std, reparameterised (not asked for)"
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", net)
    assert again.method == posterior.method and again.method.tied == ("0.weight",)
    assert str(again.summary()) == str(posterior.summary())
    assert torch.equal(again.sample_outputs(x, 3), posterior.sample_outputs(x, 3))
    torch.testing.assert_close(again.kl(), posterior.kl())


# -- the paper's counts ----------------------------------------------------------------------------------------


def count(method: KTied | MeanField, network: nn.Module, likelihood=Categorical()) -> int:
    return method.build(network, likelihood, num_data=10).posterior().num_parameters


def dense(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2


def kernels(name: str, weight: Tensor) -> bool:
    return weight.ndim > 1


def test_counts_of_the_mnist_mlp() -> None:
    network = models.mlp(784, (400, 400))
    assert count(MeanField(), network) == 956_820
    assert [count(KTied(rank=k), network) for k in (1, 2, 3)] == [481_614, 484_008, 486_402]
    posterior = MeanField().build(network, Categorical(), num_data=10).posterior()
    assert isinstance(posterior, NormalPosterior)
    assert posterior.tied(rank=2).num_parameters == 484_008


def test_counts_of_the_cifar_lenet() -> None:
    network = models.lenet(num_classes=100, in_channels=3, image_size=32)
    assert count(MeanField(), network) == 4_405_320
    assert count(KTied(rank=2, tied=dense), network) == 2_267_408


def test_counts_of_the_imdb_lstm() -> None:
    network = models.imdb_lstm()
    subset = ["lstm.weight_ih_l0", "lstm.weight_hh_l0", "fc"]  # the embedding and the LSTM's biases are points
    assert count(MeanField(subset=subset), network, Bernoulli()) == 2_822_914
    assert count(KTied(rank=2, subset=subset), network, Bernoulli()) == 2_694_402


def test_counts_of_the_resnet() -> None:
    network = models.tfp_resnet18()
    statistics = sum(b.numel() for name, b in network.named_buffers() if "running" in name)
    posterior = MeanField(subset=kernels).build(network, Categorical(), num_data=10).posterior()
    assert posterior.num_parameters + statistics == 9_814_026
    for rank, expected in ((1, 4_929_711), (2, 4_946_964), (3, 4_964_217)):
        assert count(KTied(rank=rank, subset=kernels), network) + statistics == expected


# -- truncation and spectrum -----------------------------------------------------------------------------------


def trained_mean_field() -> NormalPosterior:
    network = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Flatten(), nn.Linear(5, 7), nn.Linear(7, 2)).double()
    built = MeanField(prior_std=0.5).build(network, Categorical(), num_data=10)
    with torch.no_grad():
        for number, (_, raw) in enumerate(built.draft.group("raw_std").items()):
            raw.copy_(normal(*raw.shape, seed=number) - 2)
    built.loss(normal(4, 2, 3, 3), labels(4, 2))
    posterior = built.posterior()
    assert isinstance(posterior, NormalPosterior)
    return posterior


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_truncation_is_that_of_numpy_with_a_floor(rank: int, tmp_path) -> None:
    posterior, floor = trained_mean_field(), 0.08
    small = posterior.tied(rank=rank, floor=floor)
    x = normal(3, 2, 3, 3)
    divergence, clamped = 0.0, 0
    for name, mean in posterior.weights().items():
        std = np.log1p(np.exp(posterior.group("raw_std")[name].numpy()))
        if min(mean.shape[0], mean.numel() // mean.shape[0]) > rank and mean.ndim > 1:
            u, values, v = np.linalg.svd(std.reshape(len(std), -1), full_matrices=False)
            best = (u[:, :rank] * values[:rank] @ v[:rank]).reshape(std.shape)
            clamped += int((best < floor).sum())
            std = np.maximum(best, floor)
            assert small.holds(name) == f"Normal, std truncated to rank {rank}"
        torch.testing.assert_close(small.weight_scale(name).std, torch.from_numpy(std))
        assert torch.equal(small.weights()[name], mean)
        divergence += kl_divergence(Normal(mean, torch.from_numpy(std)), prior(0.5)).sum()
    assert rank == 4 or clamped > 0  # or the floor was not tried
    torch.testing.assert_close(small.kl(), divergence)
    draws = torch.stack([small.draw(i, small.generator(0, i))["2.weight"] for i in range(1000)])
    torch.testing.assert_close(draws.std(0), small.weight_scale("2.weight").std, rtol=5 / 2000**0.5, atol=0)
    small.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", small.fold())
    assert torch.equal(again.sample_outputs(x, 3), small.sample_outputs(x, 3))
    assert str(again.summary()) == str(small.summary())
    torch.testing.assert_close(again.predict(x, 4, marginal=True).probs, small.predict(x, 4, marginal=True).probs)


def test_full_rank_truncation_changes_nothing_and_the_original_stays() -> None:
    posterior = trained_mean_field()
    before = {name: tensor.clone() for name, tensor in posterior.stored().items()}
    with pytest.warns(DubitoWarning, match="3.weight .* rank 2 instead of 5"):
        same = posterior.tied(rank=5, subset=lambda name, weight: weight.ndim > 1, floor=1e-9)
    for name in posterior.random:
        torch.testing.assert_close(same.weight_scale(name).std, posterior.weight_scale(name).std)
    x = normal(3, 2, 3, 3)
    torch.testing.assert_close(same.sample_outputs(x, 3), posterior.sample_outputs(x, 3))
    twice = posterior.tied(rank=1, subset=["2"], floor=0.1).tied(rank=1, subset=["0"], floor=0.2)
    assert twice.details["floors"] == {"2.weight": 0.1, "0.weight": 0.2}
    with torch.no_grad():
        for parameter in twice.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in posterior.stored().items())
    assert [p.requires_grad for p in twice.fold().parameters()] == [True] * 6


def test_truncation_refusals() -> None:
    posterior = trained_mean_field()
    with pytest.raises(ConfigError, match="rank must be a whole number of at least 1"):
        posterior.tied(rank=0)
    with pytest.raises(ConfigError, match="floor must be a finite number above 0"):
        posterior.tied(rank=1, floor=0.0)
    with pytest.raises(UnknownNameError, match="unknown parameter or module 'head'"):
        posterior.tied(rank=1, subset=["head"])


def test_the_spectrum_is_that_of_every_matrix() -> None:
    posterior = trained_mean_field()
    spectrum = posterior.spectrum()
    assert list(spectrum) == ["0.weight", "2.weight", "3.weight"]
    for name, found in spectrum.items():
        mean = posterior.weights()[name].flatten(1).numpy()
        std = np.log1p(np.exp(posterior.group("raw_std")[name].flatten(1).numpy()))
        for ours, matrix in (
            (found.mean, mean),
            (found.std, std),
            (found.mean_centred, mean - mean.mean()),
            (found.std_centred, std - std.mean()),
        ):
            squares = np.linalg.svd(matrix, compute_uv=False) ** 2
            np.testing.assert_allclose(ours, squares / squares.sum(), rtol=1e-9, atol=1e-12)
    tied = KTied(rank=2).build(nn.Linear(9, 8).double(), Categorical(), num_data=10).posterior()
    assert isinstance(tied, NormalPosterior)
    assert tied.spectrum()["weight"].std[2:].abs().max() < 1e-20  # of rank 2 by construction


def test_objectives_are_of_one_kind() -> None:
    for method in (MeanField(), KTied()):
        assert isinstance(method.build(mlp(), Categorical(), num_data=10), NormalObjective)
        assert method.posterior_type is NormalPosterior
