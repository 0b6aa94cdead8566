"""Implicit networks: whose rows, which divergence, which biases, and what pretrained weights become."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import dubito
from dubito import MAP, Categorical, ConfigError, DataError, Implicit, NetworkError, Training
from dubito.fitting import Start
from dubito.inference.implicit.objective import ROWS, in_turn
from dubito.inputs import Batch
from dubito.layers.declared import weights_with_nodes
from dubito.models import resnet50, vgg16, wide_resnet
from dubito.networks import run

QUICK = Training(epochs=2, batch_size=8, lr=1e-2)
K = 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,), generator=torch.Generator().manual_seed(1))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.embed, self.encoder, self.head = (nn.Linear(4, 8), nn.TransformerEncoder(layer, 2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


class TimeMajor(nn.Module):
    """A layer that reads [T, B, features]: its rows share a draw."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.stem(x).transpose(0, 1))).mean(0))


def bound(method: Implicit, network: nn.Module, inputs: Tensor):
    built = method.objective(Start(network=network, likelihood=Categorical().build(None), num_data=50))
    built.bind(inputs)
    return built


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7])
@pytest.mark.parametrize("start", [0, 2])
def test_rows_take_turns(rows: int, start: int):
    mean, std, noise = normal(K, 4), normal(K, 4, seed=1), normal(2, rows, 4, seed=2)
    expected = torch.stack([mean[(start + b) % K] + std[(start + b) % K] * noise[:, b] for b in range(rows)], 1)
    torch.testing.assert_close(in_turn(mean, std, noise, start), expected)


def test_every_component_sees_as_many_rows():
    """29 rows in batches of 8: over an epoch, and at every moment, the counts differ by at most one."""
    x, y = normal(29, 4), labels(29)
    built = bound(Implicit(components=K), mlp(), x)
    seen = torch.zeros(K, dtype=torch.int64)
    for _ in range(2):
        for first in range(0, 29, 8):
            batch = Batch(x[first : first + 8], y[first : first + 8])
            start = built.drawn(batch, None).start
            for row in range(len(batch.targets)):
                seen[(start + row) % K] += 1
            built.batch_loss(batch, 1.0, None)
            assert seen.max() - seen.min() <= 1
    assert int(built.draft.group("statistics")[ROWS]) == 58


def given_noise(built, batch: Batch):
    return built.drawn(batch, torch.Generator().manual_seed(5))


@pytest.mark.parametrize("bias_factors", [False, True])
@pytest.mark.parametrize("arrangement", ["tile", "loop"])
def test_each_row_is_answered_by_its_component(arrangement: str, bias_factors: bool):
    """Outputs of every draw and row against the network with that row's factors in its weights and biases."""
    x, y, samples = normal(7, 4), labels(7), 2
    method = Implicit(components=K, noise_samples=samples, arrangement=arrangement, bias_factors=bias_factors)
    built = bound(method, mlp(), x)
    draft = built.draft
    drawn = given_noise(built, Batch(x, y))
    outputs = built.outputs(Batch(x, y), torch.Generator().manual_seed(5)).view(samples, 7, 3)
    own = draft.weights()
    for sample in range(samples):
        for row in range(7):
            component = row % K
            weights = {}
            for name in draft.uses:
                mean, std = draft.group("input_mean")[name][component], drawn.stds["input", name][component]
                weights[name] = own[name] * (mean + std * drawn.noise[name][sample, row])
            for name, noise in drawn.bias_noise.items():
                mean, std = draft.group("bias_mean")[name][component], drawn.stds["bias", name][component]
                weights[name] = own[name] * (mean + std * noise[sample, row])
            expected = run(draft.network, weights, x[row : row + 1])[0]
            torch.testing.assert_close(outputs[sample, row], expected, rtol=1e-10, atol=1e-12)
    assert bool(drawn.bias_noise) == bias_factors


@pytest.mark.parametrize("name", ["dense", "encoder", "time-major"])
def test_parts_of_a_batch_have_the_gradient_of_the_whole(name: str):
    network = {"dense": mlp, "encoder": Encoder, "time-major": TimeMajor}[name]().double()
    x, y = (normal(7, 4) if name == "dense" else normal(7, 5, 4)), labels(7)
    built = bound(Implicit(components=K, noise_samples=2), network, x)

    def gradients(batch: Batch) -> dict[str, Tensor]:
        built.zero_grad()
        built.draft.group("statistics")[ROWS].zero_()
        built.batch_loss(batch, 1.0, torch.Generator().manual_seed(3)).total.backward()
        return {n: p.grad for n, p in built.named_parameters() if p.grad is not None}

    whole = gradients(Batch(x, y))
    first = {n: 3 / 7 * g for n, g in gradients(Batch(x[:3], y[:3], 0, 7)).items()}
    second = {n: 4 / 7 * g for n, g in gradients(Batch(x[3:], y[3:], 3, 7)).items()}
    for key, value in whole.items():
        torch.testing.assert_close(value, first[key] + second[key], rtol=1e-8, atol=1e-10)


def test_divergences():
    x = normal(6, 4)
    paper, plain = (
        bound(Implicit(components=K, prior_std=0.2, kl=kind, bias_factors=True), mlp(), x)
        for kind in ("mixture-mean", "components")
    )
    prior, of_mean, mean_of = Normal(1.0, 0.2), 0.0, 0.0
    draft = paper.draft
    for side in ("input", "bias"):
        for name, means in draft.group(f"{side}_mean").items():
            std = F.softplus(draft.group(f"{side}_raw_std")[name])
            mixed = Normal(means.sum(0) / K, (std.square().sum(0) / K**2).sqrt())
            of_mean += kl_divergence(mixed, prior).sum()
            mean_of += kl_divergence(Normal(means, std), prior).sum() / K
    torch.testing.assert_close(paper.kl(), of_mean)
    torch.testing.assert_close(plain.kl(), mean_of)


def test_where_the_divergences_have_their_optimum():
    """Equal components: σ = √K s under the mean's divergence, σ = s under the components' own."""
    x = normal(6, 4)
    for kind, best in (("mixture-mean", 0.2 * K**0.5), ("components", 0.2)):
        built = bound(
            Implicit(components=K, prior_std=0.2, kl=kind, mean_std=0.0, initial_spread=0.0, initial_std=best), mlp(), x
        )
        kl = built.kl()
        assert float(kl.detach()) == pytest.approx(0, abs=1e-9)
        gradients = torch.autograd.grad(kl, list(built.draft.tensors.parameters()))
        assert max(float(g.abs().max()) for g in gradients) < 1e-9


def test_start():
    built = bound(Implicit(components=400, mean_std=0.5), mlp(), normal(6, 4))
    mean = built.draft.group("input_mean")["2.weight"].detach()
    std = F.softplus(built.draft.group("input_raw_std")["2.weight"]).detach()
    assert mean.shape == (400, 6)
    assert float(mean.mean()) == pytest.approx(1, abs=0.05) and float(mean.std()) == pytest.approx(0.5, rel=0.05)
    assert float(std.mean()) == pytest.approx(0.05, rel=0.05) and float(std.std()) == pytest.approx(0.02, rel=0.1)


def test_a_pretrained_network_keeps_its_outputs_at_zero_noise():
    for network, x in ((mlp(), normal(6, 4)), (Encoder().double(), normal(6, 5, 4))):
        built = bound(Implicit(components=2, mean_std=0.0), network, x)
        with torch.no_grad():
            for _, raw in built.draft.group("input_raw_std").items():
                raw.fill_(-800.0)  # softplus is 0
        plain = copy.deepcopy(network).train()(x)
        torch.testing.assert_close(built.outputs(Batch(x, labels(6)), None), plain, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(built.posterior().sample_outputs(x, 2)[1], network.eval()(x).detach())


def test_two_phases_from_pretrained_weights():
    x, y = normal(64, 4), (normal(64, 4)[:, 0] > 0).long()
    first = MAP().fit(mlp(), (x, y), Categorical(), training=Training(epochs=30, batch_size=16, lr=1e-2))
    training = Training(epochs=4, batch_size=16, lr=1e-4, variational_lr=0.05)
    second = Implicit(components=4, mean_std=0.05).fit(first.fold(), (x, y), Categorical(), training=training)
    before, after = (p.evaluate((x, y), num_samples=16)["nll"] for p in (first, second))
    assert after < before + 0.1
    moved = [(a - b).abs().max() for a, b in zip(first.weights().values(), second.weights().values(), strict=True)]
    assert 0 < max(moved) < 0.01  # the weights went on slowly, the factors fast


def test_uncertainties_and_folds():
    x, y = normal(24, 4), labels(24)
    posterior = Implicit(components=K, bias_factors=True).fit(mlp(), (x, y), Categorical(), training=QUICK)
    draws = posterior.sample_outputs(x, 6).softmax(-1)
    prediction = posterior.predict(x, 6)
    mean = draws.mean(0)
    total, expected = -(mean * mean.log()).sum(-1), -(draws * draws.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.total, total)  # Eq. 25
    torch.testing.assert_close(prediction.aleatoric, expected)  # Eq. 26
    torch.testing.assert_close(prediction.epistemic, total - expected)  # Eq. 27
    torch.testing.assert_close(posterior.fold(4)(x).detach().softmax(-1), draws[4])
    own, folded = posterior.weights(), dict(posterior.fold("mean").named_parameters())
    factors = posterior.group("input_mean")["2.weight"].mean(0)
    torch.testing.assert_close(folded["2.weight"].detach(), own["2.weight"] * factors)
    torch.testing.assert_close(folded["2.bias"].detach(), own["2.bias"] * posterior.group("bias_mean")["2.bias"].mean())
    assert posterior.components[1].predict(x, 4).probs.shape == (24, 3)


def test_saved_and_loaded_with_bias_factors(tmp_path):
    x, y = normal(24, 4), labels(24)
    posterior = Implicit(components=K, bias_factors=True).fit(mlp(), (x, y), Categorical(), training=QUICK)
    posterior.save(tmp_path / "p.safetensors")
    again = dubito.load(tmp_path / "p.safetensors", mlp())
    assert torch.equal(again.sample_outputs(x, 4), posterior.sample_outputs(x, 4))
    assert "Normal on the bias" in str(again.summary())


def test_a_resumed_run_repeats_the_original(tmp_path):
    """The turn of the components is part of what a checkpoint keeps."""
    x, y = normal(13, 4), labels(13)
    training = Training(epochs=3, batch_size=5, lr=1e-2)
    whole = Implicit(components=K).fit(mlp(), (x, y), Categorical(), training=training)
    path = tmp_path / "c.safetensors"
    stopped = replace(training, epochs=3)

    class Stop(Exception):
        pass

    steps = 0
    from dubito.inference.implicit.objective import ImplicitObjective

    plain = ImplicitObjective.batch_loss

    def failing(self, *args, **kwargs):
        nonlocal steps
        steps += 1
        if steps == 6:
            raise Stop
        return plain(self, *args, **kwargs)

    try:
        ImplicitObjective.batch_loss = failing
        with pytest.raises(Stop):
            Implicit(components=K).fit(
                mlp(), (x, y), Categorical(), training=replace(stopped, checkpoint_minutes=0.0), checkpoint=path
            )
    finally:
        ImplicitObjective.batch_loss = plain
    again = Implicit(components=K).fit(
        mlp(), (x, y), Categorical(), training=replace(stopped, checkpoint_minutes=0.0), checkpoint=path
    )
    assert torch.equal(again.sample_outputs(x, 3), whole.sample_outputs(x, 3))


@pytest.mark.parametrize(
    ("make", "nodes"),
    [
        (vgg16, 5_251),
        (lambda **k: resnet50(num_classes=1000, **k), 24_579),
        (lambda **k: wide_resnet(28, 10, **k), 9_475),
    ],
)
def test_node_counts_of_the_papers_table_1(make, nodes: int):
    with torch.device("meta"):
        network = make()
    assert sum(use.input_shape[-1] for use in weights_with_nodes(network, embeddings=False).values()) == nodes


def test_refused():
    for settings in (
        {"components": 0},
        {"noise_samples": 0},
        {"prior_std": 0.0},
        {"mean_std": -0.1},
        {"initial_std": 0.0},
        {"kl": "sum"},
        {"bias_factors": 1},
        {"arrangement": "none"},
    ):
        with pytest.raises(ConfigError):
            Implicit(**settings)
    x, y = normal(24, 4), labels(24)
    with pytest.raises(ConfigError, match="at most the batch size, got 9 and 8"):
        Implicit(components=9).fit(mlp(), (x, y), Categorical(), training=QUICK)
    with pytest.raises(NetworkError, match="LayerNorm"):
        Implicit().build(nn.LayerNorm(4), Categorical(), 10)
    with pytest.raises(NetworkError, match=r"body\.weight"):
        Implicit(bias_factors=True).fit(TimeMajor().double(), (normal(24, 5, 4), y), Categorical(), training=QUICK)
    with pytest.raises(DataError):
        Implicit().fit(mlp(), (x[:0], y[:0]), Categorical(), training=QUICK)
