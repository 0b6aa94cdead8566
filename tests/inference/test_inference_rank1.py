"""Rank-1 networks and BatchEnsemble: what is trained, what is drawn, and how components relate."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import (
    BatchEnsemble,
    Bernoulli,
    Categorical,
    ConfigError,
    DubitoWarning,
    Gaussian,
    NetworkError,
    Rank1,
    Training,
    factors,
    models,
)
from dubito.fitting import Run, Start
from dubito.inputs import Batch
from dubito.metrics import disagreement
from dubito.networks import run

QUICK = Training(epochs=1, batch_size=8, lr=1e-2)
K = 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,), generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)).double()


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (nn.Embedding(7, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


class Skipping(nn.Module):
    """Inputs that meet later activations without passing a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.tanh(self.body(x)))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)).double()


IDS = torch.randint(7, (5, 4), generator=torch.Generator().manual_seed(2))
NETWORKS = {
    "mlp": (mlp, normal(5, 4)),
    "images": (images, normal(5, 2, 7, 7)),
    "sequences": (lambda: Sequences().double(), IDS),
    "skipping": (lambda: Skipping().double(), normal(5, 4)),
}
METHODS = {
    "normal": Rank1(components=K, initial_rate=0.2),
    "cauchy": Rank1(components=K, initial_rate=0.2, family=factors.Cauchy(), bound=1.5),
    "log-normal": Rank1(components=K, initial_rate=0.2, family=factors.LogNormal()),
    "inputs": Rank1(components=K, on="input"),
    "log-mixture": Rank1(components=K, initial_rate=0.2, log_mixture=True),
    "batch-ensemble": BatchEnsemble(components=K),
}


def bound(method, network: nn.Module, inputs: Tensor, likelihood=None, seed: int = 0):
    """An objective that has seen a batch."""
    judge = (likelihood or Categorical()).build(None)
    built = method.objective(Start(network=network, likelihood=judge, num_data=50, run=Run(seed=seed)))
    built.bind(inputs)
    return built


def gradients(built, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    built.zero_grad()
    loss = built.batch_loss(batch, 1.0, torch.Generator().manual_seed(3))
    loss.total.backward()
    return loss.total.detach(), {n: p.grad for n, p in built.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("label", METHODS)
def test_tile_and_loop_have_the_same_loss_and_gradients(name: str, label: str):
    make, inputs = NETWORKS[name]
    batch = Batch(inputs, labels(5))
    found = []
    for arrangement in ("tile", "loop"):
        torch.manual_seed(0)
        built = bound(replace(METHODS[label], arrangement=arrangement), make(), inputs)
        assert built.tiles(batch) == (arrangement == "tile")
        assert built.parts_late == (name != "skipping" and K > 1)
        found.append(gradients(built, batch))
    (tile, tile_grads), (loop, loop_grads) = found
    torch.testing.assert_close(tile, loop)
    assert tile_grads.keys() == loop_grads.keys()
    for key, value in tile_grads.items():
        torch.testing.assert_close(value, loop_grads[key], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("label", ["normal", "cauchy", "batch-ensemble"])
@pytest.mark.parametrize("count", [5, 6])
def test_parts_of_a_batch_see_the_noise_of_the_whole(label: str, count: int):
    """Two processes that share a batch have the gradient of one that has all of it."""
    x, y = normal(count, 4), labels(count)
    built = bound(METHODS[label], mlp(), x)
    _, whole = gradients(built, Batch(x, y))
    parts = []
    for rows in (slice(0, 2), slice(2, count)):
        size = rows.stop - rows.start
        _, own = gradients(built, Batch(x[rows], y[rows], rows.start, count))
        parts.append({name: size / count * value for name, value in own.items()})
    for name, value in whole.items():
        torch.testing.assert_close(value, parts[0][name] + parts[1][name], rtol=1e-8, atol=1e-10)


def test_training_likelihoods_of_a_mixture():
    x, y = normal(6, 4), labels(6)
    for log_mixture in (False, True):
        built = bound(BatchEnsemble(components=K, log_mixture=log_mixture), mlp(), x)
        draws = [run(built.draft.network, built.draft.draw(k, None), x) for k in range(K)]
        log_probs = torch.stack([-F.cross_entropy(one, y, reduction="none") for one in draws])
        expected = -(log_probs.logsumexp(0) - math.log(K)).mean() if log_mixture else -log_probs.mean()
        loss = built.batch_loss(Batch(x, y), 1.0, None)
        torch.testing.assert_close(loss.nll, expected)
        assert loss.kl == 0 and built.noisy is False
        # Jensen: the mixture's likelihood is never below the mean of the logs.
        assert log_probs.logsumexp(0).mean() - math.log(K) >= log_probs.mean()


def test_divergence_is_averaged_or_summed_over_components():
    x = normal(6, 4)
    mean, total = (bound(Rank1(components=K, kl=kind), mlp(), x) for kind in ("mean", "sum"))
    draft = total.draft
    expected = 0.0
    for side in ("input", "output"):
        for name, means in draft.group(f"{side}_mean").items():
            std = F.softplus(draft.group(f"{side}_raw_std")[name])
            p, q = torch.distributions.Normal(means, std), torch.distributions.Normal(1.0, 0.1)
            expected += torch.distributions.kl_divergence(p, q).sum()
    torch.testing.assert_close(total.kl(), expected)
    torch.testing.assert_close(mean.kl(), expected / K)


def test_only_slow_weights_and_biases_decay():
    built = bound(Rank1(components=K, factor_rate=0.5), mlp(), normal(6, 4))
    slow, fast = built.parameter_groups(0.1, weight_decay=1e-4)
    named = {id(p): n for n, p in built.draft.named_parameters()}
    assert (slow["weight_decay"], fast["weight_decay"]) == (1e-4, 0.0)
    assert (slow["lr"], fast["lr"]) == (0.1, 0.05)
    assert {named[id(p)].partition(".")[0] for p in fast["params"]} == {"tensors"}
    assert not any("biases" in named[id(p)] for p in fast["params"])
    kept = [named[id(p)] for p in slow["params"]]
    assert sum("biases" in name for name in kept) == 3 and len(kept) == 9


def test_start():
    built = bound(Rank1(components=K, initial_rate=1e-3), mlp(), normal(6, 4))
    for _, raw in built.draft.group("input_raw_std").items():
        torch.testing.assert_close(F.softplus(raw), torch.full_like(raw, math.sqrt(1e-3 / (1 - 1e-3))))
    other = bound(BatchEnsemble(components=K, initial=factors.Signs()), mlp(), normal(6, 4))
    for _, mean in other.draft.group("output_mean").items():
        assert set(mean.unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize("method", [Rank1(components=K), BatchEnsemble(components=K)], ids=["rank-1", "batch ensemble"])
def test_components_sides_layers_and_seeds_start_apart(method):
    net = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)).double()
    still, data = Training(epochs=1, lr=1e-12), (normal(8, 50), labels(8))
    starts = []
    for seed in (0, 1):
        posterior = method.fit(net, data, Categorical(), training=still, seed=seed)
        for side in ("input_mean", "output_mean"):
            starts += [mean for _, mean in posterior.group(side).items()]
    rows = torch.cat(starts) - 1  # 2 seeds × 2 sides × 2 layers × K components
    assert rows.shape == (8 * K, 50)
    std = method.initial.std
    assert rows.std().item() == pytest.approx(std, rel=5 / (2 * rows.numel()) ** 0.5)
    correlations = torch.corrcoef(rows) - torch.eye(8 * K)
    assert correlations.abs().max() < 5 / 50**0.5


def test_bounded_draws_stay_within_their_bound():
    built = bound(
        Rank1(components=1, family=factors.Cauchy(), bound=2.0, on="input", initial_rate=0.5), mlp(), normal(6, 4)
    )
    draft = built.draft.finished()
    own = draft.weights()
    largest = 0.0
    for index in range(50):
        drawn = draft.draw(index, draft.generator(0, index))
        r = draft.group("output_mean")["0.weight"][0]
        ratio = drawn["0.weight"] / (own["0.weight"] * r[:, None])
        largest = max(largest, float(ratio.abs().max()))
    assert largest == pytest.approx(2.0)  # heavy tails reach it, and go no further


def test_unreachable_bounds_are_not_checked_and_change_nothing():
    x, y = normal(6, 4), labels(6)
    wide = bound(Rank1(components=K, bound=10.0), mlp(), x)
    assert set(wide._bounds(wide.draft.stds()).values()) == {None}
    narrow = bound(Rank1(components=K, bound=1.2, initial_rate=0.2), mlp(), x)
    assert set(narrow._bounds(narrow.draft.stds()).values()) == {1.2}
    torch.manual_seed(0)
    first = bound(Rank1(components=K, bound=10.0), mlp(), x)
    torch.manual_seed(0)
    second = bound(Rank1(components=K, bound=None), mlp(), x)
    loss, grads = gradients(first, Batch(x, y))
    again, others = gradients(second, Batch(x, y))
    assert loss == again and all(torch.equal(value, others[name]) for name, value in grads.items())


def fitted(method, network=None, x=None, **options):
    x = normal(24, 4) if x is None else x
    return method.fit(network or mlp(), (x, labels(len(x))), Categorical(), training=QUICK, **options), x


def test_components_are_posteriors_of_their_own():
    posterior, x = fitted(BatchEnsemble(components=K))
    assert len(posterior.components) == K
    for k, component in enumerate(posterior.components):
        assert component.num_components == component.num_atoms == 1
        torch.testing.assert_close(component.sample_outputs(x, 1)[0], posterior.sample_outputs(x, K)[k])
        torch.testing.assert_close(posterior.fold(k)(x).detach(), component.sample_outputs(x, 1)[0])
    with pytest.raises(IndexError):
        posterior.components[K]
    random, _ = fitted(Rank1(components=K))
    one = random.components[-1]
    assert one.num_components == 1 and one.method.components == 1
    torch.testing.assert_close(one.group("input_mean")["2.weight"][0], random.group("input_mean")["2.weight"][K - 1])
    torch.testing.assert_close(one.weights()["2.bias"], random.group("biases")["2.bias"][K - 2])
    assert one.predict(x, 4).probs.shape == (24, 3)


def test_components_are_saved_and_loaded(tmp_path):
    posterior, x = fitted(Rank1(components=K, family=factors.LogNormal(prior_std=0.2), subset=["0", "4"]))
    for saved in (posterior, posterior.components[1]):
        saved.save(tmp_path / "p.safetensors")
        again = dubito.load(tmp_path / "p.safetensors", mlp())
        assert torch.equal(again.sample_outputs(x, 4), saved.sample_outputs(x, 4))
        assert again.method == saved.method


def test_diversity_is_the_disagreement_of_components():
    posterior, x = fitted(BatchEnsemble(components=K))
    found = posterior.diversity(x, labels(24))
    expected = disagreement(posterior.sample_outputs(x, K).softmax(-1), labels(24))
    assert found.mean == expected.mean and torch.equal(found.pairs, expected.pairs)
    net = nn.Sequential(nn.Linear(4, 1)).double()
    binary = Rank1(components=2).fit(net, (x, labels(24) % 2), Bernoulli(), training=QUICK)
    assert binary.diversity(x, labels(24) % 2).pairs.shape == (2, 2)
    with pytest.raises(ConfigError, match="compares components"):
        posterior.components[0].diversity(x, labels(24))
    real = Rank1(components=2).fit(net, (x, x[:, :1]), Gaussian(), training=QUICK)
    with pytest.raises(ConfigError, match="about classes"):
        real.diversity(x, labels(24))


def test_a_draw_per_example():
    posterior, x = fitted(Rank1(components=2, initial_rate=0.3))
    same = x[:1].expand(300, -1)
    shared = posterior.predict(same, 2).probs
    torch.testing.assert_close(shared, shared[:1].expand_as(shared))
    own = posterior.predict(same, 2, per_example=True).probs
    assert len(own[:, 0].unique()) == 300
    chunked = posterior.predict(same, 2, per_example=True, max_rows=77).probs
    torch.testing.assert_close(own, chunked)
    # In the mean over many draws both ways agree: 300 rows of 2 draws against 600 draws shared by all.
    many = posterior.sample_outputs(x[:1], 600)[:, 0].softmax(-1)
    error = 5 * (many.std(0) / 600**0.5 + own.std(0) / 300**0.5)
    assert ((many.mean(0) - own.mean(0)).abs() < error).all()
    assert posterior.evaluate((x, labels(24)), num_samples=4, per_example=True)["nll"] > 0


class TimeMajor(nn.Module):
    """A layer that reads [T, B, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.norm, self.head = (
            nn.Linear(4, 4),
            nn.Linear(4, 5),
            nn.LayerNorm(5),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.body(self.stem(x).transpose(0, 1)))).mean(0))


def test_layers_whose_rows_cannot_be_told_apart_are_named():
    posterior, x = fitted(Rank1(components=2), TimeMajor().double(), normal(24, 3, 4))
    holds = {row.name: row.holds for row in posterior.summary().rows}
    assert "one draw per component and batch in training" in holds["body.weight"]
    assert "per component and batch" not in holds["stem.weight"]
    assert holds["body.weight"].startswith("2 × Normal on 4 inputs and Normal on 5 outputs")
    assert holds["norm.weight"].startswith("point (it multiplies no inputs") and holds["head.bias"] == "2 points"
    assert posterior.predict(x, 4, per_example=True).probs.shape == (24, 3)
    with pytest.raises(ConfigError, match=r"body\.weight"):
        fitted(Rank1(components=2, arrangement="tile"), TimeMajor().double(), normal(24, 3, 4))


def test_attention_has_factors_per_row():
    posterior, x = fitted(Rank1(components=2, arrangement="tile"), Attending().double(), normal(24, 3, 4))
    assert posterior.shared == set()
    assert posterior.holds("block.self_attn.in_proj_weight") == "2 × Normal on 12 inputs and Normal on 12 outputs"
    assert posterior.predict(x, 4, per_example=True).probs.shape == (24, 3)


class Scaled(nn.Module):
    """A weight that no module of PyTorch's own holds, and one that a function without a rule reads."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.table = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.plain)) + torch.einsum("bi,ki->bk", x @ self.plain, self.table)


def test_a_fit_says_which_matrices_stay_points():
    net, data = Scaled().double(), (normal(24, 4), labels(24))
    with pytest.warns(
        DubitoWarning,
        match="Rank1 leaves 1 of 4 parameters as points .table: there is no rule for the way einsum uses it",
    ):
        posterior = Rank1(components=2).fit(net, data, Categorical(), training=QUICK)
    assert posterior.holds("table") == "point (there is no rule for the way einsum uses it)"
    assert posterior.holds("plain") == "2 × Normal on 4 inputs and Normal on 5 outputs"
    chosen = Rank1(components=2, subset=["plain"]).fit(net, data, Categorical(), training=QUICK)  # no warning
    assert chosen.holds("head.weight") == "point (not in the subset)"
    built = Rank1(components=2).build(net, Categorical(), 24)
    with pytest.warns(DubitoWarning, match="plain: no module of PyTorch's own holds it"):
        built.loss(*data)


def test_rank_one_noise_has_the_score_variance_of_matching_full_rank_noise():
    """Theorem 1: δW with E[δW_ij δW_kl] = W_ij Σ_jl W_kl moves the score as s ~ (1, Σ) does, to first order."""
    torch.manual_seed(0)
    network, draws, scale = mlp(), 6000, 0.02
    x, y = normal(3, 4, seed=5), labels(3)
    built = bound(Rank1(components=1, on="input", bound=None), network, x)
    draft = built.draft
    with torch.no_grad():
        for side in ("input", "output"):
            for _, mean in draft.group(f"{side}_mean").items():
                mean.fill_(1.0)
        for _, raw in draft.group("input_raw_std").items():
            raw.fill_(math.log(math.expm1(scale)))

    def score(outputs: Tensor) -> Tensor:
        return F.one_hot(y, 3) - outputs.view(-1, 3, 3).softmax(-1)

    def spread(scores: Tensor) -> Tensor:
        return scores.flatten(1).var(0)

    stream = torch.Generator().manual_seed(7)
    tiled = x.repeat(draws, 1)
    with torch.no_grad():
        rank1 = spread(score(built.outputs(Batch(tiled, y.repeat(draws)), stream).view(draws, 3, 3)))
        full, apart = [], []
        own = draft.weights()
        for _ in range(draws // 4):
            matched, independent = dict(own), dict(own)
            for name in ("0.weight", "2.weight", "4.weight"):
                # Uniform numbers with variance 1: another law with the covariance W_ij Σ_jl W_kl, Σ = scale² I
                uniform = torch.rand(own[name].shape[1], generator=stream, dtype=torch.float64)
                matched[name] = own[name] * (1 + scale * math.sqrt(12) * (uniform - 0.5))
                each = torch.randn(own[name].shape, generator=stream, dtype=torch.float64)
                independent[name] = own[name] * (1 + scale * each)
            full.append(score(run(network, matched, x))[0])
            apart.append(score(run(network, independent, x))[0])
    # Relative standard errors of variances: √(2/6000) and √(2/1500), 2 % and 4 %; curvature adds O(scale).
    torch.testing.assert_close(rank1, spread(torch.stack(full)), rtol=0.2, atol=0.0)
    ratio = spread(torch.stack(apart)) / rank1
    assert (ratio - 1).abs().max() > 0.25  # the same variances without the covariance are something else


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.norm = nn.Parameter(torch.ones(4)), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x * self.scale)


def test_refused():
    for settings in (
        {"components": 0},
        {"family": "normal"},
        {"family": factors.Normal},
        {"on": "neither"},
        {"initial": 1.0},
        {"initial_rate": 0.0},
        {"initial_rate": 1.0},
        {"bound": 0.0},
        {"kl": "max"},
        {"factor_rate": 0},
        {"arrangement": "stack"},
        {"log_mixture": 1},
        {"family": factors.LogNormal(), "additive": True},
        {"family": factors.HalfCauchy(), "initial": factors.Signs()},
    ):
        with pytest.raises(ConfigError):
            Rank1(**settings)
    for settings in (
        {"components": 0},
        {"initial": None},
        {"factor_rate": -1},
        {"arrangement": ""},
        {"log_mixture": 0},
    ):
        with pytest.raises(ConfigError):
            BatchEnsemble(**settings)
    with pytest.raises(NetworkError, match=r"\['Bare', 'LayerNorm'\]"):
        Rank1().build(Bare(), Categorical(), 10)
    with pytest.raises(NetworkError, match="call loss"):
        Rank1().build(mlp(), Categorical(), 10).posterior()


@pytest.mark.parametrize("label", ["normal", "batch-ensemble"])
def test_a_loop_of_ones_own(label: str):
    """`build` gives losses whose gradients accumulate, and learns noise whose shape the outputs tell."""
    x = normal(16, 4).float()
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    for arrangement in ("tile", "loop"):
        objective = replace(METHODS[label], arrangement=arrangement).build(net, Gaussian(), 16)
        first = objective.loss(x, x[:, :2])
        optimizer = torch.optim.Adam(objective.parameter_groups(1e-2))
        for _ in range(60):
            optimizer.zero_grad()
            loss = objective.loss(x, x[:, :2], kl_weight=0.0)
            loss.total.backward()
            optimizer.step()
        assert loss.nll < first.nll - 0.1
        assert objective.posterior().predict(x, 4).mean.shape == (16, 2)


@pytest.mark.parametrize(
    ("network", "count"),
    [
        (lambda: models.wide_resnet(depth=28, width=10, num_classes=10), 36_635_872),
        (lambda: models.resnet50(num_classes=1000), 25_977_144),
    ],
)
def test_the_papers_networks_hardly_grow(network, count: int):
    """36.6 M and 26.0 M in Tables 1 and 2, with four components."""
    assert Rank1(components=4).build(network(), Categorical(), 1).draft.num_parameters == count


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3)).double()


def test_components_share_the_statistics_of_a_batch_as_they_share_running_ones(monkeypatch):
    """One after the other, each would be normalised by itself, as no prediction is: 0.27 became 0.40."""
    monkeypatch.setattr("dubito.node_factors.objective.CPU_TENSOR_BYTES", 0)  # a tile would not fit
    x = normal(256, 6)
    y = (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()
    method = BatchEnsemble(components=4, initial=factors.NearOne(std=1.0))
    posterior = method.fit(normalised(), (x, y), Categorical(), training=Training(epochs=40, batch_size=64, lr=1e-2))
    assert posterior.evaluate((x, y))["nll"] < 1.2 * posterior.history[-1]["nll"]


def test_a_loop_with_batch_norm_warns():
    data = normal(16, 6), labels(16)
    with pytest.warns(DubitoWarning, match="batch norm .'1'. normalises each component by itself"):
        Rank1(components=2, arrangement="loop").fit(normalised(), data, Categorical(), training=QUICK)


def test_frozen_batch_norm_leaves_the_choice_to_memory(monkeypatch):
    monkeypatch.setattr("dubito.node_factors.objective.CPU_TENSOR_BYTES", 0)
    net = normalised()
    net[1].eval()
    data = normal(16, 6), labels(16)
    objective = Rank1(components=2).build(net, Categorical(), 16)
    objective.bind(data[0])
    assert not objective.tiles(Batch(*data))


def test_added_factors_on_convolutions_predict_as_their_folded_networks_do():
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    inputs = normal(8, 2, 4, 4)
    method = Rank1(components=2, family=factors.Normal(prior_mean=0.0), additive=True)
    posterior = method.fit(net, (inputs, labels(8)), Categorical(), training=QUICK)
    outputs = posterior.sample_outputs(inputs, 4, seed=3)
    for index in range(4):
        torch.testing.assert_close(outputs[index], posterior.fold(index, seed=3)(inputs))
